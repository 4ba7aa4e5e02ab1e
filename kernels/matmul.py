"""The matrix product a @ b: the NumPy reference, then the launchers of matmul.cu's five versions.

    c = matmul(a, b)                       # the fastest version that fits
    c = matmul(a, b, version=2)            # one of the versions
    dw = matmul(x, dy, transpose_a=True)   # xᵀ @ dy by tensor cores, no transposed copy in memory

a (m, k), b (k, n), float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy; sums are
float32. These kernels are for learning: minidist multiplies by cuBLAS (backend.matmul). Not yet
measured.
Cost: 2·m·n·k operations; matmul.cu states the bytes that each version reads, `read_bytes` counts
      them.
"""

import numpy as np

from minidist.device.backend import LOW_PRECISION, Array, array_module
from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels.checks import check_version
from minidist.kernels.loader import FLOATS, Source, aligned, c_type, launch

VERSIONS = (1, 2, 3, 4, 5)
HALVES = FLOATS[1:]
SIDES = {1: 1, 2: 32, 3: 128, 4: 128, 5: 128}  # results (side, side) that share their loads
DEPTHS = {1: 1, 2: 32, 3: 8, 4: 16, 5: 32}  # of a tile, along k
THREADS = 256


def _tensor_core_kernel(kind: str, transpose_a: bool, transpose_b: bool) -> str:
    return f"matmul_v5<{kind}, {str(transpose_a).lower()}, {str(transpose_b).lower()}>"


SOURCE = Source(
    "matmul.cu",
    [f"matmul_v{version}<{kind}>" for version in VERSIONS[:4] for kind in FLOATS]
    + [
        _tensor_core_kernel(kind, a, b)
        for kind in HALVES
        for a in (False, True)
        for b in (False, True)
    ],
)


def matmul_reference(
    a: np.ndarray, b: np.ndarray, *, transpose_a: bool = False, transpose_b: bool = False
) -> np.ndarray:
    """Return (m, k) @ (k, n) -> (m, n), each as given or transposed."""
    return (a.T if transpose_a else a) @ (b.T if transpose_b else b)


def read_bytes(version: int, m: int, n: int, k: int, itemsize: int) -> int:
    """Return the bytes that a version reads from global memory: each tile of results reads its rows
    and columns once."""
    side = SIDES[version]
    return (-(-n // side) * m * k + -(-m // side) * n * k) * itemsize


def matmul(
    a: Array,
    b: Array,
    *,
    version: int | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Array:
    """Return a @ b, a new array (m, n) of a's dtype. transpose_a: a is (k, m); transpose_b: b is
    (n, k); both for version 5 only.

    Raises: ShapeError, DtypeError; KernelError if `version` does not fit.
    """
    xp = array_module(a, b)
    if a.ndim != 2 or b.ndim != 2 or a.shape[not transpose_a] != b.shape[transpose_b]:
        raise ShapeError(
            f"matmul kernel: a {a.shape}{' transposed' * transpose_a} times b {b.shape}"
            f"{' transposed' * transpose_b}; it needs (m, k) times (k, n)"
        )
    if a.dtype != b.dtype:
        raise DtypeError(f"matmul kernel: a of {a.dtype}, b of {b.dtype}; they need one dtype")
    check_version("matmul", version, VERSIONS)
    (m, k) = a.shape[::-1] if transpose_a else a.shape
    n = b.shape[not transpose_b]
    c = xp.empty((m, n), a.dtype) if k else xp.zeros((m, n), a.dtype)
    if m and n and k:
        _launch(a, b, c, (m, n, k), version or fastest(a), transpose_a, transpose_b)
    return c


def fastest(a: Array) -> int:
    """Return the fastest version that fits: tensor cores for half types, else vector loads."""
    return 5 if a.dtype in LOW_PRECISION else 4


def _launch(
    a: Array,
    b: Array,
    c: Array,
    sizes: tuple[int, int, int],
    version: int,
    transpose_a: bool,
    transpose_b: bool,
) -> None:
    kind = c_type(a)
    (m, n, _) = sizes
    if version < 5 and (transpose_a or transpose_b):
        raise KernelError(
            f"matmul version {version} takes no transposed matrix; version 5 does, of half types"
        )
    if version == 5 and kind not in HALVES:
        raise KernelError(
            f"matmul version 5 multiplies float16 and bfloat16, not {a.dtype}; take version 4"
        )
    if version <= 2:
        block = (32, 4 if version == 1 else 32)
        launch(
            SOURCE,
            f"matmul_v{version}<{kind}>",
            grid=(-(-n // 32), -(-m // block[1])),
            block=block,
            args=(a, b, c, *sizes),
        )
        return
    side = SIDES[version]
    kernel = (
        f"matmul_v{version}<{kind}>"
        if version < 5
        else _tensor_core_kernel(kind, transpose_a, transpose_b)
    )
    whole = () if version == 3 else (aligned(a, b),)
    launch(
        SOURCE,
        kernel,
        grid=(-(-n // side), -(-m // side)),
        block=THREADS,
        args=(a, b, c, *sizes, *whole),
    )
