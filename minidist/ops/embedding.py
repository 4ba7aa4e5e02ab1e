"""Rows of a table by id, and rotary positions."""

from typing import Any

import numpy as np

from minidist.backend import Array, array_module, matmul, widen
from minidist.errors import DtypeError, ShapeError
from minidist.tape import Node, Saved, op, saved

_ONE_HOT_ROWS = 1024  # table rows summed by one matrix product on a GPU


@op
def embedding(table: Array, ids: Array) -> tuple[Array, Saved]:
    """table[ids]: (V, n), integers (…) -> (…, n)."""
    if ids.dtype.kind not in "iu":
        raise DtypeError(f"embedding: ids are integers, not {ids.dtype}")
    if table.ndim != 2:
        raise ShapeError(f"embedding: the table has shape (vocabulary, width), not {table.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= len(table)):
        raise ShapeError(f"embedding: ids {int(ids.min())}..{int(ids.max())} outside a table of {len(table)} rows")
    return array_module(table).take(table, ids, axis=0), saved(ids=ids)


@embedding.gradient("table")
def _(node: Node, dy: Array) -> Array:
    return sum_by_id(node.ids.reshape(-1), dy.reshape(-1, dy.shape[-1]), node.shapes["table"][0])


def sum_by_id(ids: Array, values: Array, count: int) -> Array:
    """(count, n) array whose row i is the sum of values[j] over all j with ids[j] == i, in a fixed order.

    On the host: values sorted by id, each run summed. On a GPU: a product with the one-hot matrix, a slice of the table
    at a time; atomic additions would be faster and differ from run to run.
    """
    xp = array_module(values)
    wide = widen(values)
    result = xp.zeros((count, values.shape[1]), wide.dtype)
    if xp is np and len(ids):
        order = np.argsort(ids, kind="stable")
        sorted_ids = ids[order]
        starts = np.flatnonzero(np.concatenate(([True], sorted_ids[1:] != sorted_ids[:-1])))
        result[sorted_ids[starts]] = np.add.reduceat(wide[order], starts, axis=0)
    elif len(ids):
        for start in range(0, count, _ONE_HOT_ROWS):
            rows = xp.arange(start, min(start + _ONE_HOT_ROWS, count), dtype=ids.dtype)
            result[start:start + len(rows)] = matmul((rows[:, None] == ids).astype(wide.dtype), wide)
    return result.astype(values.dtype, copy=False)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn each pair (x[i], x[i + n/2]) by its angle: (…, T, n), (T, n/2) twice -> (…, T, n)."""
    xp = array_module(x)
    wide, half = widen(x), x.shape[-1] // 2
    y = xp.empty(x.shape, wide.dtype)
    a, b = wide[..., :half], wide[..., half:]
    y[..., :half] = a * cos - b * sin
    y[..., half:] = b * cos + a * sin
    return y.astype(x.dtype, copy=False)


def _angles(xp: Any, positions: Array, width: int, base: float) -> Array:
    """Position p turns pair i by p / base^(2 i / width): (T,) -> (T, width/2), float64."""
    speeds = base ** (-2.0 / width * xp.arange(width // 2, dtype="float64"))
    return positions.astype("float64")[..., None] * speeds


@op
def rotary(x: Array, positions: Array, *, base: float = 10000.0) -> tuple[Array, Saved]:
    """Turn the pairs (x[i], x[i + n/2]) by angles that grow with the token's global position.

    (…, T, n), integers (T,) -> (…, T, n), n even. A shard of the sequence passes its own global positions.
    Source: Su et al. 2021; pairs as in GPT-NeoX.
    """
    if x.ndim < 2 or x.shape[-1] % 2 or positions.shape != (x.shape[-2],):
        raise ShapeError(f"rotary: x {x.shape} with positions {positions.shape}; x needs shape (…, T, even), "
                         f"positions (T,)")
    xp = array_module(x)
    angles = _angles(xp, positions, x.shape[-1], base)
    kind = widen(x).dtype
    cos, sin = xp.cos(angles).astype(kind), xp.sin(angles).astype(kind)
    return _rotate(x, cos, sin), saved(cos=cos, sin=sin)


@rotary.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return _rotate(dy, node.cos, -node.sin)
