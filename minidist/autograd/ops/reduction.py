"""Sums, means, maxima and variances over dims. Low precision is summed in float32 and rounded
once."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import LOW_PRECISION, Array, array_module, narrow, widen
from minidist.errors import ShapeError

Dims: TypeAlias = int | Sequence[int] | None


def _dims(dim: Dims, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims that a reduction runs over, as non-negative numbers. Raises: ShapeError."""
    given = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    for d in given:
        if not -len(shape) <= d < len(shape):
            raise ShapeError(f"an array of shape {shape} has no dim {d}")
    return tuple(sorted({d % len(shape) for d in given}))


def _stretched(node: Node, y: Array) -> Array:
    """Return the node's result or dy with the reduced dims as dims of size 1, so that it broadcasts
    against x."""
    shape = node.shapes["x"]
    dims = _dims(node.options.get("dim"), node.shapes["x"])
    return y.reshape(tuple(1 if i in dims else n for i, n in enumerate(shape)))


def _total(x: Array, dims: tuple[int, ...], keepdims: bool) -> Array:
    """Sum over dims; low precision in float32."""
    return x.sum(
        axis=dims, keepdims=keepdims, dtype="float32" if x.dtype in LOW_PRECISION else x.dtype
    )


@op
def sum(x: Array, *, dim: Dims = None, keepdims: bool = False) -> tuple[Array, Saved]:  # noqa: A001 - as NumPy's
    """Sum over all dims (None), one, or several; keepdims: they stay, with size 1."""
    return narrow(_total(x, _dims(dim, x.shape), keepdims), x.dtype), saved()


@sum.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return array_module(dy).broadcast_to(_stretched(node, dy), node.shapes["x"])


@op
def mean(x: Array, *, dim: Dims = None, keepdims: bool = False) -> tuple[Array, Saved]:
    """Return the mean over all dims, one, or several. Args: as sum's."""
    dims = _dims(dim, x.shape)
    count = math.prod(x.shape[d] for d in dims)
    total = _total(x, dims, keepdims)
    return narrow(total / total.dtype.type(count), x.dtype), saved(count=count)


@mean.gradient("x")
def _(node: Node, dy: Array) -> Array:
    share = narrow(widen(dy) / widen(dy).dtype.type(node.count or 1), dy.dtype)
    return array_module(dy).broadcast_to(_stretched(node, share), node.shapes["x"])


@op
def max(x: Array, *, dim: Dims = None, keepdims: bool = False) -> tuple[Array, Saved]:  # noqa: A001 - as NumPy's
    """Return the maximum over all dims, one, or several. Equal maxima share the gradient equally.
    Args: as sum's."""
    y = x.max(axis=_dims(dim, x.shape), keepdims=keepdims)
    return y, saved(x=x, y=y)


@max.gradient("x")
def _(node: Node, dy: Array) -> Array:
    winners = node.x == _stretched(node, node.y)
    ties = winners.sum(axis=_dims(node.options.get("dim"), node.x.shape), keepdims=True).astype(
        dy.dtype
    )
    return winners.astype(dy.dtype) * (_stretched(node, dy) / ties)


@op
def var(x: Array, *, dim: Dims = None, keepdims: bool = False) -> tuple[Array, Saved]:
    """Return the variance over all dims, one, or several: the mean squared distance to the mean
    (divisor n). Args: as sum's."""
    dims = _dims(dim, x.shape)
    wide = widen(x)
    centred = wide - wide.mean(axis=dims, keepdims=True)
    y = (centred * centred).mean(axis=dims, keepdims=keepdims)
    return narrow(y, x.dtype), saved(centred=centred, count=math.prod(x.shape[d] for d in dims))


@var.gradient("x")
def _(node: Node, dy: Array) -> Array:
    wide: Any = widen(dy)
    scale = wide * wide.dtype.type(2.0 / (node.count or 1))
    return narrow(node.centred * _stretched(node, scale), dy.dtype)
