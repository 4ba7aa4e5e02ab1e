"""Shapes, strides and indices, as NumPy's: where the elements of a view lie. Strides and offsets
are in bytes."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Shape = tuple[int, ...]


def in_order(shape: Shape, itemsize: int) -> Shape:
    """Return the strides of a C-contiguous array."""
    strides = [0] * len(shape)
    step = itemsize
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def contiguous(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Return True if these strides are a C-contiguous array's; dims of one element may have any."""
    step = itemsize
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] != 1:
            if strides[dim] != step:
                return 0 in shape
            step *= shape[dim]
    return True


def completed(shape: Sequence[int], size: int) -> Shape:
    """Return `shape` with its -1 computed. Raises: ValueError if it does not hold `size`
    elements."""
    known = math.prod(n for n in shape if n != -1)
    if -1 in shape and known and size % known == 0:
        shape = [size // known if n == -1 else n for n in shape]
    if -1 in shape or math.prod(shape) != size:
        raise ValueError(f"cannot reshape {size} elements into {tuple(shape)}")
    return tuple(int(n) for n in shape)


def reshaped(old: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Return the strides of a view of another shape; None where the elements have to be copied."""
    pairs = [(n, stride) for n, stride in zip(old, strides, strict=True) if n != 1]
    result = [0] * len(new)
    left = 0
    right = 0
    while right < len(new):
        if new[right] == 1:
            right += 1
            continue
        stop = right + 1
        first = left
        have = pairs[left][0]
        want = new[right]
        left += 1
        while have != want:
            if have < want:
                have = have * pairs[left][0]
                left = left + 1
            else:
                want = want * new[stop]
                stop = stop + 1
        for a, b in zip(pairs[first : left - 1], pairs[first + 1 : left], strict=True):
            if a[1] != b[0] * b[1]:
                return None
        step = pairs[left - 1][1]
        for dim in range(stop - 1, right - 1, -1):
            result[dim] = step
            step *= new[dim]
        right = stop
    return tuple(result)


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return the common shape. Raises: ValueError, as NumPy."""
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    return np.broadcast_shapes(*shapes)


def stretched(shape: Shape, old: Shape, strides: Shape) -> Shape:
    """Return the strides of an array of shape `old` where it is broadcast to `shape`: 0 along the
    dims that it repeats in."""
    lead = len(shape) - len(old)
    return tuple(
        0 if dim < lead or old[dim - lead] == 1 != length else strides[dim - lead]
        for dim, length in enumerate(shape)
    )


@lru_cache(maxsize=1 << 16)
def inner_loops(shape: Shape, strides: tuple[Shape, ...]) -> int:
    """Return how often NumPy starts its innermost loop in a pass over operands of this shape and of
    these strides.

    Dims that lie behind each other in every operand are one loop; so an array without gaps takes
    one start.
    """
    dims: list[int] = []  # the innermost first
    for dim in reversed([dim for dim, length in enumerate(shape) if length > 1]):
        place = len(dims)
        for at in reversed(range(len(dims))):
            pairs = [
                (abs(steps[dims[at]]), abs(steps[dim]))
                for steps in strides
                if steps[dims[at]] and steps[dim]
            ]
            if not all(inner > outer for inner, outer in pairs):
                break
            place = at if pairs else place
        dims.insert(place, dim)
    length = shape[dims[0]] if dims else 1
    for inner, dim in itertools.pairwise(dims):
        if any(steps[dim] != steps[inner] * shape[inner] for steps in strides):
            break
        length *= shape[dim]
    return max(1, math.prod(shape) // length)


def expanded(index: Any, ndim: int) -> list[Any]:
    """Return an index as a list with an entry for every dim (and None for each new one), without an
    Ellipsis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(1 for part in parts if part is not None and part is not Ellipsis)
    if used > ndim:
        raise IndexError(f"too many indices: {used} for {ndim} dims")
    place = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    fill = [slice(None)] * (ndim - used)
    return parts + fill if place is None else [*parts[:place], *fill, *parts[place + 1 :]]


def view_of(shape: Shape, strides: Shape, parts: Sequence[Any]) -> tuple[Shape, Shape, int]:
    """Return (shape, strides, offset) of a basic index, one entry a dim, as `expanded` makes it.
    Raises: IndexError."""
    new_shape = []
    new_strides = []
    offset = 0
    dim = 0
    for part in parts:
        if part is None:
            new_shape.append(1)
            new_strides.append(0)
            continue
        length = shape[dim]
        stride = strides[dim]
        dim += 1
        if type(part) is slice:
            if part.start is None and part.stop is None and part.step is None:
                new_shape.append(length)
                new_strides.append(stride)
                continue
            start, stop, step = part.indices(length)
            count = len(range(start, stop, step))
            offset += start * stride if count else 0
            new_shape.append(count)
            new_strides.append(stride * step)
        else:
            if not -length <= part < length:
                raise IndexError(f"index {part} is out of bounds for a dim of {length}")
            offset += (int(part) % length) * stride
    return tuple(new_shape), tuple(new_strides), offset


def picked(shape: Shape, parts: Sequence[Any], is_array: Any) -> Shape:
    """Return the shape of an index with integer arrays among its entries, one entry a dim, as
    `expanded` makes it."""
    places = [
        i for i, part in enumerate(parts) if is_array(part) or isinstance(part, int | np.integer)
    ]
    found = broadcast([tuple(parts[i].shape) if is_array(parts[i]) else () for i in places])
    rest: list[int] = []
    dim = 0
    at = None
    for i, part in enumerate(parts):
        if i in places:
            at = len(rest) if at is None else at
            dim += 1
        elif part is None:
            rest.append(1)
        else:
            rest.append(len(range(*part.indices(shape[dim]))))
            dim += 1
    together = places[-1] - places[0] == len(places) - 1
    cut = at if together and at is not None else 0
    return (*rest[:cut], *found, *rest[cut:])
