"""The share of communication that lies under computation: on made-up timelines, and on recorded
ones."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.comm.transports.throttled import delayed
from minidist.observe.overlap import Overlap, intersect, length, measure, subtract, together, union
from minidist.observe.timeline import Span, Timeline

INTERVALS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple), max_size=6
)


def points(intervals: list[Any]) -> set[int]:
    """The unit cells that integer intervals cover."""
    return {cell for start, stop in intervals for cell in range(start, stop)}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_points(one: list[Any], other: list[Any]) -> None:
    a = union(one)
    b = union(other)
    assert points(a) == points(one) and length(a) == len(points(one))
    assert all(left[1] < right[0] for left, right in zip(a, a[1:], strict=False))
    assert points(intersect(a, b)) == points(a) & points(b)
    assert points(subtract(a, b)) == points(a) - points(b)
    assert length(intersect(a, b)) + length(subtract(a, b)) == length(a)


# ------------------------------------------------------------------------------------------ made up


def made_up(*spans: tuple[str, str, float, float]) -> Timeline:
    """A timeline of (name, row, start, stop); collectives are of the axis that stands before a
    colon, else of dp."""
    timeline = Timeline(0)
    for name, row, start, stop in spans:
        axis = name.split(":")[0] if ":" in name else "dp"
        details = {"verb": "all_reduce", "axis": axis} if row == "communication" else {"step": 0}
        timeline.add(Span(name, row, start, stop, details))
    return timeline


def test_half_hidden() -> None:
    timeline = made_up(
        ("forward", "compute", 0, 2),
        ("backward", "compute", 2, 5),
        ("bucket 0", "communication", 4, 6),
        ("wait for gradients", "compute", 5, 6),
        ("step", "compute", 0, 7),
    )
    assert measure(timeline) == Overlap(communication=2, computation=5, hidden=1, waited=1)
    assert measure(timeline).share == 0.5


def test_a_wait_inside_computation_hides_nothing() -> None:
    """The mistake to make: to take the whole of forward as computation."""
    timeline = made_up(
        ("forward", "compute", 0, 10),
        ("wait for block 1", "compute", 2, 5),
        ("gather block 1", "communication", 1, 5),
    )
    assert measure(timeline) == Overlap(communication=4, computation=7, hidden=1, waited=3)


def test_two_collectives_at_once_count_once_and_scalars_not_at_all() -> None:
    timeline = made_up(
        ("backward", "compute", 0, 4),
        ("one", "communication", 1, 3),
        ("two", "communication", 2, 6),
        ("control:norm", "communication", 6, 9),
    )
    timeline.add(Span("loss", "communication", 9, 10))  # the strategy's own span around a scalar
    assert measure(timeline) == Overlap(communication=5, computation=4, hidden=3, waited=0)


def test_nothing_to_hide() -> None:
    assert measure(made_up(("forward", "compute", 0, 1))).share == 1.0
    assert measure(Timeline(0)) == Overlap(0, 0, 0, 0)


def test_of_some_steps_alone() -> None:
    timeline = Timeline(0)
    for step in range(3):
        timeline.add(Span("forward", "compute", 10 * step, 10 * step + 4, {"step": step}))
        timeline.add(Span("step", "compute", 10 * step, 10 * step + 10, {"step": step}))
        timeline.add(
            Span(
                "gather",
                "communication",
                10 * step + 3,
                10 * step + 12,
                {"axis": "dp", "verb": "gather"},
            )
        )
    assert measure(timeline, steps=[1]) == Overlap(
        communication=9, computation=4, hidden=3, waited=0
    )
    assert measure(timeline, steps=[0, 1]).communication == 7 + 9
    assert measure(timeline, steps=[7]).communication == 0


def test_together() -> None:
    both = together([Overlap(2, 5, 1, 1), Overlap(2, 5, 2, 0)])
    assert both == Overlap(4, 10, 3, 1) and both.share == 0.75


# ----------------------------------------------------------------------------------------- recorded


@pytest.mark.parametrize("hides", [True, False])
def test_recorded_over_links_that_take_their_time(hides: bool) -> None:
    """Sleeps stand for the computing, as long as the collective is under way or none at all: all is
    hidden, or nothing."""

    def job(world: Any) -> list[float]:
        timeline = Timeline(world.rank)
        with delayed(world, alpha=0.01, beta=0) as slow:
            timeline.follow(slow.ledger)
            with timeline.span("backward", step=0):
                if hides:
                    pending = slow.start_all_reduce([1.0], algorithm="ring")
                    while not pending.done():
                        time.sleep(0.002)
                else:
                    with timeline.span("wait for gradients"):
                        pending = slow.start_all_reduce([1.0], algorithm="ring")
                        pending.wait()
            pending.wait()
        found = measure(timeline)
        return [found.share, found.communication]

    for share, seconds in md.run(job, size=2):
        assert share == (1.0 if hides else 0.0)
        assert seconds > 0.01  # two messages, one after the other
