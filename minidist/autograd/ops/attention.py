"""Causal attention: each token attends to itself and to the tokens before it.

Scores are computed for one block of queries at a time, and a block is multiplied only by the keys
that it may see. With several blocks this skips nearly half of the work. Long sequences keep no
scores: the forward saves only the logarithm of each row's sum, and backward computes the
probabilities again from it (as flash attention does), so memory grows with the number of tokens,
not with its square. On a GPU kernels/attention.cu does this for float16 and bfloat16.

Inside, score matrices are transposed, (…, K, Q): the maximum over the keys then runs along whole
rows of memory, and the numbers of a query, (…, 1, Q), broadcast without a copy.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from minidist.autograd.tape import Node, Saved, op, saved
from minidist.device.backend import (
    LOW_PRECISION,
    Array,
    array_module,
    matmul,
    narrow,
    on_host,
    widen,
)
from minidist.device.dispatch import kernel, launcher
from minidist.errors import ShapeError

QUERY_BLOCK = 64  # queries at a time on the host: one head's scores against 1,024 keys are 256 KiB
QUERY_BLOCK_GPU = 1024  # more, because each block is a series of kernel launches
# numbers; short sequences are taken together up to this number, which costs fewer calls
SCORES = 128 * 1024
# tokens; shorter sequences keep probabilities, which saves two of seven products in backward
KEEP_UP_TO = 256
WIDEST = 128  # columns of a head that the tiles of a kernel hold
# queries, the keys that they see, mask
Block: TypeAlias = tuple[slice, slice, Array]


def sequences(q: Array) -> Iterator[slice]:
    """Return slices of a batch (B, H, T, D) of sequences to compute together: on the host as many
    as fit the cache, on a GPU all."""
    b, heads, t, _ = q.shape
    together = (
        max(1, SCORES // max(1, heads * min(t, QUERY_BLOCK) * t)) if on_host(q) else max(1, b)
    )
    for start in range(0, b, together):
        yield slice(start, start + together)


def query_blocks(q: Array) -> Iterator[Block]:
    """Yield each block. The last block is first, because it sees all keys.

    The mask (Q, Q) is added to the scores of the block's own tokens: -inf where the key is after
    the query, else 0.
    """
    xp = array_module(q)
    length = q.shape[-2]
    height = min(max(1, length), QUERY_BLOCK if on_host(q) else QUERY_BLOCK_GPU)
    ahead = xp.arange(height)[:, None] > xp.arange(height)
    mask = xp.where(ahead, q.dtype.type(-np.inf), q.dtype.type(0))
    for start in reversed(range(0, length, height)):
        stop = min(start + height, length)
        yield slice(start, stop), slice(0, stop), mask[: stop - start, : stop - start]


def flip(x: Array) -> Array:
    """Return (…, m, n) as (…, n, m): a view."""
    return x.swapaxes(-1, -2)


def block_scores(q: Array, k: Array, queries: slice, keys: slice, mask: Array | None) -> Array:
    """Return k qᵀ of one block, plus the mask: (…, H, T, D), (…, H or H_kv, S, D) -> (…, H, K,
    Q)."""
    scores = matmul(shared(k, q.shape[-3])[..., keys, :], flip(q[..., queries, :]))
    if mask is not None:
        scores[..., queries, :] += mask
    return scores


def highest(scores: Array) -> Array:
    """Return the maximum over the keys: (…, K, Q) -> (…, 1, Q).

    The first maximum is over K/8 rows of 8·Q numbers: NumPy's inner loop is then longer, and all 2
    to 4 times faster.
    """
    *lead, k, q = scores.shape
    if k % 8 == 0:
        scores = scores.reshape(*lead, k // 8, 8 * q).max(axis=-2).reshape(*lead, 8, q)
    return scores.max(axis=-2, keepdims=True)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    log_total: Array,
    kept: list[Array] | None,
    blocks: Sequence[Block],
) -> None:
    """Write attention into y (…, T, D) and log(sum(exp(scores))) into log_total (…, 1, T); append
    blocks to `kept`."""
    xp = array_module(q)
    scale = q.dtype.type(max(1, q.shape[-1]) ** -0.5)
    for queries, keys, mask in blocks:
        p = block_scores(q, k, queries, keys, mask)
        p *= scale  # they are in the cache; a scaled copy of q would take four times as long
        top = highest(p)
        p -= top
        xp.exp(p, out=p)
        total = matmul(xp.ones((1, keys.stop), p.dtype), p)
        p *= 1.0 / total
        matmul(flip(p), v[..., keys, :], out=y[..., queries, :])
        xp.add(xp.log(total), top, out=log_total[..., queries])
        if kept is not None:
            kept.append(p)


def _attend_gradients(
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    log_total: Array,
    kept: Iterator[Array],
    dy: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    blocks: Sequence[Block],
) -> None:
    """Write dq, dk, dv; all (…, T, D).

    With p the probabilities, c = 1 / sqrt(D) and r = sum(dy y) of each query:
    dv = pᵀ dy, ds = c p (dy vᵀ - r), dq = ds k, dk = dsᵀ q.
    """
    xp = array_module(q)
    scale = q.dtype.type(max(1, q.shape[-1]) ** -0.5)
    row = xp.einsum("...td,...td->...t", dy, y)[..., None, :]
    for queries, keys, mask in blocks:
        q_block = q[..., queries, :]
        dy_block = dy[..., queries, :]
        p = next(kept, None)
        if p is None:
            p = block_scores(q, k, queries, keys, mask)
            p *= scale
            p -= log_total[..., queries]
            xp.exp(p, out=p)
        ds = matmul(v[..., keys, :], flip(dy_block))
        ds -= row[..., queries]
        ds *= p
        ds *= scale
        matmul(flip(ds), k[..., keys, :], out=dq[..., queries, :])
        # the first block taken sees all keys: it writes, the others add
        if queries.stop == q.shape[-2]:
            matmul(p, dy_block, out=dv)
            matmul(ds, q_block, out=dk)
        else:
            dv[..., keys, :] += matmul(p, dy_block)
            dk[..., keys, :] += matmul(ds, q_block)


def shared(x: Array, heads: int) -> Array:
    """Repeat each key or value head for the query heads that share it: (…, H_kv, T, D) -> (…, H, T,
    D); x itself if none is shared."""
    return x if x.shape[-3] == heads else array_module(x).repeat(x, heads // x.shape[-3], axis=-3)


def sum_heads(x: Array, kv_heads: int) -> Array:
    """Sum the gradients of each key head over its query heads: (…, H, T, D) -> (…, H_kv, T, D)."""
    *lead, heads, t, d = x.shape
    return (
        x if heads == kv_heads else x.reshape(*lead, kv_heads, heads // kv_heads, t, d).sum(axis=-3)
    )


def _forward(q: Array, k: Array, v: Array, y: Array, keep: bool) -> tuple[Array, list[Array]]:
    """Write the attention of a batch into y; all (B, H or H_kv, T, D). Returns:
    log(sum(exp(scores))), kept probabilities."""
    xp = array_module(q)
    (b, heads, t, _) = q.shape
    log_total = xp.empty((b, heads, 1, t), q.dtype)
    kept: list[Array] = []
    blocks = list(query_blocks(q))
    for i in sequences(q):
        _attend(
            q[i],
            shared(k[i], heads),
            shared(v[i], heads),
            y[i],
            log_total[i],
            kept if keep and t <= KEEP_UP_TO else None,
            blocks,
        )
    return log_total, kept


def _backward(
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    log_total: Array,
    kept: list[Array],
    dy: Array,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Write the gradients of a batch into dq (B, H, T, D) and dk, dv (B, H_kv, T, D)."""
    xp = array_module(q)
    heads = q.shape[1]
    kv_heads = k.shape[1]
    probabilities = iter(kept)
    blocks = list(query_blocks(q))
    for i in sequences(q):
        own = heads == kv_heads
        dk_all, dv_all = (dk[i], dv[i]) if own else xp.empty((2, *q[i].shape), q.dtype)
        _attend_gradients(
            q[i],
            shared(k[i], heads),
            shared(v[i], heads),
            y[i],
            log_total[i],
            probabilities,
            dy[i],
            dq[i],
            dk_all,
            dv_all,
            blocks,
        )
        if not own:
            dk[i] = sum_heads(dk_all, kv_heads)
            dv[i] = sum_heads(dv_all, kv_heads)


