"""The numbers of the live figure `offload_lanes`, computed another way."""

from typing import Any

import pytest

from minidist.observe.events import Await, Transfer
from minidist.parallel.memory.disk import Disk
from minidist.simulate.timelines import timelines
from minidist.simulate.trace import RankTrace
from minidist.site.live.offload_lanes import phase_begins, remembered, simulated


def test_the_lanes_of_the_figure_move_the_bytes_of_the_lessons_table() -> None:
    """Mixed precision, one pass: bytes a parameter of each lane; the update, whatever the tokens."""
    table = {"disk to host": 18, "host to disk": 16, "host to device": 4, "device to host": 2}
    found = simulated(4, 32)
    (trace,) = found.traces
    for lane, each in table.items():
        moves = [
            event.nbytes
            for event in trace.events[trace.steps[-1] :]
            if isinstance(event, Transfer) and event.lane == lane
        ]
        assert sum(moves) == pytest.approx(each * trace.parameters, rel=1e-3), lane
    updates = [
        simulated(4, sequences).step_seconds
        - phase_begins(timelines(simulated(4, sequences), [0])[0])[2]
        for sequences in (32, 128)
    ]
    assert updates[0] == pytest.approx(updates[1], rel=1e-6)


def test_a_read_when_needed_is_what_a_store_without_a_spare_buffer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (late,) = simulated(4, 32, False).traces
    monkeypatch.setattr(Disk, "has_spare", lambda disk: False)
    remembered.cache_clear()
    (trace,) = simulated.__wrapped__(4, 32, True).traces
    remembered.cache_clear()
    assert _order(trace) == _order(late)


def _order(trace: RankTrace) -> list[Any]:
    """Return a step's events without the numbers of moves, which count in the order of starts."""
    return [
        event._replace(id=0) if isinstance(event, (Transfer, Await)) else event
        for event in trace.events[trace.steps[-1] :]
    ]
