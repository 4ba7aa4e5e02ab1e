"""Chapter 24 · The array module of a device that is not there: NumPy's functions on arrays without
data.

    xp = module("cuda")
    xp.exp(x, out=x); xp.concatenate([a, b]); xp.empty((3, 4), "float32")

Each function computes the shape and dtype of its result as NumPy does, and tells the recording what
a device would do: a matrix product, or a pass over memory that reads its arguments and writes its
result.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from minidist.device.backend import FLOATS
from minidist.simulate import recording, strides
from minidist.simulate.attention_flops import attention_flops, scores_of
from minidist.simulate.no_gpu import NO_GPU
from minidist.simulate.shape_array import ShapeArray
from minidist.simulate.strides import Shape

_Array = (ShapeArray, np.ndarray)
_kinds: dict[Any, np.dtype] = {}


def _sample(value: Any) -> Any:
    """Return a small value of the same type, for NumPy to find a result's dtype."""
    return np.ones(1, value) if isinstance(value, np.dtype) else value(1)


def _portable(found: np.dtype, given: Iterable[np.dtype]) -> np.dtype:
    """Return `found`, or int64 where no given dtype is an integer: NumPy's differs by platform."""
    own = found.kind == "i" and not any(dtype.kind in "iu" for dtype in given)
    return np.dtype(np.int64) if own else found


def _dtype_of(ufunc: np.ufunc, inputs: Sequence[Any]) -> np.dtype:
    """Return the dtype of a ufunc's result."""
    key = (ufunc, *(x.dtype if isinstance(x, (*_Array, np.generic)) else type(x) for x in inputs))
    if key not in _kinds:
        with np.errstate(all="ignore"):
            result = ufunc(*map(_sample, key[1:]))
        found = (result[0] if isinstance(result, tuple) else result).dtype
        _kinds[key] = _portable(found, [each for each in key[1:] if isinstance(each, np.dtype)])
    return _kinds[key]


@cache
def _summed(name: str, dtype: np.dtype) -> np.dtype:
    found: np.dtype = getattr(np.ones(1, dtype), name)().dtype
    return _portable(found, () if name == "sum" else (dtype,))


def _shape(shape: Any) -> Shape:
    return (int(shape),) if isinstance(shape, int | np.integer) else tuple(map(int, shape))


