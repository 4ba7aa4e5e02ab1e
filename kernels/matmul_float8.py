"""The matrix product of fp8 bytes: the NumPy reference, then the launcher of matmul_float8.cu.

    x8, _ = cast(x, "float8_e4m3fn", x_scale)                   # casts.py
    w8, _ = cast(w, "float8_e4m3fn", w_scale)
    y = matmul_float8(x8, w8, (x_scale, w_scale))               # bfloat16
    formats = ("float8_e4m3fn", "float8_e5m2")
    dw = matmul_float8(x8, dy8, (x_scale, dy_scale), formats=formats, transpose_a=True)

a (m, k), b (k, n), uint8, contiguous, NumPy (CPU build) or CuPy (sm_89 and newer). Training with
`--precision fp8` does not use it: widening to bf16 and cuBLAS is faster than this kernel. The same
kernel for bf16, matmul_v5, has an eighth of cuBLAS' rate on an H200. Not yet measured.
Cost: 2·m·n·k operations; read (ceil(n/128)·m·k + ceil(m/128)·k·n) bytes, written 2·m·n.
"""

import ml_dtypes
import numpy as np

from minidist.device.backend import Array, array_module, dtype_name
from minidist.errors import DtypeError, ShapeError
from minidist.kernels.casts import EXPONENT_BITS
from minidist.kernels.checks import check_number
from minidist.kernels.loader import Source, aligned, c_type, launch

# results (side, side) of a block; compute capability 8.9
SIDE = 128
THREADS = 256
SINCE = 89
E4M3, E5M2 = EXPONENT_BITS
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))  # gradients are e5m2: no product has two of them


def _kernel(formats: tuple[str, str], transpose_a: bool, transpose_b: bool) -> str:
    bits = ", ".join(str(EXPONENT_BITS[name]) for name in formats)
    return f"matmul_float8<{bits}, {str(transpose_a).lower()}, {str(transpose_b).lower()}>"


SOURCE = Source(
    "matmul_float8.cu",
    [_kernel(pair, a, b) for pair in PAIRS for a in (False, True) for b in (False, True)],
    since=SINCE,
)


def matmul_float8_reference(
    a: np.ndarray,
    b: np.ndarray,
    scales: tuple[float, float],
    *,
    formats: tuple[str, str] = (E4M3, E4M3),
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> np.ndarray:
    """Return (m, k) @ (k, n) of bytes, each as given or transposed, in float64, divided by both
    scales: (m, n)."""
    left, right = (
        bytes_.view(name).astype(np.float64) for bytes_, name in zip((a, b), formats, strict=True)
    )
    return (
        (left.T if transpose_a else left)
        @ (right.T if transpose_b else right)
        / (scales[0] * scales[1])
    )


def matmul_float8(
    a: Array,
    b: Array,
    scales: tuple[Array, Array],
    *,
    formats: tuple[str, str] = (E4M3, E4M3),
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Array:
    """Return a @ b, a new array (m, n), bfloat16. transpose_a: a is (k, m); transpose_b: b is (n,
    k); scales: float32 (1,) each.

    Raises: ShapeError, DtypeError; KernelError on a GPU older than sm_89.
    """
    xp = array_module(a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[not transpose_a] != b.shape[transpose_b]:
        raise ShapeError(
            f"matmul_float8: a {a.shape}{' transposed' * transpose_a} times b {b.shape}"
            f"{' transposed' * transpose_b}; it needs (m, k) times (k, n)"
        )
    if formats not in PAIRS or {c_type(a), c_type(b)} != {"unsigned char"}:
        raise DtypeError(
            f"matmul_float8: {dtype_name(a.dtype)} as {formats[0]} times {dtype_name(b.dtype)} "
            f"as {formats[1]}; it takes uint8 as one of "
            f"{', '.join(' times '.join(pair) for pair in PAIRS)}"
        )
    for name, scale in zip("ab", scales, strict=True):
        check_number("matmul_float8", f"the scale of {name}", scale)
    (m, k) = a.shape[::-1] if transpose_a else a.shape
    n = b.shape[not transpose_b]
    c = xp.empty((m, n), ml_dtypes.bfloat16) if k else xp.zeros((m, n), ml_dtypes.bfloat16)
    if m and n and k:
        launch(
            SOURCE,
            _kernel(formats, transpose_a, transpose_b),
            grid=(-(-n // SIDE), -(-m // SIDE)),
            block=THREADS,
            args=(a, b, c, *scales, m, n, k, aligned(a, b)),
        )
    return c
