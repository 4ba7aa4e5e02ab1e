"""Exercise 10: a model cut by layers: which rank has which, one batch there and back, messages, and
waiting.

Copy this file (`minidist lesson 10 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 10 DIR/exercise_10.py`. What you may use:

    group.send(x, dst=r), group.recv(src=r)     an array to or from rank r
    tensor(array, requires_grad=True)           the start of a tape, whose .grad is there after
                                                backward
    y.data                                      the array of a tensor y
    y.backward(dy)                              backward from y, whose gradient is dy, an array; a
                                                loss needs none
"""

from minidist.autograd.tensor import tensor  # noqa: F401 - you will want it
from minidist.grading import hole


def layers_of(rank, ranks, layers):
    """Return a rank's layers as a range: consecutive layers; sizes differ by at most 1, larger ones
    first."""
    each, more = divmod(layers, ranks)
    first = hole(
        1,
        "how many layers the ranks before this one have; the first `more` have one more",
        each,
        more,
    )
    return range(first, first + each + (rank < more))


def plain_model_parallel(layers, group, inputs, targets, divisor):
    """Run one batch forward through all ranks and backward; layers(x, targets, divisor) are this
    rank's, the last rank's return the loss."""
    first = group.rank == 0
    last = group.rank == group.size - 1
    x = (
        inputs
        if first
        else hole(2, "what arrives from the previous rank, as the start of this rank's own tape")
    )
    y = layers(x, targets, divisor)  # the last: the loss
    if not last:
        hole(3, "hand this rank's output, an array, to the next rank (section 1)", y)
    y.backward(
        None if last else hole(4, "with what does backward begin on any other rank? (section 1)")
    )
    if not first:
        hole(
            5, "hand the gradient of this rank's input, an array, to the rank before (section 1)", x
        )


def bytes_sent(ranks, sequences, tokens, width, itemsize):
    """Return the bytes of activations and their gradients that all ranks together send in a step (no
    tied table)."""
    return hole(6, "how many cuts, how often each, how large (section 4)")


def idle(times):
    """Return the share of the ranks' time in which they wait; `times[r]` is how long rank r
    computes per step."""
    return hole(7, "the step takes as long as all of them one after the other (section 3)")
