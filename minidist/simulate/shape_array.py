"""Chapter 24 · Arrays with a shape and a dtype, and no data: the modules of this project compute
with them unchanged.

    x = module("cuda").empty((8192, 4096), np.float32)       # 134 MB on a GPU that is not there
    y = x[:, :10].T @ w                                      # a view, then one Kernel("matmul", …)
                                                             in the recording

Views share a base, and have the strides that NumPy would give them, so copies happen where they
would, and the memory account counts the same buffers. Every operation tells the recording one
Kernel: a device runs it as one. `device` is "cpu" or "cuda", and says which branch of the modules
runs. Small integers (token ids, positions, counts) stay NumPy arrays. A number read from an array
without data is 1, and a comparison of such numbers is true.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.device import backend
from minidist.simulate import strides
from minidist.simulate.no_gpu import NO_GPU, NoGpu
from minidist.simulate.operators import Operators
from minidist.simulate.strides import Shape

_addresses = itertools.count(1)
PAGE = 512  # bytes: where arrays begin on a GPU, so that 16-byte loads fit


class _Flags:
    """What the modules ask of `array.flags`."""

    __slots__ = ("c_contiguous", "writeable")

    def __init__(self, c_contiguous: bool, writeable: bool) -> None:
        self.c_contiguous = c_contiguous
        self.writeable = writeable


class _Place:
    """`array.data.ptr`, as CuPy has it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def is_picked(part: Any) -> bool:
    """Return True if a part of an index is an array."""
    return isinstance(part, np.ndarray | ShapeArray) and part.ndim > 0 or isinstance(part, list)


