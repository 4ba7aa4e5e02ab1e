"""Reshape, transpose, index, join, split: no arithmetic, so only shapes are saved."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.autograd.tape import Node, Saved, op, op_of_several, saved
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array, array_module
from minidist.errors import ShapeError


@op
def reshape(x: Array, shape: Sequence[int]) -> tuple[Array, Saved]:
    """Return x in another shape; one size may be -1. A view where the layout allows it."""
    return x.reshape(shape), saved()


@reshape.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return dy.reshape(node.shapes["x"])


@op
def transpose(x: Array, dims: Sequence[int] | None = None) -> tuple[Array, Saved]:
    """Return x with dim dims[i] of x as dim i; without dims they are reversed. A view."""
    order = tuple(reversed(range(x.ndim))) if dims is None else tuple(d % x.ndim for d in dims)
    return x.transpose(order), saved(back=tuple(int(i) for i in np.argsort(order)))


@transpose.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return dy.transpose(node.back)


def _is_basic(index: Any) -> bool:
    """Return whether an index has only numbers, slices, None and …, so that no element is picked
    twice."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is Ellipsis or isinstance(part, (int, np.integer, slice))
        for part in parts
    )


@op
def getitem(x: Array, index: Any) -> tuple[Array, Saved]:
    """Return x[index], with slices (a view), integer arrays or a bool array (a copy).

    A GPU adds the gradients of an element picked several times in no fixed order; `take` adds in a
    fixed order.
    Raises:  ShapeError if the index does not fit.
    """
    try:
        return x[index], saved(index=index, kind=x.dtype)
    except IndexError as error:
        raise ShapeError(
            f"getitem: index {index!r} does not fit shape {x.shape}: {error}"
        ) from error


@getitem.gradient("x")
def _(node: Node, dy: Array) -> Array:
    xp = array_module(dy)
    dx = xp.zeros(node.shapes["x"], node.kind)
    if _is_basic(node.index):
        dx[node.index] = dy
    else:
        xp.add.at(dx, node.index, dy)
    return dx


@op
def _concat(*parts: Array, dim: int) -> tuple[Array, Saved]:
    if not parts:
        raise ShapeError("concat: no arrays to join; pass at least one")
    ends = tuple(itertools.accumulate(part.shape[dim] for part in parts))
    return array_module(*parts).concatenate(parts, axis=dim), saved(bounds=(0, *ends))


@_concat.gradient("parts")
def _(node: Node, dy: Array, which: int) -> Array:
    where: list[Any] = [slice(None)] * dy.ndim
    where[node.options["dim"]] = slice(node.bounds[which], node.bounds[which + 1])
    return dy[tuple(where)]


def concat(parts: Sequence[Any], *, dim: int = 0) -> Tensor:
    """Join arrays of one dtype along `dim`; their other dims must be equal. Raises: ShapeError for
    no arrays."""
    return _concat(*parts, dim=dim)


@op_of_several
def split(
    x: Array, sections: int | Sequence[int], *, dim: int = 0
) -> tuple[tuple[Array, ...], Saved]:
    """Cut x along `dim`: a tuple of views.

    Args:    sections: the number of equal parts, or the size of each part.
    Raises:  ShapeError if the sizes do not add up to the dim.
    """
    n = x.shape[dim]
    if isinstance(sections, int) and (sections < 1 or n % sections):
        raise ShapeError(
            f"split: dim {dim} of shape {x.shape} cannot be divided into {sections} equal parts; "
            "pass a list of sizes"
        )
    # int: a sum in the dtype of an array of sizes could overflow.
    sizes = [n // sections] * sections if isinstance(sections, int) else list(map(int, sections))
    if sum(sizes) != n or min(sizes, default=0) < 0:
        raise ShapeError(f"split: sizes {sizes} do not add up to dim {dim} of shape {x.shape}")
    cuts = list(itertools.accumulate(sizes))[:-1]
    return tuple(array_module(x).split(x, cuts, axis=dim)), saved()


@split.gradient("x")
def _(node: Node, dy: tuple[Array, ...]) -> Array:
    return array_module(*dy).concatenate(dy, axis=node.options.get("dim", 0))
