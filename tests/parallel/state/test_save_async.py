"""Saves behind the next steps: what they hold, how they fail, and what they cost in memory."""

import errno
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers import SOON, run
from training import global_batch, tiny

from minidist.bench.step.ranks import Model, random_batch
from minidist.errors import CheckpointError, CommError, PeerLostError
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.state import checkpoint
from minidist.parallel.state.manifest import MANIFEST, checkpoints, step_folder
from minidist.parallel.state.save_async import AsyncSaver, plain_start_save

ON_DISK = checkpoint.write_shard
# seconds of a slow disk: many times what a wait lasts before the deadlock detector is told
LONG = 0.7
PLANS = [
    {"dp": 2, "zero": 3},
    {"dp": 2},
    {"dp": 1, "pp": 2},
    {"dp": 2, "tp": 2, "zero": 1},
    {"dp": 2, "zero": 3, "offload": "all"},
]


def trainer_of(world: Any, plan: dict[str, Any] | None = None, **options: Any) -> Trainer:
    plan = {"dp": world.size, **(plan or {})}
    return Trainer(
        Plan(bucket_bytes=2048, **plan),
        tiny(),
        world,
        optimizer="adamw",
        lr=1e-2,
        clip=0.5,
        seed=3,
        **options,
    )


def steps(trainer: Trainer, count: int) -> list[float]:
    first = trainer.steps_done
    return [
        trainer.step(global_batch(step, 5, trainer.config)) for step in range(first, first + count)
    ]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != MANIFEST}


