"""Test what it costs the ranks that they can be watched and diagnosed: their records, as seconds
and bytes of a step."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import minidist as md
from minidist.cli import main
from minidist.comm.flight.message_times import MessageTimes
from minidist.comm.flight.recorder import FlightRecorder
from minidist.comm.flight.slots import RING_BYTES, read_ring
from minidist.comm.group import Group
from minidist.comm.signature import Signature
from minidist.device.account import CATEGORIES, MemoryAccount
from minidist.launch.flight import ring_file
from minidist.nn import GPTConfig
from minidist.observe.finite_watch import _finite
from minidist.observe.rank_records import RankRecords
from minidist.observe.rank_steps import StepRecorder, _ResidentBytes

MODEL = ["--batch", "8", "--context", "64", "--layers", "2", "--width", "64", "--heads", "2"]


def best_seconds(work: Callable[[], object], times: int = 500) -> float:
    """Processor seconds of one call, in the quickest of ten rounds."""
    rounds = []
    for _ in range(10):
        start = time.thread_time()
        for _ in range(times):
            work()
        rounds.append((time.thread_time() - start) / times)
    return min(rounds)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks."""
    folder = tmp_path_factory.mktemp("cost") / "run"
    assert (
        main(
            [
                "train",
                "-n",
                "2",
                "--transport",
                "tcp",
                "--quiet",
                "--steps",
                "20",
                *MODEL,
                "--digest-every",
                "5",
                "--out",
                str(folder),
            ]
        )
        == 0
    )
    return folder


@pytest.mark.soak
def test_the_records_take_less_than_a_hundredth_of_a_step(run: Path, tmp_path: Path) -> None:
    """Each kind of record: how many a step has, times what one costs. The digest is made every 50
    steps by default."""
    _, entries = read_ring(ring_file(run / "flight", 0))
    kinds = Counter(entry["kind"] for entry in entries)
    calls = sum(entry["kind"] in ("call", "message") for entry in entries) / 20
    messages = sum(entry.get("messages") or 0 for entry in entries) / 20
    assert kinds["state"] == 20 and messages > 0
    costs = {
        "calls": calls * _a_call(),
        "state": _a_state(),
        "step": _a_step(tmp_path),
        "messages": messages * _a_message(),
        "finite": 2 * 2 * best_seconds(lambda: _finite(np.ones((4, 64, 64), np.float32))),
    }
    step = json.loads((run / "metrics.json").read_text())["step_seconds"]
    told = ", ".join(f"{name} {1e6 * cost:.1f} µs" for name, cost in costs.items())
    cost = sum(costs.values())
    print(f"{1e6 * cost:.1f} µs of a step of {1e3 * step:.1f} ms: {cost / step:.3%} ({told})")
    assert cost < 0.01 * step


def _a_call() -> float:
    recorder = FlightRecorder()
    call = SimpleNamespace(
        signature=Signature(1, 1, "all_reduce", "ring", "sum", None, "<f4", (4,), "a.py:1"),
        group_axis="dp",
        world_ranks=(0, 1),
        started=True,
        nbytes=16,
        messages=2,
    )
    call.meta = b"".join(call.signature.pack())

    def tell() -> None:
        call.record = 0
        recorder.on_made(call, False)
        recorder.on_made(call, True)
        recorder.on_end(call, False)
        recorder.on_wait(call, time.perf_counter())

    return best_seconds(tell)


def _a_state() -> float:
    recorder = FlightRecorder()
    account = MemoryAccount()

    def state() -> None:
        now = account.now
        peak = account.peak
        recorder.state(
            [now[name] for name in CATEGORIES],
            [peak[name] for name in (*CATEGORIES, "total")],
            None,
            1.0,
            "estimate",
        )

    return best_seconds(state)


def _a_step(folder: Path) -> float:
    """A line of a rank with one link."""
    made: list[StepRecorder] = []
    md.run(lambda world: made.append(StepRecorder(world, folder)), size=1)
    (recorder,) = made
    recorder._rss = _ResidentBytes()

    def step() -> None:
        recorder._times._out[1] = [1, 9, 10**6, 10**6, 10**9]
        recorder._times._in[1] = [1, 9, 10**6, 10**6, 10**9, 10**9]
        recorder.step_done(tokens=512, loss=3.123456)

    seconds = best_seconds(step)
    recorder.close()
    return seconds


def _a_message() -> float:
    """Both ends."""
    times = MessageTimes(0, 2)

    def message() -> None:
        times.sent(1, 1, 1000)
        if (arrival := times.posted(1, 1, 1000)) is not None:
            arrival.accepted(1000)
            arrival.over(False)
        times._in.clear()

    return best_seconds(message)


@pytest.mark.soak
def test_a_step_with_and_without_records_side_by_side(tmp_path: Path) -> None:
    """20 turns of each in one process a rank; the middle step. A busy machine moves it by more than
    the records."""

    def job(world: Group) -> tuple[float, float]:
        config = GPTConfig(vocabulary=64, context=64, layers=2, width=64, heads=2)
        trainer = md.Trainer(md.Plan(dp=2), config, world)
        batch = np.ones((8, 64), np.int64), np.ones((8, 64), np.int64)
        taken: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(40):
            on = turn % 2 == 0
            records = (
                RankRecords(trainer, tmp_path, batch=8, context=64, digest_every=0) if on else None
            )
            world.ledger.times = world.ledger.times if on else None
            for _ in range(5):
                start = time.perf_counter()
                trainer.step(batch)
                if records is not None:
                    records.step_done(trainer.steps_done)
                taken[on].append(time.perf_counter() - start)
            if records is not None:
                records.close()
        trainer.close()
        return statistics.median(taken[True]), statistics.median(taken[False])

    with_records, without = md.run(job, size=2, transport="tcp")[0]
    print(
        f"{1e3 * with_records:.2f} ms with, {1e3 * without:.2f} ms without: "
        f"{with_records / without - 1:+.1%}"
    )
    assert with_records < 1.25 * without


def grown(run: Path, steps: int) -> float:
    """Bytes a rank and step; nothing else on the disk grows with the steps."""
    assert [path.stat().st_size for path in (run / "flight").iterdir()] == [RING_BYTES] * 2
    records = [path.stat().st_size for path in (run / "steps").iterdir()]
    log = (run / "metrics.jsonl").stat().st_size
    print(
        f"{sum(records) / 2 / steps:.0f} bytes of steps/ a rank and step, metrics.jsonl "
        f"{log / steps:.0f} a step"
    )
    assert len(records) == 2
    return (sum(records) + log) / 2 / steps


@pytest.mark.soak
def test_the_disk_holds_a_ring_a_rank_and_less_than_a_kibibyte_a_rank_and_step(
    tmp_path: Path,
) -> None:
    assert (
        main(
            [
                "train",
                "-n",
                "2",
                "--transport",
                "threads",
                "--quiet",
                "--steps",
                "3",
                "--batch",
                "2",
                "--context",
                "8",
                "--layers",
                "1",
                "--width",
                "8",
                "--heads",
                "1",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    assert grown(tmp_path, 3) < 1024


@pytest.mark.soak
def test_ranks_that_are_processes_write_no_more(run: Path) -> None:
    assert grown(run, 20) < 1024
