"""Chapter 24 · Layouts: what a call takes where a plan's groups lie on the cluster, with those
beside it.

    layouts = Layouts(cluster)
    groups = layouts.groups({"dp": 64, "pp": 1, "ep": 1, "cp": 1, "tp": 8}, AXES)
    layouts.price(groups["tp"], "all_reduce", "native", 1 << 20, ())    # while its neighbours' groups do the same

Groups along an axis are alike, so the group of rank 0 stands for all. Groups that begin in the same
node share its network cards: the bytes of all are added on each link (walk.py says which), and the
busiest one counts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product

from minidist.observe.events import GroupCall
from minidist.parallel.hybrid.plan_checks import AXES
from minidist.simulate.cluster import Cluster
from minidist.simulate.messages import Operands
from minidist.simulate.walk import call_cost, library_of

DATA = ("dp", "ep", "cp")
"""Axes whose ranks have the same dense weights."""

Groups = tuple[tuple[int, ...], ...]
"""A group, as places, and those that do the same beside it."""


class Layouts:
    """Groups of plans on one cluster; what was priced once is remembered."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.price = lru_cache(maxsize=None)(self._price)
        self._crowding = lru_cache(maxsize=None)(self._crowded)

    def groups(self, sizes: Mapping[str, int], order: Sequence[str]) -> dict[str, Groups]:
        """The group of rank 0 along tp, cp, ep, dp (all of DATA) and pp, then its neighbours', as
        places."""
        strides = {}
        step = 1
        for axis in reversed(order):
            strides[axis] = step
            step = step * sizes[axis]
        return {
            name: self._with_neighbours(sizes, strides, axes)
            for name, axes in {
                "tp": ("tp",),
                "cp": ("cp",),
                "ep": ("ep",),
                "dp": DATA,
                "pp": ("pp",),
            }.items()
        }

    def _with_neighbours(
        self, sizes: Mapping[str, int], strides: Mapping[str, int], axes: Sequence[str]
    ) -> Groups:
        """The group of rank 0 along some axes, and those that begin in the same node, if it leaves
        the node."""
        first = tuple(_places(sizes, strides, axes))
        node = self.cluster.per_node
        if max(first) < node and not self.cluster.topology.torus:
            return (first,)
        others = [axis for axis in AXES if axis not in axes]
        return tuple(
            tuple(start + place for place in first)
            for start in sorted(_places(sizes, strides, others))
            if start < node
        )

    def _price(
        self, groups: Groups, verb: str, algorithm: str, nbytes: int, blocks: tuple[int, ...]
    ) -> float:
        """Seconds of a call of the first group while the others do the same.

        The bytes of an all-reduce are rounded up to a multiple of the ranks: one rank's messages
        then stand for all (turned_walk.py). A ring of 1,024 ranks with 256 bytes is walked in a
        hundredth of the time.
        """
        members = groups[0]
        if len(members) < 2 or nbytes <= 0:
            return 0.0
        if verb in ("send", "recv"):
            groups = tuple(group[:2] for group in groups)
        elif verb == "all_reduce" and algorithm != "native":
            nbytes = -(-nbytes // len(members)) * len(members)
        if algorithm == "native" and verb != "all_to_all":
            way = library_of(self.cluster, members).fastest(verb, Operands(nbytes, blocks))
            return way.seconds + way.nbytes * self._crowding(groups, verb, way.name)
        cost = call_cost(GroupCall("", verb, algorithm, nbytes, blocks), groups[0], self.cluster)
        if len(groups) == 1 or not cost.link_bytes:
            return cost.seconds
        loads = Counter(cost.link_bytes)
        for group in groups[1:]:
            loads.update(
                call_cost(
                    GroupCall("", verb, algorithm, nbytes, blocks), group, self.cluster
                ).link_bytes
            )
        links = self.cluster.links
        alone = max(spent / links[link].bandwidth for link, spent in cost.link_bytes.items())
        shared = max(loads[link] / links[link].bandwidth for link in cost.link_bytes)
        return cost.seconds + shared - alone

    def _crowded(self, groups: Groups, verb: str, way: str) -> float:
        """Seconds a byte by which a way of the library takes longer if all groups go it at once."""
        if len(groups) == 1:
            return 0.0
        own, *others = (
            library_of(self.cluster, group).load(verb, way).per_byte for group in groups
        )
        links = self.cluster.links
        loads = dict(own)
        for other in others:
            for link in own.keys() & other.keys():
                loads[link] += other[link]
        alone, shared = (
            max(share[link] / links[link].bandwidth for link in own) for share in (own, loads)
        )
        return shared - alone


def cut(groups: Groups, size: int, per_node: int) -> Groups:
    """The groups of so many neighbours that these groups consist of, as far as they begin in the
    first node."""
    return _beginning(
        per_node, (group[at : at + size] for group in groups for at in range(0, len(group), size))
    )


def strided(groups: Groups, size: int, per_node: int) -> Groups:
    """The groups of the first of each `size` neighbours, of the second, …, as far as they begin in
    the first node."""
    return _beginning(per_node, (group[at::size] for group in groups for at in range(size)))


def _beginning(per_node: int, groups: Iterable[tuple[int, ...]]) -> Groups:
    first, *others = groups
    return first, *(group for group in others if group[0] < per_node and max(first) >= per_node)


def _places(sizes: Mapping[str, int], strides: Mapping[str, int], axes: Sequence[str]) -> list[int]:
    """Places of the ranks along some axes, the last axis innermost, as a group counts its
    members."""
    return [
        sum(at * strides[axis] for at, axis in zip(spot, axes, strict=True))
        for spot in product(*(range(sizes[axis]) for axis in axes))
    ]
