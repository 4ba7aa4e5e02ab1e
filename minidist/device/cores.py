"""The cores of a machine that a job may use, divided among its ranks.

    deal([0, 1, 2, 3], 2)   [0, 1] and [2, 3]        each rank has its own
    deal([0, 1], 3)         [0, 1] for each rank     fewer cores than ranks: all share them, and the
                                                     system schedules

A process starts with the cores of the thread that starts it: `starting_on` binds a rank before its
libraries start threads of their own. Linux only: elsewhere `usable` is None.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

# cores of all ranks of a host together, where a launcher has bound each of them
VARIABLE = "MINIDIST_CORES"


def usable() -> list[int] | None:
    """Return the cores that this process may use, by number; None where a process cannot choose."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def of_all_ranks() -> int:
    """Return the number of cores that the ranks of this host have together, as far as this rank
    knows."""
    told = os.environ.get(VARIABLE, "")
    mine = usable()
    if re.fullmatch("[0-9]{1,6}", told) and int(told):
        return int(told)
    return len(mine) if mine else os.cpu_count() or 1


def deal(cores: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the cores of each of `ranks` ranks of a host; the first ranks have one more where the
    numbers do not divide."""
    if len(cores) < ranks:
        return [[*cores] for _ in range(ranks)]
    least, more = divmod(len(cores), ranks)
    first = [rank * least + min(rank, more) for rank in range(ranks + 1)]
    return [[*cores[first[rank] : first[rank + 1]]] for rank in range(ranks)]


def keep_to(cores: Sequence[int]) -> None:
    """Run all threads of this process, and the processes that they start from now on, only on these
    cores."""
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), cores)


@contextmanager
def starting_on(cores: Sequence[int]) -> Iterator[None]:
    """Context manager: processes that this thread starts inside have these cores; with none, the
    cores of the thread."""
    if not cores or not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def in_words(cores: Sequence[int]) -> str:
    """Return a short text for core numbers: [0, 1, 2, 5] -> "0-2,5"."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
