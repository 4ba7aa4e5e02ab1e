"""Work on big arrays a block at a time, so that the intermediate results of a fused op never leave the cache.

NumPy runs one pass over memory per operation. A fused op of ten passes over 4 MB arrays would read and write 80 MB;
over blocks whose scratch fits the second-level cache it touches main memory only for what comes in and goes out. On a
GPU there is one block: CuPy launches a kernel per pass, and many small ones cost more than they save.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from minidist.device.backend import Array

BLOCK_BYTES = 256 * 1024  # of one array. Smaller ones cost more in calls than the nearer cache saves


def row_blocks(xp: Any, x: Array, *, scratch: int = 0) -> Iterator[tuple[slice, list[Array]]]:
    """Slices over dim 0 of a contiguous x, each with `scratch` spare arrays of the block's shape and dtype."""
    n = len(x)
    per_row = max(1, x.nbytes // max(1, n))
    height = max(1, n if xp is not np else min(n, BLOCK_BYTES // per_row))
    spare = [xp.empty((height, *x.shape[1:]), x.dtype) for _ in range(scratch)]
    for start in range(0, n, height):
        stop = min(start + height, n)
        yield slice(start, stop), [s[:stop - start] for s in spare]