def check_shapes(name: str, q: Array, k: Array, v: Array) -> None:
    """Check (B, H, T, D), (B, H_kv, T, D) twice, H a multiple of H_kv. Raises: ShapeError, which
    begins with `name`."""
    if (
        q.ndim != 4
        or k.ndim != 4
        or k.shape != v.shape
        or (len(q), *q.shape[2:]) != (len(k), *k.shape[2:])
    ):
        raise ShapeError(
            f"{name}: q {q.shape}, k {k.shape}, v {v.shape}; they need shapes (B, H, T, D), "
            f"(B, H_kv, T, D), (B, H_kv, T, D)"
        )
    if q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]:
        raise ShapeError(
            f"{name}: {q.shape[1]} query heads cannot be divided equally among {k.shape[1]} key "
            "heads"
        )


def fits_kernel(q: Array) -> bool:
    """Return whether kernels/attention.cu takes these queries (B, H, T, D): on a GPU, in half
    precision, with narrow heads."""
    # device and dtype decide, not the layout, because views are copied
    return (
        q.dtype in LOW_PRECISION
        and q.shape[-1] <= WIDEST
        and kernel("attention", q[:0]) is not None
    )


def _by_kernel(q: Array, k: Array, v: Array) -> tuple[Array, Array] | None:
    """Return the result and log_total (B, H, T) from the kernel, or None if the code below has to
    compute them."""
    if not fits_kernel(q):
        return None
    xp = array_module(q)
    return launcher("attention")(*map(xp.ascontiguousarray, (q, k, v)), causal=True)  # type: ignore[no-any-return]


