"""Exercise 17: where a rank is on the mesh, its groups, what it reads, what it adds up, and one norm of all.

Copy this file (`minidist lesson 17 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 17 DIR/exercise_17.py`. `shape` is a dict of the mesh's axes, outermost first, with their sizes, such as
{"dp": 2, "pp": 2, "tp": 2}. What else you may use:

    mesh["dp"], mesh["pp", "tp"]      this rank's group along one axis, or along several together
    group.rank, group.size, group.all_reduce(x) -> the sum of all ranks' x
"""

import numpy as np

from minidist.grading import hole


def coordinates(rank, shape):
    """{axis: place} of a rank: the last axis is innermost, so that ranks 0, 1, … differ in it first."""
    places = {}
    for axis in reversed(shape):
        places[axis] = hole(1, "this rank's place on the axis, from what is left of `rank`", rank, shape[axis])
        rank = hole(2, "what is left for the axes outside this one", rank, shape[axis])
    return {axis: places[axis] for axis in shape}


def partners(rank, axis, shape):
    """The ranks of `rank`'s group along `axis`, itself among them, in order: a list."""
    mine = coordinates(rank, shape)
    everyone = range(int(np.prod(list(shape.values()))))
    return [other for other in everyone
            if hole(3, "does `other` differ from `rank` in no axis but this one?", coordinates(other, shape), mine)]


def rows(rank, shape, sequences):
    """Which sequences of the global batch a rank works on: an array of their numbers, cut as numpy.array_split does."""
    place = coordinates(rank, shape)
    return np.array_split(np.arange(sequences), hole(4, "into how many parts?", shape))[hole(5, "which?", place)]


def add_gradients(gradient, mesh):
    """The gradient of the whole batch of what this rank holds; each rank's loss was divided by all tokens."""
    return hole(6, "which group adds up, and is it a sum or a mean?", gradient, mesh)


def norm(shards, whole, mesh):
    """The norm of the whole model's gradient, the same on every rank, after add_gradients.

    shards: gradients that are cut over tp, this rank's parts (a list of arrays); whole: those that all ranks of tp hold
    alike (norms, biases of row linears). Each stage of the pipeline has others.
    """
    squares = sum(float((grad ** 2).sum()) for grad in shards)
    squares += hole(7, "the squares of `whole`: on which rank of tp?", whole, mesh["tp"].rank)
    total = hole(8, "added up over which group?", np.array([squares]))
    return float(np.sqrt(total[0]))


def layout(sent):
    """The axes, outermost first, as they should lie on machines: `sent` says how many bytes a step sends on each."""
    return hole(9, "which one needs the fastest links, those between neighbours?", sent)
