"""Rotary positions and their gradient: the reference, then the launchers of rotary.cu's two
versions.

    # x (…, tokens, width), cos and sin (tokens, width/2) float32
    y = rotary(x, cos, sin)
    dx = rotary_gradient(dy, cos, sin)

x float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy; layout as ops.rotary: (x[i],
x[i + width/2]) is a pair. Moved: x.nbytes read and written.
"""

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.errors import KernelError, ShapeError
from minidist.kernels.loader import FLOATS, Source, aligned, c_type, launch

VERSIONS = (1, 2)
SOURCE = Source(
    "rotary.cu", [f"rotary_v{version}<{kind}>" for version in VERSIONS for kind in FLOATS]
)
BLOCK = 256  # threads


def rotary_reference(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate each pair (x[i], x[i + width/2]) by its angle; with -sin by the negative angle, for
    the gradient."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotary(x: Array, cos: Array, sin: Array, *, version: int | None = None) -> Array:
    """Return x rotated, a new array like x. Raises: ShapeError if cos or sin do not fit;
    KernelError if `version` does not."""
    return _turned(x, cos, sin, 1.0, version)


def rotary_gradient(dy: Array, cos: Array, sin: Array, *, version: int | None = None) -> Array:
    """Return the gradient of x: dy rotated back. Raises: as rotary."""
    return _turned(dy, cos, sin, -1.0, version)


def _turned(x: Array, cos: Array, sin: Array, turn: float, version: int | None) -> Array:
    if (
        x.ndim < 2
        or x.shape[-1] % 2
        or not cos.shape == sin.shape == (x.shape[-2], x.shape[-1] // 2)
    ):
        raise ShapeError(
            f"rotary: cos {cos.shape} and sin {sin.shape} do not fit x {x.shape}; they need shape "
            f"(tokens, width/2) of x (…, tokens, width), width even"
        )
    y = array_module(x).empty(x.shape, x.dtype)
    half = x.shape[-1] // 2
    fits = half * x.dtype.itemsize % 16 == 0 and aligned(x, y, cos, sin)
    version = version or (2 if fits else 1)
    if version == 2 and not fits:
        raise KernelError(
            f"rotary_v2 loads 16 bytes at a time, and halves of {half} do not fit; take version 1"
        )
    if x.size:
        a_block = BLOCK * (16 // x.dtype.itemsize if version == 2 else 1)
        launch(
            SOURCE,
            f"rotary_v{version}<{c_type(x)}>",
            grid=-(-(x.size // 2) // a_block),
            block=BLOCK,
            args=(x, cos, sin, y, turn, x.shape[-2], half, x.size // 2),
        )
    return y
