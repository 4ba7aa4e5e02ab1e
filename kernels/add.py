"""a + b in one pass: the reference, then the launchers of add.cu's two versions.

    y = add(a, b)                       # of one shape, or b as a's last dims: a bias for each row
    add(a, b, out=a)                    # in place

float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy; added in float32 and rounded
once. Moved: 2 itemsize bytes per element of a, and b once. On an H200 CuPy's sums of bfloat16 in a
step took four times as long.
"""

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels.checks import check_version
from minidist.kernels.loader import FLOATS, Source, begin_aligned, c_type, launch

VERSIONS = (1, 2)
SOURCE = Source("add.cu", [f"add_v{version}<{kind}>" for version in VERSIONS for kind in FLOATS])
BLOCK = 256  # threads


def add_reference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a + b; b is repeated over the dims that it lacks."""
    return a + b


def add(a: Array, b: Array, *, out: Array | None = None, version: int | None = None) -> Array:
    """Return a + b in `out`, or in a new array of a's shape. out may be a.

    Raises: ShapeError if b is not a's last dims; DtypeError if they differ in dtype; KernelError if
            `version` does not fit.
    """
    y = array_module(a, b).empty(a.shape, a.dtype) if out is None else out
    check_version("add", version, VERSIONS)
    if a.shape[max(0, a.ndim - b.ndim) :] != b.shape or y.shape != a.shape:
        raise ShapeError(
            f"add: arrays of shapes {a.shape}, {b.shape} and {y.shape}; b must be a's last dims, "
            f"and y as a"
        )
    if not a.dtype == b.dtype == y.dtype:
        raise DtypeError(f"add: arrays of {a.dtype}, {b.dtype} and {y.dtype}; they need one dtype")
    if not a.size:
        return y
    pack = 16 // a.dtype.itemsize
    fits = begin_aligned(a, b, y) and (b.size == a.size or b.size % pack == 0)
    if version == 2 and not fits:
        raise KernelError(
            "add_v2 loads 16 bytes at a time, and an array begins elsewhere or b ends within them; "
            "take version 1"
        )
    version = version or (2 if fits else 1)
    launch(
        SOURCE,
        f"add_v{version}<{c_type(a)}>",
        grid=-(-a.size // (BLOCK * (pack if version == 2 else 1))),
        block=BLOCK,
        args=(a, b, y, a.size, b.size),
    )
    return y
