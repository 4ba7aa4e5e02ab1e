"""Test how many cores other programs take, by counted processor seconds; no clock of this
machine."""

from types import SimpleNamespace
from typing import Any

import pytest

from minidist.device import cores
from minidist.observe import other_load
from minidist.observe.other_load import OtherLoad, advice


@pytest.mark.parametrize(("usable", "others"), [(None, 1.5), ([0], 0.4), ([1, 2], 0.6)])
def test_others_are_what_is_busy_but_not_ours(
    usable: list[int] | None, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 10 s this process computes 5 s; of three cores 9, 10 and 1 s are busy."""
    now = SimpleNamespace(clock=100.0, own=7.0, busy=[50.0, 60.0, 70.0])
    monkeypatch.setattr(
        other_load,
        "time",
        SimpleNamespace(perf_counter=lambda: now.clock, process_time=lambda: now.own),
    )
    monkeypatch.setattr(
        other_load.psutil,
        "cpu_times",
        lambda percpu: [
            SimpleNamespace(user=busy - 3, system=2.0, nice=0.5, softirq=0.5, idle=99.0)
            for busy in now.busy
        ],
    )
    monkeypatch.setattr(cores, "usable", lambda: usable)
    load = OtherLoad()
    now.clock = 110.0
    now.own = 12.0
    now.busy = [59.0, 70.0, 71.0]
    assert load.seconds() == 10 and load.cores() == pytest.approx(others)


@pytest.mark.parametrize(
    ("threads", "busy", "says"),
    [
        (1, 2.0, None),
        (2, 0.4, None),
        (2, 0.6, "--threads 1 "),
        (2, 2.0, "--threads 1 "),
        (4, 0.4, None),
        (4, 1.2, "--threads 2 "),
        (3, 1.4, None),
        (3, 1.6, "--threads 2 "),
    ],
)
def test_threads_that_lack_room_are_told(
    threads: int, busy: float, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "of_all_ranks", lambda: 2 if threads < 3 else 4)
    line: Any = advice(threads, busy)
    assert (line is None) if says is None else says in line and f"keep {busy:.1f} of " in line