def _gradients_by_kernel(
    q: Array, k: Array, v: Array, y: Array, log_total: Array, dy: Array
) -> tuple[Array, ...]:
    q, k, v, y, dy = (array_module(q).ascontiguousarray(x) for x in (q, k, v, y, dy))
    return tuple(launcher("attention_gradient")(q, k, v, y, log_total, dy, causal=True))


@op
def causal_attention(q: Array, k: Array, v: Array, *, keep: bool = True) -> tuple[Array, Saved]:
    """Return softmax(q kᵀ / sqrt(D)) v over the keys up to each query: (B, H, T, D), (B, H_kv, T,
    D) twice -> (B, H, T, D).

    With fewer key and value heads than query heads, H / H_kv query heads in a row share one
    (grouped-query attention).
    Args:    keep: whether short sequences keep their probabilities, B·H·T² numbers, for backward.
    Cost:    forward up to 4·T²·D FLOPs a head, nearly half of it with several blocks; memory: B·H·T
             numbers, in addition to q, k, v and the result.
    Raises:  ShapeError if the shapes do not fit.
    Source:  Vaswani et al. 2017; Dao et al. 2022.
    """
    check_shapes("causal_attention", q, k, v)
    fast = _by_kernel(q, k, v)
    if fast is not None:
        return fast[0], saved(q=q, k=k, v=v, y=fast[0], log_total=fast[1], kept=None)
    q_wide = widen(q)
    k_wide = widen(k)
    v_wide = widen(v)
    y = array_module(q).empty(q.shape, q_wide.dtype)
    log_total, kept = _forward(q_wide, k_wide, v_wide, y, keep)
    y = narrow(y, q.dtype)
    return y, saved(q=q, k=k, v=v, y=y, log_total=log_total, kept=kept)


@causal_attention.gradient("q", "k", "v")
def _(node: Node, dy: Array) -> tuple[Array, ...]:
    if node.kept is None:
        return _gradients_by_kernel(node.q, node.k, node.v, node.y, node.log_total, dy)
    xp = array_module(dy)
    q = widen(node.q)
    k = widen(node.k)
    v = widen(node.v)
    dq, dk, dv = (xp.empty(x.shape, x.dtype) for x in (q, k, v))
    _backward(q, k, v, widen(node.y), node.log_total, node.kept, widen(dy), dq, dk, dv)
    return tuple(narrow(x, dy.dtype) for x in (dq, dk, dv))


def _by_head(x: Array, heads: int) -> Array:
    """Return (B, T, H·D) as (B, H, T, D): a view."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)


def _unpack(qkv: Array, heads: int) -> tuple[Array, Array, Array]:
    """Return (B, T, 3·H·D) as three views (B, H, T, D)."""
    b, t, n = qkv.shape
    parts = qkv.reshape(b, t, 3, heads, n // (3 * heads)).transpose(2, 0, 3, 1, 4)
    return parts[0], parts[1], parts[2]


@op
def causal_attention_packed(qkv: Array, *, heads: int, keep: bool = True) -> tuple[Array, Saved]:
    """Return causal attention on the output of one linear that makes q, k and v: (B, T, 3·H·D) ->
    (B, T, H·D).

    The last dim holds q of all heads, then k, then v. It computes on views, without transposing
    memory. Args, Raises: as causal_attention.
    """
    if qkv.ndim != 3 or heads < 1 or qkv.shape[-1] % (3 * heads):
        raise ShapeError(
            f"causal_attention_packed: qkv {qkv.shape} with {heads} heads; it needs (B, T, "
            "3·heads·D)"
        )
    if fits_kernel(_unpack(qkv, heads)[0]):
        y, log_total = launcher("attention_packed")(array_module(qkv).ascontiguousarray(qkv), heads)
        return y, saved(qkv=qkv, y=y, log_total=log_total, kept=None)
    wide = widen(qkv)
    y = array_module(qkv).empty((*qkv.shape[:2], qkv.shape[2] // 3), wide.dtype)
    log_total, kept = _forward(*_unpack(wide, heads), _by_head(y, heads), keep)
    y = narrow(y, qkv.dtype)
    return y, saved(qkv=qkv, y=y, log_total=log_total, kept=kept)


@causal_attention_packed.gradient("qkv")
def _(node: Node, dy: Array) -> Array:
    heads = node.options["heads"]
    if node.kept is None:
        qkv, y, dy = (array_module(dy).ascontiguousarray(x) for x in (node.qkv, node.y, dy))
        return launcher("attention_packed_gradient")(qkv, y, node.log_total, dy, heads)
    qkv = widen(node.qkv)
    dqkv = array_module(dy).empty(qkv.shape, qkv.dtype)
    _backward(
        *_unpack(qkv, heads),
        _by_head(widen(node.y), heads),
        node.log_total,
        node.kept,
        _by_head(widen(dy), heads),
        *_unpack(dqkv, heads),
    )
    return narrow(dqkv, dy.dtype)
