"""What follows the results of a run: each piece fails by itself, with one line, and the others are
made.

    with by_itself("the sample"):                       # on one rank alone, which sends nothing
                                                        meanwhile
        ...
    loss = together(world, "the validation", evaluate)  # on all ranks, which send to each other

The results are on the disk by then, so nothing that is made of them may cost them.
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
    """In the block an error ends only the block, and is told in one line that begins with
    `what`."""
    try:
        yield
    except OF_THE_JOB:
        raise
    except Exception as error:
        _tell(what, _in_words(error))


def together(world: Group, what: str, work: Callable[[], Result]) -> Result | None:
    """Return `work()`, or None on every rank if it fails on one, which is told in one line. Every
    rank calls it.

    The ranks wait for the slowest as long as it works.

    Cost:    two all-gathers of small records, counted under `control`.
    Raises:  what ends the job; the error of the work if other ranks still send in it, so that they
             cannot go on.
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
    """Return one line on an error; what is no error of minidist begins with its type."""
    told = (words(error).splitlines() or [""])[0]
    return told if isinstance(error, MinidistError) and told else f"{type(error).__name__}: {told}"


def _tell(what: str, problem: str) -> None:
    say_line(f"minidist train: {what} failed: {problem}; the run has its results without it")
