"""Block-sparse causal attention: blocks of keys that a block of queries does not see are never
multiplied.

    blocks   # . . .      a mask of blocks, here of 4 × 4; # is seen: queries of block 2 see the
             keys of blocks 0 and 2
             # # . .      scores: 7 of the 10 tiles that causal attention computes; backward skips
                          the same three
             # . # .
             . . # #

For each block of queries the keys that it sees are copied together, with their values; the rest is
the softmax of attention.py, with shorter rows. Inside its own block a query sees the keys up to
itself. No scores are kept: backward computes the probabilities again from log(sum(exp(scores))). So
only the tiles that are seen are computed, and memory grows with the number of tokens.

On a GPU kernels/attention.cu does this in half precision, if a block is 64 tokens.

notes:   N3 §3.2 (N3:52)
Source:  Child et al. 2019, "Generating Long Sequences with Sparse Transformers".
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from minidist.autograd.ops.attention import (
    SCORES,
    check_shapes,
    fits_kernel,
    flip,
    highest,
    shared,
    sum_heads,
)
from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import Array, array_module, beside, matmul, narrow, on_host, widen
from minidist.device.dispatch import launcher
from minidist.errors import ShapeError

SIDE = 64  # tokens of a block: what the mask of kernels/attention.cu has


class SeenKeys(NamedTuple):
    """The keys that a block of queries sees: runs of neighbouring keys, in order; the last `own`
    keys are the block's own."""

    queries: slice
    runs: tuple[slice, ...]
    own: int

    @property
    def keys(self) -> int:
        """Return the number of these keys."""
        return sum(run.stop - run.start for run in self.runs)


def seen_keys(blocks: np.ndarray, length: int, side: int) -> list[SeenKeys]:
    """Return the keys that each block of queries sees; a block that sees none is left out.

    Args:    blocks: (n, n) bool, n = ceil(length / side); what is above the diagonal does not
             count.
    """
    causal = np.zeros((len(blocks), len(blocks) + 2), np.int8)
    causal[:, 1:-1] = np.tril(blocks)
    # runs begin at the even ones, and end at the odd ones
    number, edge = np.nonzero(np.diff(causal, axis=1))
    runs: dict[int, list[slice]] = {}
    for row, begin, end in zip(
        number[::2].tolist(), edge[::2].tolist(), edge[1::2].tolist(), strict=True
    ):
        runs.setdefault(row, []).append(slice(begin * side, min(end * side, length)))
    found = []
    for row, each in runs.items():
        queries = slice(row * side, min((row + 1) * side, length))
        own = queries.stop - queries.start if each[-1].stop == queries.stop else 0
        found.append(SeenKeys(queries, tuple(each), own))
    return found


