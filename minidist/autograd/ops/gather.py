"""Pick rows by integer position: the embedding of tokens, and `take` along any dim.

Positions may stay on the host while the rows are on a GPU. Then the host checks them, and sorts
them for the gradient, while the GPU computes. Positions on the GPU are not checked, because the
host would have to wait.
"""

import math
from dataclasses import dataclass

import numpy as np

from minidist.autograd.ops.linear import rows
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import (
    FLOATS,
    Array,
    array_module,
    beside,
    device_of,
    matmul,
    narrow,
    on_host,
    widen,
)
from minidist.device.dispatch import kernel, launcher
from minidist.errors import DtypeError, ShapeError

_ONE_HOT_ROWS = 1024  # table rows summed by one matrix product on a GPU


@dataclass(frozen=True)
class SortedIds:
    """Positions on a GPU, checked and sorted by the host in advance, so that no op has to do it
    (cuda_graph.py)."""

    ids: Array  # int64 (…)
    order: Array  # int32 (n,): id t is at the positions order[starts[t]:starts[t + 1]]
    starts: Array  # int32 (count + 1,)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ids.shape)


def positions_in(name: str, ids: Array, count: int) -> Array:
    """Return the positions as int64: later arithmetic must not depend on the caller's dtype.

    Raises:  DtypeError; ShapeError for positions on the host outside of 0 … count - 1.
    """
    if ids.dtype.kind not in "iu":
        raise DtypeError(f"{name}: positions must be integers, not {ids.dtype}")
    if device_of(ids) == "cpu" and ids.size and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise ShapeError(
            f"{name}: positions {int(ids.min())}..{int(ids.max())} in a table of {count} rows; "
            f"they must lie in 0..{count - 1}"
        )
    return ids.astype("int64", copy=False)


def _picked(x: Array, index: Array, dim: int) -> Array:
    """Return the slices of x along `dim` at `index`; NaN for a position on a GPU that is out of
    range."""
    xp = array_module(x)
    y = xp.take(x, beside(index, x), axis=dim)
    if device_of(index) == "cpu" or x.dtype not in FLOATS:
        return y
    outside = ((index < 0) | (index >= x.shape[dim])).reshape(
        *index.shape, *(1,) * (x.ndim - 1 - dim % x.ndim)
    )
    return xp.where(outside, xp.full((), np.nan, x.dtype), y)


@op
def embedding(table: Array, ids: Array | SortedIds) -> tuple[Array, Saved]:
    """Return table[ids]: (V, n), integers (…) -> (…, n). Ids on a GPU that are outside of the table
    give NaN.

    Raises:  DtypeError, ShapeError if ids on the host do not fit the table.
    """
    if table.ndim != 2:
        raise ShapeError(
            f"embedding: the table must have shape (vocabulary, width), not {table.shape}"
        )
    if isinstance(ids, SortedIds):
        return array_module(table).take(table, ids.ids, axis=0), saved(ids=ids)
    ids = positions_in("embedding", ids, len(table))
    return _picked(table, ids, 0), saved(ids=ids)


@embedding.gradient("table")
def _(node: Node, dy: Array) -> Array:
    ids = node.ids
    dy = rows(dy)
    count = node.shapes["table"][0]
    if not isinstance(ids, SortedIds):
        return sum_by_id(ids.reshape(-1), dy, count)
    dy = array_module(dy).ascontiguousarray(dy)
    found = (ids.order, ids.starts)
    return launcher("embedding_gradient")(ids.ids.reshape(-1), dy, count, found=found)


def sum_by_id(ids: Array, values: Array, count: int) -> Array:
    """Sum values by id: row i of the result is the sum of values[j] over all j with ids[j] == i, in
    a fixed order.

    The host sorts values by id and sums each run, and so does the kernel on a GPU. Otherwise a GPU
    multiplies by the one-hot matrix, a slice of the table at a time. Atomic additions would differ
    from run to run.
    Args:    ids: (m,) integers; values: (m, n) floats; count: rows of the result.
    Returns: (count, n), values' dtype.
    """
    # of any layout
    xp = array_module(values)
    fast = kernel("embedding_gradient", values[:0])
    if fast is not None:
        return fast(ids, xp.ascontiguousarray(values), count)
    wide = widen(values)
    result = xp.zeros((count, values.shape[1]), wide.dtype)
    if on_host(values) and len(ids):
        order = np.argsort(ids, kind="stable")
        sorted_ids = ids[order]
        starts = np.flatnonzero(np.concatenate(([True], sorted_ids[1:] != sorted_ids[:-1])))
        result[sorted_ids[starts]] = np.add.reduceat(wide[order], starts, axis=0)
    elif len(ids):
        ids = beside(ids, values)
        for start in range(0, count, _ONE_HOT_ROWS):
            some = xp.arange(start, min(start + _ONE_HOT_ROWS, count), dtype=ids.dtype)
            result[start : start + len(some)] = matmul(
                (some[:, None] == ids).astype(wide.dtype), wide
            )
    return narrow(result, values.dtype)


@op
def take(x: Array, index: Array, *, dim: int = 0) -> tuple[Array, Saved]:
    """Return slices of x along `dim` at the integer positions `index` (any shape, no gradient); NaN
    as in `embedding`.

    Raises:  DtypeError, ShapeError if dim or index do not fit x.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"take: x {x.shape} has no dim {dim}")
    index = positions_in("take", index, x.shape[dim])
    return _picked(x, index, dim), saved(index=index)


@take.gradient("x")
def _(node: Node, dy: Array) -> Array:
    xp = array_module(dy)
    shape = node.shapes["x"]
    dim = node.options.get("dim", 0) % len(shape)
    picked = node.index.ndim
    values = xp.moveaxis(dy, range(dim, dim + picked), range(picked))
    rest = values.shape[picked:]
    sums = sum_by_id(
        node.index.reshape(-1), values.reshape(node.index.size, math.prod(rest)), shape[dim]
    )
    return xp.moveaxis(sums.reshape(shape[dim], *rest), 0, dim)
