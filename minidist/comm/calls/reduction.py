"""Reductions: the effect of an op on two arrays, and the dtype in which it accumulates.

float16, bfloat16 and the float8s are combined in float32 and rounded: once per hop where a partial
result is passed on (ring, tree, halving and doubling), once in total where one rank has every value
(naive, direct). Every other dtype is combined in itself, as NumPy's ufuncs do: integers wrap
around, bool's sum and max are "or", its prod and min "and", NaN wins in max and min.

An overflow gives inf, and inf - inf gives NaN, without a warning, as in MPI and NCCL: a warning
would appear on an arbitrary rank.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from functools import lru_cache
from operator import setitem
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from minidist.comm.calls.call import Call
from minidist.comm.transport import Reduce
from minidist.device.backend import widen
from minidist.errors import ConfigError, DtypeError

UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


class _Quiet(threading.local):
    """A callable `run(function, …)` without NumPy's warnings: it uses one context per thread, which
    takes a tenth of np.errstate's time."""

    def __init__(self) -> None:
        context = Context()
        context.run(np.seterr, all="ignore")
        self.run: Callable[..., Any] = context.run


_quiet = _Quiet()


def _apply(
    ufunc: np.ufunc, a: np.ndarray, b: np.ndarray, out: np.ndarray, loop: np.dtype | None
) -> None:
    if out.size == 1:
        # not in place: NumPy would take another loop, which rounds a complex product differently
        _quiet.run(setitem, out, ..., _quiet.run(ufunc, a, b, dtype=loop))
    elif loop is None:
        _quiet.run(ufunc, a, b, out=out)
    else:
        _quiet.run(ufunc, a, b, out=out, dtype=loop, casting="same_kind")


class Reduction(NamedTuple):
    """An op for one dtype over `size` ranks."""

    op: str
    dtype: np.dtype
    total: np.dtype  # the dtype it accumulates in
    # the dtype in which the ufunc must compute; None where NumPy's own choice is right
    loop: np.dtype | None
    size: int

    def combine_all(self, values: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Write to `out` the values (two or more), combined in order; `out` may be the first."""
        ufunc = UFUNCS[self.op]
        total = values[0]
        for value in values[1:]:
            _apply(ufunc, total, value, out, self.loop)
            total = out

    def into(self, source: np.ndarray, *, behind: bool = False) -> Reduce:
        """Return the Reduce that writes target = source (op) arriving piece; `source` may be the
        target itself.

        `behind`: arriving piece (op) source. If two ranks add the same two values, one of them sets
        it: otherwise their bits could differ (for NaN, or -0 and 0).
        """
        ufunc = UFUNCS[self.op]
        loop = self.loop

        def reduce(target: np.ndarray, start: int, piece: np.ndarray) -> None:
            stop = start + len(piece)
            first, second = (piece, source[start:stop]) if behind else (source[start:stop], piece)
            _apply(ufunc, first, second, target[start:stop], loop)

        return reduce

    def onto(self, total: np.ndarray) -> Reduce:
        """Return the Reduce that adds arriving pieces to `total`, whose dtype is wider than the
        target's, and does not write the target."""
        add = self.into(total)
        return lambda target, start, piece: add(total, start, piece)

    def pass_on(self, total: np.ndarray, out: np.ndarray) -> None:
        """Round a partial result to the dtype in which it is sent."""
        _quiet.run(setitem, out, ..., total)

    def finish(self, total: np.ndarray, out: np.ndarray) -> None:
        """Write the result, given all ranks' values combined; a mean is divided here, once. `out`
        may be `total`."""
        if self.op != "mean":
            if out is not total:
                self.pass_on(total, out)
            return
        if isinstance(total, np.ndarray):
            _quiet.run(np.divide, total, self.size, out=out, dtype=self.loop, casting="same_kind")
        else:
            out[...] = widen(total) / self.size  # on a GPU, which does not warn


def _keeps_dtype(ufunc: np.ufunc, dtype: np.dtype) -> bool:
    """Return whether the ufunc is defined for a dtype and returns that dtype."""
    one = np.zeros(1, dtype)
    try:
        combined = ufunc(one, one)
    except TypeError:
        return False
    return bool(combined.dtype.newbyteorder("=") == dtype.newbyteorder("="))


@lru_cache(maxsize=512)
def reduction(op: str, dtype: np.dtype, size: int) -> Reduction:
    """Return the reduction `op`. Raises: ConfigError for an unknown op; DtypeError if the dtype
    does not support the op."""
    if op not in UFUNCS:
        raise ConfigError(f"unknown op {op!r}; choose one of {', '.join(UFUNCS)}")
    low = dtype.type is np.float16 or (
        dtype.type.__module__ == ml_dtypes.__name__ and "float" in dtype.name
    )
    total = np.dtype(np.float32) if low else dtype
    taken = [
        name for name, ufunc in UFUNCS.items() if name != "mean" and _keeps_dtype(ufunc, total)
    ]
    if op == "mean" and "prod" in taken and not (low or dtype.kind in "fc"):
        raise DtypeError(
            f"op mean of {dtype} would have to round; cast to a float dtype, or use op sum"
        )
    if (op if op != "mean" else "prod") not in taken:
        raise DtypeError(
            f"op {op} is not defined for dtype {dtype}, or its result has another dtype; "
            f"{'use ' + ', '.join(taken) if taken else 'cast to numbers first'}"
        )
    return Reduction(op, dtype, total, total if low else None, size)


def add_from(
    call: Call, sources: Iterable[int], x: np.ndarray, out: np.ndarray, op: Reduction
) -> np.ndarray:
    """Return x (op) the array from each of `sources`, in order, added from the receive buffer.

    Args:    x, out (n,); x is only read, and may be out, which is overwritten.
    Returns: the total: `out`, or `x` if there are no sources; in low precision a float32 workspace,
    not rounded yet.
    """
    if op.total == out.dtype:
        for src in sources:
            call.recv(src, out, op.into(x))
            x = out
        return x
    total = call.workspace(len(x), op.total)
    total[...] = x
    for src in sources:
        call.recv(src, out, op.onto(total))
    return total
