"""What a mixture of experts needs beside `take`: products group by group, rows added where they belong, top-k.

A token that goes to k experts is k rows: `take` copies it, sorted by expert; `grouped_linear` multiplies each run of
rows with its expert's matrix; `add_rows` brings the results back to their tokens and adds them up there.
"""

from collections.abc import Sequence

import numpy as np

from minidist.backend import Array, array_module, widen
from minidist.backend import matmul as multiply
from minidist.errors import ShapeError
from minidist.ops.gather import check_positions, sum_by_id
from minidist.tape import Node, Saved, op, saved


def top_positions(scores: Array, k: int) -> Array:
    """Where the k largest of each row stand, the largest first; of equals the first: (…, n) -> (…, k) integers."""
    xp = array_module(scores)
    order = xp.argsort(-widen(scores), axis=-1, kind="stable")
    return order[..., :k]


def places_in_runs(ids: Array) -> Array:
    """How many equal ids stand before each: [2, 0, 2, 2] -> [0, 0, 1, 2]."""
    xp = array_module(ids)
    order = xp.argsort(ids, kind="stable")
    ordered = ids[order]
    places = xp.empty(len(ids), "int64")
    places[order] = xp.arange(len(ids)) - xp.searchsorted(ordered, ordered, side="left")
    return places


def _runs(counts: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *counts]).tolist()
    return [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


@op
def grouped_linear(x: Array, w: Array, *, counts: Sequence[int]) -> tuple[Array, Saved]:
    """Rows sorted by group, each times its group's matrix: (R, in), (G, in, out) -> (R, out).

    Args:    counts: how many rows each group has, also none.
    Cost:    2 R in out FLOPs, in one product a group.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ShapeError(f"grouped_linear: x {x.shape} does not fit w {w.shape}; they need shapes (rows, in) and "
                         f"(groups, in, out)")
    if len(counts) != len(w) or sum(counts) != len(x) or min(counts, default=0) < 0:
        raise ShapeError(f"grouped_linear: counts {list(counts)} do not fit {len(x)} rows of {len(w)} groups; "
                         f"pass one a group, which add up to the rows")
    y = array_module(x).empty((len(x), w.shape[2]), x.dtype)
    for group, run in enumerate(_runs(counts)):
        if run.stop > run.start:
            multiply(x[run], w[group], out=y[run])
    return y, saved(x=x, w=w)


@grouped_linear.gradient("x")
def _(node: Node, dy: Array) -> Array:
    dx = array_module(dy).empty(node.shapes["x"], dy.dtype)
    for group, run in enumerate(_runs(node.options["counts"])):
        if run.stop > run.start:
            multiply(dy[run], node.w[group].T, out=dx[run])
    return dx


@grouped_linear.gradient("w")
def _(node: Node, dy: Array) -> Array:
    room = node.room("w")
    dw = array_module(dy).empty(node.shapes["w"], dy.dtype) if room is None else room
    for group, run in enumerate(_runs(node.options["counts"])):
        if run.stop > run.start:
            multiply(node.x[run].T, dy[run], out=dw[group])
        else:
            dw[group] = 0
    return dw


@op
def add_rows(x: Array, rows: Array, *, count: int) -> tuple[Array, Saved]:
    """y[rows[i]] += x[i], in the order of i: (R, n), integers (R,) -> (count, n); rows that nobody names are zero."""
    if x.ndim != 2 or rows.shape != x.shape[:1]:
        raise ShapeError(f"add_rows: rows {rows.shape} do not fit x {x.shape}; one number for each row of x (R, n)")
    check_positions("add_rows", rows, count)
    return sum_by_id(rows, x, count), saved(rows=rows)


@add_rows.gradient("x")
def _(node: Node, dy: Array) -> Array:
    return array_module(dy).take(dy, node.rows, axis=0)
