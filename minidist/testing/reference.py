"""One call of a collective as data, the arrays that the ranks bring to it, and the results by
NumPy.

The numbers of an example are chosen so that a right collective can be compared exactly:

    values   numbers                                            sums compared
    whole    small whole numbers                                exactly: any order of additions
                                                                gives the same sum
    large    integers over the whole range of the dtype, whose  exactly, for the same reason
             sums wrap around as NumPy's do; floats: whole
             numbers up to the largest with an exact sum
             (op prod or mean: small whole numbers)
    rough    random floats                                      within rounding; their sum depends
                                                                on the order of additions
"""

from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np

from minidist.comm.calls.reduction import UFUNCS
from minidist.errors import ConfigError

VERBS = (
    "broadcast",
    "scatter",
    "reduce",
    "gather",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "barrier",
)
REDUCING = ("reduce", "all_reduce", "reduce_scatter")
ROOTED = ("broadcast", "scatter", "reduce", "gather")
OPS = tuple(UFUNCS)
LAYOUTS = ("plain", "strided", "read-only", "transposed")
VALUES = ("whole", "large", "rough")
SIZES = (2, 3, 4, 5, 8, 1)
TRANSPORTS = ("threads", "threads-unbuffered")
ONLY_ON = {"native": ("mpi",), "shared": ("shm",)}
"""Algorithms that not every transport has."""

DTYPES = (
    "float32",
    "float64",
    "int64",
    "int32",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "bool",
    "complex64",
)
"""Dtypes that a collective for training should take."""

EVERY_DTYPE = (*DTYPES, "int16", "uint64", "complex128", "longdouble") + (
    ">u2",
    ">i4",
    ">f2",
    ">f4",
    ">f8",
    ">c16",
)
"""Also rare dtypes, and dtypes in the byte order of other machines."""

_WIDE = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(ml_dtypes.bfloat16): np.dtype(np.float32),
}
_MOST_WHOLE = 27  # whole numbers go up to it


