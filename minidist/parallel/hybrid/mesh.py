"""A mesh: the ranks of a job on a grid with one axis for each way of cutting the work.

Two data ranks of two tensor ranks each, dp=2, tp=2 (the last axis is innermost: its ranks are
neighbours):

          tp=0   tp=1
    dp=0   r0     r1      mesh["tp"] on r0: ranks 0, 1
    dp=1   r2     r3      mesh["dp"] on r0: ranks 0, 2

Neighbours should share a node, but a launcher may distribute ranks over nodes in turn. So the ranks
are numbered anew first (`placed`), here for nodes of r0, r2 and of r1, r3:

          tp=0   tp=1
    dp=0   r0     r2      node 0: no message along tp leaves it
    dp=1   r1     r3      node 1
"""

from collections.abc import Mapping

import numpy as np

from minidist.comm.group import Group
from minidist.errors import PlanError
from minidist.parallel.hybrid.plan_checks import AXES, ORDER, axis_order


def placed(
    world: Group, shape: Mapping[str, int], order: str = ORDER, placement: str = "node"
) -> Group:
    """Return the ranks of `world`, renumbered so that a mesh in row-major order over AXES lies on
    the nodes as planned.

    Args:    shape: {axis: size}; order: which axis is innermost: the last; placement: one of
             PLACEMENTS.
    Returns: `world` itself where no number changes. Rank 0 is the same in any case.
    Cost:    a split, if a number changes.
    Raises:  PlanError for an unknown axis.
    """
    axes = axis_order(order)
    count = np.arange(world.size)
    nodes = [world.nodes.index(node) if placement == "node" else 0 for node in world.nodes]
    at_place = np.argsort(nodes, kind="stable")  # the rank at each place; places count node by node
    on_mesh = (
        count.reshape([shape[axis] for axis in AXES])
        .transpose([AXES.index(axis) for axis in axes])
        .ravel()
    )
    if (at_place == on_mesh).all():
        return world
    return world.split(0, key=int(on_mesh[at_place == world.rank][0]), axis=world.axis)


class Mesh:
    """The ranks of a job in row-major order over the axes dp, pp, ep, cp, tp.

    `mesh["tp"]` is this rank's group along one axis, `mesh["dp", "cp"]` along several together
    (ranks that agree in every other coordinate). A group is made when first asked for, which all
    ranks must do in the same order.

    Args:       world: the Group of all ranks. dp, pp, ep, cp, tp: the number of ranks along each
                axis.
                order, placement: which ranks are neighbours, as in Plan. These and world have no
                names in a call.
    Attributes: shape: {axis: size}; coordinates: {axis: this rank's place}.
                world: all ranks, in the mesh's order: the group that was given, unless `placed`
                changes a number.
    Raises:     PlanError if the sizes' product is not the world's size, or for an unknown axis in
                `order`.
    """

    def __init__(
        self,
        world: Group,
        order: str = ORDER,
        placement: str = "node",
        /,
        *,
        dp: int = 1,
        pp: int = 1,
        ep: int = 1,
        cp: int = 1,
        tp: int = 1,
    ) -> None:
        """Place the ranks on the grid. Args, Raises: as in help(minidist.Mesh)."""
        self.shape = dict(zip(AXES, (dp, pp, ep, cp, tp), strict=True))
        sizes = tuple(self.shape.values())
        if min(sizes) < 1 or int(np.prod(sizes)) != world.size:
            cut = (
                " × ".join(f"{axis}={size}" for axis, size in self.shape.items() if size != 1)
                or "dp=1"
            )
            raise PlanError(
                f"mesh {cut} has {int(np.prod(sizes))} places, the job has {world.size} ranks; "
                f"choose axes whose product is {world.size}, such as dp={world.size}"
            )
        self.world = placed(world, self.shape, order, placement)
        self.coordinates = dict(
            zip(AXES, (int(i) for i in np.unravel_index(self.world.rank, sizes)), strict=True)
        )
        self._groups: dict[tuple[str, ...], Group] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        """Return the group along one axis or several. Raises PlanError for a name that is no
        axis."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = [name for name in names if name not in AXES]
        if unknown or not names or len(set(names)) < len(names):
            raise PlanError(
                f"mesh[{axes!r}]: give different axes of {', '.join(AXES)}, "
                f"such as mesh['dp'] or mesh['dp', 'cp']"
            )
        names = tuple(axis for axis in AXES if axis in names)
        if names not in self._groups:
            # ranks that share this rank's place on every other axis, in the mesh's order
            fixed = [0 if axis in names else place for axis, place in self.coordinates.items()]
            color = int(np.ravel_multi_index(fixed, tuple(self.shape.values())))
            group = self.world.split(color, axis=",".join(names))
            assert group is not None
            self._groups[names] = group
        return self._groups[names]

    @property
    def copies(self) -> Group:
        """The ranks that share the dense weights: along dp, and along ep and cp if they have
        several ranks."""
        return self._with("ep", "cp")

    @property
    def stage(self) -> Group:
        """The ranks that have the same layers, or parts of them: all axes except pp."""
        return self._with("ep", "cp", "tp")

    @property
    def experts(self) -> Group:
        """The ranks that share the weights of some experts, if ep divides them: along dp and cp."""
        return self._with("cp")

    @property
    def rows(self) -> Group:
        """The ranks that divide the batch's rows: along dp and ep; ranks of cp divide the tokens of
        a row."""
        return self._with("ep")

    def _with(self, *axes: str) -> Group:
        """Return the group along dp and those of `axes` that have several ranks."""
        return self[("dp", *(axis for axis in axes if self.shape[axis] > 1))]

    def close(self, *, world: bool = False) -> None:
        """End the groups' worker threads. Raises: the error of a started call whose wait() was
        never called.

        Args:    world: whether to end that of the mesh's world too, which stays open otherwise.
        """
        for group in self._groups.values():
            group.close()
        if world:
            self.world.close()
