"""Ops of a mixture of experts: a token that goes to k experts is k rows.

`to_experts` copies tokens to rows, sorted by expert. `grouped_linear` multiplies each run of rows
by the matrix of its expert. `from_experts` weights the results and sums them per token.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from minidist.autograd.ops.arithmetic import unbroadcast
from minidist.autograd.ops.gather import sum_by_id
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, is_virtual, narrow, widen
from minidist.device.backend import matmul as multiply
from minidist.device.dispatch import kernel
from minidist.errors import ShapeError


def top_positions(scores: Array, k: int) -> Array:
    """Return the positions of the k largest of each row, in descending order; ties: the first. (…,
    n) -> (…, k) integers."""
    if is_virtual(scores):
        return drawn_positions(scores.shape, k)
    return array_module(scores).argsort(-widen(scores), axis=-1, kind="stable")[..., :k]


_drawn = threading.local()  # `load`: of the ranks that this thread simulates
# multiples of it lie evenly between whole numbers, however many there are
_GOLDEN = (5.0**0.5 - 1) / 2


@contextmanager
def drawn_load(load: Sequence[float] | None) -> Iterator[None]:
    """Context manager: draw choices that have no scores so that expert e gets them in the
    proportion load[e] (None: evenly)."""
    before = getattr(_drawn, "load", None)
    _drawn.load = load
    try:
        yield
    finally:
        _drawn.load = before


def drawn_positions(shape: tuple[int, ...], k: int) -> np.ndarray:
    """Return choices for scores of this shape that have no data: (…, n) -> (…, k) integers.

    Without a load, row r gets k positions from k·r on, modulo n. With a load: systematic sampling,
    so the k differ if no expert's part is above 1 / k.
    """
    rows = np.arange(math.prod(shape[:-1]), dtype=np.int64).reshape(shape[:-1])[..., None]
    choices = np.arange(k, dtype=np.int64)
    load = getattr(_drawn, "load", None)
    if load is None:
        return (rows * k + choices) % shape[-1]
    places = (rows * _GOLDEN % 1.0 + choices) / k
    found = np.searchsorted(np.cumsum(load)[:-1] / np.sum(load), places, side="right")
    return found.astype(np.int64, copy=False)


def places_in_runs(ids: Array) -> Array:
    """Return the number of equal ids before each id: [2, 0, 2, 2] -> [0, 0, 1, 2]."""
    xp = array_module(ids)
    order = xp.argsort(ids, kind="stable")
    ordered = ids[order]
    places = xp.empty(len(ids), "int64")
    places[order] = xp.arange(len(ids)) - xp.searchsorted(ordered, ordered, side="left")
    return places


def _runs(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Return (group, its rows) of each group."""
    sizes = [int(count) for count in counts]  # of an array, a sum in its dtype could overflow
    return [
        (group, slice(end - size, end))
        for group, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True))
    ]


