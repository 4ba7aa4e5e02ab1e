"""Exercise 11: the order of 1F1B, the messages it needs, its bubble and its memory.

Copy this file (`minidist lesson 11 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 11 DIR/exercise_11.py`. Rank r has stage r of `ranks`; microbatches are numbered from 0.
"""

from minidist.grading import hole
from minidist.parallel.pipeline.instructions import (  # noqa: F401 - you will want them
    Backward,
    Forward,
    RecvActivation,
    RecvGradient,
)


def ahead(rank, ranks, microbatches):
    """How many forwards a rank does before its first turn of one forward and one backward."""
    return hole(1, "as many as there are stages after this one, but no more than there are microbatches (section 3)")


def one_f_one_b(rank, ranks, microbatches):
    """A rank's computes in order: a list of Forward(stage, microbatch) and Backward(stage, microbatch)."""
    first = ahead(rank, ranks, microbatches)
    order = [Forward(rank, microbatch) for microbatch in range(first)]
    for microbatch in range(microbatches):
        hole(2, "if a forward is left, append it: which microbatch's, when `first` are ahead?", order, first)
        hole(3, "append the backward of this turn", order, microbatch)
    return order


def waits_for(instruction, ranks):
    """What must have come from another rank before `instruction`: RecvActivation or RecvGradient of it, or None."""
    stage, microbatch = instruction.stage, instruction.microbatch
    if isinstance(instruction, Forward):
        return hole(4, "a forward needs the activation of the stage before, if there is one", stage, microbatch)
    return hole(5, "a backward needs the gradient from the next stage, if there is one", stage, microbatch, ranks)


def bubble(ranks, microbatches):
    """The share of time in which a rank of GPipe or 1F1B is idle, where stages are equal."""
    return hole(6, "the formula of section 3")


def held(rank, ranks, microbatches):
    """The most microbatches whose activations a rank of 1F1B holds at once."""
    return hole(7, "the ones ahead, and the one in work; no more than there are (section 4)")
