"""Online softmax: attention to keys that arrive block by block.

Softmax needs the maximum and the sum over all keys of a query. If keys arrive in blocks, three
numbers or rows are kept for each query: the maximum `top` so far, the sum `total` of exp(score -
top), and `y`, the sum of values weighted by exp(score - top). If a new block raises the maximum,
the earlier sums are scaled down to it:

    now   = max(top, max(scores))
    total = total · exp(top - now) + Σ exp(scores - now)
    y     = y · exp(top - now) + exp(scores - now) v

At the end y / total is the attention to all keys, in whatever order the blocks arrived. No exponent
is above 0. Backward needs only log(sum(exp(scores))) of each query to compute the probabilities of
any block again, and the gradients of blocks add up. All arrays are plain ones, (B, H or H_kv, T,
D).

Where kernels/attention.cu takes the arrays (fits_kernel), it attends to each block in one pass, and
keeps no scores. Two results join by their log_total L, log(sum(exp(scores))):

    L = log(exp(L1) + exp(L2))      y = y1 exp(L1 - L) + y2 exp(L2 - L)

Source:  Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
         "FlashAttention".
"""

from collections.abc import Iterator

import numpy as np

from minidist.autograd.ops import attention
from minidist.autograd.ops.attention import (
    block_scores,
    flip,
    highest,
    query_blocks,
    sequences,
    shared,
    sum_heads,
)
from minidist.device.backend import Array, array_module, matmul, on_host, widen
from minidist.device.dispatch import launcher


def scaled_queries(q: Array) -> Array:
    """Return q / sqrt(D), widened: (…, D) -> (…, D)."""
    wide = widen(q)
    return wide * wide.dtype.type(q.shape[-1] ** -0.5)


class OnlineSoftmax:
    """The state of all queries q (B, H, T, D) after some blocks of keys: y (B, H, T, D), top and
    total (B, H, 1, T)."""

    def __init__(self, q: Array) -> None:
        xp = array_module(q)
        row = (*q.shape[:2], 1, q.shape[2])
        self.y: Array = xp.zeros(q.shape, q.dtype)
        self.top = xp.full(row, -np.inf, q.dtype)
        self.total = xp.zeros(row, q.dtype)

    def absorb(self, q: Array, k: Array, v: Array, queries: slice, *, causal: bool) -> None:
        """Add a block of keys and values to the state of some queries.

        Args:    q: all queries, scaled by 1 / sqrt(D); k, v: the block, (B, H_kv, K, D); queries:
                 which of them.
                 causal: keys and queries are the same tokens, and a query sees no later key.
        Cost:    4·Q·K·D FLOPs a head, half of it if causal.
        """
        q = q[:, :, queries]
        if not q.shape[2] or not k.shape[2]:
            return
        y = self.y[:, :, queries]
        top = self.top[..., queries]
        total = self.total[..., queries]
        for i, rows, keys, mask in _tiles(q, causal):
            p = block_scores(q[i], k[i], rows, keys, mask)
            _update(
                p,
                shared(v[i], q.shape[1])[..., keys, :],
                y[i][..., rows, :],
                top[i][..., rows],
                total[i][..., rows],
            )

    def finish(self) -> tuple[Array, Array]:
        """Return attention to all blocks (B, H, T, D), and log(sum(exp(scores))) of each query (B,
        H, 1, T); overwrites y."""
        self.y /= flip(self.total)
        return self.y, array_module(self.y).log(self.total) + self.top


def _update(scores: Array, v: Array, y: Array, top: Array, total: Array) -> None:
    """Update the online softmax by scores (…, K, Q) of new keys and their values (…, K, D); y, top
    and total are overwritten."""
    xp = array_module(scores)
    now = xp.maximum(top, highest(scores))
    scores -= now
    p = xp.exp(scores, out=scores)
    shrink = xp.exp(top - now)  # 0 for the first block, because top was -inf
    total *= shrink
    total += matmul(xp.ones((1, p.shape[-2]), p.dtype), p)
    y *= flip(shrink)
    y += matmul(flip(p), v)
    top[...] = now


