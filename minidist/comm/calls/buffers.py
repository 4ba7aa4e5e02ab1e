"""The arrays of a call: the caller's argument, prepared for sending, and the array of the result.

Algorithms get contiguous NumPy arrays, except in calls that a device transport carries out on the
GPU (device_lane.py). Other arrays are copied here, once on the way in or out; between GPU and host
through pinned memory (backend.to_host).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.comm.calls.dlpack import is_foreign, shared
from minidist.comm.device_lane import SideStream
from minidist.comm.signature import dtype_code
from minidist.device import account, backend
from minidist.errors import DtypeError, ShapeError

Place = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""`place(shape, dtype)` -> the contiguous host array that receives an incoming block."""

PlaceOf = Callable[[int], Place]
"""`place(rank)` -> the Place of the block from `rank`."""


def from_caller(verb: str, x: Any) -> Any:
    """Return the array on the memory of `x` if `x` is an array of another library, else `x`.

    Raises: as dlpack.shared.
    """
    return shared(verb, "x", x) if type(x) is not np.ndarray and is_foreign(x) else x


def argument(verb: str, x: Any, device: str = "cpu") -> np.ndarray:
    """Return `x` (array, scalar or nested list) as a contiguous array on `device`: itself, or a
    copy if necessary.

    Raises: DtypeError for a dtype that cannot be sent, and for objects that are not plain arrays;
    ShapeError for uneven lists.
    """
    plain = type(x) is np.ndarray
    array = (
        x
        if plain or (backend.is_array(x) and backend.device_of(x) == "cuda")
        else as_array(verb, x)
    )
    try:
        dtype_code(array.dtype)
    except DtypeError as error:
        raise DtypeError(f"{verb}: x is a {type(x).__name__}; {error}") from None
    if plain and device == "cpu" and array.flags.c_contiguous:
        return array
    array = backend.to_host(array) if device == "cpu" else backend.to_device(array, device)
    if not array.flags.c_contiguous:
        array = array.copy()
    return array if array is x else account.current().hold(array, "communication")


def as_array(verb: str, x: Any) -> np.ndarray:
    """Return `x`, converted by NumPy. Raises: ShapeError, DtypeError with NumPy's reason;
    DtypeError for a masked array."""
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(
            f"{verb}: x is a masked array, whose mask would be lost; pass x.filled(value), or "
            "x.data"
        )
    try:
        return np.asarray(x)
    # for uneven lists, and errors of other libraries' arrays
    except (ValueError, TypeError, RuntimeError) as error:
        kind = ShapeError if isinstance(error, ValueError) else DtypeError
        raise kind(
            f"{verb}: x is a {type(x).__name__} that cannot be converted to an array: {error}"
        ) from error


def apart(array: np.ndarray, out: Any, part: np.ndarray | None = None) -> np.ndarray:
    """Return `array`, or a copy if it shares memory with `out`. No copy is needed if `out` has the
    same elements as `array`, or as `part`, the part of `array` that the result replaces."""
    if (
        out is array
        or not isinstance(out, type(array))
        or not backend.array_module(array).may_share_memory(array, out)
        or _same_elements(array if part is None else part, out)
    ):
        return array
    return account.current().hold(array.copy(), "communication")


def check_lists(verb: str, x: Any, out: Any, size: int) -> None:
    """Raise ShapeError unless the arguments of an all_to_all are lists with one array for each of
    `size` ranks."""
    for name, arrays in (("x", x), *([] if out is None else [("out", out)])):
        if not hasattr(arrays, "__getitem__") or getattr(arrays, "shape", None) == ():
            raise ShapeError(
                f"{verb}: {name} is a {type(arrays).__name__}; pass a list of {size} arrays"
            )
        if len(arrays) != size:
            raise ShapeError(
                f"{verb}: {name} has {len(arrays)} arrays; pass one for each of {size} ranks"
            )
    if out is not None and len(set(map(id, out))) < size:
        raise ShapeError(
            f"{verb}: out= has the same array several times; pass a separate array for each rank"
        )


