"""Exercise 16: ZeRO-3: gather a unit's weights before its turn, free them after, in forward and in
backward.

Copy this file (`minidist lesson 16 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 16 DIR/exercise_16.py`. What you may use:

    group.all_gather(self.shard)            all chunks, one after the other
    group.reduce_scatter(x, out=y)          y (this rank's chunk of x) = its sum over the ranks
    self.gather, self.free, self.reduce     the three methods of a unit
    flat.views(vector)                      (parameter, its place in the vector), one by one

Weights that are not there read as NaN.
"""

import numpy as np

from minidist.grading import hole
from minidist.parallel.step.flat import Flat
from minidist.parallel.step.step import part_of


class PlainUnit:
    """A unit of the plain version: this rank's chunk of its weights, and of their gradients."""

    def __init__(self, unit, group):
        self.flat = Flat(list(unit.parameters()), group)
        self.group = group
        self.shard = self.flat.join()[self.flat.chunk].copy()
        self.mine = np.zeros(self.flat.chunk_size, self.flat.dtype)
        unit.register_forward_pre_hook(
            hole(1, "which method runs before the unit computes? (section 1, forward)")
        )
        unit.register_forward_hook(
            hole(2, "which one after it has computed? Are its weights needed any longer?")
        )
        unit.register_backward_pre_hook(
            hole(
                3,
                "which one before backward goes through the unit, and reads its "
                "weights? (section 1, backward 1)",
            )
        )
        unit.register_backward_hook(self.reduce)  # backward 3, 4; in between 2: compute
        self.free()

    def gather(self, *_):
        """All-gather the weights of the unit."""
        for p, view in self.flat.views(hole(4, "the whole vector of weights, by one collective")):
            p.data = view

    def free(self, *_):
        """Free the weights: only the shard is kept."""
        for p in self.flat.parameters:
            p.data = np.broadcast_to(np.nan, p.shape)

    def reduce(self, *_):
        """Reduce-scatter the gradients; free them and the weights."""
        gradient = np.empty(self.flat.size, self.flat.dtype)
        for p, view in self.flat.views(gradient):
            view[...] = p.grad
            p.zero_grad()
        hole(
            5,
            "sum it to self.mine, and leave nothing behind (section 1, backward 3 and 4)",
            gradient,
        )


def plain_zero3(model, modules, new_optimizer, group, batches):
    """Train by ZeRO-3, unit by unit, each gathered when its turn comes; batches are global, the
    numbers are those of N4:398."""
    units = [PlainUnit(module, group) for module in modules]
    optimizer = new_optimizer(
        [piece for unit in units for piece in unit.flat.pieces(unit.shard, unit.mine)]
    )
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        # the hooks run in here
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        hole(6, "update; and what must be sent then? (section 4)", optimizer, units)
    for unit in units:  # whole once more, to be looked at
        unit.gather()
