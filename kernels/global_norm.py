"""The global norm of many gradients, inf or NaN after an overflow: the reference, then the
launchers.

    gradients = Gradients([p.grad for p in parameters])      # a table on the device, made once
    norm = global_norm(gradients, factor=1 / loss_scale)     # float32 (1,), on the device; the host
                                                             # does not wait
    squares = sum_of_squares([p.grad for p in parameters])   # before the root; float64 ()

Tensors of one dtype (float32, float16, bfloat16), contiguous, any shapes; version 1, the naive one,
takes only float32. Bytes read: all of the gradients, once. The bits depend only on the tensors'
values, lengths and order.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError, KernelError
from minidist.kernels.chunks import CHUNK, Chunks
from minidist.kernels.loader import FLOATS, Places, Source, Table, begin_aligned, c_type, launch

VERSIONS = (1, 2, 3)
SOURCE = Source(
    "global_norm.cu",
    [
        "global_norm_v1<float>",
        "global_norm_finish",
        *(f"global_norm_v{version}<{kind}>" for version in (2, 3) for kind in FLOATS),
    ],
)
BLOCK = 256  # threads


def global_norm_reference(gradients: Sequence[np.ndarray]) -> float:
    """Return the square root of the sum of squares, in float64."""
    return float(np.sqrt(sum(np.square(g.astype(np.float64)).sum() for g in gradients)))


class Gradients:
    """Tensors of one dtype for a kernel: a table of pointers, and chunks for the blocks.

    Args:    chunks: those of earlier tensors of the same lengths, or None: they are made.
             places: the addresses of an earlier table; they are used again if these tensors have
             the same addresses.
    """

    def __init__(
        self, arrays: Sequence[Array], chunks: Chunks | None = None, places: Places | None = None
    ) -> None:
        if not arrays:
            raise ConfigError("Gradients: no tensors; pass at least one")
        self.arrays = tuple(arrays)
        self.table = Table(arrays, places)
        self.chunks = chunks or Chunks([array.size for array in arrays], array_module(*arrays))

    @cached_property
    def aligned(self) -> bool:
        """Return whether each array begins at a multiple of 16 bytes; its length does not
        matter."""
        return begin_aligned(*self.arrays)


def global_norm(gradients: Gradients, *, factor: float = 1.0, version: int | None = None) -> Array:
    """Return factor x the norm, float32 (1,), on the gradients' device; inf or NaN if an element
    is.

    Raises: KernelError if version 3 is asked for and a tensor does not begin at a multiple of 16
    bytes.
    """
    sums = _sums(gradients, version)
    norm = array_module(gradients.arrays[0]).empty((1,), np.float32)
    launch(
        SOURCE, "global_norm_finish", grid=1, block=256, args=(sums, sums.size, None, norm, factor)
    )
    return norm


def sum_of_squares(arrays: Sequence[Array] | Gradients) -> Array:
    """Return the sum of the squares of all elements: float64, without dims, on the device of the
    arrays."""
    gradients = arrays if isinstance(arrays, Gradients) else Gradients(arrays)
    sums = _sums(gradients, None)
    squares = array_module(*gradients.arrays).empty((1,), np.float64)
    launch(
        SOURCE, "global_norm_finish", grid=1, block=256, args=(sums, sums.size, squares, None, 1.0)
    )
    return squares.reshape(())


def _sums(gradients: Gradients, version: int | None) -> Array:
    """Return the sums of the squares, float32: of each chunk, or with version 1 of each tensor."""
    first = gradients.arrays[0]
    chunks = gradients.chunks
    version = version or (3 if gradients.aligned else 2)
    if version == 3 and not gradients.aligned:
        raise KernelError(
            "global_norm_v3 loads 16 bytes at a time, and a tensor begins elsewhere; take version 2"
        )
    count = len(gradients.arrays) if version == 1 else len(chunks)
    sums = array_module(first).empty((count,), np.float32)
    if version == 1:
        for place, array in enumerate(gradients.arrays):
            launch(
                SOURCE,
                f"global_norm_v1<{c_type(array)}>",
                grid=1,
                block=BLOCK,
                args=(array, sums, place, array.size),
            )
    elif count:
        launch(
            SOURCE,
            f"global_norm_v{version}<{c_type(first)}>",
            grid=count,
            block=BLOCK,
            args=(gradients.table, chunks.owner, chunks.start, chunks.lengths, sums, CHUNK),
        )
    return sums
