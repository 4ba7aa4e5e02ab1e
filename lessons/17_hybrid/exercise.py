"""Exercise 17: where a rank is on the mesh, its groups, what it reads, what it adds up, and one
norm of all.

Copy this file (`minidist lesson 17 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 17 DIR/exercise_17.py`. `shape` is a dict of the mesh's axes, outermost
first, with their sizes, such as {"dp": 2, "pp": 2, "tp": 2}. What else you may use:

    mesh["dp"], mesh["pp", "tp"]      this rank's group along one axis, or along several together
    group.rank, group.size, group.all_reduce(x) -> the sum of all ranks' x
"""

import numpy as np

from minidist.grading import hole


def coordinates(rank, shape):
    """Return {axis: place} of a rank; the last axis is innermost: ranks 0, 1, … differ in it
    first."""
    places = {}
    for axis in reversed(shape):
        places[axis] = hole(
            1, "this rank's place on the axis, from what is left of `rank`", rank, shape[axis]
        )
        rank = hole(2, "what is left for the axes outside this one", rank, shape[axis])
    return {axis: places[axis] for axis in shape}


def partners(rank, axis, shape):
    """Return the ranks of `rank`'s group along `axis`, itself included, in order: a list."""
    mine = coordinates(rank, shape)
    everyone = range(int(np.prod(list(shape.values()))))
    return [
        other
        for other in everyone
        if hole(
            3,
            "does `other` differ from `rank` in no axis but this one?",
            coordinates(other, shape),
            mine,
        )
    ]


def plain_hybrid(dp, pp, tp, inputs, targets, up, down, lr):
    """Run one step of SGD on dp × pp × tp ranks, in place: one MLP per stage; a rank has some of
    its columns and rows.

    dp, pp and tp are this rank's groups. The numbers are those of N0:452.
    """
    mine = np.array_split(
        np.arange(len(inputs)), hole(4, "into how many parts? (section 1, step 1)")
    )[hole(5, "which of them? (section 1, step 1)")]
    # 1.1 the first half's activations
    x = inputs[mine] if pp.rank == 0 else pp.recv(src=pp.rank - 1)
    inner = np.maximum(x @ up, 0)  # up: own columns of the own stage
    y = hole(6, "down has own rows: which group adds up? (section 1, and lesson 12)", inner)
    if pp.rank < pp.size - 1:
        pp.send(y, dst=pp.rank + 1)  # 1.2 the next stage continues
        dy = pp.recv(src=pp.rank + 1)  # 1.3 its gradient returns
    else:
        dy = 2 * (y - targets[mine]) / targets.size  # divided by the whole batch
    dinner = (dy @ down.T) * (inner > 0)
    dx = hole(7, "the whole gradient of x: which group adds up? (section 1, and lesson 12)", dinner)
    if pp.rank > 0:
        pp.send(dx, dst=pp.rank - 1)
    for weights, gradient in ((up, x.T @ dinner), (down, inner.T @ dy)):  # 2.1 local gradients
        hole(
            8,
            "add up, and update in place (section 1, step 5): over which group? A sum or a mean?",
            weights,
            gradient,
        )


def norm(shards, whole, mesh):
    """Return the norm of the whole model's gradient, the same on every rank, after the sums of section
    1, step 5.

    shards: this rank's parts of the gradients that are cut over tp (a list of arrays); whole: the
    gradients that all ranks of tp hold in full (norm layers, biases of row-cut matrices). Each
    stage of the pipeline has other gradients.
    """
    squares = sum(float((grad**2).sum()) for grad in shards)
    squares += hole(
        9, "the squares of `whole`: on which rank of tp? (section 6)", whole, mesh["tp"].rank
    )
    total = hole(10, "added up over which group? (section 6)", np.array([squares]))
    return float(np.sqrt(total[0]))


def layout(sent):
    """Return the axes, outermost first, so that the axis with the most bytes is innermost; `sent` has
    the bytes per step on each axis. (What waits also decides, section 5; here only bytes count.)"""
    return hole(11, "which one needs the fastest links, those between neighbours?", sent)
