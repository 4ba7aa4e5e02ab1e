"""Exercise 14: ZeRO-1 without buckets: which rank updates what, what travels, and when.

Copy this file (`minidist lesson 14 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 14 DIR/exercise_14.py`. Every rank runs it with its own replica of the
model; the batches are global. What you may use:

    group.rank, group.size
    group.reduce_scatter(x, out=y)   y (this rank's chunk of x, cut as numpy.array_split does) = its
                                     sum over the ranks
    group.all_reduce(x)              the sum of x over the ranks, whole, on every rank
    group.all_gather(y, out=x)       x = every rank's y, one after the other; y may not lie in x:
                                     give it a copy
    flat.chunk                       the slice of a vector as long as the model that is this rank's
    flat.pieces(w, g)                the argument of an optimizer: it will change `w`, this rank's
                                     weights, by the gradients in `g`, and keeps a state for these
                                     weights only
"""

import numpy as np

from minidist.grading import hole
from minidist.parallel.step.flat import Flat
from minidist.parallel.step.step import part_of


def chunk_of(n, rank, size):
    """Return the slice of n numbers that a rank owns, cut as numpy.array_split cuts; `flat.chunk`
    below is one."""
    return hole(1, "where does it begin, where does it end? (section 1)", n, rank, size)


def plain_zero1(model, new_optimizer, group, batches):
    """Train by ZeRO-1 without buckets and without overlap; batches are global, the numbers are
    those of N4:297."""
    flat = Flat(list(model.parameters()), group)  # all weights; one chunk is mine
    weights = flat.join()
    mine = np.zeros(flat.chunk_size, flat.dtype)
    optimizer = new_optimizer(
        hole(2, "which weights is it to change, by which gradients? (section 1)", weights, mine)
    )
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        # 1 the whole gradient
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        gradient = np.empty(flat.size, flat.dtype)
        for p, view in flat.views(gradient):
            view[...] = p.grad
        hole(
            3,
            "2 by one collective: mine = the sum over the ranks of my chunk of gradient",
            gradient,
        )
        optimizer.step()  # 3 update my chunk
        hole(
            4,
            "4 by one collective: every rank gets the weights that the others have updated",
            weights,
        )
        model.zero_grad()
