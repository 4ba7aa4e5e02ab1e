"""Schedules: right for any number of stages and microbatches, as long and as hungry as the chapter
says."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.errors import ScheduleError
from minidist.parallel.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeights,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
    SendGradient,
)
from minidist.parallel.pipeline.schedule_checker import (
    ComputeSpan,
    Times,
    broken,
    check,
    check_spans,
    clock_of,
    peak_held,
)
from minidist.parallel.pipeline.schedules import (
    ORDERS,
    V_SHAPED,
    make_schedule,
    of_orders,
    stages_a_rank,
)

any_schedule = given(
    st.sampled_from([*ORDERS]), st.integers(1, 9), st.integers(1, 12), st.integers(1, 4)
)


@settings(max_examples=30)
@any_schedule
def test_every_schedule_is_right_and_as_long_as_its_formula(
    name: str, ranks: int, microbatches: int, v: int
) -> None:
    check_one(name, ranks, microbatches, v)


@pytest.mark.soak
@settings(max_examples=2000)
@any_schedule
def test_very_many_schedules(name: str, ranks: int, microbatches: int, v: int) -> None:
    check_one(name, ranks, microbatches, v)


def check_one(name: str, p: int, m: int, v: int) -> None:
    """Proved, its clock breaks nothing, and bubble and activations are the chapter's."""
    schedule = make_schedule(name, p, m, chunks=v if name == "interleaved" else None)
    check(schedule)
    times = Times(*(time / schedule.chunks for time in (1, 2, 1, 1)))
    clock = clock_of(schedule, times)
    held = peak_held(schedule)
    assert not broken(clock.spans)
    formula = {
        "naive": (p - 1) / p,
        "gpipe": (p - 1) / (m + p - 1),
        "1f1b": (p - 1) / (m + p - 1),
        "interleaved": (p - 1) / (v * m + p - 1) if m % p == 0 else None,
        "zb-h1": (p - 1) / (3 * m + p - 1) if m >= p else None,
        "pipedream": (p - 1) / (m + p - 1),
        "zb-v": (p - 1) / (6 * m + p - 1) if m >= 2 * p - 1 else None,
        "dualpipe-v": (p - 1) / (6 * m + p - 1) if m >= 2 * p else None,
    }[name]
    assert formula is None or clock.bubble == pytest.approx(formula, abs=1e-12)
    if name == "zb-h1":
        assert max(held) <= min(m, p)
    elif name in V_SHAPED:
        most = 2 * p if name == "zb-v" else 2 * p + 1
        assert max(held) <= min(2 * m, most) and (m < 2 * p or max(held) == most)
        assert m < 2 * p or name != "zb-v" or held == [most] * p  # equally much on every rank
        assert [schedule.stages_of(rank) for rank in range(p)] == [
            [rank, 2 * p - 1 - rank] for rank in range(p)
        ]
    elif name == "interleaved":
        assert (
            m % p
            or v == 1
            or held == [min(2 * (p - 1 - rank) + (v - 1) * p + 1, v * m) for rank in range(p)]
        )
    else:
        assert held == [{"naive": 1, "gpipe": m}.get(name, min(m, p - rank)) for rank in range(p)]


def drawn(schedule: Schedule) -> list[str]:
    """Each rank's line in the notation of the module's docstring."""
    lines = []
    clock = clock_of(schedule)
    for rank in range(schedule.ranks):
        cells = [".."] * int(clock.length)
        for span in clock.spans:
            if span.rank == rank:
                letter = "F" if isinstance(span.instruction, Forward) else "B"
                cells[int(span.start) : int(span.stop)] = [
                    f"{letter}{span.instruction.microbatch}"
                ] * int(span.stop - span.start)
        lines.append(" ".join(cells))
    return lines


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_docstrings_chart(name: str) -> None:
    from minidist.parallel.pipeline import schedules

    for line in drawn(make_schedule(name, 3, 4)):
        assert line in schedules.__doc__


