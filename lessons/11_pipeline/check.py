"""Grades exercise 11: the lists are proved and timed by the library's checker, and stages that
compute run them."""

import sys
from collections.abc import Iterator
from functools import partial
from math import isclose
from types import ModuleType
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, tensor
from minidist.comm.group import Group
from minidist.console import plural
from minidist.errors import GradientError, ScheduleError
from minidist.grading import Result, expect
from minidist.lessons.checking import Lane, backward_mistake, on_ranks, timelines
from minidist.parallel.pipeline.instructions import (
    RECEIVES,
    Backward,
    Forward,
    Instruction,
    RecvActivation,
    Schedule,
)
from minidist.parallel.pipeline.pipeline import plain_gpipe
from minidist.parallel.pipeline.schedule_checker import check, clock_of, needs, peak_held
from minidist.parallel.pipeline.schedules import make_schedule, of_orders

# (ranks, microbatches); some have fewer microbatches than stages.
SIZES = ((1, 3), (2, 4), (4, 8), (4, 2), (3, 7))

CUT_FROM = (plain_gpipe,)
ANSWERS = {
    4: "min(ranks - 1 - rank, microbatches)",
    5: """
        if microbatch + first < microbatches:
            order.append(Forward(rank, microbatch + first))
       """,
    6: "[Backward(rank, microbatch)]",
    7: "RecvActivation(stage, microbatch) if stage else None",
    8: "RecvGradient(stage, microbatch) if stage < ranks - 1 else None",
    9: "(ranks - 1) / (microbatches + ranks - 1)",
    10: "min(microbatches, ranks - rank)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check GPipe, how many forwards come first, the lists, the messages and the formulas.

    The lists must be correct, as short as possible, and hold no more microbatches than needed.
    """
    for ranks in (1, 2, 3):
        yield from _gpipe(exercise, ranks)
    for ranks, microbatches in SIZES:
        yield from _ahead(exercise, ranks, microbatches)
    for ranks, microbatches in SIZES:
        yield from _lists(exercise, ranks, microbatches)
    yield from _messages(exercise)
    for ranks, microbatches in SIZES:
        yield from _formulas(exercise, ranks, microbatches)


class _Named:
    """A group that names what cannot be sent; all else is the group's own."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, x: Any, dst: int) -> None:
        """Send x."""
        if x is None:
            raise GradientError(
                f"there is nothing to send to rank {dst}: that tensor has no gradient; with which "
                "tensor did this stage's tape begin, and what was kept of it?"
            )
        self.group.send(x, dst=dst)


def _how_wrong(found: list[Any], target: list[np.ndarray]) -> str:
    """Return how the last stage whose gradient is wrong differs, in words."""
    for stage in reversed(range(len(target))):
        mine = found[stage]
        right = target[stage]
        if mine is None:
            return f"stage {stage} has no gradient"
        if np.allclose(mine, right):
            continue
        factor = float((mine * right).sum() / (right * right).sum())
        if np.allclose(mine, factor * right):
            return f"stage {stage}'s gradient is {factor:.3g} times the right one"
        return f"stage {stage}'s gradient is another one"
    return ""


def _gpipe(exercise: ModuleType, ranks: int) -> Iterator[Result]:
    """Check the gradient of each stage of GPipe against one process's.

    A stage has one matrix; the batch has three microbatches.
    """
    draw = np.random.default_rng(ranks)
    drawn = [draw.normal(size=(4, 4)) for _ in range(ranks)]
    batch = draw.normal(size=(3, 2, 4))

    def forward(x: Any, weight: Parameter, *, last: bool) -> Any:
        y = ops.gelu(ops.linear(x, weight))
        return ops.sum(y * y) if last else y

    def job(group: Group) -> Any:
        weight = Parameter(drawn[group.rank], name="w")
        exercise.plain_gpipe(
            lambda x, *_: forward(x, weight, last=group.rank == ranks - 1),
            _Named(group),
            [(tensor(rows), None) for rows in batch],
            1,
        )
        return None if weight.grad is None else np.array(weight.grad)

    def alone(micros: Any) -> list[np.ndarray]:
        weights = [Parameter(array, name="w") for array in drawn]
        for rows in micros:
            x = tensor(rows)
            for stage, weight in enumerate(weights):
                x = forward(x, weight, last=stage == ranks - 1)
            x.backward()
        return [np.array(weight.grad) for weight in weights]

    task = f"GPipe, {plural(ranks, 'rank')}: the gradient of each stage"
    target = alone(batch)
    try:
        found = on_ranks(
            job,
            size=ranks,
            task=task,
            target="every rank returns",
            mistake="the ranks wait for each other",
            advice="each receive needs its send, on the stage it names: section 1 (holes 1 to 3)",
        )
    # The student's code may raise anything. The check may know the cause.
    except Exception as error:
        mistake, advice = backward_mistake(error)
        if not mistake:
            raise
        raised = type(error.__cause__ or error).__name__
        yield Result(task, False, "every rank returns", raised, mistake, advice)
        return
    same = [
        mine is not None and np.allclose(mine, right)
        for mine, right in zip(found, target, strict=True)
    ]
    yield expect(
        task,
        [True] * ranks,
        same,
        _how_wrong(found, target),
        "what does a stage's backward begin with, and what does the stage before it get? section 1 "
        "(holes 1 to 3)",
        signs={
            "nothing was kept for backward": found[-1] is None,
            "the backward of one microbatch alone": lambda: any(
                np.allclose(found[-1], alone(batch[at : at + 1])[-1]) for at in range(3)
            ),
        },
    )


def _ahead(exercise: ModuleType, ranks: int, microbatches: int) -> Iterator[Result]:
    target = [min(ranks - 1 - rank, microbatches) for rank in range(ranks)]
    measured = [exercise.ahead(rank, ranks, microbatches) for rank in range(ranks)]
    yield expect(
        f"forwards ahead, {plural(ranks, 'rank')}, {microbatches} microbatches",
        target,
        measured,
        "other numbers",
        "follow the figure's 1F1B: what does each rank do before its first backward? section 3 "
        "(hole 4)",
        known={
            "that is the first stage's number for all": [min(ranks - 1, microbatches)] * ranks,
            "that is GPipe: all forwards first": [microbatches] * ranks,
            "none is ahead: only the last stage begins so": [0] * ranks,
            "the other way round: the first stage has most stages after it": [
                min(r, microbatches) for r in range(ranks)
            ],
            "the one of the first turn is not ahead": [
                min(ranks - rank, microbatches) for rank in range(ranks)
            ],
            "more than there are microbatches": [ranks - 1 - rank for rank in range(ranks)],
        },
    )


def _lists(exercise: ModuleType, ranks: int, microbatches: int) -> Iterator[Result]:
    """Check the lists: by proof, then by the clock, then by what they hold."""
    what = f"{plural(ranks, 'rank')}, {microbatches} microbatches"
    orders = [exercise.one_f_one_b(rank, ranks, microbatches) for rank in range(ranks)]
    right = make_schedule("1f1b", ranks, microbatches)
    schedule = of_orders("your 1F1B", orders)
    schedule = Schedule("your 1F1B", ranks, microbatches, 1, schedule.lists)
    try:
        check(schedule)
        mistake = ""
    except ScheduleError as error:
        mistake = str(error)
    yield Result(
        f"your lists, {what}",
        not mistake,
        "proved",
        "refused" if mistake else "proved",
        mistake,
        "each microbatch once forward and once backward: section 3 (holes 5, 6)",
    )
    length = clock_of(schedule).length
    target = clock_of(right).length
    yield expect(
        f"length, {what}",
        target,
        length,
        "ranks wait longer than they must",
        "forwards and backwards in turn: section 3 (holes 5, 6)",
        picture=lambda: timelines(_lanes(right), _lanes(schedule)),
    )
    yield expect(
        f"microbatches held, {what}",
        peak_held(right),
        peak_held(schedule),
        "that holds more than 1F1B",
        "a backward as soon as there can be one: section 4 (holes 5, 6)",
        picture=lambda: timelines(_lanes(right), _lanes(schedule)),
    )


def _lanes(schedule: Schedule) -> list[Lane]:
    """Return what each stage computes by the checker's clock: F2 is the forward of microbatch 2."""
    spans = clock_of(schedule).spans
    return [
        (
            f"stage {rank}",
            [
                (
                    f"{type(span.instruction).__name__[0]}{span.instruction.microbatch}",
                    span.start,
                    span.stop,
                )
                for span in spans
                if span.rank == rank
            ],
        )
        for rank in range(schedule.ranks)
    ]


def _messages(exercise: ModuleType) -> Iterator[Result]:
    """Check which message each compute of three stages waits for."""
    schedule = make_schedule("1f1b", 3, 2)
    for instruction in (compute(stage, 1) for compute in (Forward, Backward) for stage in range(3)):
        target = next(
            (needed for needed in needs(instruction, schedule) if isinstance(needed, RECEIVES)),
            None,
        )
        measured = exercise.waits_for(instruction, 3)
        kind = "forward" if isinstance(target, RecvActivation) else "backward"
        yield expect(
            f"what the {instruction} waits for, 3 stages",
            _name(target),
            _name(measured),
            "a receive carries the number of the stage that receives",
            "section 2 (holes 7, 8)",
            signs={
                "there is no stage there: the first stage reads the batch, the last has the loss": (
                    target is None
                ),
                "it would use what has not come": measured is None,
                "it returned no message": not isinstance(measured, RECEIVES),
                "another microbatch's message": getattr(measured, "microbatch", None)
                != getattr(target, "microbatch", None),
                f"a {kind} needs the other kind of message": type(target) is not type(measured),
            },
        )


def _name(instruction: Instruction | None) -> str:
    return str(instruction) if instruction is not None else "nothing"


def _formulas(exercise: ModuleType, ranks: int, microbatches: int) -> Iterator[Result]:
    right = make_schedule("1f1b", ranks, microbatches)
    yield expect(
        f"bubble, {plural(ranks, 'rank')}, {microbatches} microbatches",
        clock_of(right).bubble,
        exercise.bubble(ranks, microbatches),
        "another number",
        "for how long does a rank compute, for how long does it wait, and what is the whole? section "
        "3 (hole 9)",
        known={
            "that is the share in which a rank computes": microbatches / (microbatches + ranks - 1),
            "p stages, one of which does not wait for itself": ranks / (microbatches + ranks - 1),
            "the whole step is shorter than that": (ranks - 1) / (microbatches + ranks),
            "microbatches and ranks changed places": (microbatches - 1)
            / (microbatches + ranks - 1),
            "that is idle time over busy time; the bubble is over all of it": (
                (ranks - 1) / microbatches
            ),
            "that is the naive schedule's": (ranks - 1) / ranks,
        },
        same=partial(isclose, abs_tol=1e-9),
        show="{:.4f}".format,
    )
    yield expect(
        f"held, {plural(ranks, 'rank')}, {microbatches} microbatches",
        peak_held(right),
        [exercise.held(rank, ranks, microbatches) for rank in range(ranks)],
        "not what the list holds",
        "a microbatch is held from its forward to its backward: count the forwards before each "
        "rank's first backward: section 4 (hole 10)",
        known={
            "that is GPipe, which holds all": [microbatches] * ranks,
            "that is the first rank's number for all": [min(microbatches, ranks)] * ranks,
            "the other way round: the last rank holds least": [
                min(microbatches, rank + 1) for rank in range(ranks)
            ],
            "the one in work is held, too": [
                min(microbatches, ranks - 1 - rank) for rank in range(ranks)
            ],
            "more than there are microbatches": [ranks - rank for rank in range(ranks)],
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "11", *sys.argv[1:]]))
