"""Exercise 11: GPipe; then the order of 1F1B, the messages it needs, its bubble and its memory.

Copy this file (`minidist lesson 11 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 11 DIR/exercise_11.py`. Rank r has stage r of `ranks`; microbatches are
numbered from 0. What you may use:

    y.backward(dy)                     backward from y, whose gradient is dy, an array
    group.send(x, dst=r)               sends an array to rank r
    group.recv(src=r)                  receives an array from rank r
    Forward(stage, microbatch)         the forward of a microbatch on a stage; Backward alike
    RecvActivation(stage, microbatch)  this stage receives the activation of a microbatch from the
                                       previous stage
    RecvGradient(stage, microbatch)    this stage receives the gradient of a microbatch from the
                                       next stage
"""

from minidist.autograd.tensor import tensor
from minidist.grading import hole
from minidist.parallel.pipeline.instructions import (  # noqa: F401 - you will want them
    Backward,
    Forward,
    RecvActivation,
    RecvGradient,
)


def plain_gpipe(stage, group, micros, divisor):
    """Run one step of GPipe without a schedule and without overlap; stage(x, targets, divisor) is
    as in chapter 10."""
    first = group.rank == 0
    last = group.rank == group.size - 1
    kept = []
    for inputs, targets in micros:  # all forwards
        x = inputs if first else tensor(group.recv(src=group.rank - 1), requires_grad=True)
        y = stage(x, targets, divisor)  # the last stage: the loss
        if not last:
            group.send(y.data, dst=group.rank + 1)
        hole(1, "what will this microbatch's backward need? (section 1)", x, y)
    for x, y in reversed(kept):  # all backwards
        y.backward(
            None if last else hole(2, "with what does it begin on any other stage? (section 1)")
        )
        if not first:
            hole(3, "what does the stage before wait for? (section 1)", x)


def ahead(rank, ranks, microbatches):
    """Return how many forwards a rank does before its first pair of one forward and one
    backward."""
    return hole(
        4,
        "as many as there are stages after this one, but no more than there are microbatches "
        "(section 3)",
    )


def one_f_one_b(rank, ranks, microbatches):
    """Return a rank's computes in order: a list of Forward(stage, microbatch) and Backward(stage,
    microbatch)."""
    first = ahead(rank, ranks, microbatches)
    order = [Forward(rank, microbatch) for microbatch in range(first)]
    for microbatch in range(microbatches):
        hole(
            5,
            "if a forward is left, append it: which microbatch's, when `first` are ahead?",
            order,
            first,
        )
        order += hole(6, "the backward of this turn, in a list", microbatch)
    return order


def waits_for(instruction, ranks):
    """Return what must have arrived from another rank before `instruction`: its RecvActivation or
    RecvGradient, or None."""
    stage = instruction.stage
    microbatch = instruction.microbatch
    if isinstance(instruction, Forward):
        return hole(
            7,
            "a forward needs the activation of the stage before, if there is one",
            stage,
            microbatch,
        )
    return hole(
        8,
        "a backward needs the gradient from the next stage, if there is one",
        stage,
        microbatch,
        ranks,
    )


def bubble(ranks, microbatches):
    """Return the share of time in which a rank of GPipe or 1F1B is idle, if stages are equal."""
    return hole(9, "the formula of section 3")


def held(rank, ranks, microbatches):
    """Return the largest number of microbatches whose activations a rank of 1F1B holds at once."""
    return hole(10, "the ones ahead, and the one in work; no more than there are (section 4)")