def test_an_uneven_stage_slows_all() -> None:
    even, uneven = (
        clock_of(make_schedule("1f1b", 3, 6), Times(shares=shares)) for shares in (None, [1, 2, 1])
    )
    assert even.length == 24 and uneven.length == 40  # the slow stage alone has 36
    assert uneven.bubble > even.bubble


def test_messages_take_time() -> None:
    assert clock_of(make_schedule("naive", 2, 1), Times(message=0.5)).length == 7.0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("message", "lengths"),
    [
        (0.0, [57, 52.5, 51, 49.5, 49.5]),
        (0.5, [71, 59.5, 57, 56.5, 58]),
        (1.0, [85, 75.5, 71, 65.5, 75]),
    ],
)
def test_slow_messages(message: float, lengths: list[float]) -> None:
    """The table of lesson 11."""
    names = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
    times = {name: [time / stages_a_rank(name) for time in (1.0, 2.0, 1.0, 1.0)] for name in names}
    assert [
        clock_of(make_schedule(name, 4, 16), Times(*times[name], message=message)).length
        for name in names
    ] == lengths


def test_what_there_is() -> None:
    for name, ranks, microbatches, chunks, says in (
        ("dualpipe", 2, 2, None, "choose one of naive, gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        ("1f1b", 0, 2, None, "both are at least 1"),
        ("1f1b", 2, 0, None, "both are at least 1"),
        ("gpipe", 2, 2, 2, "one stage per rank, not 2; use interleaved"),
        ("zb-v", 2, 2, 3, "two stages per rank, not 3"),
        ("interleaved", 2, 2, 0, "at least 1"),
    ):
        with pytest.raises(ScheduleError, match=says):
            make_schedule(name, ranks, microbatches, chunks=chunks)


# --------------------------------------------------------------------------- broken by hand, caught


def changed(
    name: str, rank: int, edit: "Iterable[Instruction]", ranks: int = 2, microbatches: int = 2
) -> Schedule:
    """A schedule in which one rank has another list."""
    right = make_schedule(name, ranks, microbatches)
    lists = [*right.lists]
    lists[rank] = tuple(edit)
    return Schedule(name, ranks, microbatches, right.chunks, tuple(lists))


def without(name: str, rank: int, *left_out: Instruction) -> Schedule:
    mine = make_schedule(name, 2, 2).lists[rank]
    assert set(left_out) <= set(mine)
    return changed(name, rank, (i for i in mine if i not in left_out))


def swapped(name: str, rank: int, one: Instruction, other: Instruction) -> Schedule:
    turn = {one: other, other: one}
    return changed(name, rank, (turn.get(i, i) for i in make_schedule(name, 2, 2).lists[rank]))


def halves(instruction: Instruction) -> list[Instruction]:
    """A backward in two."""
    if not isinstance(instruction, Backward):
        return [instruction]
    return [BackwardInput(instruction.stage, instruction.microbatch)]


BROKEN = {
    "use before arrival": (
        swapped("gpipe", 1, RecvActivation(1, 1), Forward(1, 1)),
        "rank 1 does the forward of microbatch 1 on stage 1 before its input is there: the "
        "receive of the activation of microbatch 1 on stage 1 is later",
    ),
    "never received": (
        without("gpipe", 1, RecvActivation(1, 1)),
        "the receive of the activation of microbatch 1 on stage 1 is missing in its list",
    ),
    "backward first": (
        swapped("naive", 0, Forward(0, 0), Backward(0, 0)),
        "rank 0 does the backward of microbatch 0 on stage 0 before",
    ),
    "sent before computed": (
        swapped("gpipe", 0, Forward(0, 1), SendActivation(0, 1)),
        "send of the activation of microbatch 1 on stage 0 before its input is there",
    ),
    "missing forward": (
        without("1f1b", 0, Forward(0, 1), SendActivation(0, 1), Backward(0, 1), RecvGradient(0, 1)),
        "never does the forward of microbatch 1 on stage 0",
    ),
    "missing backward": (
        without("1f1b", 0, Backward(0, 1)),
        "never does the backward of microbatch 1 on stage 0",
    ),
    "missing weights": (
        without("zb-h1", 0, BackwardWeights(0, 1)),
        "never does the backward for the weights of microbatch 1 on stage 0",
    ),
    "twice": (
        changed("gpipe", 0, (*make_schedule("gpipe", 2, 2).lists[0], Backward(0, 0))),
        "backward of microbatch 0 on stage 0 twice",
    ),
    "foreign stage": (
        changed("gpipe", 0, (Forward(1, 0),)),
        "rank 0 does the forward of microbatch 0 on stage 1, a stage of another rank",
    ),
    "whole and in parts": (
        changed("1f1b", 0, (*make_schedule("1f1b", 2, 2).lists[0], BackwardInput(0, 0))),
        "whole and in parts",
    ),
    "never sent": (
        without("gpipe", 0, SendActivation(0, 1)),
        "rank 1 does the receive of the activation of microbatch "
        "1 on stage 1, but rank 0 never sends it",
    ),
    "nobody takes it": (
        without("gpipe", 0, RecvGradient(0, 1), Backward(0, 1)),
        "never does the backward",
    ),
    "another order": (
        swapped("gpipe", 0, SendActivation(0, 0), SendActivation(0, 1)),
        "before its input",
    ),
    "orders cross": (
        changed(
            "gpipe",
            0,
            sorted(
                make_schedule("gpipe", 2, 2).lists[0],
                key=lambda i: (
                    not isinstance(i, Forward),
                    not isinstance(i, SendActivation),
                    -i.microbatch,
                ),
            ),
        ),
        "received in another order than sent: the receive of the activation of microbatch 1 on "
        "stage 1 arrives first, but rank 1 expects the receive of the activation of microbatch 0",
    ),
    "deadlock": (
        swapped("naive", 0, SendActivation(0, 0), RecvGradient(0, 0)),
        "deadlock, these ranks wait: rank 0 at the receive of the gradient of microbatch 0 on "
        "stage 0 for rank 1; rank 1 at the receive of the activation of microbatch 0 on stage 1 "
        "for rank 0",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_schedule_is_named(how: str) -> None:
    schedule, says = BROKEN[how]
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_the_deadlock_is_named_by_the_clock_too() -> None:
    with pytest.raises(ScheduleError, match="these ranks wait"):
        clock_of(BROKEN["deadlock"][0])


@settings(max_examples=40)
@given(
    any_place=st.integers(0, 10**6),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    name=st.sampled_from([*ORDERS]),
)
def test_nothing_can_be_left_out(any_place: int, ranks: int, microbatches: int, name: str) -> None:
    """Leave out any instruction of any schedule."""
    right = make_schedule(name, ranks, microbatches)
    rank = any_place % ranks
    mine = [*right.lists[rank]]
    del mine[any_place // ranks % len(mine)]
    with pytest.raises(ScheduleError):
        check(
            replace(
                right,
                lists=tuple(tuple(mine) if r == rank else right.lists[r] for r in range(ranks)),
            )
        )


def test_a_chart_that_breaks_what_a_clock_does_not() -> None:
    spans = list(clock_of(make_schedule("gpipe", 2, 2)).spans)
    check_spans(spans)
    early = [
        ComputeSpan(s.rank, s.instruction, s.start - 1, s.stop - 1)
        if s.instruction == Backward(0, 1)
        else s
        for s in spans
    ]
    with pytest.raises(
        ScheduleError,
        match=r"the backward of microbatch 1 on stage 0 begins at 4 on rank 0, but needs "
        r"the backward of microbatch 1 on stage 1, which rank 1 ends at 5; 1 dep",
    ):
        check_spans(early)


def test_orders_get_the_messages_that_they_need() -> None:
    schedule = of_orders("mine", [[Forward(0, 0), Backward(0, 0)], [Forward(1, 0), Backward(1, 0)]])
    assert schedule.lists == (
        (Forward(0, 0), SendActivation(0, 0), RecvGradient(0, 0), Backward(0, 0)),
        (RecvActivation(1, 0), Forward(1, 0), Backward(1, 0), SendGradient(1, 0)),
    )
    assert make_schedule("naive", 2, 1).lists == schedule.lists
    assert str(Forward(3, 1)) == "forward of microbatch 1 on stage 3"
