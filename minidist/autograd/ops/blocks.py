"""Work on big arrays block by block, so that the intermediate results of a fused op never leave the cache.

NumPy makes one pass over memory per operation: a fused op of ten passes over arrays of 4 MB reads and writes 80 MB. If
the temporaries of a block fit the second-level cache, only inputs and outputs go to main memory. On a GPU there is one
block, because CuPy launches a kernel per pass, and many small kernels cost more than they save.
"""

from collections.abc import Iterator

import numpy as np

from minidist.device.backend import Array

BLOCK_BYTES = 256 * 1024  # of one array. Smaller ones cost more in calls than the nearer cache saves


def row_blocks(x: Array) -> Iterator[slice]:
    """Slices over dim 0 of x."""
    n = len(x)
    per_row = max(1, x.nbytes // max(1, n))
    height = max(1, min(n, BLOCK_BYTES // per_row) if isinstance(x, np.ndarray) else n)
    return (slice(start, min(start + height, n)) for start in range(0, n, height))