class OnlineGradients:
    """Gradients block by block, in any order of the blocks.

    Args:    q: scaled queries (B, H, T, D); y, log_total: from OnlineSoftmax.finish; dy: the
             gradient of y.
    Attributes: row   (B, H, 1, T): Σ dy y of each query
                dq    (B, H, T, D): the sum of the gradients of the unscaled queries so far
    """

    def __init__(self, q: Array, y: Array, log_total: Array, dy: Array) -> None:
        self.q = q
        self.dy = dy
        self.log_total = log_total
        self.row = array_module(q).einsum("...td,...td->...t", dy, y)[..., None, :]
        self.dq: Array = array_module(q).zeros(q.shape, q.dtype)

    def add(
        self, k: Array, v: Array, queries: slice, dk: Array, dv: Array, *, causal: bool
    ) -> None:
        """Add to dq, dk and dv the gradients of some queries and a block of keys.

        With p the probabilities: dv = pᵀ dy, ds = p (dy vᵀ - row), dq = c ds k, dk = dsᵀ (c q), c =
        1 / sqrt(D).
        Args:    k, v, dk, dv: of the block, (B, H_kv, K, D); dk and dv are added to. queries,
                 causal: as in absorb.
        Cost:    10·Q·K·D FLOPs a head, half of it if causal.
        """
        q = self.q[:, :, queries]
        dy = self.dy[:, :, queries]
        dq = self.dq[:, :, queries]
        if not q.shape[2] or not k.shape[2]:
            return
        log_total = self.log_total[..., queries]
        row = self.row[..., queries]
        heads = q.shape[1]
        for i, rows, keys, mask in _tiles(q, causal):
            p = block_scores(q[i], k[i], rows, keys, mask)
            p -= log_total[i][..., rows]
            array_module(p).exp(p, out=p)
            ds = matmul(shared(v[i], heads)[..., keys, :], flip(dy[i][..., rows, :]))
            ds -= row[i][..., rows]
            ds *= p
            dq[i][..., rows, :] += matmul(flip(ds), shared(k[i], heads)[..., keys, :])
            dv[i][..., keys, :] += sum_heads(matmul(p, dy[i][..., rows, :]), k.shape[1])
            dk[i][..., keys, :] += sum_heads(matmul(ds, q[i][..., rows, :]), k.shape[1])

    def finish(self) -> Array:
        """Return the gradient of the unscaled q; overwrites dq."""
        self.dq *= self.dq.dtype.type(self.dq.shape[-1] ** -0.5)
        return self.dq


class FusedSoftmax:
    """OnlineSoftmax whose blocks are passes of a kernel. State: y (B, H, T, D) and log_total (B, H,
    T), in float32."""

    def __init__(self, q: Array) -> None:
        xp = array_module(q)
        self.y: Array = xp.zeros(q.shape, np.float32)
        self.log_total: Array = xp.full(q.shape[:3], -np.inf, np.float32)

    def absorb(self, q: Array, k: Array, v: Array, queries: slice, *, causal: bool) -> None:
        """Add a block of keys and values to the state, as OnlineSoftmax.absorb does; the queries
        are not scaled."""
        xp = array_module(q)
        q = q[:, :, queries]
        if not q.shape[2] or not k.shape[2]:
            return
        y = self.y[:, :, queries]
        before = self.log_total[..., queries]
        own, added = launcher("attention")(*map(xp.ascontiguousarray, (q, k, v)), causal=causal)
        log_total = xp.logaddexp(before, added)
        y *= xp.exp(before - log_total)[..., None]
        y += widen(own) * xp.exp(added - log_total)[..., None]
        before[...] = log_total

    def finish(self) -> tuple[Array, Array]:
        """Return attention to all blocks (B, H, T, D), and log(sum(exp(scores))) of each query (B,
        H, T)."""
        return self.y, self.log_total


class FusedGradients:
    """OnlineGradients whose blocks are passes of a kernel.

    Args:    q, y, dy: (B, H, T, D) in half precision, q not scaled; log_total: from
             FusedSoftmax.finish.
    Attributes: dq    (B, H, T, D), float32: the sum of the gradients of the queries so far
    """

    def __init__(self, q: Array, y: Array, log_total: Array, dy: Array) -> None:
        self.q = q
        self.y = y
        self.log_total = log_total
        self.dy = dy
        self.dq: Array = array_module(q).zeros(q.shape, np.float32)

    def add(
        self, k: Array, v: Array, queries: slice, dk: Array, dv: Array, *, causal: bool
    ) -> None:
        """Add the gradients of some queries and a block of keys, as OnlineGradients.add does."""
        contiguous = array_module(k).ascontiguousarray
        q, y, dy = (contiguous(x[:, :, queries]) for x in (self.q, self.y, self.dy))
        if not q.shape[2] or not k.shape[2]:
            return
        found = launcher("attention_gradient")(
            q,
            contiguous(k),
            contiguous(v),
            y,
            contiguous(self.log_total[..., queries]),
            dy,
            causal=causal,
        )
        for total, own in zip((self.dq[:, :, queries], dk, dv), found, strict=True):
            total += widen(own)

    def finish(self) -> Array:
        """Return the gradient of q."""
        return self.dq


def _tiles(q: Array, causal: bool) -> Iterator[tuple[slice, slice, slice, Array | None]]:
    """Return (sequences, queries, keys, mask) of each tile: few queries, so that the scores stay in
    the cache."""
    length = q.shape[2]
    height = attention.QUERY_BLOCK if on_host(q) else attention.QUERY_BLOCK_GPU
    for i in sequences(q):
        if causal:
            yield from ((i, rows, keys, mask) for rows, keys, mask in query_blocks(q))
        else:
            yield from (
                (i, slice(at, min(at + height, length)), slice(None), None)
                for at in range(0, length, height)
            )
