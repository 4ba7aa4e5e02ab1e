"""What the live view costs the ranks: the records that they write for it, in number and seconds of a step."""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.comm.flight.recorder import FlightRecorder
from minidist.comm.flight.slots import RING_BYTES, read_ring
from minidist.device.account import CATEGORIES, MemoryAccount
from minidist.launch.flight import ring_file

MODEL = ["--batch", "8", "--context", "64", "--layers", "2", "--width", "64", "--heads", "2"]


def best_seconds(work: Callable[[], object], times: int = 500) -> float:
    """Of one call, in the quickest of ten rounds."""
    rounds = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(times):
            work()
        rounds.append((time.perf_counter() - start) / times)
    return min(rounds)


@pytest.mark.soak
def test_the_records_take_less_than_a_hundredth_of_a_step(tmp_path: Path) -> None:
    assert main(["train", "-n", "2", "--transport", "threads", "--quiet", "--steps", "20", *MODEL, "--out",
                 str(tmp_path)]) == 0
    _, entries = read_ring(ring_file(tmp_path / "flight", 0))
    kinds = Counter(entry["kind"] for entry in entries)
    assert kinds["state"] == 20
    calls = sum(entry["kind"] in ("call", "message") for entry in entries) / 20
    recorder, account = FlightRecorder(), MemoryAccount()
    number = recorder.made(1, 1, "all_reduce", "ring", "sum", None, "<f4", (4,), "a.py:1", axis="dp",
                           world_ranks=(0, 1))

    def state() -> None:
        now, peak = account.now, account.peak
        recorder.state([now[name] for name in CATEGORIES], [peak[name] for name in (*CATEGORIES, "total")], None, 1.0,
                       "estimate")

    cost = best_seconds(state) + calls * best_seconds(lambda: recorder.stood(number, 0.1))
    step = json.loads((tmp_path / "metrics.json").read_text())["step_seconds"]
    print(f"{1e6 * cost:.1f} µs of a step of {1e3 * step:.1f} ms: {cost / step:.3%}")
    assert cost < 0.01 * step


def test_the_disk_holds_a_ring_a_rank_and_a_line_a_step(tmp_path: Path) -> None:
    """So nothing on the disk grows with the steps but metrics.jsonl."""
    assert main(["train", "-n", "2", "--transport", "threads", "--quiet", "--steps", "3", "--batch", "2",
                 "--context", "8", "--layers", "1", "--width", "8", "--heads", "1", "--out", str(tmp_path)]) == 0
    assert [path.stat().st_size for path in (tmp_path / "flight").iterdir()] == [RING_BYTES] * 2
    assert len((tmp_path / "metrics.jsonl").read_bytes()) < 3 * 1024
