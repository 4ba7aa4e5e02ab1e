"""Intel's MKL in place of NumPy's BLAS, for large products on an Intel processor: `pip install
minidist[mkl]`.

It is found at run time, and used by ranks of one BLAS thread; `minidist doctor` names it, and so
does the machine of every result. MKL runs without threads of its own, so ranks may be forked, and
several may be threads of one process. Its sums are added in another order than NumPy's BLAS adds
them, so results differ in their last bits.
"""

import ctypes
import platform
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from minidist.device.processor import processor

# multiplications and additions of a product that is worth a call by ctypes, some 60 µs
LEAST = 1 << 22
# CblasRowMajor, CblasNoTrans, CblasTrans
_ROWS = 101
_PLAIN = 111
_TRANSPOSED = 112
_SEQUENTIAL = 1  # MKL_THREADING_SEQUENTIAL
_KINDS = {
    np.dtype(np.float32): ("cblas_sgemm", ctypes.c_float),
    np.dtype(np.float64): ("cblas_dgemm", ctypes.c_double),
}

_in_use: "HostProducts | None" = None


class HostProducts:
    """Products of matrices by a library with CBLAS's interface.

    Args:    library: with cblas_sgemm and cblas_dgemm; integer: the type of its lengths.
    """

    def __init__(self, library: Any, integer: Any = ctypes.c_int) -> None:
        self._functions = {}
        for kind, (name, number) in _KINDS.items():
            function = getattr(library, name)
            flag = ctypes.c_int
            address = ctypes.c_void_p
            function.restype = None
            function.argtypes = [
                flag,
                flag,
                flag,
                integer,
                integer,
                integer,
                number,
                address,
                integer,
                address,
                integer,
                number,
                address,
                integer,
            ]
            self._functions[kind] = function

    def multiply(self, a: Any, b: Any, out: Any = None) -> Any:
        """Return a @ b of two matrices, (m, k) @ (k, n) -> (m, n), in `out`; None if NumPy must
        compute it.

        NumPy computes small or stacked products, other dtypes, and matrices not stored by whole
        rows or columns.
        """
        if a.ndim != 2 or b.ndim != 2 or a.dtype != b.dtype or a.dtype not in self._functions:
            return None
        (m, k) = a.shape
        n = b.shape[1]
        if m * k * n < LEAST or k != len(b):
            return None
        left = _layout(a)
        right = _layout(b)
        if left is None or right is None:
            return None
        if out is None:
            out = np.empty((m, n), a.dtype)
        elif (
            out.shape != (m, n)
            or out.dtype != a.dtype
            or not out.flags.c_contiguous
            or not out.flags.writeable
            or np.may_share_memory(out, a)
            or np.may_share_memory(out, b)
        ):
            return None
        self._functions[a.dtype](
            _ROWS,
            left[0],
            right[0],
            m,
            n,
            k,
            1.0,
            a.ctypes.data,
            left[1],
            b.ctypes.data,
            right[1],
            0.0,
            out.ctypes.data,
            n,
        )
        return out


def _layout(x: Any) -> tuple[int, int] | None:
    """Return whether a matrix is stored by rows or, transposed, by columns, and the number of
    elements from one row (column) to the next; None for another layout."""
    (down, across) = x.strides
    item = x.itemsize
    (height, width) = x.shape
    if across == item and down >= width * item and down % item == 0:
        return _PLAIN, down // item
    if down == item and across >= height * item and across % item == 0:
        return _TRANSPOSED, across // item
    return None


@lru_cache(maxsize=1)
def find(prefix: str = sys.prefix) -> Path | None:
    """Return the path of MKL's library, where pip puts it; None if it is not there, or the
    processor is not Intel's."""
    if platform.machine() != "x86_64" or "Intel" not in processor():
        return None
    return next(iter(sorted(Path(prefix, "lib").glob("libmkl_rt.so*"))), None)


def use(threads: int) -> None:
    """Use MKL for the large products of this process, if it is found and a rank has one thread;
    else NumPy's BLAS."""
    global _in_use
    _in_use = _loaded(find()) if threads == 1 else None


def in_use() -> "HostProducts | None":
    """Return the library that computes large products; None: NumPy."""
    return _in_use


@lru_cache(maxsize=1)
def _loaded(library: Path | None) -> HostProducts | None:
    """Return MKL without threads; None if there is none, or it cannot be loaded here."""
    if library is None:
        return None
    try:
        mkl = ctypes.CDLL(str(library))
    except OSError:
        return None
    mkl.MKL_Set_Threading_Layer(_SEQUENTIAL)
    return HostProducts(mkl)
