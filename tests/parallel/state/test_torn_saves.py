"""Saves that are cut short: by kill -9 at any file-system call, by a full or slow disk, by a
refused permission."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torn_saves
from checkpoints import ended, make, resumed, same_state, saved, steps
from torn_saves import CHANGES, PLAN, torn_save, watched

import minidist as md
from minidist.errors import CheckpointError, MinidistError
from minidist.parallel.state.manifest import checkpoints

SUPPORT = Path(torn_saves.__file__)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose step 2 will be saved once more, and what an earlier kill has left."""
    run = tmp_path_factory.mktemp("torn") / "base"
    md.run(saved, str(run / "step-000001"), PLAN, CHANGES, {}, 1, size=2)
    md.run(saved, str(run / "step-000002"), PLAN, CHANGES, {}, 2, size=2)
    (run / ".minidist-stale").mkdir()
    (run / ".minidist-stale" / "shard-00000.safetensors").write_bytes(b"half")
    return run


def check(run: Path, base: Path) -> None:
    """The last complete checkpoint is of step 2, and right; the next save leaves nothing but
    checkpoints."""
    last = checkpoints(run)[-1]
    assert last.name in ("step-000002", "step-000002~")
    assert same_state(last, base / "step-000002") and same_state(
        run / "step-000001", base / "step-000001"
    )
    (again,) = md.run(resumed, str(last), {}, CHANGES, {}, 1, str(run / "step-000003"), size=1)
    assert again["steps"] == 3
    left = {file.name for file in run.iterdir()} - {"step-000002", last.name}
    assert left == {"step-000001", "step-000003"}
    assert same_state(checkpoints(run)[-1], base / "step-000002") and len(checkpoints(run)) == 3


@pytest.mark.soak  # the next test kills one rank in a save
@pytest.mark.parametrize("sample", [2, 0])
def test_killed_at_any_call(sample: int, base: Path, tmp_path: Path) -> None:
    """All ranks at once, as when a machine stops."""
    job = subprocess.run(
        [sys.executable, str(SUPPORT), str(base), str(tmp_path), str(sample)],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SUPPORT.parent)},
        timeout=1500,
    )
    killed = json.loads(job.stdout)
    assert len(killed) == 2 * sample or not sample
    for run, victim, at, call in killed:
        try:
            check(Path(run), base)
        except BaseException:
            print(f"rank {victim} killed at call {at}, {call}")
            raise
        shutil.rmtree(run)
    print(f"{len(killed)} kills")


@pytest.mark.parametrize(
    ("victim", "at"),
    [(1, 2)]
    + [
        pytest.param(victim, at, marks=pytest.mark.soak)
        for victim in range(2)
        for at in range(1, 60, 4)
    ],
)
def test_one_rank_of_two_processes_is_killed(
    victim: int, at: int, base: Path, tmp_path: Path
) -> None:
    """The other one learns it, and ends; or no call of that number was made (rank 1 only writes its
    shard)."""
    run = tmp_path / "run"
    names = tmp_path / "names"
    shutil.copytree(base, run)
    try:
        md.run(torn_save, str(run / "step-000002"), victim, at, str(names), size=2, transport="tcp")
    except MinidistError as error:
        assert f"rank {victim}" in str(error)
    else:
        assert 4 <= len(json.loads(names.read_text())) <= at, "nothing was killed"
    check(run, base)


# -------------------------------------------------------------------------------- disks that refuse


