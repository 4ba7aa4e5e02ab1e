"""The critical path of each algorithm: its steps on the slowest rank, from which `auto` predicts
the time.

    path = PATHS["all_reduce", "ring"](4)      # for P = 4
    path.work(n)                               # LinkWork(waits=6, messages=6, moved=1.5 n,
                                               #          added=0.75 n)
    cost.seconds(path.work(n))                 # with the α, o, β, γ, κ of a profile's link

volume.py sums all ranks' messages and bytes; here only those count that no other hides. Q is the
largest power of two up to P. Hierarchical algorithms have a path in each of two link classes
(Tiers). With a profile, `auto` does not choose algorithms that are missing here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from minidist.comm.cost.link_model import LinkCost, LinkWork, Profile
from minidist.comm.cost.volume import box
from minidist.comm.limits import STRETCH_BYTES


class Path(NamedTuple):
    """The fields of link_model.LinkWork, with moved, added and crowded as multiples of n, the bytes
    of each rank's array."""

    waits: int
    messages: int
    moved: float
    added: float
    crowded: float = 0.0
    # whether waits and messages are repeated for each STRETCH_BYTES of the array
    stretched: bool = False

    def work(self, nbytes: int) -> LinkWork:
        """Return the work of a call with arrays of `nbytes` bytes."""
        times = max(1, -(-nbytes // STRETCH_BYTES)) if self.stretched else 1
        return LinkWork(
            times * self.waits,
            times * self.messages,
            self.moved * nbytes,
            self.added * nbytes,
            self.crowded * nbytes,
        )


def _log(size: int) -> int:
    """Return ceil(log2 P)."""
    return (size - 1).bit_length()


def _doublings(size: int) -> tuple[int, int]:
    """Return log2 Q, and 1 if ranks beyond Q are folded and unfolded, else 0."""
    steps = size.bit_length() - 1
    return steps, int(size != 1 << steps)


def _part(size: int) -> float:
    """Return (P-1)/P: the share of all chunks except one."""
    return (size - 1) / size


def _crowd(moved: float, size: int) -> float:
    """Return the bytes sent to all others at once, which is crowded only for more than one."""
    return moved if size > 2 else 0.0


def _doubling(size: int) -> Path:
    steps, fold = _doublings(size)
    return Path(steps + 2 * fold, steps + 2 * fold, steps + 2 * fold, steps + fold)


def _halves(size: int) -> float:
    """Return the bytes that the first rank gets in all steps of halving: for each surplus rank, a
    core rank acts for two chunks."""
    steps, _ = _doublings(size)
    surplus = size - (1 << steps)
    return sum((1 << step) + min(1 << step, surplus) for step in range(steps)) / size


def _halving_doubling(size: int) -> Path:
    steps, fold = _doublings(size)
    waits = 2 * (steps + fold)
    chunks = _halves(size)
    return Path(waits, waits, 2 * (chunks + fold), chunks + fold)


def _halving(size: int) -> Path:
    steps, fold = _doublings(size)
    waits = steps + 2 * fold
    chunks = _halves(size)
    return Path(waits, waits, chunks + fold * (1 + 1 / size), chunks + fold)


PATHS: dict[tuple[str, str], Callable[[int], Path]] = {
    ("reduce", "naive"): lambda size: Path(size - 1, size - 1, size - 1, size - 1),
    ("reduce", "tree"): lambda size: Path(_log(size), _log(size), _log(size), _log(size)),
    ("all_reduce", "naive"): lambda size: Path(
        2 * (size - 1), 2 * (size - 1), 2 * (size - 1), size - 1
    ),
    ("all_reduce", "tree"): lambda size: Path(
        2 * _log(size), 2 * _log(size), 2 * _log(size), _log(size)
    ),
    ("all_reduce", "ring"): lambda size: Path(
        2 * (size - 1), 2 * (size - 1), 2 * _part(size), _part(size), stretched=True
    ),
    ("all_reduce", "direct"): lambda size: Path(
        min(1, size - 1), size - 1, size - 1, size - 1, _crowd(size - 1, size)
    ),
    ("all_reduce", "pairwise"): lambda size: Path(
        min(2, 2 * (size - 1)),
        2 * (size - 1),
        2 * _part(size),
        _part(size),
        _crowd(2 * _part(size), size),
    ),
    ("all_reduce", "doubling"): _doubling,
    ("all_reduce", "halving-doubling"): _halving_doubling,
    ("reduce_scatter", "naive"): lambda size: Path(
        2 * (size - 1), 2 * (size - 1), size - 1 + _part(size), size - 1
    ),
    ("reduce_scatter", "ring"): lambda size: Path(size - 1, size - 1, _part(size), _part(size)),
    ("reduce_scatter", "pairwise"): lambda size: Path(
        min(1, size - 1), size - 1, _part(size), _part(size), _crowd(_part(size), size)
    ),
    ("reduce_scatter", "halving-doubling"): _halving,
}


def _torus_both(size: int) -> Path:
    """Return the path: each step sends one message per part; with three ranks, to all others at
    once."""
    sides = box(size)
    steps = 2 * (sum(sides) - len(sides))
    moved = 2 * _part(size)
    return Path(steps, 2 * len(sides) * steps, moved, _part(size), moved if size == 3 else 0.0)


WIRED: dict[tuple[str, str], Callable[[int], Path]] = {("all_reduce", "torus-both"): _torus_both}
"""The paths of algorithms for a special wiring, which `auto` does not know: it does not choose
them."""

BETWEEN_LEADERS = {"all_reduce": "ring", "reduce": "tree"}
"""The algorithm of the leaders in a hierarchical verb; inside the nodes it is a tree."""


class Tiers(NamedTuple):
    """The layout of a group on several nodes with several ranks."""

    nodes: int  # number of nodes
    largest: int  # number of ranks of the largest
    inside: LinkCost | None  # the cost of messages inside a node; None if not measured
    between: LinkCost | None  # the same between nodes

    def seconds(self, verb: str, nbytes: int) -> float | None:
        """Return the time of the hierarchical algorithm; None if unknown."""
        if self.inside is None or self.between is None or verb not in BETWEEN_LEADERS:
            return None
        return self.inside.seconds(
            PATHS[verb, "tree"](self.largest).work(nbytes)
        ) + self.between.seconds(PATHS[verb, BETWEEN_LEADERS[verb]](self.nodes).work(nbytes))


def tiers(nodes: Sequence[int], profile: Profile | None, inside: str) -> Tiers | None:
    """Return the tiers of a group with ranks on these nodes; None if it has only one node, or on
    average fewer than two ranks per node.

    Args:    nodes: the machine of each rank; profile: the job's; inside: the link class between
             ranks of one node.
    """
    ranks = Counter(nodes)
    if len(ranks) == 1 or len(nodes) < 2 * len(ranks):
        return None
    largest = max(ranks.values())
    return Tiers(
        len(ranks),
        largest,
        *(
            None if profile is None else profile.link(inside, some)
            for some in ([0] * largest, list(ranks))
        ),
    )


def fastest(
    verb: str, nbytes: int, size: int, cost: LinkCost, usual: str, here: Tiers | None = None
) -> str:
    """Return the algorithm with the least time in the model. Return `usual` if the model does not
    know it, or if it is slower by no more than the model's misfit (the model ignores caches etc.).
    """
    times = {
        algorithm: cost.seconds(path(size).work(nbytes))
        for (of, algorithm), path in PATHS.items()
        if of == verb
    }
    leaders = None if here is None else here.seconds(verb, nbytes)
    if leaders is not None:
        times["hierarchical"] = leaders
    if usual not in times:
        return usual
    best = min(times, key=times.__getitem__)
    return usual if times[usual] <= (1 + cost.misfit) * times[best] else best