class ShapeArray(Operators):
    """An array without data, of an array module (shape_module.py).

    Attributes: base: None if it owns its buffer; mask: the numbers of a mask that came from the
    host, else None.
    """

    __slots__ = (
        "shape",
        "dtype",
        "module",
        "base",
        "writeable",
        "mask",
        "_strides",
        "_offset",
        "_number",
        "__weakref__",
    )

    def __init__(
        self,
        shape: Shape,
        dtype: np.dtype,
        module: Any,
        *,
        base: "ShapeArray | None" = None,
        steps: Shape | None = None,
        offset: int = 0,
        writeable: bool = True,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.module = module
        self.base = base
        self.writeable = writeable
        self.mask: np.ndarray | None = None
        # steps None: C-contiguous
        self._strides = steps
        self._offset = offset
        self._number = next(_addresses) if base is None else 0

    # ----------------------------------------------------------------------------------- what it is

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def strides(self) -> Shape:
        return (
            strides.in_order(self.shape, self.itemsize) if self._strides is None else self._strides
        )

    @property
    def flags(self) -> _Flags:
        return _Flags(self.c_contiguous, self.writeable)

    @property
    def c_contiguous(self) -> bool:
        return self._strides is None or strides.contiguous(self.shape, self._strides, self.itemsize)

    @property
    def owner(self) -> "ShapeArray":
        return self if self.base is None else self.base

    @property
    def address(self) -> int:
        """Return where the array would begin: owners do not overlap."""
        return self.owner._number * (1 << 44) + PAGE + self._offset

    @property
    def data(self) -> _Place:
        return _Place(self.address)

    @property
    def device_name(self) -> str:
        """Return "cpu" or "cuda"."""
        return self.module.device  # type: ignore[no-any-return]

    @property
    def T(self) -> "ShapeArray":  # noqa: N802 - as NumPy's
        return self.transpose()

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"ShapeArray({self.dtype} {self.shape} on {self.device_name})"

    def extent(self) -> tuple[int, int]:
        """Return the bytes of its owner between which its elements lie."""
        low = high = self._offset
        for length, stride in zip(self.shape, self.strides, strict=True):
            reach = (length - 1) * stride
            low = low + min(0, reach)
            high = high + max(0, reach)
        return low, high + self.itemsize

    # ---------------------------------------------------------------------------------------- views

    def _view(
        self, shape: Shape, steps: Shape | None, offset: int = 0, *, writeable: bool = True
    ) -> "ShapeArray":
        return ShapeArray(
            shape,
            self.dtype,
            self.module,
            base=self.owner,
            steps=steps,
            offset=self._offset + offset,
            writeable=self.writeable and writeable,
        )

    def like(self, shape: Shape, dtype: Any = None) -> "ShapeArray":
        """Return a new array on the same device."""
        return ShapeArray(shape, self.dtype if dtype is None else np.dtype(dtype), self.module)

    def reshape(self, *shape: Any) -> "ShapeArray":
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        new = strides.completed(wanted, self.size)
        if self.c_contiguous:
            return self._view(new, None)
        steps = strides.reshaped(self.shape, self.strides, new) if self.size else None
        return self._view(new, steps) if steps is not None else self.copy()._view(new, None)

    def transpose(self, *dims: Any) -> "ShapeArray":
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
        order = (
            tuple(range(self.ndim))[::-1]
            if not order or order[0] is None
            else tuple(d % self.ndim for d in order)
        )
        steps = self.strides
        return self._view(tuple(self.shape[d] for d in order), tuple(steps[d] for d in order))

    def swapaxes(self, a: int, b: int) -> "ShapeArray":
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self.transpose(order)

    def view(self, dtype: Any = None) -> "ShapeArray":
        kind = (
            self.dtype
            if dtype is None or isinstance(dtype, type) and dtype is np.ndarray
            else np.dtype(dtype)
        )
        if kind.itemsize == self.itemsize:
            same = self._view(self.shape, self._strides)
        else:
            same = self._view(
                (*self.shape[:-1], self.shape[-1] * self.itemsize // kind.itemsize), None
            )
        same.dtype = kind
        return same

    def __getitem__(self, index: Any) -> "ShapeArray":
        if type(index) is slice and index.step is None and self.shape:  # a ring takes millions
            start, stop, _ = index.indices(len(self))
            count = max(0, stop - start)
            offset = start * self.strides[0] if count else 0
            return self._view((count, *self.shape[1:]), self._strides, offset)
        parts = strides.expanded(_without_masks(index), self.ndim)
        if any(map(is_picked, parts)):
            result = self.like(strides.picked(self.shape, parts, is_picked))
            self.module.kernel("memory", self.dtype, 0, 2 * result.nbytes + _index_bytes(parts))
            return result
        shape, steps, offset = strides.view_of(self.shape, self.strides, parts)
        if (
            shape == ()
            and self.device_name == "cpu"
            and Ellipsis not in (index if type(index) is tuple else (index,))
        ):
            return self.like(())  # NumPy returns a number
        return self._view(shape, steps, offset)

    def __setitem__(self, index: Any, value: Any) -> None:
        parts = strides.expanded(_without_masks(index), self.ndim)
        if any(map(is_picked, parts)):
            target = self.like(strides.picked(self.shape, parts, is_picked))
        else:
            target = self._view(*strides.view_of(self.shape, self.strides, parts))
        strides.broadcast([target.shape, getattr(value, "shape", ())])
        operands = [(target.shape, target.strides)]
        if isinstance(value, ShapeArray):
            if (
                value.owner is target.owner
                and value._offset == target._offset
                and value.strides == target.strides
            ):
                return  # x[i] += y puts its own view back
            operands.append((value.shape, value.strides))
        read = value.nbytes if isinstance(value, ShapeArray) else 0
        self.module.memory_pass(target.shape, self.dtype, read + target.nbytes, operands)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    # --------------------------------------------------------------------------------------- copies

    def copy(self) -> "ShapeArray":
        return self.astype(self.dtype)

    def astype(self, dtype: Any, *, copy: bool = True, order: str = "K") -> "ShapeArray":
        kind = np.dtype(dtype)
        if not copy and kind == self.dtype:
            return self
        result = self.like(self.shape, kind)
        self.module.memory_pass(
            self.shape,
            kind,
            self.nbytes + result.nbytes,
            [(x.shape, x.strides) for x in (self, result)],
        )
        return result

    def get(self, **_: Any) -> None:
        """Move the array to the host, as CuPy's get(out=): a lane's move, or a number of a few
        bytes."""

    def set(self, source: Any, **_: Any) -> None:
        """Move an array here from the host, as CuPy's."""

    @property
    def device(self) -> NoGpu:
        """Return the device, as CuPy's."""
        return NO_GPU

    def item(self) -> Any:
        """Return the declared value of a number: 1."""
        return self.dtype.type(1).item()

    def __float__(self) -> float:
        return 1.0

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"the truth of an array of shape {self.shape} is not known")
        return True

    # ----------------------------------------------------------------------------------- arithmetic

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return self.module.ufunc(ufunc, method, inputs, **options)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        return getattr(self.module, function.__name__)(*args, **options)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            f"an array without data ({self.dtype} {self.shape}) has no numbers to copy; what "
            "depends on them must be declared (simulate/one_rank.py)"
        )

    def __hash__(self) -> int:
        return id(self)


def _without_masks(index: Any) -> Any:
    """Return an index in which bool arrays are the places of their ones."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, np.ndarray | ShapeArray) and part.dtype == bool for part in parts):
        return index
    found: list[Any] = []
    for part in parts:
        if isinstance(part, ShapeArray) and part.dtype == bool:
            raise TypeError(
                "a mask without data picks an unknown number of elements: its caller must "
                "declare it"
            )
        if isinstance(part, np.ndarray) and part.dtype == bool:
            found += [places.astype(np.int64, copy=False) for places in part.nonzero()]
        else:
            found.append(part)
    return tuple(found)


def _index_bytes(parts: Sequence[Any]) -> int:
    return sum(part.nbytes for part in parts if isinstance(part, np.ndarray | ShapeArray))


backend.add_virtual(ShapeArray)
