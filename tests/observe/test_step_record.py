"""A recorded step replays as it was recorded: on every rank, whatever ended when."""

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_steps import random_steps

from minidist.observe.events import Busy
from minidist.observe.overlap import length, union
from minidist.observe.rank_line import StepLines
from minidist.observe.step_bound import lower_bound, plain_critical_path
from minidist.observe.step_record import StepRecord, StepWait, record_step
from minidist.observe.timeline import Timeline
from minidist.observe.what_if import Change, predict
from minidist.observe.why import why

MOMENTS = st.integers(-5, 25).map(float)


def busy_of(record: StepRecord, start: float, stop: float) -> list[tuple[str, float]]:
    return [(busy.name, cast(float, busy.work)) for busy in record._busy(0, start, stop)]


def test_between_a_moment_and_one_before_it_no_work_is_done() -> None:
    record = StepRecord([(0.0, 10.0)], [], [[]], [[("backward", 0.0, 10.0)]])
    assert busy_of(record, 5.0, 3.0) == []
    assert busy_of(record, 3.0, 5.0) == [("backward", 2.0)]


@given(MOMENTS, MOMENTS, MOMENTS, st.lists(MOMENTS, max_size=8))
@settings(max_examples=100)
def test_pieces_of_work_fill_the_time_and_none_is_negative(
    start: float, stop: float, begin: float, edges: list[float]
) -> None:
    """Pieces of work and waits of any places, of which some end before they begin."""
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    work = [("forward", *pair) for pair in pairs[::2]]
    waits = [StepWait("wait", first, last, None) for first, last in pairs[1::2]]
    found = busy_of(StepRecord([(begin, 20.0)], [], [waits], [work]), start, stop)
    assert all(seconds > 0 for _, seconds in found)
    assert sum(seconds for _, seconds in found) == pytest.approx(max(0.0, stop - start))


@given(random_steps())
@settings(max_examples=100)
def test_a_step_replays_as_it_was_recorded(timelines: list[Timeline]) -> None:
    """With nothing changed each rank ends when it ended; no work is negative."""
    record = record_step(timelines, 0)
    for trace in record.traces():
        assert all(cast(float, event.work) > 0 for event in trace if isinstance(event, Busy))
    replayed = record.replay()
    for rank, (_, stop) in enumerate(record.windows):
        assert replayed.times(rank)[-1] == pytest.approx(stop - record.begin, abs=1e-9)
    lines = StepLines(record)
    assert predict(record, Change()) == pytest.approx(
        max(record.replay(lines.traces()).times(rank)[-1] for rank in range(len(record.windows)))
    )
    assert predict(record, Change()) <= record.seconds + 1e-9


@given(random_steps())
@settings(max_examples=100)
def test_the_accounts_of_any_step_add_up(timelines: list[Timeline]) -> None:
    """Causes add up to the waits, the path to the step; the bound is below the step."""
    record = record_step(timelines, 0)
    report = why(record)
    assert report["replayed"] == pytest.approx(record.seconds)
    for rank, (start, stop) in enumerate(record.windows):
        rows = [row["seconds"] for row in report["rows"] if row["rank"] == rank]
        assert all(seconds > 0 for seconds in rows)
        assert sum(rows) == pytest.approx(record.exposed(rank), abs=1e-12)
        waits = length(union((wait.start, wait.stop) for wait in record.waits[rank]))
        assert record.exposed(rank) == pytest.approx(waits, abs=1e-12)
        assert waits <= stop - start + 1e-12
    path = report["path"]
    assert path[0]["start"] == 0.0
    assert path[-1]["stop"] == pytest.approx(record.seconds)
    assert all(
        one["stop"] == pytest.approx(other["start"])
        for one, other in zip(path, path[1:], strict=False)
    )
    assert sum(part.stop - part.start for part in plain_critical_path(record)) == pytest.approx(
        record.seconds
    )
    assert lower_bound(record) <= record.seconds + 1e-12
