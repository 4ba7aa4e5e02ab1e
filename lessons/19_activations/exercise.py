"""Exercise 19: a stack of blocks that keeps one input for every few of them.

Copy this file (`minidist lesson 19 --copy DIR`), replace each `hole(...)` by your own code, and grade it:
`minidist check 19 DIR/exercise_19.py`. Blocks run in segments of `size`; of a segment its input alone is kept.
"""

from typing import Any

from minidist.autograd.tensor import no_grad, tensor  # noqa: F401 - you will want them
from minidist.grading import hole


def peak(layers, size, x, a):
    """Bytes at the peak of backward: kept inputs, x bytes each, and the insides of one segment, a bytes a block.

    `size` divides `layers`. The segment that is made again needs its own input too, but a counts that.
    """
    segments = layers // size
    return hole(1, "the kept inputs of the other segments, and one segment made again", segments)


def best_size(layers, x, a):
    """Which segment size, among those that divide `layers`, has the lowest peak."""
    sizes = [size for size in range(1, layers + 1) if layers % size == 0]
    return hole(2, "the size with the lowest peak (ask your own function)", sizes)


def forward(blocks, x, size):
    """(what comes out of the last block, the kept inputs): blocks are functions of one Tensor; x is a Tensor.

    Nothing but the inputs may stay alive.
    """
    kept: list[Any] = []
    for start in range(0, len(blocks), size):
        hole(3, "keep the segment's input", kept, x)
        x = hole(4, "run blocks[start:start + size] so that nothing stays on the tape", start, x)
    return x, kept


def backward(blocks, kept, size, dy):
    """The gradient of the stack's input, an array; adds the weights' gradients. `dy` is the result's, an array."""
    for start in reversed(range(0, len(blocks), size)):
        again = hole(5, "the segment's input as the start of a new tape, asking for its gradient", kept)
        y = again
        for block in blocks[start:start + size]:
            y = block(y)
        dy = hole(6, "go backward through this segment; what is the gradient for the one before?", y, again, dy)
    return dy
