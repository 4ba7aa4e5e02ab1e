"""Attention and its gradients: the NumPy reference, then the launchers of attention.cu.

    y, log_total = attention(q, k, v, causal=True)                     # the fastest version that fits
    dq, dk, dv = attention_gradient(q, k, v, y, log_total, dy, causal=True)

q (B, H, T, D), k and v (B, H_kv, S, D), float32, float16 or bfloat16, contiguous, NumPy (CPU build) or CuPy. H / H_kv
query heads in a row share one key head. log_total (B, H, T), float32, is log(sum(exp(scores))) of each query; backward
needs only this beside the inputs and y. `blocks` (ceil(T / 64), ceil(S / 64)), bool: which 64 queries see which 64
keys, for all heads (block-sparse attention); a query without keys gets zeros. Sums are float32.
Cost: 4·B·H·T·S·D operations forward, less those of skipped tiles: tiles after all of their queries, or False in
`blocks`. Speed is not yet measured.
"""

from typing import Any

import numpy as np
from minidist.kernels.checks import check_version
from minidist.kernels.loader import FLOATS, Source, aligned, c_type, launch

from minidist.device.backend import LOW_PRECISION, Array, array_module
from minidist.errors import DtypeError, KernelError, ShapeError

VERSIONS = (1, 2, 3)
HALVES = FLOATS[1:]
MASK_SIDE = 64              # queries and keys of a block of the mask
WIDTHS = (64, 128)          # of a head, rounded up: versions 2 and 3
SOURCE = Source("attention.cu", [f"attention_v1<{kind}>" for kind in FLOATS]
                + [f"attention_v2<{kind}, {width}>" for kind in FLOATS for width in WIDTHS]
                + [f"attention_v3<{kind}, {width}>" for kind in HALVES for width in WIDTHS])
GRADIENTS = Source("attention_gradient.cu", [f"attention_{name}<{kind}>" for name in ("row", "dq_v1", "dkv_v1")
                                             for kind in FLOATS]
                   + [f"attention_{name}_v{version}<{kind}, {width}>" for name in ("dq", "dkv")
                      for version, kinds in ((2, FLOATS), (3, HALVES)) for kind in kinds for width in WIDTHS])


# ---------------------------------------------------------------------------------------------------------- references

