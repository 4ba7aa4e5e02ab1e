"""Exercise 19: a stack of blocks that keeps only their inputs, what a stack in segments needs, and
8 bits.

Copy this file (`minidist lesson 19 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 19 DIR/exercise_19.py`. A block may be a segment of several layers: only
its input is kept. What you may use:

    no_grad()                            for `with`: ops inside record nothing
    tensor(array, requires_grad=True)    a Tensor without a past, the start of a tape; its gradient
                                         is wanted
    x.data, x.grad                       a Tensor's array; its gradient, an array, after backward
    np.floor(x)                          the whole number below each number of x
"""

import numpy as np

from minidist.autograd.tensor import no_grad, tensor  # noqa: F401 - you will want them
from minidist.grading import hole


def peak(layers, size, x, a):
    """Return the bytes at the peak of backward: kept inputs, x bytes each, and the insides of one
    segment, a bytes per block.

    `size` divides `layers`. The segment that is recomputed needs its own input too, but a includes
    it.
    """
    segments = layers // size
    return hole(1, "the kept inputs of the other segments, and one segment made again", segments)


def best_size(layers, x, a):
    """Return the segment size with the lowest peak, among those that divide `layers`."""
    sizes = [size for size in range(1, layers + 1) if layers % size == 0]
    return hole(2, "the size with the lowest peak (ask your own function)", sizes)


def plain_recompute(blocks, x, dy):
    """Run forward and backward through blocks that keep only their inputs; return the gradient of
    x.

    Args:    blocks: functions of one Tensor; x: a Tensor; dy: the gradient of the last block's output,
             an array.
    """
    kept = []
    with hole(3, "how is forward run, so that nothing stays on the tape? (section 1)"):
        for block in blocks:
            hole(4, "keep what backward will need of this block (section 1)", kept, x)
            x = block(x)
    for block in reversed(blocks):
        again = hole(
            5,
            "this block's input as the start of a new tape, asking for its gradient (section 1)",
            kept,
        )
        block(again).backward(dy)  # forward once more, with a tape, and back
        dy = hole(6, "the gradient for the block before (section 1)", again)
    return dy


def codes_of(x, chance):
    """Return one-byte codes and the scale of a group of numbers, as in section 5: code × scale is x
    on average.

    Args:    chance: uniform in [0, 1), one for each number.
    """
    scale = np.abs(x).max() / 127
    codes = hole(
        7,
        "whole numbers, of which the mean over all chances is x / scale (section 5)",
        x,
        scale,
        chance,
    )
    return codes.astype(np.int8), scale
