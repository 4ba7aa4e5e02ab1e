"""Attention to keys that come in pieces: the softmax of all of them, though no one ever holds all of them.

Softmax needs the maximum and the sum over all keys of a query. When keys come piece by piece, three things are kept for
each query of what came so far: the maximum `top`, the sum `total` of exp(score - top), and `y`, the sum of values
weighted by exp(score - top). A new piece may raise the maximum; what was summed under the old one is then scaled down:

    now   = max(top, max(scores))
    total = total · exp(top - now) + Σ exp(scores - now)
    y     = y · exp(top - now) + exp(scores - now) v

and at the end y / total is the attention to all pieces, in whatever order they came. No exponent is ever above 0.
Backward needs no order at all: from log(sum(exp(scores))) of each query any piece's probabilities can be computed again
by themselves, and gradients of pieces add up.

These are plain functions of arrays, (B, H or H_kv, T, D), for strategies whose ranks pass pieces on.
Source:  Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention".
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minidist.autograd.ops.attention import QUERY_BLOCK, QUERY_BLOCK_GPU, flip, highest, query_blocks, sequences, shared
from minidist.device.backend import Array, array_module, matmul


@dataclass
class OnlineSoftmax:
    """What is known of queries after some pieces: y (B, H, T, D), and top and total (B, H, 1, T)."""

    y: Array
    top: Array
    total: Array

    @staticmethod
    def of(q: Array) -> "OnlineSoftmax":
        """Before the first piece."""
        xp = array_module(q)
        row = (*q.shape[:2], 1, q.shape[2])
        return OnlineSoftmax(xp.zeros(q.shape, q.dtype), xp.full(row, -np.inf, q.dtype), xp.zeros(row, q.dtype))

    def absorb(self, q: Array, k: Array, v: Array, queries: slice, *, causal: bool) -> None:
        """Let some queries see a piece's keys and values; with `causal`, keys and queries are the same tokens.

        Args:    q: all queries, scaled by 1 / sqrt(D); k, v: of the piece, (B, H_kv, K, D).
        Cost:    4·Q·K·D FLOPs a head, half of it if causal.
        """
        q = q[:, :, queries]
        if not q.shape[2] or not k.shape[2]:
            return
        y, top, total = self.y[:, :, queries], self.top[..., queries], self.total[..., queries]
        for i, rows, keys, mask in _tiles(q, causal):
            p = _scores(q[i], k[i], rows, keys, mask)
            _update(p, shared(v[i], q.shape[1])[..., keys, :], y[i][..., rows, :], top[i][..., rows],
                    total[i][..., rows])

    def finish(self) -> tuple[Array, Array]:
        """Attention to all pieces (B, H, T, D), and log(sum(exp(scores))) of each query (B, H, 1, T); overwrites y."""
        self.y /= flip(self.total)
        return self.y, array_module(self.y).log(self.total) + self.top


def _update(scores: Array, v: Array, y: Array, top: Array, total: Array) -> None:
    """The online softmax: scores (…, K, Q) of new keys, their values (…, K, D); y, top and total are overwritten."""
    xp = array_module(scores)
    now = xp.maximum(top, highest(scores))
    scores -= now
    p = xp.exp(scores, out=scores)
    shrink = xp.exp(top - now)                  # 0 for the first piece: before it, top is -inf
    total *= shrink
    total += matmul(xp.ones((1, p.shape[-2]), p.dtype), p)
    y *= flip(shrink)
    y += matmul(flip(p), v)
    top[...] = now


@dataclass
class OnlineGradients:
    """What gradients of pieces need of all queries: q scaled, dy, and of each query log(sum(exp(scores))) and Σ dy y.

    dq (B, H, T, D) collects the gradient of the unscaled q; `finish` returns it.
    """

    q: Array
    dy: Array
    log_total: Array
    row: Array
    dq: Array

    @staticmethod
    def of(q: Array, y: Array, log_total: Array, dy: Array) -> "OnlineGradients":
        """Before the first piece; q comes scaled."""
        xp = array_module(q)
        row = xp.einsum("...td,...td->...t", dy, y)[..., None, :]
        return OnlineGradients(q, dy, log_total, row, xp.zeros(q.shape, q.dtype))

    def add(self, k: Array, v: Array, queries: slice, dk: Array, dv: Array, *, causal: bool) -> None:
        """Add a piece's part to dq, and what some queries contribute to the piece's own gradients to dk and dv.

        With p the probabilities: dv = pᵀ dy, ds = p (dy vᵀ - row), dq = c ds k, dk = dsᵀ (c q), c = 1 / sqrt(D).
        Cost:    10·Q·K·D FLOPs a head, half of it if causal.
        """
        q, dy, dq = self.q[:, :, queries], self.dy[:, :, queries], self.dq[:, :, queries]
        if not q.shape[2] or not k.shape[2]:
            return
        log_total, row = self.log_total[..., queries], self.row[..., queries]
        heads = q.shape[1]
        for i, rows, keys, mask in _tiles(q, causal):
            p = _scores(q[i], k[i], rows, keys, mask)
            p -= log_total[i][..., rows]
            array_module(p).exp(p, out=p)
            ds = matmul(shared(v[i], heads)[..., keys, :], flip(dy[i][..., rows, :]))
            ds -= row[i][..., rows]
            ds *= p
            dq[i][..., rows, :] += matmul(flip(ds), shared(k[i], heads)[..., keys, :])
            _add_heads(dv[i][..., keys, :], matmul(p, dy[i][..., rows, :]))
            _add_heads(dk[i][..., keys, :], matmul(ds, q[i][..., rows, :]))

    def finish(self) -> Array:
        """The gradient of q."""
        self.dq *= self.dq.dtype.type(self.dq.shape[-1] ** -0.5)
        return self.dq


def _tiles(q: Array, causal: bool) -> Iterator[tuple[slice, slice, slice, Array | None]]:
    """(sequences, queries, keys, mask) to be multiplied at a time: few queries, so that scores stay in the cache."""
    length = q.shape[2]
    height = QUERY_BLOCK if array_module(q) is np else QUERY_BLOCK_GPU
    for i in sequences(q):
        if causal:
            yield from ((i, rows, keys, mask) for rows, keys, mask in query_blocks(q))
        else:
            yield from ((i, slice(at, min(at + height, length)), slice(None), None)
                        for at in range(0, length, height))


def _scores(q: Array, k: Array, rows: slice, keys: slice, mask: Array | None) -> Array:
    """k qᵀ of a tile, -inf where the mask says that a key lies ahead: (…, K, Q)."""
    scores = matmul(shared(k, q.shape[1])[..., keys, :], flip(q[..., rows, :]))
    if mask is not None:
        scores[..., rows, :] += mask
    return scores


def _add_heads(target: Array, each: Array) -> None:
    """Add (…, H, K, D) to (…, H_kv, K, D): a key head's gradient is the sum over its query heads."""
    heads, kv_heads = each.shape[1], target.shape[1]
    if heads != kv_heads:
        each = each.reshape(len(each), kv_heads, heads // kv_heads, *each.shape[2:]).sum(axis=2)
    target += each
