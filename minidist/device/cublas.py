"""Matrix products by cuBLAS, called through ctypes: products of the small types, and all products
while a stream is captured.

CuPy refuses its own cuBLAS calls during a capture, because its handle shares one workspace.
Products own a handle and a workspace, so their calls may become nodes of a graph (cuda_graph.py).
An eager step multiplies the small types by them too, so that it computes the same as a captured
step.

    products = Products()
    with products.instead():        # on this thread
        ...                         # backend.matmul calls products.multiply for arrays on the GPU
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidist.errors import DeviceError, KernelError, ShapeError

WORKSPACE = 32 << 20  # bytes, as NVIDIA advises for sm_90
# cudaDataType: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_KINDS = {"float32": 0, "float16": 2, "bfloat16": 14}
# CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
_SUMS_IN_FLOAT32 = 68
_ANY_ALGORITHM = -1


class _Current(threading.local):
    # read for every product: getattr with a default costs seven times as much
    products: "Products | None" = None

    def __init__(self) -> None:
        self.own: dict[int, Products] = {}  # by device


_current = _Current()


def current() -> "Products | None":
    """Return the Products that this thread uses instead of CuPy's, or None."""
    return _current.products


def own(cupy: Any) -> "Products":
    """Return this thread's Products on the current device, for the small types."""
    device = cupy.cuda.runtime.getDevice()
    if device not in _current.own:
        _current.own[device] = Products()
    return _current.own[device]


class Products:
    """Products of matrices on the current device, in the current stream, with sums in float32.

    Args:    library: cuBLAS, or a stand-in for it; None: as load(). Raises: DeviceError if it
             cannot be loaded.
    """

    def __init__(self, library: Any = None) -> None:
        import cupy  # noqa: PLC0415 - only where a GPU was asked for

        self._cupy = cupy
        self._library = load() if library is None else library
        self._handle = ctypes.c_void_p()
        self._one = ctypes.c_float(1.0)
        self._zero = ctypes.c_float(0.0)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._workspace = cupy.empty((WORKSPACE,), np.uint8)

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Context manager: this thread's products of arrays on a GPU are computed by this
        object."""
        before = _current.products
        _current.products = self
        try:
            yield
        finally:
            _current.products = before

    def multiply(self, a: Any, b: Any, out: Any = None) -> Any:
        """Return (m, k) @ (k, n) -> (m, n), of one dtype; a matrix without contiguous rows or
        columns is copied.

        cuBLAS stores matrices by columns and reads one stored by rows as its transpose, so it
        computes outᵀ = bᵀ aᵀ.
        Raises:  ShapeError for more dims, which only attention without a kernel has.
        """
        if a.ndim != 2 or b.ndim != 2 or a.dtype != b.dtype or str(a.dtype) not in _KINDS:
            raise ShapeError(
                f"a product {a.dtype} {a.shape} @ {b.dtype} {b.shape} in a captured step: it needs "
                f"two matrices of one dtype, {', '.join(_KINDS)}; attention heads of more than 128 "
                "columns need other products"
            )
        (m, k) = a.shape
        n = b.shape[1]
        out = self._cupy.empty((m, n), a.dtype) if out is None else out
        if out.shape != (m, n) or out.dtype != a.dtype or not out.flags.c_contiguous:
            raise ShapeError(
                f"a product {a.shape} @ {b.shape} into {out.dtype} {out.shape}: it needs a "
                f"contiguous {a.dtype} {(m, n)}"
            )
        if m * n * k == 0:
            out[...] = 0
            return out
        (a, turn_a, step_a) = self._laid_out(a)
        (b, turn_b, step_b) = self._laid_out(b)
        stream = self._cupy.cuda.get_current_stream().ptr
        kind = _KINDS[str(a.dtype)]
        # forgets the workspace
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))
        self._call(
            "cublasSetWorkspace_v2",
            self._handle,
            ctypes.c_void_p(self._workspace.data.ptr),
            ctypes.c_size_t(WORKSPACE),
        )
        self._call(
            "cublasGemmEx",
            self._handle,
            turn_b,
            turn_a,
            n,
            m,
            k,
            ctypes.byref(self._one),
            ctypes.c_void_p(b.data.ptr),
            kind,
            step_b,
            ctypes.c_void_p(a.data.ptr),
            kind,
            step_a,
            ctypes.byref(self._zero),
            ctypes.c_void_p(out.data.ptr),
            kind,
            n,
            _SUMS_IN_FLOAT32,
            _ANY_ALGORITHM,
        )
        return out

    def _laid_out(self, x: Any) -> tuple[Any, int, int]:
        """Return a matrix, whether cuBLAS must transpose it, and the elements from one row (or
        column) to the next."""
        rows, columns = x.shape
        down, along = (stride // x.dtype.itemsize for stride in x.strides)
        if (along == 1 or columns == 1) and (down >= columns or rows == 1):
            return x, 0, max(down, columns)
        if (down == 1 or rows == 1) and (along >= rows or columns == 1):
            return x, 1, max(along, rows)
        return self._cupy.ascontiguousarray(x), 0, columns

    def _call(self, name: str, *args: Any) -> None:
        """Call a function of the library. Raises: KernelError if it fails."""
        status = getattr(self._library, name)(*args)
        if status:
            raise KernelError(f"{name} failed with cublasStatus {status}")

    def close(self) -> None:
        """Destroy the handle. Graphs that contain these products must not run any more."""
        if self._handle:
            self._call("cublasDestroy_v2", self._handle)
            self._handle = ctypes.c_void_p()


def load() -> Any:
    """Return the cuBLAS library that CuPy uses. Raises: DeviceError if it cannot be loaded."""
    import cupy  # noqa: PLC0415 - only where a GPU was asked for

    # CuPy loads it now, if it has not; CDLL then finds the one of that name
    cupy.cuda.device.get_cublas_handle()
    name = f"libcublas.so.{cupy.cuda.runtime.runtimeGetVersion() // 1000}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise DeviceError(
            f"{name}, which a captured step uses for matrix products, cannot be loaded: {error}; "
            "train without --graph"
        ) from error
