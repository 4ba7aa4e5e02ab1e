"""Causal attention: each token looks at itself and the tokens before it.

Scores are computed for one sequence and a block of its queries at a time and never kept: the forward saves only the
logarithm of each row's sum, and backward computes the probabilities again from it (as flash attention does), so memory
grows with the number of tokens and not with its square. A block of queries is multiplied only with the keys it may see,
which skips nearly half of the work when there are several blocks.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from minidist.backend import Array, array_module, matmul, widen
from minidist.errors import ShapeError
from minidist.tape import Node, Saved, op, saved

QUERY_BLOCK = 128  # queries at a time on the host: their scores against 1,024 keys are 512 KiB a head


def _blocks(xp: Any, length: int) -> Iterator[tuple[slice, slice, Array]]:
    """(queries, the keys they see, bias of those scores: 0 or -inf): blocks over one sequence."""
    height = QUERY_BLOCK if xp is np else length
    for start in range(0, length, height):
        stop = min(start + height, length)
        ahead = xp.arange(stop)[None, :] > xp.arange(start, stop)[:, None]
        yield slice(start, stop), slice(0, stop), ahead


def _scores(xp: Any, q: Array, k: Array, ahead: Array) -> Array:
    """q kᵀ / sqrt(D), -inf where a key lies ahead: (H, Q, D), (H, K, D) -> (H, Q, K)."""
    scores = matmul(q, k.swapaxes(-1, -2))
    scores *= scores.dtype.type(q.shape[-1] ** -0.5)
    xp.copyto(scores, scores.dtype.type(-np.inf), where=ahead)
    return scores


def _attend(q: Array, k: Array, v: Array, y: Array) -> Array:
    """Write the attention of one sequence into y (H, T, D); returns log(sum(exp(scores))) (H, T, 1)."""
    xp = array_module(q)
    log_total = xp.empty((*q.shape[:-1], 1), q.dtype)
    for queries, keys, ahead in _blocks(xp, q.shape[-2]):
        p = _scores(xp, q[..., queries, :], k[..., keys, :], ahead)
        top = p.max(axis=-1, keepdims=True)
        p -= top
        xp.exp(p, out=p)
        total = p.sum(axis=-1, keepdims=True)
        y[..., queries, :] = matmul(p, v[..., keys, :]) / total
        log_total[..., queries, :] = xp.log(total) + top
    return log_total


def _attend_gradients(q: Array, k: Array, v: Array, y: Array, log_total: Array, dy: Array,
                      dq: Array, dk: Array, dv: Array) -> None:
    """Write dq, and add dk and dv, of one sequence; all (H, T, D).

    With p the probabilities and r = sum(dy y) a row: dv = pᵀ dy, ds = p (dy vᵀ - r) / sqrt(D), dq = ds k, dk = dsᵀ q.
    """
    xp = array_module(q)
    row = (dy * y).sum(axis=-1, keepdims=True)
    for queries, keys, ahead in _blocks(xp, q.shape[-2]):
        q_block, dy_block = q[..., queries, :], dy[..., queries, :]
        p = _scores(xp, q_block, k[..., keys, :], ahead)
        p -= log_total[..., queries, :]
        xp.exp(p, out=p)
        dv[..., keys, :] += matmul(p.swapaxes(-1, -2), dy_block)
        ds = matmul(dy_block, v[..., keys, :].swapaxes(-1, -2))
        ds -= row[..., queries, :]
        ds *= p
        ds *= ds.dtype.type(q.shape[-1] ** -0.5)
        dq[..., queries, :] = matmul(ds, k[..., keys, :])
        dk[..., keys, :] += matmul(ds.swapaxes(-1, -2), q_block)


def _repeat(x: Array, heads: int) -> Array:
    """(H_kv, T, D) with each head repeated for the query heads that share it: a view if they are as many."""
    return x if len(x) == heads else array_module(x).repeat(x, heads // len(x), axis=0)


def _sum_groups(x: Array, heads: int) -> Array:
    """Back from (H, T, D) to (heads, T, D): the sum over the query heads that share a key head."""
    return x if len(x) == heads else x.reshape(heads, len(x) // heads, *x.shape[1:]).sum(axis=1)


def _check(name: str, q: Array, k: Array, v: Array) -> None:
    if q.ndim != 4 or k.shape != v.shape or k.ndim != 4 or q.shape[::2] + q.shape[3:] != k.shape[::2] + k.shape[3:]:
        raise ShapeError(f"{name}: q {q.shape}, k {k.shape}, v {v.shape}; they need shapes (B, H, T, D), "
                         f"(B, H_kv, T, D) twice")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"{name}: {q.shape[1]} query heads do not divide among {k.shape[1]} key and value heads")


def _forward(q: Array, k: Array, v: Array, y: Array) -> Array:
    """Attention of a batch into y; all (B, H or H_kv, T, D). Returns log(sum(exp(scores))): (B, H, T, 1)."""
    xp, heads = array_module(q), q.shape[1]
    log_total = xp.empty((*q.shape[:-1], 1), q.dtype)
    for i in range(len(q)):
        log_total[i] = _attend(q[i], _repeat(k[i], heads), _repeat(v[i], heads), y[i])
    return log_total


def _backward(q: Array, k: Array, v: Array, y: Array, log_total: Array, dy: Array,
              dq: Array, dk: Array, dv: Array) -> None:
    """Write the gradients of a batch into dq, dk, dv."""
    xp, heads, kv_heads = array_module(q), q.shape[1], k.shape[1]
    for i in range(len(q)):
        dk_all, dv_all = xp.zeros(q.shape[1:], q.dtype), xp.zeros(q.shape[1:], q.dtype)
        _attend_gradients(q[i], _repeat(k[i], heads), _repeat(v[i], heads), y[i], log_total[i], dy[i],
                          dq[i], dk_all, dv_all)
        dk[i], dv[i] = _sum_groups(dk_all, kv_heads), _sum_groups(dv_all, kv_heads)


@op
def causal_attention(q: Array, k: Array, v: Array) -> tuple[Array, Saved]:
    """softmax(q kᵀ / sqrt(D)) v over the keys up to each query: (B, H, T, D), (B, H_kv, T, D) twice -> (B, H, T, D).

    With fewer key and value heads than query heads, H / H_kv query heads in a row share one (grouped-query attention).
    Cost: 4·T²·D FLOPs a head forward, less what lies ahead; memory: B·H·T numbers beside q, k, v and the result.
    """
    _check("causal_attention", q, k, v)
    q_wide, k_wide, v_wide = widen(q), widen(k), widen(v)
    y = array_module(q).empty(q.shape, q_wide.dtype)
    log_total = _forward(q_wide, k_wide, v_wide, y)
    y = y.astype(q.dtype, copy=False)
    return y, saved(q=q, k=k, v=v, y=y, log_total=log_total)


def _gradients(node: Node, dy: Array) -> dict[str, Array]:
    xp = array_module(dy)
    q, k, v = widen(node.q), widen(node.k), widen(node.v)
    dq, dk, dv = (xp.empty(x.shape, x.dtype) for x in (q, k, v))
    _backward(q, k, v, widen(node.y), node.log_total, widen(dy), dq, dk, dv)
    return {name: x.astype(dy.dtype, copy=False) for name, x in (("q", dq), ("k", dk), ("v", dv))}


@causal_attention.gradient("q")
def _(node: Node, dy: Array) -> Array:
    return node.once(_gradients, dy)["q"]


@causal_attention.gradient("k")
def _(node: Node, dy: Array) -> Array:
    return node.once(_gradients, dy)["k"]


@causal_attention.gradient("v")
def _(node: Node, dy: Array) -> Array:
    return node.once(_gradients, dy)["v"]


def _unpack(qkv: Array, heads: int) -> tuple[Array, Array, Array]:
    """(B, T, 3 H D) as three views (B, H, T, D)."""
    b, t, n = qkv.shape
    parts = qkv.reshape(b, t, 3, heads, n // (3 * heads)).transpose(2, 0, 3, 1, 4)
    return parts[0], parts[1], parts[2]


@op
def causal_attention_packed(qkv: Array, *, heads: int) -> tuple[Array, Saved]:
    """Causal attention on the output of one linear that makes q, k and v: (B, T, 3·H·D) -> (B, T, H·D).

    The last dim holds q of all heads, then k, then v. Computed on views: nothing is transposed in memory.
    """
    if qkv.ndim != 3 or qkv.shape[-1] % (3 * heads):
        raise ShapeError(f"causal_attention_packed: qkv {qkv.shape} with {heads} heads; it needs (B, T, 3·heads·D)")
    xp = array_module(qkv)
    wide = widen(qkv)
    q, k, v = _unpack(wide, heads)
    y = xp.empty((*qkv.shape[:2], qkv.shape[2] // 3), wide.dtype)
    log_total = _forward(q, k, v, y.reshape(*y.shape[:2], heads, -1).swapaxes(1, 2))
    y = y.astype(qkv.dtype, copy=False)
    return y, saved(qkv=qkv, y=y, log_total=log_total)


@causal_attention_packed.gradient("qkv")
def _(node: Node, dy: Array) -> Array:
    xp, heads = array_module(dy), node.options["heads"]
    qkv = widen(node.qkv)
    dqkv = xp.empty(qkv.shape, qkv.dtype)
    y, dy_heads = (widen(x).reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for x in (node.y, dy))
    _backward(*_unpack(qkv, heads), y, node.log_total, dy_heads, *_unpack(dqkv, heads))
    return dqkv.astype(dy.dtype, copy=False)
