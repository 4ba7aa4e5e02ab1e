"""Softmax along the last dim and its gradient: the NumPy reference, then the launchers of
softmax.cu's three versions.

    y = softmax(x)                           # the fastest version that fits x
    dx = softmax_gradient(y, dy, version=2)  # one of the versions

x (…, columns), float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy. Sums are
float32. Moved: x.nbytes read and written forward; 2 x.nbytes read, x.nbytes written backward. 5
operations per element.
"""

from typing import Any

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.kernels.checks import check_alike
from minidist.kernels.loader import FLOATS, Source, c_type, launch, version_for

VERSIONS = (1, 2, 3)
SOURCE = Source(
    "softmax.cu",
    [
        f"{name}_v{version}<{kind}>"
        for name in ("softmax", "softmax_gradient")
        for version in VERSIONS
        for kind in FLOATS
    ],
)
BLOCK = 128  # threads


def softmax_reference(x: np.ndarray) -> np.ndarray:
    """Return exp(x) / sum(exp(x)) along the last dim, in x's dtype; zeros for a row with only
    -inf."""
    top = x.max(axis=-1, keepdims=True)
    e = np.exp(x - np.where(top == -np.inf, 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def softmax_gradient_reference(y: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return the gradient of x, given y = softmax(x) and y's gradient."""
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


def softmax(x: Array, *, version: int | None = None) -> Array:
    """Return the softmax, a new array of x's shape and dtype. Raises: KernelError if `version` does
    not fit x."""
    y = array_module(x).empty(x.shape, x.dtype)
    _launch("softmax", (x, y), version)
    return y


def softmax_gradient(y: Array, dy: Array, *, version: int | None = None) -> Array:
    """Return the gradient of x, a new array of y's shape and dtype. Raises: ShapeError,
    KernelError."""
    check_alike("softmax_gradient", y, dy)
    dx = array_module(y).empty(y.shape, y.dtype)
    _launch("softmax_gradient", (y, dy, dx), version)
    return dx


def _launch(name: str, arrays: tuple[Any, ...], version: int | None) -> None:
    first = arrays[0]
    if first.size == 0:
        return
    columns = first.shape[-1]
    rows = first.size // columns
    version = version_for(name, version, *arrays, packed=3)
    kernel = f"{name}_v{version}<{c_type(first)}>"
    if version == 1:
        launch(SOURCE, kernel, grid=-(-rows // BLOCK), block=BLOCK, args=(*arrays, rows, columns))
    elif version == 2:
        launch(SOURCE, kernel, grid=rows, block=BLOCK, args=(*arrays, columns), shared=BLOCK * 4)
    else:
        launch(
            SOURCE,
            kernel,
            grid=-(-rows // (BLOCK // 32)),
            block=BLOCK,
            args=(*arrays, rows, columns),
        )
