"""Chapter 24 · Where ranks lie: which device of the cluster each rank of a plan is on, and its
groups along the axes.

    places = RankPlaces({"dp": 128, "tp": 8}, cluster)                              # rank r at place r
    places = RankPlaces(plan, cluster, order=["pp", "tp", "dp"])                    # dp inside nodes
    places.place_of(5), places.members("dp,cp", 5)

The notes' advice (N2 §12.2) is an order: tensor parallelism innermost, because its messages are the
largest.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from minidist.errors import ConfigError
from minidist.parallel.hybrid.plan_checks import AXES, axis_order
from minidist.simulate.cluster import Cluster


class RankPlaces:
    """Ranks of a plan on the places of a cluster.

    Ranks count as Mesh counts them (dp, pp, ep, cp, tp, the last innermost). Places are dealt along
    `order`, whose last axis is innermost: it lies inside nodes. As long as `order` is Mesh's own,
    rank r is at place r.

    Raises: ConfigError if the plan has more ranks than the cluster has devices, or the order names
    no axis.
    """

    def __init__(
        self, plan: Any, cluster: Cluster | None = None, order: Sequence[str] | None = None
    ) -> None:
        sizes = {
            axis: plan.get(axis, 1) if isinstance(plan, Mapping) else getattr(plan, axis)
            for axis in AXES
        }
        self.shape = {axis: int(size) for axis, size in sizes.items()}
        self.size = prod(self.shape.values())
        if cluster is not None and self.size > cluster.size:
            cut = (
                " × ".join(f"{axis}={size}" for axis, size in self.shape.items() if size > 1)
                or "dp=1"
            )
            raise ConfigError(
                f"{cut} are {self.size} ranks, and {cluster.spec} has {cluster.size} devices; "
                f"choose axes whose product is {cluster.size}"
            )
        self.order = list(axis_order(order or AXES))
        self._strides = _strides(self.shape, AXES)
        self._steps = _strides(self.shape, self.order)
        self.places = [self._place(rank) for rank in range(self.size)]
        self._groups: dict[tuple[tuple[str, ...], int], tuple[int, ...]] = {}

    def place_of(self, rank: int) -> int:
        """Return the place of a rank."""
        return self.places[rank]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's place on each axis."""
        return {axis: rank // self._strides[axis] % self.shape[axis] for axis in AXES}

    def members(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of `rank` along "tp", "dp,cp" or "world", in the group's
        order.

        The replay uses group_ranks.py, which also knows subgroups.
        """
        if axis == "world":
            return self._everyone
        named = tuple(name for name in AXES if name in axis.split(","))
        if not named:
            raise ConfigError(
                f"no group {axis!r}; groups are along world, or along axes of {', '.join(AXES)}"
            )
        first = rank - sum(
            rank // self._strides[name] % self.shape[name] * self._strides[name] for name in named
        )
        known = self._groups.get((named, first))
        if known is None:
            found = [first]
            for name in named:
                found = [
                    start + step * self._strides[name]
                    for start in found
                    for step in range(self.shape[name])
                ]
            known = self._groups[named, first] = tuple(found)
        return known

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def _place(self, rank: int) -> int:
        return sum(
            rank // self._strides[axis] % self.shape[axis] * self._steps[axis] for axis in AXES
        )


def _strides(shape: Mapping[str, int], order: Iterable[str]) -> dict[str, int]:
    """Return how far apart neighbours along each axis are, the last of `order` innermost."""
    found = {}
    step = 1
    for axis in reversed(list(order)):
        found[axis] = step
        step = step * shape[axis]
    return found