def _dims(axis: Any, ndim: int) -> tuple[int, ...]:
    given = range(ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return tuple(d % ndim for d in given)


class Shapes:
    """The functions. What is not here (dtypes, constants, ufuncs) is NumPy's."""

    ndarray = ShapeArray
    cuda = NO_GPU

    def __init__(self, device: str) -> None:
        self.device = device
        self.__name__ = f"shapes on {device}"

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if callable(found) and not isinstance(found, np.ufunc | type):
            raise TypeError(
                f"arrays without data know no {name}; add it to simulate/shape_module.py"
            )
        return found

    def kernel(
        self, kind: str, dtype: np.dtype, flops: float, nbytes: float, size: tuple[int, ...] = ()
    ) -> None:
        """Tell the recording of this thread, if there is one; what the host does for a GPU is of
        the kind "host"."""
        mine = recording.active.recording
        if mine is not None and not mine.paused:
            mine.kernel(kind if mine.device == self.device else "host", dtype, flops, nbytes, size)

    def memory_pass(
        self, shape: Shape, dtype: np.dtype, nbytes: float, operands: Iterable[tuple[Shape, Shape]]
    ) -> None:
        """Tell of a pass over operands of (shape, strides), broadcast to `shape`; on a host in how
        many inner loops."""
        loops = 1
        if self.device == "cpu":
            loops = strides.inner_loops(
                shape, tuple(strides.stretched(shape, *operand) for operand in operands)
            )
        self.kernel("memory", dtype, 0, nbytes, (loops,) if loops > 1 else ())

    # ------------------------------------------------------------------------------------------ new

    def empty(self, shape: Any, dtype: Any = np.float64, order: str = "C") -> ShapeArray:
        return ShapeArray(_shape(shape), np.dtype(dtype), self)

    def zeros(self, shape: Any, dtype: Any = np.float64) -> ShapeArray:
        result = self.empty(shape, dtype)
        self.kernel("memory", result.dtype, 0, result.nbytes)
        return result

    ones = zeros

    def full(self, shape: Any, value: Any, dtype: Any = None) -> ShapeArray:
        if dtype is None:
            given = [value.dtype] if hasattr(value, "dtype") else []
            dtype = _portable(np.asarray(value).dtype, given)
        return self.zeros(shape, dtype)

    def empty_like(self, x: Any, dtype: Any = None) -> ShapeArray:
        return self.empty(x.shape, x.dtype if dtype is None else dtype)

    def zeros_like(self, x: Any, dtype: Any = None) -> ShapeArray:
        return self.zeros(x.shape, x.dtype if dtype is None else dtype)

    ones_like = zeros_like

    def arange(self, *bounds: Any, dtype: Any = None) -> ShapeArray:
        first = np.arange(*bounds[:3], dtype=dtype) if len(bounds) == 3 else None
        length = (
            len(first)
            if first is not None
            else max(0, math.ceil(bounds[-1] - (bounds[0] if bounds[1:] else 0)))
        )
        kind = dtype or (
            np.int64 if all(isinstance(b, int | np.integer) for b in bounds) else np.float64
        )
        return self.zeros(length, kind)

    def asarray(self, x: Any, dtype: Any = None, order: str | None = None) -> Any:
        """Return an array of this module. On the host a NumPy array stays one: it is small, and its
        numbers matter."""
        if isinstance(x, ShapeArray) or (isinstance(x, np.ndarray) and self.device == "cpu"):
            return x if dtype is None else x.astype(dtype, copy=False)
        given = np.asarray(x)
        result = self.zeros(given.shape, given.dtype if dtype is None else dtype)
        # how much a kernel computes depends on it
        result.mask = given if given.dtype == bool else None
        return result

    def array(self, x: Any, dtype: Any = None, order: str | None = None) -> Any:
        found = self.asarray(x, dtype)
        return found.copy() if found is x else found

    def ascontiguousarray(self, x: Any, dtype: Any = None) -> Any:
        found = self.asarray(x, dtype)
        return found if found.flags.c_contiguous else found.copy()

    # ---------------------------------------------------------------------------------- elementwise

    def elementwise(self, ufunc: np.ufunc, inputs: Sequence[Any], out: Any = None) -> Any:
        """Return a ufunc's result, in `out` if that is given."""
        arrays = [x for x in inputs if isinstance(x, _Array)]
        shape = strides.broadcast([x.shape for x in arrays])
        kind = _dtype_of(ufunc, inputs) if out is None else out.dtype
        result = ShapeArray(shape, kind, self) if out is None else out
        self.memory_pass(
            shape,
            kind,
            sum(x.nbytes for x in arrays) + result.nbytes,
            [(x.shape, x.strides) for x in (arrays if out is None else [*arrays, out])],
        )
        return result

    def ufunc(
        self, ufunc: np.ufunc, method: str, inputs: Sequence[Any], out: Any = None, **options: Any
    ) -> Any:
        """Do with arrays without data what NumPy's ufuncs do."""
        result = out[0] if isinstance(out, tuple) else out
        if ufunc is np.matmul:
            return self.matmul(inputs[0], inputs[1], out=result)
        if method == "__call__":
            if result is None and options.get("dtype") is not None:
                result = self.empty(
                    strides.broadcast([getattr(x, "shape", ()) for x in inputs]), options["dtype"]
                )
            return self.elementwise(ufunc, inputs, result)
        if method == "at":
            self.kernel("memory", inputs[0].dtype, 0, 2 * getattr(inputs[-1], "nbytes", 0))
            return None
        if method == "reduceat":
            x = inputs[0]
            places = inputs[1]
            axis = options.get("axis", 0)
            return self._made((*x.shape[:axis], len(places), *x.shape[axis + 1 :]), x.dtype, x)
        if method == "reduce":
            return self.sum(
                inputs[0], axis=options.get("axis", 0), keepdims=options.get("keepdims", False)
            )
        raise TypeError(f"arrays without data know no {ufunc.__name__}.{method}")

    def where(self, condition: Any, a: Any, b: Any) -> ShapeArray:
        given = [x.dtype for x in (a, b) if hasattr(x, "dtype")]
        kind = _portable(np.result_type(*(getattr(x, "dtype", x) for x in (a, b))), given)
        shape = strides.broadcast([getattr(x, "shape", ()) for x in (condition, a, b)])
        return self._made(shape, kind, condition, a, b)

    def clip(self, x: ShapeArray, low: Any, high: Any) -> ShapeArray:
        return self._made(x.shape, x.dtype, x)

    # ----------------------------------------------------------------------------------- reductions

    def _reduced(
        self,
        name: str,
        x: ShapeArray,
        axis: Any,
        keepdims: bool,
        dtype: Any = None,
        out: Any = None,
    ) -> Any:
        dims = _dims(axis, x.ndim)
        shape = tuple(
            1 if d in dims else n for d, n in enumerate(x.shape) if keepdims or d not in dims
        )
        result = ShapeArray(
            shape, np.dtype(dtype) if dtype is not None else _summed(name, x.dtype), self
        )
        whole = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
        self.memory_pass(
            x.shape,
            result.dtype,
            x.nbytes + result.nbytes,
            [(x.shape, x.strides), (whole, strides.in_order(whole, result.itemsize))],
        )
        return result

    def sum(
        self, x: ShapeArray, axis: Any = None, keepdims: bool = False, dtype: Any = None
    ) -> Any:
        return self._reduced("sum", x, axis, keepdims, dtype)

    def max(self, x: ShapeArray, axis: Any = None, keepdims: bool = False) -> Any:
        return self._reduced("max", x, axis, keepdims)

    min = max

    # ------------------------------------------------------------------------------------- products

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """Return (…, m, k) @ (…, k, n), and of vectors, as NumPy. 2mkn FLOPs a matrix."""
        left = (1, *a.shape) if a.ndim == 1 else a.shape
        right = (*b.shape, 1) if b.ndim == 1 else b.shape
        if left[-1] != right[-2]:
            raise ValueError(f"matmul: {a.shape} @ {b.shape}")
        lead = strides.broadcast([left[:-2], right[:-2]])
        shape = (*lead, *left[-2:-1][a.ndim == 1 :], *right[-1:][b.ndim == 1 :])
        bytes_only = a.dtype.itemsize == b.dtype.itemsize == 1
        kind = a.dtype if bytes_only or a.dtype == b.dtype else np.result_type(a.dtype, b.dtype)
        made = np.dtype(ml_dtypes.bfloat16) if bytes_only else kind
        result = ShapeArray(shape, made, self) if out is None else out
        count = math.prod(lead)
        (m, k) = left[-2:]
        n = right[-1]
        self.kernel(
            "matmul",
            kind,
            2.0 * count * m * k * n,
            a.nbytes + b.nbytes + result.nbytes,
            (count, m, k, n),
        )
        return result

    dot = matmul

    def einsum(self, how: str, *arrays: ShapeArray) -> ShapeArray:
        """Return a sum over the last dim of a product: all that the modules ask of einsum."""
        if how != "...td,...td->...t":
            raise TypeError(f"arrays without data know no einsum {how!r}")
        return self._made(arrays[0].shape[:-1], arrays[0].dtype, *arrays)

    # --------------------------------------------------------------------------------------- layout

    def _made(self, shape: Shape, dtype: Any, *read: Any) -> ShapeArray:
        """Return a new array, made in one pass over `read`."""
        result = ShapeArray(shape, np.dtype(dtype), self)
        self.kernel(
            "memory", result.dtype, 0, sum(getattr(x, "nbytes", 0) for x in read) + result.nbytes
        )
        return result

    def broadcast_to(self, x: Any, shape: Any) -> ShapeArray:
        shape = _shape(shape)
        x = x if isinstance(x, ShapeArray) else self.empty(x.shape, x.dtype)
        return x._view(shape, strides.stretched(shape, x.shape, x.strides), writeable=False)  # type: ignore[no-any-return]

    def moveaxis(self, x: Any, source: Any, target: Any) -> Any:
        ends = [_dims(ends, x.ndim) for ends in (source, target)]
        order = [d for d in range(x.ndim) if d not in ends[0]]
        for place, dim in sorted(zip(ends[1], ends[0], strict=True)):
            order.insert(place, dim)
        return x.transpose(tuple(order))

    def split(self, x: Any, cuts: Any, axis: int = 0) -> list[Any]:
        length = x.shape[axis]
        edges = (
            [0, *cuts, length]
            if not isinstance(cuts, int)
            else [length * i // cuts for i in range(cuts + 1)]
        )
        lead = (slice(None),) * (axis % x.ndim)
        return [
            x[(*lead, slice(min(a, length), min(b, length)))]
            for a, b in zip(edges, edges[1:], strict=False)
        ]

    def concatenate(self, parts: Sequence[Any], axis: int = 0, dtype: Any = None) -> ShapeArray:
        first = parts[0]
        dim = axis % parts[0].ndim
        length = sum(part.shape[dim] for part in parts)
        return self._made(
            (*first.shape[:dim], length, *first.shape[dim + 1 :]), dtype or first.dtype, *parts
        )

    def stack(self, parts: Sequence[Any], axis: int = 0) -> ShapeArray:
        shape = list(parts[0].shape)
        shape.insert(axis, len(parts))
        return self._made(tuple(shape), parts[0].dtype, *parts)

    def repeat(self, x: Any, count: int, axis: int = 0) -> ShapeArray:
        dim = axis % x.ndim
        return self._made((*x.shape[:dim], x.shape[dim] * count, *x.shape[dim + 1 :]), x.dtype, x)

    def take(self, x: Any, index: Any, axis: int = 0) -> ShapeArray:
        dim = axis % x.ndim
        result = ShapeArray(
            (*x.shape[:dim], *getattr(index, "shape", ()), *x.shape[dim + 1 :]), x.dtype, self
        )
        self.kernel("memory", x.dtype, 0, 2 * result.nbytes + getattr(index, "nbytes", 0))
        return result

    # ------------------------------------------------------------------------------------- integers

    def argsort(self, x: Any, axis: int = -1, kind: str | None = None) -> ShapeArray:
        return self._made(x.shape, np.int64, x)

    def searchsorted(self, x: Any, values: Any, side: str = "left") -> ShapeArray:
        return self._made(values.shape, np.int64, x, values)

    def may_share_memory(self, a: Any, b: Any) -> bool:
        """Return True if the bytes between the ends of two arrays overlap."""
        if not (isinstance(a, ShapeArray) and isinstance(b, ShapeArray)) or a.owner is not b.owner:
            return False
        (low, high) = a.extent()
        (other_low, other_high) = b.extent()
        return bool(a.size and b.size) and low < other_high and other_low < high

    # -------------------------------------------------------------------------------------- kernels

    def record_launch(self, name: str, values: Iterable[tuple[Any, Any]]) -> None:
        """Record a kernel of kernels/: it reads or writes each of its arrays once, also one that it
        gets as several."""
        pairs = list(values)
        given = {parameter.name: value for parameter, value in pairs}
        arrays = list(
            {
                (id(each), parameter.const): each
                for parameter, value in pairs
                for each in getattr(value, "arrays", (value,))
                if isinstance(each, _Array)
            }.values()
        )
        flops = attention_flops(name, given)
        size: tuple[int, ...] = scores_of(given) if flops else ()
        label = "attention" if flops else "memory"
        if name.startswith("cross_entropy"):
            label = "loss"
            size = (given["rows"] * given["columns"],)
        kind = next((x.dtype for x in arrays if x.dtype in FLOATS), np.dtype(np.float32))
        self.kernel(label, kind, flops, sum(x.nbytes for x in arrays), size)


_MODULES = {device: Shapes(device) for device in ("cpu", "cuda")}


def module(device: str) -> Shapes:
    """Return the array module of a device that is not there."""
    return _MODULES[device]
