"""Chapter 24 · Layouts: seconds of a call by the places of a plan's groups on the cluster, while
neighbour groups make the same call.

    layouts = Layouts(cluster)
    groups = layouts.groups({"dp": 64, "pp": 1, "ep": 1, "cp": 1, "tp": 8}, AXES)
    layouts.price(groups["tp"], "all_reduce", "native", 1 << 20, ())    # while its neighbours' groups do the same

Groups along an axis are equal, so the group of rank 0 stands for all. Groups that begin in the same
node share its network cards, and all groups share the links between switches, where routes of some
meet: bytes are added up on each link (library.py and walk.py give the links), and the busiest link
counts.
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
"""A group, as places of its ranks, followed by the other groups that make the same call."""


class Layouts:
    """Groups and prices of calls on one cluster; prices are cached."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.price = lru_cache(maxsize=None)(self._price)
        self._crowding = lru_cache(maxsize=None)(self._crowded)

    def groups(self, sizes: Mapping[str, int], order: Sequence[str]) -> dict[str, Groups]:
        """Return, for tp, cp, ep, dp (all of DATA) and pp, the group of rank 0 and its neighbour
        groups, as places."""
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
        """Return the group of rank 0 along some axes; if it leaves the node, also all others."""
        first = tuple(_places(sizes, strides, axes))
        node = self.cluster.per_node
        if max(first) < node and not self.cluster.topology.torus:
            return (first,)
        others = [axis for axis in AXES if axis not in axes]
        return tuple(
            tuple(start + place for place in first)
            for start in sorted(_places(sizes, strides, others))
        )

    def _price(
        self, groups: Groups, verb: str, algorithm: str, nbytes: int, blocks: tuple[int, ...]
    ) -> float:
        """Return the seconds of a call of the first group while the other groups make the same
        call.

        The bytes of an all-reduce are rounded up to a multiple of the ranks: then one rank's
        messages stand for all (simulate/program.py). This computes a ring of 1,024 ranks with 256 bytes
        in a hundredth of the time.
        """
        members = groups[0]
        if len(members) < 2 or nbytes <= 0:
            return 0.0
        if verb in ("send", "recv"):
            groups = tuple(group[:2] for group in self._near(groups))
        elif verb == "all_reduce" and algorithm != "native":
            nbytes = -(-nbytes // len(members)) * len(members)
        if algorithm == "native" and verb != "all_to_all":
            way = library_of(self.cluster, members).taken(verb, Operands(nbytes, blocks))
            return way.seconds + way.nbytes * self._crowding(groups, verb, way.name)
        groups = self._near(groups)
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

    def _near(self, groups: Groups) -> Groups:
        """Return the first group and those that begin in its node."""
        first, *others = groups
        return first, *(group for group in others if group[0] < self.cluster.per_node)

    def _crowded(self, groups: Groups, verb: str, way: str) -> float:
        """Return the extra seconds per byte of a way of the library if all groups use it at once,
        for the slowest of them: routes of two groups may meet on a link between switches."""
        if len(groups) == 1:
            return 0.0
        links = self.cluster.links
        own, *others = (
            library_of(self.cluster, group).load(verb, way).per_byte for group in groups
        )
        loads = Counter(own)
        for other in others:
            loads.update(other)
        alone, shared = (
            max(spent / links[link].bandwidth for link, spent in load.items())
            for load in (own, loads)
        )
        return shared - alone


def cut(groups: Groups, size: int, per_node: int) -> Groups:
    """Return the groups cut into pieces of `size` neighbours; of the pieces after the first, those
    that begin in the first node."""
    return _beginning(
        per_node, (group[at : at + size] for group in groups for at in range(0, len(group), size))
    )


def strided(groups: Groups, size: int, per_node: int) -> Groups:
    """Return groups of every `size`-th member: from the first member on, from the second on, …; of
    the groups after the first, those that begin in the first node."""
    return _beginning(per_node, (group[at::size] for group in groups for at in range(size)))


def _beginning(per_node: int, groups: Iterable[tuple[int, ...]]) -> Groups:
    first, *others = groups
    return first, *(group for group in others if group[0] < per_node and max(first) >= per_node)


def _places(sizes: Mapping[str, int], strides: Mapping[str, int], axes: Sequence[str]) -> list[int]:
    """Return the places of the ranks along some axes in the order of a group's members: the last
    axis is innermost."""
    return [
        sum(at * strides[axis] for at, axis in zip(spot, axes, strict=True))
        for spot in product(*(range(sizes[axis]) for axis in axes))
    ]