def _together(q: Array, seen: list[SeenKeys]) -> Iterator[slice]:
    """Return slices of the sequences (B, H, T, D) to compute together: on the host those whose
    scores fit the cache."""
    b, heads = q.shape[:2]
    widest = max(
        (len(range(*row.queries.indices(q.shape[2]))) * row.keys for row in seen), default=1
    )
    together = max(1, SCORES // max(1, heads * widest)) if on_host(q) else max(1, b)
    for start in range(0, b, together):
        yield slice(start, start + together)


def _gather(x: Array, runs: tuple[slice, ...], heads: int) -> Array:
    """Return the keys or values of some runs, for all query heads: (b, H_kv, T, D) -> (b, H, K, D);
    one run is a view."""
    parts = [x[..., run, :] for run in runs]
    return shared(
        parts[0] if len(parts) == 1 else array_module(x).concatenate(parts, axis=-2), heads
    )


def _add_to(total: Array, runs: tuple[slice, ...], part: Array) -> None:
    """Add gradients of gathered keys (b, H, K, D) to those of all keys (b, H_kv, T, D)."""
    part = sum_heads(part, total.shape[-3])
    at = 0
    for run in runs:
        total[..., run, :] += part[..., at : at + run.stop - run.start, :]
        at += run.stop - run.start


def _probabilities(q: Array, k: Array, row: SeenKeys, ahead: Array) -> Array:
    """Return the scores (b, H, K, Q) of one block: gathered keys (b, H, K, D) times scaled queries;
    -inf for keys after a query."""
    scores = matmul(k, flip(q[..., row.queries, :]))
    if row.own:
        scores[..., -row.own :, :] += ahead[: row.own, : row.own]
    return scores


def _ahead(like: Array, side: int) -> Array:
    """Return (side, side): -inf where the key, of the first dim, is after the query, else 0."""
    xp = array_module(like)
    places = array_module(like).arange(side)
    return xp.where(places[:, None] > places, like.dtype.type(-np.inf), like.dtype.type(0))


def _forward(q: Array, k: Array, v: Array, seen: list[SeenKeys], side: int) -> tuple[Array, Array]:
    """Return the result (B, H, T, D) and log(sum(exp(scores))) (B, H, 1, T); zeros and -inf for
    queries that see nothing."""
    xp = array_module(q)
    (b, heads, t, d) = q.shape
    y = xp.zeros(q.shape, q.dtype)
    log_total = xp.full((b, heads, 1, t), -np.inf, q.dtype)
    ahead = _ahead(q, side)
    scale = q.dtype.type(max(1, d) ** -0.5)
    for i in _together(q, seen):
        scaled = q[i] * scale
        for row in seen:
            p = _probabilities(scaled, _gather(k[i], row.runs, heads), row, ahead)
            top = highest(p)
            p -= top
            xp.exp(p, out=p)
            total = matmul(xp.ones((1, row.keys), p.dtype), p)
            p *= 1.0 / total
            y[i][..., row.queries, :] = matmul(flip(p), _gather(v[i], row.runs, heads))
            log_total[i][..., row.queries] = xp.log(total) + top
    return y, log_total


def _backward(node: Node, seen: list[SeenKeys], dy: Array, side: int) -> tuple[Array, Array, Array]:
    """Return dq (B, H, T, D), dk and dv (B, H_kv, T, D), computed only for the tiles that are seen.

    With p the probabilities, c = 1 / sqrt(D), r = sum(dy y) of a query: dv = pᵀ dy, ds = p (dy vᵀ -
    r), dq = c ds k, dk = dsᵀ (c q).
    """
    q = widen(node.q)
    k = widen(node.k)
    v = widen(node.v)
    xp = array_module(q)
    heads = q.shape[1]
    dq, dk, dv = (xp.zeros(x.shape, x.dtype) for x in (q, k, v))
    ahead = _ahead(q, side)
    scale = q.dtype.type(max(1, q.shape[-1]) ** -0.5)
    sums = xp.einsum("...td,...td->...t", dy, widen(node.y))[..., None, :]
    for i in _together(q, seen):
        scaled = q[i] * scale
        for row in seen:
            keys = _gather(k[i], row.runs, heads)
            dy_block = dy[i][..., row.queries, :]
            p = _probabilities(scaled, keys, row, ahead)
            p -= node.log_total[i][..., row.queries]
            xp.exp(p, out=p)
            ds = matmul(_gather(v[i], row.runs, heads), flip(dy_block))
            ds -= sums[i][..., row.queries]
            ds *= p
            dq[i][..., row.queries, :] = matmul(flip(ds), keys)
            _add_to(dv[i], row.runs, matmul(p, dy_block))
            _add_to(dk[i], row.runs, matmul(ds, scaled[..., row.queries, :]))
    dq *= scale
    return dq, dk, dv


@op
def sparse_attention(
    q: Array, k: Array, v: Array, *, blocks: np.ndarray, side: int = SIDE
) -> tuple[Array, Saved]:
    """Return causal_attention to the keys of the blocks that a query's block sees: (B, H, T, D) ->
    (B, H, T, D).

    Args:    q (B, H, T, D), k and v (B, H_kv, T, D), of any float dtype. blocks: (n, n) bool on the
             host, n = ceil(T / side): row i says which blocks of `side` keys the i-th `side`
             queries see; what is above the diagonal does not count. A query that sees nothing gets
             zeros.
    Cost:    a head and tile that is seen: forward 4·side²·D FLOPs, backward 10·side²·D; other tiles
             nothing. Memory: B·H·T numbers in addition to q, k, v and
             the result.
    Raises:  ShapeError if the shapes do not fit.
    """
    check_shapes("sparse_attention", q, k, v)
    count = -(-q.shape[2] // side) if side > 0 else -1
    if blocks.shape != (count, count):
        raise ShapeError(
            f"sparse_attention: blocks {blocks.shape} of side {side}; {q.shape[2]} tokens need a "
            f"side of at least 1 and blocks of shape {(count, count) if side > 0 else '(n, n)'}"
        )
    if side == SIDE and fits_kernel(q):
        xp = array_module(q)
        mask = beside(np.tril(blocks), q)
        y, log_total = launcher("attention")(
            *map(xp.ascontiguousarray, (q, k, v)), causal=True, blocks=mask
        )
        return y, saved(q=q, k=k, v=v, y=y, log_total=log_total, mask=mask)
    y, log_total = _forward(widen(q), widen(k), widen(v), seen_keys(blocks, q.shape[2], side), side)
    y = narrow(y, q.dtype)
    return y, saved(q=q, k=k, v=v, y=y, log_total=log_total, mask=None)


@sparse_attention.gradient("q", "k", "v")
def _(node: Node, dy: Array) -> tuple[Array, ...]:
    if node.mask is not None:
        contiguous = array_module(dy).ascontiguousarray
        q, k, v, y, dy = map(contiguous, (node.q, node.k, node.v, node.y, dy))
        return tuple(
            launcher("attention_gradient")(
                q, k, v, y, node.log_total, dy, causal=True, blocks=node.mask
            )
        )
    side = node.options.get("side", SIDE)
    seen = seen_keys(node.options["blocks"], dy.shape[2], side)
    return tuple(narrow(x, dy.dtype) for x in _backward(node, seen, widen(dy), side))