def _repeated(x: np.ndarray, heads: int) -> np.ndarray:
    """(B, H_kv, S, D) -> (B, H, S, D): each key head repeated for the query heads that share it."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def seen(queries: int, keys: int, causal: bool, blocks: np.ndarray | None) -> np.ndarray:
    """(T, S), bool: whether a query sees a key."""
    mask = np.ones((queries, keys), bool)
    if causal:
        mask &= np.arange(keys) <= np.arange(queries)[:, None]
    if blocks is not None:
        mask &= np.repeat(np.repeat(blocks, MASK_SIDE, 0), MASK_SIDE, 1)[:queries, :keys].astype(bool)
    return mask


def attention_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False,
                        blocks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """y (B, H, T, D) and log_total (B, H, T)."""
    scores = q @ _repeated(k, q.shape[1]).swapaxes(-1, -2) * q.shape[-1] ** -0.5
    scores = np.where(seen(q.shape[2], k.shape[2], causal, blocks), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top)
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    y = p / np.where(total == 0, 1, total) @ _repeated(v, q.shape[1])
    with np.errstate(divide="ignore"):
        return y, (np.log(total) + top)[..., 0]


def attention_gradient_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, dy: np.ndarray, *, causal: bool = False,
                                 blocks: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv; the formulas are in attention_gradient.cu."""
    heads, scale = q.shape[1], q.shape[-1] ** -0.5
    y, log_total = attention_reference(q, k, v, causal=causal, blocks=blocks)
    k_all, v_all = _repeated(k, heads), _repeated(v, heads)
    mask = seen(q.shape[2], k.shape[2], causal, blocks)
    scores = np.where(mask, q @ k_all.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(scores - np.where(log_total == -np.inf, 0, log_total)[..., None])
    ds = p * (dy @ v_all.swapaxes(-1, -2) - (dy * y).sum(axis=-1, keepdims=True))
    dk, dv = ds.swapaxes(-1, -2) @ q * scale, p.swapaxes(-1, -2) @ dy
    shared = (k.shape[0], k.shape[1], heads // k.shape[1], *k.shape[2:])
    return ds @ k_all * scale, dk.reshape(shared).sum(axis=2), dv.reshape(shared).sum(axis=2)


# ----------------------------------------------------------------------------------------------------------- launchers

def attention(q: Array, k: Array, v: Array, *, causal: bool = False, blocks: Array | None = None,
              version: int | None = None) -> tuple[Array, Array]:
    """y, of q's shape and dtype, and log_total (B, H, T), float32.

    Raises: ShapeError, DtypeError; KernelError if `version` does not fit.
    """
    xp = array_module(q, k, v)
    _check(q, k, v, causal, blocks)
    check_version("attention", version, VERSIONS)
    y, log_total = xp.zeros_like(q), xp.full(q.shape[:3], -np.inf, np.float32)
    if not q.size or not k.size:
        return y, log_total
    version = version or fastest(q)
    kind, width = c_type(q), _fitting(q, version)
    arrays = (q, k, v, y, log_total)
    rules = _rules(q, k, causal, blocks)
    rows, heads = q.shape[2], q.shape[0] * q.shape[1]
    if version == 1:
        scores = xp.empty((*q.shape[:3], k.shape[2]), np.float32)
        launch(SOURCE, f"attention_v1<{kind}>", grid=(-(-rows // 64), heads), block=64, args=(*arrays, scores, *rules))
    elif version == 2:
        shared = 32 * (3 * width + 1 + 32) * 4
        launch(SOURCE, f"attention_v2<{kind}, {width}>", grid=(-(-rows // 32), heads), block=128,
               args=(*arrays, *rules), shared=shared)
    else:
        launch(SOURCE, f"attention_v3<{kind}, {width}>", grid=(-(-rows // 64), heads), block=128,
               args=(*arrays, *rules, aligned(q, k, v)))
    return y, log_total


def attention_gradient(q: Array, k: Array, v: Array, y: Array, log_total: Array, dy: Array, *, causal: bool = False,
                       blocks: Array | None = None, version: int | None = None) -> tuple[Array, Array, Array]:
    """dq, dk, dv, with the shapes and the dtype of q, k, v. y, log_total: from `attention`; dy: the gradient of y.

    Raises: ShapeError, DtypeError; KernelError if `version` does not fit.
    """
    xp = array_module(q, k, v)
    _check(q, k, v, causal, blocks)
    check_version("attention_gradient", version, VERSIONS)
    if not y.shape == dy.shape == q.shape or log_total.shape != q.shape[:3]:
        raise ShapeError(f"attention kernel: y {y.shape}, dy {dy.shape}, log_total {log_total.shape}; "
                         f"they need q's shape {q.shape}, and {q.shape[:3]}")
    dq, dk, dv = (xp.zeros_like(x) for x in (q, k, v))
    if not q.size or not k.size:
        return dq, dk, dv
    version, row = version or fastest(q), xp.empty_like(log_total)
    rows = row.size
    launch(GRADIENTS, f"attention_row<{c_type(q)}>", grid=-(-rows // 4), block=128,
           args=(y, dy, row, rows, q.shape[3]))
    rules, run = _rules(q, k, causal, blocks), _naive_gradient if version == 1 else _tiled_gradient
    run(version, (q, k, v, dy, log_total, row), (dq, dk, dv), rules)
    return dq, dk, dv


def _naive_gradient(version: int, given: tuple[Array, ...], results: tuple[Array, ...], rules: tuple[Any, ...]) -> None:
    q, k, _, dy = given[:4]
    (b, heads, t, d), kv_heads, s, kind = q.shape, k.shape[1], k.shape[2], c_type(q)
    p, ds = (array_module(q).empty((b, heads, t, s), np.float32) for _ in range(2))
    launch(GRADIENTS, f"attention_dq_v{version}<{kind}>", grid=(-(-t // 64), b * heads), block=64,
           args=(*given, results[0], p, ds, *rules))
    launch(GRADIENTS, f"attention_dkv_v{version}<{kind}>", grid=(-(-s * d // 64), b * kv_heads), block=64,
           args=(q, dy, p, ds, *results[1:], heads, kv_heads, t, s, d))


def _tiled_gradient(version: int, given: tuple[Array, ...], results: tuple[Array, ...], rules: tuple[Any, ...]) -> None:
    q, k, v, dy = given[:4]
    width = _fitting(q, version)
    side = 32 if version == 2 else 64                     # of a tile; shared memory holds four, and scores of version 2
    four = 4 * 32 * (width + 1) * 4 if version == 2 else 4 * 64 * (width + 8) * 2
    whole = (aligned(q, k, v, dy),) if version == 3 else ()
    for name, along, outputs, scores in (("dq", q, results[:1], 1), ("dkv", k, results[1:], 2)):
        b, heads, rows, _ = along.shape
        launch(GRADIENTS, f"attention_{name}_v{version}<{c_type(q)}, {width}>", grid=(-(-rows // side), b * heads),
               block=128, args=(*given, *outputs, *rules, *whole),
               shared=four + scores * 32 * 32 * 4 * (version == 2))


def fastest(q: Array) -> int:
    """The fastest version that fits: tensor cores for half types; version 1 if a head is wider than a tile."""
    return 1 if q.shape[-1] > WIDTHS[-1] else 3 if q.dtype in LOW_PRECISION else 2


def _fitting(q: Array, version: int) -> int:
    """The width of a tile that holds a head. Raises: KernelError if the version has none or does not take q's dtype."""
    if version == 3 and q.dtype not in LOW_PRECISION:
        raise KernelError(f"attention version 3 takes float16 and bfloat16, not {q.dtype}; take version 2")
    width = next((width for width in WIDTHS if q.shape[-1] <= width), 0)
    if version > 1 and not width:
        raise KernelError(f"attention version {version} takes heads of at most {WIDTHS[-1]} columns, "
                          f"not {q.shape[-1]}; take version 1")
    return width


def _rules(q: Array, k: Array, causal: bool, blocks: Array | None) -> tuple[Any, ...]:
    mask = None if blocks is None else array_module(q).ascontiguousarray(blocks).view(np.uint8)
    return q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], q.shape[3] ** -0.5, causal, mask


def _check(q: Array, k: Array, v: Array, causal: bool, blocks: Array | None) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (len(q), q.shape[3]) != (len(k), k.shape[3]):
        raise ShapeError(f"attention kernel: q {q.shape}, k {k.shape}, v {v.shape}; they need shapes (B, H, T, D), "
                         f"(B, H_kv, S, D), (B, H_kv, S, D)")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"attention kernel: {q.shape[1]} query heads do not divide among {k.shape[1]} key heads")
    if causal and q.shape[2] != k.shape[2]:
        raise ShapeError(f"attention kernel: causal with {q.shape[2]} queries and {k.shape[2]} keys; they are the same "
                         f"tokens, so as many")
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"attention kernel: q of {q.dtype}, k of {k.dtype}, v of {v.dtype}; they need one dtype")
    sides = tuple(-(-n // MASK_SIDE) for n in (q.shape[2], k.shape[2]))
    if blocks is not None and (blocks.shape != sides or blocks.dtype != bool):
        raise ShapeError(f"attention kernel: blocks {blocks.dtype} {blocks.shape}; they need bool {sides}: one for "
                         f"{MASK_SIDE} queries and {MASK_SIDE} keys")