@dataclass(frozen=True)
class Example:
    """One call of a collective on all ranks of a group.

    Attributes: verb        a name of Group's verbs: "all_reduce", "broadcast", …
                size        number of ranks in the group
                lengths     elements that each rank brings (gather, all_gather, scatter: rows of two
                            elements); for all_to_all lengths[src][dst]
                dtype       name of the dtype: "float32", "bfloat16", ">f4", …
                op          sum, mean, max, min or prod; for verbs that reduce
                root        rank of the root; for a barrier the rank that calls last
                layout      how an array lies in memory: plain, strided, read-only, transposed
                values      whole, large or rough (see the head of minidist/testing/reference.py)
                world_ranks the ranks of the job in the group, in the group's order; empty: the
                            group is the whole job
                transport   "threads", or "threads-unbuffered", whose send waits for its receive
    """

    verb: str
    size: int
    lengths: Any
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    layout: str = "plain"
    values: str = "whole"
    world_ranks: tuple[int, ...] = ()
    transport: str = "threads"

    def __repr__(self) -> str:
        """Return the call that makes this example, without arguments that have their default."""
        words = [f"{self.verb!r}, {self.size}, {self.lengths!r}"]
        words += [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)[3:]
            if getattr(self, field.name) != field.default
        ]
        return f"Example({', '.join(words)})"

    def kind(self) -> np.dtype:
        """Return the dtype as NumPy's object."""
        return dtype_of(self.dtype)

    def check(self) -> None:
        """Raise ConfigError unless the fields fit together."""
        check_verb(self.verb)
        dtype_of(self.dtype)
        rows = self.lengths if self.verb == "all_to_all" else [self.lengths]
        shape = f"{self.size} tuples of {self.size}" if self.verb == "all_to_all" else self.size
        wrong = ""
        if not isinstance(self.size, int) or self.size < 1:
            wrong = f"size={self.size!r}; expected a count of ranks"
        elif not all(isinstance(row, tuple) and len(row) == self.size for row in rows):
            wrong = f"lengths={self.lengths!r}; expected a tuple of {shape} lengths"
        elif self.root not in range(self.size):
            wrong = f"root={self.root!r}; expected a rank below {self.size}"
        elif self.world_ranks and len({*self.world_ranks}) != self.size:
            wrong = f"world_ranks={self.world_ranks!r}; expected {self.size} ranks, or ()"
        choices = {"op": OPS, "layout": LAYOUTS, "values": VALUES, "transport": TRANSPORTS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                wrong = f"{name}={getattr(self, name)!r}; choose one of {', '.join(known)}"
        if wrong:
            raise ConfigError(f"example of {self.verb}: {wrong}")


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a name of NumPy or ml_dtypes.

    Raises: ConfigError for any other name, and for a dtype without numbers.
    """
    try:
        kind = np.dtype(getattr(ml_dtypes, name, name))
        if kind.kind not in "biuc":
            ml_dtypes.finfo(kind)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name!r} is no dtype of NumPy or ml_dtypes for numbers; for example "
            f"{', '.join(DTYPES)}"
        ) from None
    return kind


def defined(op: str, dtype: str) -> bool:
    """Return whether an op is defined for a dtype: the mean of integers would have to round."""
    return op != "mean" or dtype_of(dtype).kind not in "biu"


def check_verb(verb: str) -> None:
    """Raise ConfigError unless `verb` is the name of a collective."""
    if verb not in VERBS:
        raise ConfigError(f"there is no collective {verb!r}; choose one of {', '.join(VERBS)}")


# --------------------------------------------------------------------------------------- arguments


def argument(example: Example, rank: int, call: int = 0) -> Any:
    """Return what a rank brings: an array, a list of arrays for all_to_all, or None where the verb
    takes nothing.

    Args:    call: number of the call, from 0; each call has other values.
    """
    verb = example.verb
    if verb == "barrier" or (verb in ("broadcast", "scatter") and rank != example.root):
        return None
    if verb == "all_to_all":
        return [
            laid_out(numbers(example, rank, length, dst + example.size * call), example.layout)
            for dst, length in enumerate(example.lengths[rank])
        ]
    length = example.lengths[rank]
    if verb in ("scatter", "gather", "all_gather"):
        rows = numbers(example, rank, 2 * length, call).reshape(length, 2)
        return laid_out(rows, example.layout)
    shape = (2, -1) if length % 2 == 0 else (-1,)
    return laid_out(numbers(example, rank, length, call).reshape(shape), example.layout)


def numbers(example: Example, rank: int, length: int, salt: int = 0) -> np.ndarray:
    """Return `length` numbers: other numbers for each rank, index and salt, as far as the dtype can
    tell them apart."""
    kind = example.kind()
    if example.values == "rough":
        real, imaginary = np.random.default_rng([rank, salt]).standard_normal((2, length))
        rough: np.ndarray = real + 1j * imaginary if kind.kind == "c" else real
        return rough.astype(kind)
    index: np.ndarray = np.arange(length) + 7 * rank + 13 * salt
    if kind.kind == "b":
        third: np.ndarray = index % 3 == 0
        return third
    exact = kind.kind in "iu" or example.op not in ("prod", "mean")
    if example.values == "large" and exact:
        return _large(example, rank, length, salt)
    if example.op == "prod" and example.verb in REDUCING:
        factors: np.ndarray = np.where(index % 5 < 3, 1, 2)
        if kind.kind != "u":
            factors = factors * np.where(index % 2, 1, -1)
        return factors.astype(kind)
    most = _MOST_WHOLE if kind.kind in "iu" else min(_MOST_WHOLE, _largest(kind) // example.size)
    # no zeros: a sum without them would look right
    whole = 1 + (index * 11 + rank * rank) % max(most, 2)
    if kind.kind == "c":
        return (whole + 1j * (whole[::-1] + rank)).astype(kind)
    return whole.astype(kind)


def _large(example: Example, rank: int, length: int, salt: int) -> np.ndarray:
    kind = example.kind()
    draw = np.random.default_rng([rank, salt, 1])
    if kind.kind in "iu":
        native = kind.newbyteorder("=")
        low, high = np.iinfo(native).min, np.iinfo(native).max
        whole: np.ndarray = draw.integers(low, high, length, native, endpoint=True)
        return whole.astype(kind)
    most = min(_largest(kind) // example.size, 1 << 62)
    parts: np.ndarray = draw.integers(-most, most, (2, length), endpoint=True)
    if kind.kind != "c":
        real: np.ndarray = parts[0]
        return real.astype(kind)
    both = np.empty(length, kind)
    both.real = parts[0]
    both.imag = parts[1]
    return both


def _largest(kind: np.dtype) -> int:
    """Return the largest n such that a float dtype holds every whole number up to n."""
    return int(2 / float(ml_dtypes.finfo(kind).eps))


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """Return a copy with the same values in another layout in memory."""
    if layout == "strided":
        return np.repeat(array, 2, axis=0)[::2]
    if layout == "transposed":
        return np.ascontiguousarray(array.T).T
    copy = array.copy()
    copy.flags.writeable = layout != "read-only"
    return copy


# ----------------------------------------------------------------------------------------- results


def expected(example: Example, call: int = 0) -> list[Any]:
    """Return the result of each rank by NumPy; None for a rank that gets none."""
    ranks = range(example.size)
    verb = example.verb
    if verb == "barrier":
        return [None for _ in ranks]
    if verb == "all_to_all":
        brought = [argument(example, src, call) for src in ranks]
        return [[brought[src][dst] for src in ranks] for dst in ranks]
    if verb in ("gather", "all_gather"):
        parts = [argument(example, rank, call) for rank in ranks]
        whole = np.concatenate(parts, dtype=example.kind())
        return [whole if verb == "all_gather" or rank == example.root else None for rank in ranks]
    if verb in REDUCING:
        total = _reduced(example, call)
        if verb == "reduce_scatter":
            return np.array_split(total.reshape(-1), example.size)
        return [total if verb == "all_reduce" or rank == example.root else None for rank in ranks]
    full = argument(example, example.root, call)
    return np.array_split(full, example.size) if verb == "scatter" else [full for _ in ranks]


def _reduced(example: Example, call: int) -> np.ndarray:
    """Return all ranks' arrays combined in rank order; low precision is combined in float32."""
    kind = example.kind()
    ufunc = UFUNCS[example.op]
    wide = _WIDE.get(kind, kind)
    arrays = [argument(example, rank, call).astype(wide) for rank in range(example.size)]
    total: np.ndarray = arrays[0]
    for array in arrays[1:]:
        total = ufunc(total, array)
    if example.op == "mean":
        total = total / total.dtype.type(example.size)
    return total.astype(kind)


def tolerance(example: Example) -> dict[str, float]:
    """Return rtol and atol of rounding: each of at most P additions may be off by half a unit of a
    value of at most 4P."""
    unit = float(ml_dtypes.finfo(example.kind()).eps)
    return {"rtol": example.size * unit, "atol": 4 * example.size * unit}


def same(a: Any, b: Any) -> bool:
    """Return whether two arguments or results have equal dtype, shape and bits (but -0 equals
    0)."""
    if a is None or b is None:
        return a is b
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))


def bits(array: np.ndarray) -> bytes:
    """Return the bytes of an array, without those that a longdouble's 80 bits leave unused."""
    if array.dtype != np.longdouble or array.dtype.itemsize != 16:
        return array.tobytes()
    return np.frombuffer(array.tobytes(), np.uint8).reshape(-1, 16)[:, :10].tobytes()