def goes_on(
    world: Any, folder: str, victim: int, call: str, wrong: int
) -> tuple[str, dict[str, Any], int]:
    """A save whose call number `wrong` of this name fails on a rank: (what is told, the run after
    it, open files)."""
    trainer = make(world, PLAN, CHANGES, {})
    losses = steps(trainer, 2)
    told = ""
    me = threading.current_thread()
    count = [0]
    trainer.save(folder)
    losses += steps(trainer, 1)

    def before(name: str, *arguments: Any) -> None:
        if name == call and threading.current_thread() is me:
            count[0] += 1
            if count[0] == wrong:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")

    world.barrier()
    with watched(before) if world.rank == victim else nullcontext():
        world.barrier()
        opened = len(os.listdir("/proc/self/fd")) if not world.rank else 0  # of both ranks
        world.barrier()
        try:
            trainer.save(folder)
        except CheckpointError as error:
            told = str(error)
        world.barrier()
        leaks = len(os.listdir("/proc/self/fd")) - opened if not world.rank else 0
        world.barrier()
    return told, ended(trainer, losses + steps(trainer, 1)), leaks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what the ranks of the run hold in which no save failed."""
    return md.run(
        saved, str(tmp_path_factory.mktemp("undisturbed") / "a"), PLAN, CHANGES, {}, 4, size=2
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("victim", "call", "wrong"),
    [
        (1, "pwrite", 1),
        (0, "fsync", 2),
        (0, "rename", 2),
        (0, "mkdir", 2),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((0, "pwrite", 1), (1, "fsync", 1), (0, "rename", 1), (1, "open", 1))
        ),
    ],
    ids=["shard 1", "manifest", "publish", "draft", "shard 0", "fsync", "move aside", "open"],
)
def test_a_full_disk(
    victim: int, call: str, wrong: int, undisturbed: list[Any], tmp_path: Path
) -> None:
    """Every rank is told in the same line; the older folder of the step stays, as it was; training
    goes on."""
    ranks = md.run(goes_on, str(tmp_path / "run" / "step-000002"), victim, call, wrong, size=2)
    told = {text for text, _, _ in ranks}
    assert len(told) == 1 and "\n" not in (text := told.pop())
    assert f"rank {victim} cannot" in text and "No space left" in text and "before it stay" in text
    assert [run for _, run, _ in ranks] == undisturbed
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["step-000002"]
    assert (
        md.run(resumed, str(tmp_path / "run" / "step-000002"), {}, CHANGES, {}, 0, size=1)[0][
            "steps"
        ]
        == 2
    )
    assert [leaks for _, _, leaks in ranks] == [0, 0]


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = {text for text, _ in md.run(refused_save, str(tmp_path / "file" / "a"), size=2)}
    assert len(told) == 1 and "rank 0 cannot make a folder" in told.pop()


def refused_save(world: Any, folder: str) -> tuple[str, int]:
    trainer = make(world, PLAN, CHANGES, {})
    with pytest.raises(CheckpointError) as caught:
        trainer.save(folder)
    trainer.close()
    return str(caught.value), world.rank


@pytest.mark.parametrize("slow", ["shard-00000.safetensors", "shard-00001.safetensors"])
def test_the_manifest_comes_last(slow: str, tmp_path: Path) -> None:
    """All is on the disk before the manifest, which is before the folder has its place, however
    slow one disk is."""
    made = list[tuple[str, str]]()
    files = dict[int, str]()
    opened = os.open

    def before(name: str, *arguments: Any) -> int | None:
        if name == "open" and isinstance(arguments[0], (str, Path)) and type(arguments[-1]) is int:
            descriptor = opened(*arguments)
            files[descriptor] = Path(arguments[0]).name
            return descriptor
        if name == "close":
            files.pop(arguments[0], None)
        if name in ("pwrite", "fsync", "rename"):
            file = (
                arguments[0].name if name == "rename" else files.get(arguments[0], "manifest.json")
            )
            if file == slow:
                time.sleep(0.01)
            made.append((name, file))
        return None

    with watched(before):
        md.run(saved, str(tmp_path / "run" / "step-000002"), PLAN, CHANGES, {}, 2, size=2)
    (draft,) = [file for name, file in made if name == "rename"]
    places = [
        made.index(("fsync", "manifest.json")),
        made.index(("fsync", draft)),
        made.index(("rename", draft)),
        made.index(("fsync", "run")),
    ]
    assert places == sorted(places)
    for rank in range(2):
        shard = f"shard-{rank:05}.safetensors"
        writes = [number for number, event in enumerate(made) if event == ("pwrite", shard)]
        assert writes and writes[-1] < made.index(("fsync", shard)) < places[0]
