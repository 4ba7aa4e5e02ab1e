"""What an op does to two arrays, and in which dtype it adds up.

float16, bfloat16 and the float8s combine in float32 and are rounded once: once a hop where a partial result travels
(ring, tree, halving and doubling), once altogether where one rank sees every value (naive, direct). Every other dtype
combines in itself, as NumPy's ufuncs do: integers wrap round, bool's sum and max are "or", its prod and min "and", NaN
wins in max and min.

An overflow gives inf, and inf - inf gives NaN, without a warning, as in MPI and NCCL, whatever numpy.errstate says: the
algorithm decides which rank adds what, so a warning would appear on an arbitrary rank.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

from minidist.comm.calls.call import Call
from minidist.comm.transport import Reduce
from minidist.device.backend import widen
from minidist.errors import ConfigError, DtypeError

UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@np.errstate(all="ignore")
def _apply(ufunc: np.ufunc, a: np.ndarray, b: np.ndarray, out: np.ndarray, loop: np.dtype | None) -> None:
    if loop is None:
        ufunc(a, b, out=out)
    else:
        ufunc(a, b, out=out, dtype=loop, casting="same_kind")


class Reduction(NamedTuple):
    """One op on one dtype over `size` ranks.

    Attributes: total   the dtype it accumulates in
                loop    the dtype that the ufunc is told to compute in; None where NumPy's own choice is right
    """

    op: str
    dtype: np.dtype
    total: np.dtype
    loop: np.dtype | None
    size: int

    def combine(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """out = a (op) b, all of one length; `out` may be `a` or `b`. Rounds to out's dtype."""
        _apply(UFUNCS[self.op], a, b, out, self.loop)

    def combine_all(self, values: Sequence[np.ndarray], out: np.ndarray) -> None:
        """out = the values, two or more, combined in their order; `out` may be the first."""
        ufunc, total = UFUNCS[self.op], values[0]
        for value in values[1:]:
            _apply(ufunc, total, value, out, self.loop)
            total = out

    def into(self, source: np.ndarray) -> Reduce:
        """The Reduce that writes target = source (op) what arrives; `source` may be the target itself."""
        ufunc, loop = UFUNCS[self.op], self.loop

        def reduce(target: np.ndarray, start: int, piece: np.ndarray) -> None:
            stop = start + len(piece)
            _apply(ufunc, source[start:stop], piece, target[start:stop], loop)

        return reduce

    def behind(self, source: np.ndarray) -> Reduce:
        """The Reduce that writes target = what arrives (op) source: for two ranks that add the same two values, and
        must get the same bits (of a NaN, or of -0 against 0), though the one's own is what arrives at the other."""
        ufunc, loop = UFUNCS[self.op], self.loop

        def reduce(target: np.ndarray, start: int, piece: np.ndarray) -> None:
            stop = start + len(piece)
            _apply(ufunc, piece, source[start:stop], target[start:stop], loop)

        return reduce

    def onto(self, total: np.ndarray) -> Reduce:
        """The Reduce that adds what arrives to `total` and leaves the target alone: for a total wider than that."""
        def reduce(target: np.ndarray, start: int, piece: np.ndarray) -> None:
            stop = start + len(piece)
            self.combine(total[start:stop], piece, out=total[start:stop])

        return reduce

    def pass_on(self, total: np.ndarray, out: np.ndarray) -> None:
        """Round a partial result to the dtype in which it travels."""
        with np.errstate(all="ignore"):
            out[...] = total

    def finish(self, total: np.ndarray, out: np.ndarray) -> None:
        """Write the result, given all ranks' values combined: a mean is divided here, once. `out` may be `total`."""
        if out is total and self.op != "mean":
            return
        with np.errstate(all="ignore"):
            if self.op == "mean" and not isinstance(total, np.ndarray):
                out[...] = widen(total) / self.size             # on a GPU
            elif self.op == "mean":
                np.divide(total, self.size, out=out, dtype=self.loop, casting="same_kind")
            else:
                self.pass_on(total, out)


def _keeps_dtype(ufunc: np.ufunc, dtype: np.dtype) -> bool:
    """Whether an op is defined for a dtype, and gives that dtype."""
    one = np.zeros(1, dtype)
    try:
        combined = ufunc(one, one)
    except TypeError:
        return False
    return bool(combined.dtype.newbyteorder("=") == dtype.newbyteorder("="))


@lru_cache(maxsize=512)
def reduction(op: str, dtype: np.dtype, size: int) -> Reduction:
    """The reduction `op` on arrays of `dtype`.

    Raises: ConfigError for an op that does not exist; DtypeError for one that the dtype does not take.
    """
    if op not in UFUNCS:
        raise ConfigError(f"unknown op {op!r}; choose one of {', '.join(UFUNCS)}")
    low = dtype == np.float16 or (dtype.type.__module__ == ml_dtypes.__name__ and _is_float(dtype))
    total = np.dtype(np.float32) if low else dtype
    taken = [name for name, ufunc in UFUNCS.items() if name != "mean" and _keeps_dtype(ufunc, total)]
    if op == "mean" and "prod" in taken and not (low or dtype.kind in "fc"):
        raise DtypeError(f"op mean of {dtype} would have to round; cast to a float dtype, or take op sum")
    if (op if op != "mean" else "prod") not in taken:
        raise DtypeError(f"op {op} is not defined for dtype {dtype}, or gives another dtype; "
                         f"{'it takes ' + ', '.join(taken) if taken else 'cast to numbers first'}")
    return Reduction(op, dtype, total, total if low else None, size)


def add_from(call: Call, sources: Iterable[int], x: np.ndarray, out: np.ndarray, op: Reduction) -> np.ndarray:
    """x (op) what each of `sources` sends, in that order, added straight from the receive buffer.

    Args:    x, out (n,); x is only read, and may be out, which is overwritten.
    Returns: the total: `out`, or `x` if there are no sources; in low precision a float32 workspace, not rounded yet.
    """
    if op.total == out.dtype:
        total = x
        for src in sources:
            call.recv(src, out, op.into(total))
            total = out
    else:
        total = call.workspace(len(x), op.total)
        total[...] = x
        for src in sources:
            call.recv(src, out, op.onto(total))
    return total


def _is_float(dtype: np.dtype) -> bool:
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True
