"""Measures that several checks share: ranks that do not fit together, and arrays compared with the
answer key's.

    ranks = on_ranks(_train, exercise, size=3, task="3 steps", advice="every rank calls the same")
    yield parity("weights", alone(), [rank["weights"] for rank in ranks], "wrong sums", "section 2",
                 known={"averaged twice": lambda: alone(1 / 3)})
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from minidist.errors import CommError
from minidist.grading import Known, Result, Signs, TaskFailed, judge, named
from minidist.launch import run
from minidist.lessons.lab import difference

T = TypeVar("T")

MOST_COLUMNS = 100  # of a picture in text
LIMIT = 60.0  # seconds for the ranks to return: of a busy machine; a deadlock is found at once


def on_ranks(
    work: Callable[..., T],
    *args: Any,
    size: int,
    task: str,
    advice: str,
    mistake: str = "the ranks do not fit together",
    target: str = "an end",
) -> list[T]:
    """Run `work(group, *args)`, which calls the student's functions, on `size` ranks as threads.

    Args:    task, advice, mistake, target: of the Result if the ranks do not fit together; it tells
             the error, too.
    Returns: the results of all ranks, in rank order.
    Raises:  TaskFailed if ranks wait for each other, or make calls that do not match; any error of
             the student's code.
    """
    try:
        return run(work, *args, size=size, limit=LIMIT)
    except CommError as error:
        result = Result(task, False, target, type(error).__name__, mistake, f"{advice}; {error}")
        raise TaskFailed(result) from error


def parity(
    task: str,
    target: np.ndarray,
    ranks: Sequence[np.ndarray],
    mistake: str,
    advice: str,
    *,
    known: Known | None = None,
    signs: Signs | None = None,
    wanted: str = "those of one process",
) -> Result:
    """Return a Result that passes if every rank's array is `target`, to 1e-10 of its largest number.

    Args:    mistake, advice: if it is no known mistake. known: by the array that rank 0 then has.
             signs: tried after `known`. wanted: whose numbers `target` has.
    """
    error = np.max([difference(mine, target) for mine in ranks])  # a NaN of any rank stays
    if error < 1e-10:
        return Result(task, True, f"{wanted}, to 1e-10", f"{wanted}, to 1e-10")
    mistake, advice = named(
        mistake,
        advice,
        known=known,
        gives=lambda wrong: difference(ranks[0], wrong) < 1e-9,
        signs=signs,
    )
    return Result(task, False, wanted, f"off by {error:.1e}", mistake, advice)


def backward_mistake(error: BaseException) -> tuple[str, str]:
    """Return (mistake, advice) of a stage whose backward cannot begin; ("", "") if `error` tells of
    something else."""
    told = str(error)
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        told += f"; {error}"
    if "a loss must be one number" in told:
        return (
            "only the last rank's y is a loss; every other rank begins with the gradient of its "
            "output",
            "which rank has that gradient? section 1",
        )
    if "a Tensor has no 'base'" in told:
        return "backward takes an array, not a tensor", "a received array is one: section 1"
    if "has no attribute 'backward'" in told or "no tensor that this one was computed" in told:
        return (
            "backward needs the output with its tape, and the input, whose gradient is sent",
            "keep both, in the order (x, y): section 1",
        )
    return "", ""


def replicas(task: str, ranks: Sequence[np.ndarray], mistake: str, advice: str) -> Result:
    """Return a Result that passes if every rank's array is rank 0's, to 1e-12 of its largest
    number."""
    apart = np.max([difference(mine, ranks[0]) for mine in ranks])  # a NaN of any rank stays
    return Result(task, bool(apart < 1e-12), "equal", f"apart by {apart:.1e}", mistake, advice)


def pair(task: str, answer: Any, advice: str) -> Result:
    """Return a Result that passes if an answer is two numbers."""
    is_several = isinstance(answer, tuple | list)
    return judge(
        task,
        is_several and len(answer) == 2,
        "two numbers",
        f"{len(answer)} numbers" if is_several else type(answer).__name__,
        "not a pair",
        advice,
    )


Lane = tuple[str, Sequence[tuple[str, float, float]]]
"""A lane of a timeline: its name, and what happens in it: (label, start, stop)."""


def timelines(right: Sequence[Lane], yours: Sequence[Lane]) -> str:
    """Return both timelines as lines of text on one clock, for `Result.picture`.

    A unit of time is two to four columns, as fit; dots are waits.
    """
    wide = max(len(name) for name, _ in [*right, *yours])
    last = max(stop for _, things in [*right, *yours] for _, _, stop in things)
    unit = max(2, min(4, int(MOST_COLUMNS / last)))
    told = list[str]()
    for title, lanes in (("right", right), ("yours", yours)):
        told.append(f"{title}:")
        told += [f"  {name:<{wide}} |{_lane(things, unit)}" for name, things in lanes]
    return "\n".join(told)


def _lane(things: Sequence[tuple[str, float, float]], unit: int) -> str:
    """Return one lane: each thing as wide as it is long, and a bar at its end."""
    line = ""
    for label, start, stop in sorted(things, key=lambda thing: thing[1]):
        line = line.ljust(round(unit * start), ".")
        room = max(1, round(unit * stop) - len(line) - 1)
        line += f"{label[:room]:<{room}}|"
    return line
