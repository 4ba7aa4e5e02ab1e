"""Bias + GELU, SwiGLU and their gradients: NumPy references, then the launchers of activation.cu's
versions.

    y = bias_gelu(x, bias)                          # x (…, columns), bias (columns,) or None
    dx, dbias = bias_gelu_gradient(x, bias, dy)
    y = swiglu(gate, up)                            # silu(gate) up, all of one shape
    dgate, dup = swiglu_gradient(gate, up, dy)

float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy; computed in float32, rounded
once. Version 2 loads 16 bytes at a time and runs if every row begins at a multiple of that. Bytes
moved: at the head of activation.cu.
"""

from typing import Any

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.errors import ShapeError
from minidist.kernels.checks import check_alike
from minidist.kernels.loader import FLOATS, Source, c_type, launch, version_for

VERSIONS = (1, 2)
SOURCE = Source(
    "activation.cu",
    [
        *(
            f"{name}_v{version}<{kind}>"
            for name in ("bias_gelu", "bias_gelu_gradient", "swiglu", "swiglu_gradient")
            for version in VERSIONS
            for kind in FLOATS
        ),
        *(f"sum_rows<{kind}>" for kind in FLOATS),
    ],
)
BLOCK = 256  # threads
ROW_PARTS = 64  # the most blocks that share the rows of a bias gradient; its sums are float32

_IN = np.sqrt(2 / np.pi)
_CUBE = 0.044715


def _gate(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return h = (1 + tanh u) / 2 and 1 - h, both right to their last digits where they are
    small."""
    with np.errstate(over="ignore"):  # 1 / inf is the 0 that is meant
        return 1 / (1 + np.exp(-2 * u)), 1 / (1 + np.exp(2 * u))


def bias_gelu_reference(x: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """z/2 (1 + tanh(sqrt(2/pi) (z + 0.044715 z³))) with z = x + bias."""
    z = x if bias is None else x + bias
    h, _ = _gate(_IN * (z + _CUBE * z * z * z))
    return z * h


def bias_gelu_gradient_reference(
    x: np.ndarray, bias: np.ndarray | None, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of x and of the bias."""
    z = x if bias is None else x + bias
    h, rest = _gate(_IN * (z + _CUBE * z * z * z))
    dx = dy * (h + 2 * z * h * rest * _IN * (1 + 3 * _CUBE * z * z))
    return dx, dx.reshape(-1, dx.shape[-1]).sum(axis=0)


def swiglu_reference(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gate / (1 + exp(-gate)) up"""
    h, _ = _gate(gate / 2)
    return gate * h * up


def swiglu_gradient_reference(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of gate and up."""
    h, rest = _gate(gate / 2)
    return dy * up * h * (1 + gate * rest), dy * gate * h


def bias_gelu(x: Array, bias: Array | None = None, *, version: int | None = None) -> Array:
    """Return GELU of x + bias: a new array of x's shape and dtype. Raises: ShapeError if the bias
    is not one row of x."""
    y = array_module(x).empty(x.shape, x.dtype)
    _check_bias(x, bias)
    _elementwise("bias_gelu", x, (x, bias, y), (x.size, x.shape[-1]), version)
    return y


def bias_gelu_gradient(
    x: Array, bias: Array | None, dy: Array, *, version: int | None = None
) -> tuple[Array, Array]:
    """Return dx and dbias (columns,), summed in float32 in an order that depends only on the shape.
    Raises: ShapeError.
    Raises: ShapeError.
    """
    xp = array_module(x)
    columns = x.shape[-1]
    _check_bias(x, bias)
    check_alike("bias_gelu_gradient", x, dy)
    dx = xp.empty(x.shape, x.dtype)
    dbias = xp.empty((columns,), x.dtype)
    if x.size == 0:
        dbias[...] = 0.0
        return dx, dbias
    rows = x.size // columns
    kind = c_type(x)
    version = version_for("bias_gelu_gradient", version, *_given(x, bias, dy))
    wide = 32 * (16 // x.dtype.itemsize if version == 2 else 1)
    parts = min(ROW_PARTS, -(-rows // 8))
    partial = xp.empty((parts, columns), np.float32)
    launch(
        SOURCE,
        f"bias_gelu_gradient_v{version}<{kind}>",
        grid=(-(-columns // wide), parts),
        block=(32, 8),
        args=(x, bias, dy, dx, partial, rows, columns),
    )
    launch(
        SOURCE,
        f"sum_rows<{kind}>",
        grid=-(-columns // BLOCK),
        block=BLOCK,
        args=(partial, dbias, parts, columns),
    )
    return dx, dbias


def swiglu(gate: Array, up: Array, *, version: int | None = None) -> Array:
    """Return silu(gate) up, a new array. Raises: ShapeError."""
    check_alike("swiglu", gate, up)
    y = array_module(gate).empty(gate.shape, gate.dtype)
    _elementwise("swiglu", gate, (gate, up, y), (gate.size,), version)
    return y


def swiglu_gradient(
    gate: Array, up: Array, dy: Array, *, version: int | None = None
) -> tuple[Array, Array]:
    """Return the gradients of gate and up: new arrays. Raises: ShapeError."""
    check_alike("swiglu_gradient", gate, up, dy)
    xp = array_module(gate)
    dgate, dup = (xp.empty(gate.shape, gate.dtype) for _ in range(2))
    _elementwise("swiglu_gradient", gate, (gate, up, dy, dgate, dup), (gate.size,), version)
    return dgate, dup


def _given(*arrays: Any) -> list[Any]:
    """Return the arrays that are not None."""
    return [array for array in arrays if array is not None]


def _check_bias(x: Array, bias: Array | None) -> None:
    """Raise ShapeError if the bias is not one row of x."""
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ShapeError(
            f"bias_gelu: a bias of shape {bias.shape} does not fit x {x.shape}; it needs "
            f"{x.shape[-1:]}"
        )


def _elementwise(
    name: str, first: Array, arrays: tuple[Any, ...], numbers: tuple[int, ...], version: int | None
) -> None:
    """Launch with one thread per element (version 1) or per 16 bytes (version 2)."""
    if first.size == 0:
        return
    version = version_for(name, version, *_given(*arrays))
    elements = -(-first.size // (16 // first.dtype.itemsize)) if version == 2 else first.size
    launch(
        SOURCE,
        f"{name}_v{version}<{c_type(first)}>",
        grid=-(-elements // BLOCK),
        block=BLOCK,
        args=(*arrays, *numbers),
    )