@op
def grouped_linear(x: Array, w: Array, *, counts: Sequence[int]) -> tuple[Array, Saved]:
    """Return rows sorted by group, each times the matrix of its group: (R, in), (G, in, out) -> (R,
    out).

    Args:    counts: the number of rows of each group. Raises: ShapeError if they or the shapes do
             not fit.
    Cost:    2·R·in·out FLOPs, in one product a group.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ShapeError(
            f"grouped_linear: x {x.shape} does not fit w {w.shape}; they need shapes (rows, in) "
            "and (groups, in, out)"
        )
    if len(counts) != len(w) or sum(map(int, counts)) != len(x) or min(counts, default=0) < 0:
        raise ShapeError(
            f"grouped_linear: counts {list(counts)} do not fit {len(x)} rows of {len(w)} groups; "
            f"pass one count per group, with the sum {len(x)}"
        )
    y = array_module(x).empty((len(x), w.shape[2]), x.dtype)
    for group, run in _runs(counts):
        multiply(x[run], w[group], out=y[run])
    return y, saved(x=x, w=w)


@grouped_linear.gradient("x")
def _(node: Node, dy: Array) -> Array:
    dx = array_module(dy).empty(node.shapes["x"], dy.dtype)
    for group, run in _runs(node.options["counts"]):
        multiply(dy[run], node.w[group].T, out=dx[run])
    return dx


@grouped_linear.gradient("w")
def _(node: Node, dy: Array) -> Array:
    room = node.room("w")
    dw = array_module(dy).empty(node.shapes["w"], dy.dtype) if room is None else room
    for group, run in _runs(node.options["counts"]):  # of no rows: zeros
        multiply(node.x[run].T, dy[run], out=dw[group])
    return dw


@dataclass(frozen=True)
class Placement:
    """The token of each row. Rows are sorted by expert, the rows of an expert by token."""

    shape: tuple[int, int]  # (T, k): tokens, and choices of each token
    choices: Array  # (R,) integers: for each row, its index in the flattened (T, k) choices
    experts: Array  # (R,) integers: the expert of each row
    counts: Array  # (experts,) integers: the number of rows of each expert

    @cached_property
    def tokens(self) -> Array:
        """Return the token of each row: (R,) int32."""
        return (self.choices // max(1, self.shape[1])).astype("int32")

    @cached_property
    def slots(self) -> Array:
        """Return the rows of each token, ascending, after a -1 for each dropped choice: (T, k)
        int32."""
        xp = array_module(self.choices)
        slots = xp.full(self.shape[0] * self.shape[1], -1, "int32")
        slots[self.choices] = xp.arange(len(self.choices), dtype="int32")
        return xp.sort(slots.reshape(self.shape), axis=1)


def place_rows(chosen: Array, kept: Array | None = None, *, experts: int) -> Placement:
    """Return the placement of all kept choices: chosen (T, k) integers, kept (T, k) bool, or None
    to keep all.

    Raises:  ShapeError if the shapes do not fit.
    """
    if chosen.ndim != 2 or (kept is not None and kept.shape != chosen.shape):
        raise ShapeError(
            f"place_rows: chosen {chosen.shape} and kept {None if kept is None else kept.shape}; "
            "both need the same shape (tokens, choices)"
        )
    xp = array_module(chosen)
    chosen = chosen.astype("int64", copy=False)
    where = xp.arange(chosen.size) if kept is None else xp.flatnonzero(kept)
    where = where[xp.argsort(chosen.reshape(-1)[where], kind="stable")].astype("int64", copy=False)
    ids = chosen.reshape(-1)[where]
    return Placement(chosen.shape, where, ids, xp.bincount(ids, minlength=experts))


@op
def to_experts(x: Array, placement: Placement) -> tuple[Array, Saved]:
    """Copy the token of each row: (T, n) -> (R, n). Raises: ShapeError."""
    if x.ndim != 2 or len(x) != placement.shape[0]:
        raise ShapeError(
            f"to_experts: x {x.shape} does not fit {placement.shape[0]} tokens; "
            f"it needs shape (tokens, n)"
        )
    fast = kernel("to_experts", x)
    y = (
        fast(x, placement)
        if fast is not None
        else array_module(x).take(x, placement.tokens, axis=0)
    )
    return y, saved(placement=placement)


@to_experts.gradient("x")
def _(node: Node, dy: Array) -> Array:
    fast = kernel("from_experts", dy)
    if fast is not None:
        return fast(dy, None, node.placement)
    return sum_by_id(node.placement.tokens, dy, node.placement.shape[0])


@op
def from_experts(results: Array, weights: Array, placement: Placement) -> tuple[Array, Saved]:
    """Return the sum of the rows of each token, each times its weight: (R, n), (R,) -> (T, n).

    Products are rounded, then added in the order of the rows; the kernel rounds only once, at the
    end.
    Raises:  ShapeError if the shapes do not fit.
    """
    count = len(placement.tokens)
    if results.ndim != 2 or len(results) != count or weights.shape != (count,):
        raise ShapeError(
            f"from_experts: results {results.shape} and weights {weights.shape} do not fit "
            f"{count} rows; they need shapes (rows, n) and (rows,)"
        )
    kept = saved(results=results, weights=weights, placement=placement)
    fast = kernel("from_experts", results)
    if fast is not None:
        return fast(results, widen(weights), placement), kept
    weighted = narrow(widen(results) * widen(weights)[:, None], results.dtype)
    return sum_by_id(placement.tokens, weighted, placement.shape[0]), kept


@from_experts.gradient("results", "weights")
def _(node: Node, dy: Array) -> tuple[Array, Array]:
    """Return the gradient of results: weight · dy of the row's token; and of weights: the dot
    product of row and dy."""
    fast = kernel("from_experts_gradient", dy)
    if fast is not None:
        dresults, dweights = fast(dy, node.results, widen(node.weights), node.placement)
        return dresults, narrow(dweights, dy.dtype)
    rows = widen(array_module(dy).take(dy, node.placement.tokens, axis=0))
    dweights = unbroadcast(rows * widen(node.results), (len(rows), 1)).reshape(-1)
    return narrow(rows * widen(node.weights)[:, None], dy.dtype), narrow(dweights, dy.dtype)