def on_rank(rank: int, fails: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fails()` runs before a rank writes its shard."""

    def write(file: Path, *rest: Any) -> Any:
        if file.name == checkpoint.shard_name(rank):
            fails()
        return ON_DISK(file, *rest)

    monkeypatch.setattr(checkpoint, "write_shard", write)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "shard-00001.safetensors")


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of standard error, without those of a disk so slow that a save waited for the one
    before it."""
    return [line for line in capfd.readouterr().err.splitlines() if "training waited" not in line]


# ----------------------------------------------------------------------------------- what they hold


def test_the_plain_version_holds_the_state_of_its_start(tmp_path: Path) -> None:
    state = np.arange(9.0)
    room = np.empty(9)
    for _ in range(2):
        before = state.copy()
        writer = plain_start_save(tmp_path / "state.npy", state, room)
        state += 1
        writer.join()
        np.testing.assert_array_equal(np.load(tmp_path / "state.npy"), before)
    assert [file.name for file in tmp_path.iterdir()] == ["state.npy"]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_later_updates_do_not_touch_the_copy(
    plan: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def job(world: Any) -> None:
        trainer = trainer_of(world, plan)
        steps(trainer, 2)
        trainer.save(tmp_path / "blocking")
        on_rank(0, lambda: go_on.wait(SOON), monkeypatch)
        about = {"words": ["then"]}
        save = trainer.start_save(tmp_path / "behind", **about)
        about["words"].append("now")
        steps(trainer, 3)
        assert not save.done()
        world.barrier()
        go_on.set()
        save.wait()
        trainer.close()

    run(job, size=plan["dp"] * plan.get("pp", 1) * plan.get("tp", 1))
    assert files(tmp_path / "behind") == files(tmp_path / "blocking")
    (one, two) = (checkpoint.read_manifest(tmp_path / name) for name in ("behind", "blocking"))
    assert one["about"].pop("words") == ["then"]
    assert one["about"] == two["about"]
    assert one["shards"] == two["shards"]


def test_a_run_that_goes_on_from_one_has_the_same_bits(tmp_path: Path) -> None:
    def whole(world: Any) -> tuple[list[float], str]:
        trainer = trainer_of(world, {"zero": 2})
        losses = steps(trainer, 2)
        trainer.start_save(tmp_path / "a")
        losses += steps(trainer, 3)
        digest = trainer.weights_sha256()
        trainer.close()  # waits for the save
        return losses, digest

    def rest(world: Any) -> tuple[list[float], str]:
        trainer = trainer_of(world, {"zero": 2})
        trainer.load(tmp_path / "a")
        losses = steps(trainer, 3)
        digest = trainer.weights_sha256()
        trainer.close()
        return losses, digest

    losses, digest = run(whole, size=2)[0]
    assert run(rest, size=2)[0] == (losses[2:], digest)


# ---------------------------------------------------------------------- one at a time, also if slow


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["threads", "shm"])
def test_a_slow_disk_on_one_rank_is_no_deadlock_and_holds_up_no_step(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rank(1, lambda: time.sleep(LONG), monkeypatch)

    def job(world: Any) -> tuple[bool, bool]:
        trainer = trainer_of(world)
        save = trainer.start_save(tmp_path / "a")
        steps(trainer, 2)
        early = save.done()
        if world.rank == 0:  # its program waits, and its thread: for rank 1's thread,
            save.wait()  # whose program waits for rank 0's
        world.barrier()
        late = save.done()
        trainer.close()
        return early, late

    assert run(job, size=2, transport=transport)[0] == (False, True)
    assert (tmp_path / "a" / MANIFEST).is_file()


@pytest.mark.soak
def test_a_second_save_waits_for_the_first_and_says_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drafts = []

    def look() -> None:
        time.sleep(0.3)
        drafts.append(len(list(tmp_path.glob(".minidist-*"))))

    on_rank(1, look, monkeypatch)

    def job(world: Any) -> list[tuple[float, bool]]:
        trainer = trainer_of(world)
        saves = []
        for step in range(3):
            saves.append(trainer.start_save(step_folder(tmp_path, step)))
            assert all(save.done() for save in saves[:-1])
            steps(trainer, 1)
        trainer.save(step_folder(tmp_path, 3))  # a blocking one waits, too
        result = [(save.waited, save.seconds > 0.25) for save in saves]
        trainer.close()
        return result

    (first, *others), _ = run(job, size=2)
    assert first[0] < 0.1 < min(waited for waited, _ in others)
    assert all(slow for _, slow in (first, *others))
    assert drafts == [1] * 4
    assert len(checkpoints(tmp_path)) == 4
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert f"{step_folder(tmp_path, 1)}: training waited 0." in lines[0]


# ------------------------------------------------------------------------------------ how they fail


def test_a_full_disk_on_one_rank_is_told_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def job(world: Any) -> tuple[list[float], str]:
        trainer = trainer_of(world)
        trainer.start_save(step_folder(tmp_path, 0)).wait()
        world.barrier()
        on_rank(1, no_space, monkeypatch)
        save = trainer.start_save(step_folder(tmp_path, 1))
        losses = steps(trainer, 2)
        with pytest.raises(CheckpointError, match="rank 1 cannot write shard-00001"):
            save.wait()
        world.barrier()
        monkeypatch.setattr(checkpoint, "write_shard", ON_DISK)
        trainer.start_save(step_folder(tmp_path, 2))
        losses += steps(trainer, 2)
        trainer.close()
        return losses, ""

    def undisturbed(world: Any) -> list[float]:
        trainer = trainer_of(world)
        losses = steps(trainer, 4)
        trainer.close()
        return losses

    assert run(job, size=2)[0][0] == run(undisturbed, size=2)[0]
    assert sorted(os.listdir(tmp_path)) == ["step-000000", "step-000002"]
    assert said(capfd) == [
        f"minidist: {step_folder(tmp_path, 1)} was not saved: rank 1 cannot write shard-00001."
        f"safetensors: No space left on device; checkpoints before it stay"
    ]


def test_a_folder_that_cannot_be_made_is_told_and_the_next_save_does_not_raise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    def job(world: Any) -> None:
        trainer = trainer_of(world)
        trainer.start_save(tmp_path / "file" / "a")
        trainer.start_save(tmp_path / "file" / "b")
        trainer.close()

    run(job, size=2)
    assert [
        line.split(" was not saved: rank 0 cannot make a folder")[0].rsplit("/", 1)[1]
        for line in said(capfd)
    ] == ["a", "b"]


def test_another_error_in_the_thread_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("planted")

    on_rank(1, broken, monkeypatch)

    def job(world: Any) -> None:
        trainer = trainer_of(world)
        trainer.start_save(tmp_path / "a")
        started = time.monotonic()
        while time.monotonic() - started < SOON:  # nobody asks how the save went
            steps(trainer, 1)
            world.barrier()

    with pytest.raises(CommError, match="the save of .*a failed: ValueError: planted"):
        run(job, size=2)
    assert not checkpoints(tmp_path)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "slow", [0, 1], ids=["the survivor's disk hangs", "the dead rank's disk hangs"]
)
def test_a_rank_killed_while_a_save_is_under_way(
    slow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rank(slow, lambda: time.sleep(2 * SOON), monkeypatch)

    def job(world: Any) -> None:
        trainer = trainer_of(world)
        save = trainer.start_save(step_folder(tmp_path, 1))
        steps(trainer, 1)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):  # before the process is ended for being busy
            save.wait()
        (tmp_path / "told").touch()
        trainer.close()

    started = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 .*was killed by SIGKILL"):
        run(job, size=2, transport="shm")
    assert time.monotonic() - started < SOON
    assert (tmp_path / "told").exists()
    assert not checkpoints(tmp_path)


def test_a_real_disk_limit_on_one_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def job(world: Any) -> None:
        import resource  # noqa: PLC0415 - in the rank

        trainer = trainer_of(world)
        trainer.start_save(step_folder(tmp_path, 0)).wait()
        if world.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            sys.dont_write_bytecode = True
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        save = trainer.start_save(step_folder(tmp_path, 1))
        steps(trainer, 1)
        with pytest.raises(CheckpointError, match="rank 1 cannot write .*File too large"):
            save.wait()
        if world.rank == 1:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
        trainer.close()

    run(job, size=2, transport="tcp")
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-000000"]
    assert capfd.readouterr().err.count("\n") == 1


# --------------------------------------------------------------------------------------- their cost


def test_copies_are_in_the_account_and_used_again(tmp_path: Path) -> None:
    def job(world: Any) -> tuple[int, int, int, int]:
        trainer = trainer_of(world, {"zero": 1})
        first = trainer.start_save(tmp_path / "a")
        first.wait()
        held = trainer.store.host.now["workspace"]
        for _ in range(3):
            trainer.start_save(tmp_path / "a")
        peak = trainer.store.host.peak["workspace"]
        trainer.close()
        gc.collect()
        shard = checkpoint.read_manifest(tmp_path / "a")["shards"][world.rank]
        return (
            sum(array["nbytes"] for array in shard["arrays"]),
            held,
            peak,
            trainer.store.host.now["workspace"],
        )

    for nbytes, held, peak, after in run(job, size=2):
        assert nbytes <= held <= nbytes + 64 * 100
        assert peak == held
        assert after == 0


def test_a_save_sends_nothing_in_the_phase_of_a_step(tmp_path: Path) -> None:
    def job(world: Any, saves: bool) -> tuple[Any, Any]:
        trainer = trainer_of(world)
        world.ledger.clear()
        for _ in range(3):
            if saves:
                trainer.start_save(tmp_path / "a")
            steps(trainer, 1)
        trainer.close()
        return world.ledger.sent_bytes("step"), world.ledger.sent_bytes("save")

    with_saves, without = (run(job, saves, size=2)[0] for saves in (True, False))
    assert with_saves[0] == without[0]
    assert with_saves[1].keys() == {"control"}
    assert not without[1]


@pytest.mark.soak
def test_training_stands_still_for_one_copy_and_a_half_at_most(tmp_path: Path) -> None:
    """The time is its own processor time; on a busy machine the clock says nothing."""

    def job(world: Any) -> tuple[float, float]:
        trainer = Trainer(
            Plan(), tiny(width=384, layers=8, heads=4, dtype="float32"), world, seed=3
        )
        saver = AsyncSaver(trainer.strategy, trainer.optimizer, world)
        arrays = [
            array
            for slot in trainer.optimizer.slots
            for array in (slot.weights.data, *slot.state.values())
        ]
        targets = [np.zeros_like(array) for array in arrays]
        stands = []
        copies = []
        for _ in range(15):
            begun = time.thread_time()
            save = saver.start(tmp_path / "a", {})
            stands.append(time.thread_time() - begun)
            save.wait()
            begun = time.thread_time()
            for array, target in zip(arrays, targets, strict=True):
                np.copyto(target, array)
            copies.append(time.thread_time() - begun)
        saver.close()
        trainer.close()
        return min(stands), min(copies)

    stand, copy = run(job, size=1)[0]
    assert stand <= 1.5 * copy


@pytest.mark.soak
def test_a_save_in_50_steps_costs_one_percent_of_their_processor_time_at_most(
    tmp_path: Path,
) -> None:
    """The writer's thread counts, too: so much is lost where all cores compute."""

    def job(world: Any) -> tuple[float, float]:
        model = Model()
        trainer = Trainer(Plan(), model.config(), world)
        batch = random_batch(model.vocab, model.batch, model.context)
        saves = []
        computes = []
        for _ in range(6):
            begun = time.process_time()
            trainer.step(batch)
            computes.append(time.process_time() - begun)
            begun = time.process_time()
            trainer.start_save(tmp_path / "a").wait()
            saves.append(time.process_time() - begun)
        trainer.close()
        return min(saves[1:]), min(computes)

    save, step = run(job, size=1)[0]
    assert save <= 0.01 * 50 * step


@pytest.mark.soak
def test_resident_memory_is_flat_over_500_saves(tmp_path: Path) -> None:
    def job(world: Any) -> list[int]:
        trainer = trainer_of(world)
        process = psutil.Process()
        seen = []
        steps(trainer, 300)  # buffers between ranks have been used to their ends
        for save in range(500):
            trainer.start_save(step_folder(tmp_path, save % 2))
            steps(trainer, 1)
            if save % 50 == 49:
                gc.collect()
                seen.append(process.memory_info().rss)
        trainer.close()
        return seen

    for seen in run(job, size=2, transport="shm", limit=600):
        assert max(seen[1:]) - seen[0] < 2 << 20, seen
