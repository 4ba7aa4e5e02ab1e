"""Work on big arrays block by block, so that the intermediate results of a fused op never leave the cache.

NumPy makes one pass over memory per operation: a fused op of ten passes over arrays of 4 MB reads and writes 80 MB. If
the scratch of a block fits the second-level cache, only inputs and outputs travel to main memory. On a GPU there is one
block, because CuPy launches a kernel per pass, and many small kernels cost more than they save.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from minidist.device.backend import Array

BLOCK_BYTES = 256 * 1024  # of one array. Smaller ones cost more in calls than the nearer cache saves


def row_blocks(xp: Any, x: Array, *, scratch: int = 0) -> Iterator[tuple[slice, list[Array]]]:
    """Slices over dim 0 of a contiguous x, each with `scratch` spare arrays of the shape and dtype of the block."""
    n = len(x)
    per_row = max(1, x.nbytes // max(1, n))
    height = max(1, n if xp is not np else min(n, BLOCK_BYTES // per_row))
    spare = [xp.empty((height, *x.shape[1:]), x.dtype) for _ in range(scratch)]
    for start in range(0, n, height):
        stop = min(start + height, n)
        yield slice(start, stop), [s[:stop - start] for s in spare]
