"""Work after the results of a run: each piece may fail with one line, and the other pieces are
still done.

    with by_itself("the sample"):                       # on one rank, which sends nothing in it
        ...
    loss = together(world, "the validation", evaluate)  # on all ranks, which send to each other

The results are on the disk by then, and no failure of later work may lose them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from minidist.cli.train.saving import Stopped
from minidist.comm.group import Group
from minidist.comm.health.failure import say_line, words
from minidist.comm.records import share_records, unhurried
from minidist.errors import CommError, MinidistError
from minidist.survive.elastic import Regrouping

Result = TypeVar("Result")

OF_THE_JOB = (CommError, Stopped, Regrouping)
"""Errors that end the job, or a generation of it, on all ranks."""


@contextmanager
def by_itself(what: str) -> Iterator[None]:
    """Print an error of the block in one line that begins with `what`, and continue after the
    block."""
    try:
        yield
    except OF_THE_JOB:
        raise
    except Exception as error:
        _tell(what, _in_words(error))


def together(world: Group, what: str, work: Callable[[], Result]) -> Result | None:
    """Return `work()`; if it fails on one rank, print one line and return None on every rank.

    Every rank calls it.

    The ranks wait for the slowest as long as it works.

    Cost:    two all-gathers of small records, counted under `control`.
    Raises:  an error that ends the job; the error of the work if other ranks still send in it, so
             that they cannot continue.
    """
    result = None
    failed = None
    try:
        result = work()
    except OF_THE_JOB:
        raise
    except Exception as error:
        failed = error
    try:
        with unhurried(world):
            problems = share_records(world, "" if failed is None else _in_words(failed))
    except CommError:
        if failed is None:
            raise
        _tell(
            f"rank {world.rank}: {what}", _in_words(failed)
        )  # the job may end with another rank's error
        raise failed from None
    problem = next(filter(None, problems), "")
    if problem and world.rank == 0:
        _tell(what, problem)
    return None if problem else result


def _in_words(error: Exception) -> str:
    """Return an error in one line; the type is put first, unless it is an error of minidist."""
    told = (words(error).splitlines() or [""])[0]
    return told if isinstance(error, MinidistError) and told else f"{type(error).__name__}: {told}"


def _tell(what: str, problem: str) -> None:
    say_line(f"minidist train: {what} failed: {problem}; the run has its results without it")
