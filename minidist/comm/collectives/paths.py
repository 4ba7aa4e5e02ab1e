"""What an algorithm does one thing after the other, on the rank that takes longest: from it `auto` tells the time.

    path = PATHS["all_reduce", "ring"](4)             # for P = 4
    path.work(n)                                      # Work(waits=6, messages=6, moved=1.5 n, added=0.75 n)
    cost.seconds(path.work(n))                        # with the α, o, β, γ, κ of a profile's link

These are the formulas of costs.py, seen from one rank: there all ranks' messages and bytes are summed, here only those
count that nothing else hides. P ranks; L = ceil(log2 P); Q the largest power of two in P. Algorithms that are not here
depend on more than P and n (where ranks are, what the hardware does), and `auto` does not take them from a profile.
"""

from collections.abc import Callable
from typing import NamedTuple

from minidist.comm.profile import LinkCost, Work


class Path(NamedTuple):
    """As profile.Work, but moved, added and crowded are multiples of n, the bytes of the array of each rank."""

    waits: int
    messages: int
    moved: float
    added: float
    crowded: float = 0.0

    def work(self, nbytes: int) -> Work:
        """The work of a call with arrays of `nbytes` bytes."""
        return Work(self.waits, self.messages, self.moved * nbytes, self.added * nbytes, self.crowded * nbytes)


def _log(size: int) -> int:
    """L."""
    return (size - 1).bit_length()


def _doublings(size: int) -> tuple[int, int]:
    """log2 Q, and whether ranks beyond Q are folded in and told the result: 1 or 0."""
    steps = size.bit_length() - 1
    return steps, int(size != 1 << steps)


def _part(size: int) -> float:
    """(P-1)/P: all chunks but one."""
    return (size - 1) / size


def _crowd(moved: float, size: int) -> float:
    """What is moved to all others at once: with one other, nothing is crowded."""
    return moved if size > 2 else 0.0


def _doubling(size: int) -> Path:
    steps, fold = _doublings(size)
    return Path(steps + 2 * fold, steps + 2 * fold, steps + 2 * fold, steps + fold)


def _halving_doubling(size: int) -> Path:
    steps, fold = _doublings(size)
    waits, chunks = 2 * (steps + fold), _part(1 << steps)
    return Path(waits, waits, 2 * (chunks + fold), chunks + fold)


def _halving(size: int) -> Path:
    steps, fold = _doublings(size)
    waits, chunks = steps + 2 * fold, _part(1 << steps)
    return Path(waits, waits, chunks + fold * (1 + 1 / size), chunks + fold)


PATHS: dict[tuple[str, str], Callable[[int], Path]] = {
    ("reduce", "naive"): lambda size: Path(size - 1, size - 1, size - 1, size - 1),
    ("reduce", "tree"): lambda size: Path(_log(size), _log(size), _log(size), _log(size)),
    ("all_reduce", "naive"): lambda size: Path(2 * (size - 1), 2 * (size - 1), 2 * (size - 1), size - 1),
    ("all_reduce", "tree"): lambda size: Path(2 * _log(size), 2 * _log(size), 2 * _log(size), _log(size)),
    ("all_reduce", "ring"): lambda size: Path(2 * (size - 1), 2 * (size - 1), 2 * _part(size), _part(size)),
    ("all_reduce", "direct"): lambda size: Path(min(1, size - 1), size - 1, size - 1, size - 1, _crowd(size - 1, size)),
    ("all_reduce", "pairwise"): lambda size: Path(min(2, 2 * (size - 1)), 2 * (size - 1), 2 * _part(size), _part(size),
                                                  _crowd(2 * _part(size), size)),
    ("all_reduce", "doubling"): _doubling,
    ("all_reduce", "halving-doubling"): _halving_doubling,
    ("reduce_scatter", "naive"): lambda size: Path(2 * (size - 1), 2 * (size - 1), size - 1 + _part(size), size - 1),
    ("reduce_scatter", "ring"): lambda size: Path(size - 1, size - 1, _part(size), _part(size)),
    ("reduce_scatter", "pairwise"): lambda size: Path(min(1, size - 1), size - 1, _part(size), _part(size),
                                                      _crowd(_part(size), size)),
    ("reduce_scatter", "halving-doubling"): _halving,
}


def fastest(verb: str, nbytes: int, size: int, cost: LinkCost, usual: str) -> str:
    """The algorithm that the model gives the least time, the first of equals; `usual` for a verb without paths.

    Where `usual` comes as near to it as the model came to what was measured (its misfit), it stays with `usual`: the
    model knows nothing of what it was not asked about, such as how caches like an algorithm.
    """
    times = {algorithm: cost.seconds(path(size).work(nbytes))
             for (of, algorithm), path in PATHS.items() if of == verb}
    best = min(times, key=times.__getitem__, default=usual)
    return usual if usual in times and times[usual] <= (1 + cost.misfit) * times[best] else best