def list_argument(
    verb: str, x: Sequence[Any], out: Sequence[Any] | None, device: str
) -> list[np.ndarray]:
    """Return `argument` of each array of a list, all of one dtype; copies of all if one shares
    memory with an array of `out`."""
    parts = [argument(verb, part, device) for part in x]
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1:
        raise DtypeError(
            f"{verb}: the arrays have dtypes {', '.join(sorted(map(str, dtypes)))}; cast them to "
            "one"
        )
    share = backend.array_module(parts[0]).may_share_memory
    targets = [array for array in out or () if isinstance(array, type(parts[0]))]
    # mostly they are views of one array, and the others of another: then one look is enough
    whole = _viewed(parts)
    target = _viewed(targets)
    if whole is not None and target is not None and not share(whole, target):
        return parts
    if any(share(part, target) for target in targets for part in parts):
        return [part.copy() for part in parts]
    return parts


def _viewed(arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the array of which all of `arrays` are views; None if there is none."""
    base = arrays[0].base if arrays else None
    for array in arrays:
        if array.base is not base:
            return None
    return base if isinstance(base, np.ndarray) else None


def _same_elements(a: np.ndarray, b: np.ndarray) -> bool:
    # faster than asking both for their addresses
    if a.size and not backend.array_module(a).may_share_memory(a, b):
        return False
    return a.shape == b.shape and a.strides == b.strides and address_of(a) == address_of(b)


def _overlaps_itself(array: np.ndarray) -> bool:
    """Return whether elements may share memory, as in a broadcast view: the stride of a dim is
    smaller than the memory that the inner dims span."""
    if array.flags.c_contiguous or array.size == 0:
        return False
    reach = array.itemsize
    steps = [
        (abs(stride), length)
        for stride, length in zip(array.strides, array.shape, strict=True)
        if length > 1
    ]
    for stride, length in sorted(steps):
        if stride < reach:
            return True
        reach += stride * (length - 1)
    return False


def address_of(array: Any) -> int:
    """Return the address of an array in the memory of its device."""
    return int(
        array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    )


def bytes_view(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array, as a 1-D uint8 view."""
    return array.reshape(-1).view(np.uint8)


def device_of(*arrays: Any) -> str | None:
    """Return the device of the first value that is not None: "cuda", or "cpu" (also for values that
    are not arrays); None if all are None."""
    for array in arrays:
        if array is not None:
            return "cpu" if isinstance(array, np.ndarray) or not backend.is_array(array) else "cuda"
    return None


class OutputArray:
    """The array of a verb's result: the caller's `out`, else a new array.

        array = result.array(shape, dtype)      # contiguous, on `device`: for the algorithm to fill
        return result.deliver(None, "cpu")      # out, or the new array, on the requested device

    Attributes: out     the caller's
                target  the memory of `out` as a plain array, not a subclass or another library's
                device  the device on which the algorithm works
                side    the stream of the algorithm, if the array is allocated inside its work; else
                        None
    """

    def __init__(
        self, verb: str, out: Any = None, device: str = "cpu", side: SideStream | None = None
    ) -> None:
        self.verb = verb
        self.out = out
        self.device = device
        self.side = side
        self._array: np.ndarray | None = None
        self.target: Any = out
        if out is None or (
            type(out) is np.ndarray and out.flags.c_contiguous and out.flags.writeable
        ):
            return
        if is_foreign(out):
            self.target = out = self._shared(out)
        if not backend.is_array(out) or isinstance(out, np.ma.MaskedArray):
            raise DtypeError(f"{verb}: out= must be an array, not {type(out).__name__}")
        if not isinstance(out, np.ndarray):
            return
        if not out.flags.writeable:
            raise ShapeError(f"{verb}: out= is read-only; pass a writable array")
        if _overlaps_itself(out):
            raise ShapeError(
                f"{verb}: out= has shape {out.shape} and strides {out.strides}: elements of it "
                "share memory and cannot all be written; pass an array whose elements share no "
                "memory"
            )
        self.target = out.view(np.ndarray)

    def _shared(self, out: Any) -> Any:
        """Return the array on the memory of another library's `out`, which must be contiguous: it is
        written in place."""
        array = shared(self.verb, "out=", out)
        if not array.flags.c_contiguous:
            raise ShapeError(
                f"{self.verb}: out= is a {type(out).__name__} that is not contiguous (shape "
                f"{array.shape}, strides {array.strides} in bytes); pass a contiguous one, and copy "
                "it"
            )
        return array

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the array to fill: `out` if it is contiguous and on the algorithm's device.

        Raises: ShapeError, DtypeError if `out` does not have this shape and dtype.
        """
        out = self.target
        if out is not None:
            if out.shape != shape:
                raise ShapeError(f"{self.verb}: out= has shape {out.shape}, the result has {shape}")
            if out.dtype != dtype:
                raise DtypeError(f"{self.verb}: out= has dtype {out.dtype}, the result has {dtype}")
            here = "cpu" if type(out) is np.ndarray else device_of(out)
            if here == self.device and out.flags.c_contiguous:
                self._array = out
                return self._array
        xp = np if self.device == "cpu" else backend.module_for(self.device)
        if self.side is None or self.device == "cpu":
            self._array = xp.empty(shape, dtype)
        else:
            self._array = self.side.allocate(lambda: xp.empty(shape, dtype))
        if out is not None:
            account.current().hold(self._array, "communication")
        return self._array

    def deliver(self, _returned: Any, device: str | None) -> Any:
        """Return the caller's result (as Call.deliver): `out`, filled, or the new array on
        `device`."""
        assert self._array is not None, "array() comes before deliver()"
        if self.out is None:
            if device == self.device == "cpu":  # saves a call for most results
                return self._array
            return backend.to_device(self._array, device or "cpu")
        if self._array is not self.target:
            self.target[...] = backend.to_device(self._array, backend.device_of(self.target))
        return self.out


class Rows:
    """The result of a gather: the blocks of all ranks, one after the other along the first dim.

    The lengths of the blocks are unknown before they arrive. A block with the shape of this rank's
    own is received straight into its place in `whole`, the result. A block with another shape is
    received into a new array, and all blocks are joined at the end (two copies more).
    """

    def __init__(self, result: OutputArray, own: np.ndarray, size: int) -> None:
        self._result = result
        self._own = own
        self.whole: np.ndarray | None = None
        shape = (size * len(own), *own.shape[1:])
        if result.out is None or result.target.shape == shape:
            self.whole = result.array(shape, own.dtype)

    def put_own(self, rank: int) -> np.ndarray:
        """Return this rank's block: copied to its place in the result if that is known, else a
        copy. `own` is not read after this."""
        if self.whole is None:
            return self._own.copy()
        place = self.place(rank)(self._own.shape, self._own.dtype)
        if not _same_elements(place, self._own):
            place[...] = self._own
        return place

    def place(self, rank: int, count: int = 1) -> Place:
        """Return the Place for the block of `rank`, or for the joined blocks of `count` ranks from
        `rank` on."""

        def of_ranks(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            rows = len(self._own)
            if self.whole is None or shape != (count * rows, *self._own.shape[1:]):
                return account.current().hold(
                    backend.array_module(self._own).empty(shape, dtype), "communication"
                )
            return self.whole[rank * rows : (rank + count) * rows]

        return of_ranks

    def merge(self, rank: int, blocks: list[np.ndarray]) -> np.ndarray:
        """Return consecutive blocks from `rank` on, joined: a view of the result if all of them are
        in it, else a new array."""
        if self.whole is not None:
            start = rank * len(self._own)
            edges = start + np.cumsum([0, *map(len, blocks)])
            if all(
                _same_elements(self.whole[edges[i] : edges[i + 1]], block)
                for i, block in enumerate(blocks)
            ):
                return self.whole[start : edges[-1]]
        return account.current().hold(self._joined(blocks), "communication")

    def place_whole(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the array that receives all blocks at once."""
        if self.whole is None or self.whole.shape != shape:
            self.whole = self._result.array(shape, dtype)
        return self.whole

    def join(self, blocks: list[np.ndarray]) -> np.ndarray:
        """Return all blocks in rank order, as the result array."""
        if self.whole is not None and all(block.shape == self._own.shape for block in blocks):
            return self.whole
        # not into `out`: blocks may lie in it, at places for blocks of equal length
        return self.complete(self._joined(blocks))

    def _joined(self, blocks: list[np.ndarray]) -> np.ndarray:
        # pass the dtype, because the default has the machine's byte order
        xp = backend.array_module(*blocks)
        return xp.concatenate(blocks, dtype=self._own.dtype)  # type: ignore[no-any-return]

    def complete(self, joined: np.ndarray) -> np.ndarray:
        """Return the blocks of all ranks, as joined by `merge`, as the result array."""
        if self.whole is not None and _same_elements(self.whole, joined):
            return self.whole
        whole = self._result.array(joined.shape, self._own.dtype)
        whole[...] = joined
        return whole
