"""Attention and its gradients: the NumPy reference, then the launchers of attention.cu.

    y, log_total = attention(q, k, v, causal=True)                     # the fastest version that fits
    dq, dk, dv = attention_gradient(q, k, v, y, log_total, dy, causal=True)
    y, log_total = attention_packed(qkv, heads)                        # q, k and v in one array, as they lie

q (B, H, T, D), k and v (B, H_kv, S, D), float32, float16 or bfloat16, contiguous, NumPy (CPU build)
or CuPy. H / H_kv query heads in a row share one key head. log_total (B, H, T), float32, is
log(sum(exp(scores))) of each query; backward needs only this, the inputs and y. `blocks`
(ceil(T / 64), ceil(S / 64)), bool: which 64 queries see which 64 keys, for all heads (block-sparse
attention); a query without keys gets zeros. Sums are float32.
Cost: 4·B·H·T·S·D operations forward, less those of skipped tiles: tiles after all of their queries,
or False in `blocks`. Speed: benchmarks/results/gpu/README.md.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.device.backend import LOW_PRECISION, Array, array_module
from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels.checks import check_version
from minidist.kernels.loader import FLOATS, Source, begin_aligned, c_type, launch

VERSIONS = (1, 2, 3)
HALVES = FLOATS[1:]
MASK_SIDE = 64  # queries and keys of a block of the mask
WIDTHS = (64, 128)  # of a head, rounded up: versions 2 and 3
SOURCE = Source(
    "attention.cu",
    [f"attention_v1<{kind}>" for kind in FLOATS]
    + [f"attention_v2<{kind}, {width}>" for kind in FLOATS for width in WIDTHS]
    + [f"attention_v3<{kind}, {width}>" for kind in HALVES for width in WIDTHS],
)
GRADIENTS = Source(
    "attention_gradient.cu",
    [f"attention_{name}<{kind}>" for name in ("row", "dq_v1", "dkv_v1") for kind in FLOATS]
    + [
        f"attention_{name}_v{version}<{kind}, {width}>"
        for name in ("dq", "dkv")
        for version, kinds in ((2, FLOATS), (3, HALVES))
        for kind in kinds
        for width in WIDTHS
    ],
)


# --------------------------------------------------------------------------------------- references


def _repeated(x: np.ndarray, heads: int) -> np.ndarray:
    """Repeat each key head for the query heads that share it: (B, H_kv, S, D) -> (B, H, S, D)."""
    return np.repeat(x, heads // x.shape[1], axis=1)


def seen(queries: int, keys: int, causal: bool, blocks: np.ndarray | None) -> np.ndarray:
    """Return (T, S), bool: whether a query sees a key."""
    mask = np.ones((queries, keys), bool)
    if causal:
        mask &= np.arange(keys) <= np.arange(queries)[:, None]
    if blocks is not None:
        mask &= np.repeat(np.repeat(blocks, MASK_SIDE, 0), MASK_SIDE, 1)[:queries, :keys].astype(
            bool
        )
    return mask


def attention_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    blocks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return y (B, H, T, D) and log_total (B, H, T)."""
    scores = q @ _repeated(k, q.shape[1]).swapaxes(-1, -2) * q.shape[-1] ** -0.5
    scores = np.where(seen(q.shape[2], k.shape[2], causal, blocks), scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(top == -np.inf, 0, top)
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    y = p / np.where(total == 0, 1, total) @ _repeated(v, q.shape[1])
    with np.errstate(divide="ignore"):
        return y, (np.log(total) + top)[..., 0]


def attention_gradient_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dy: np.ndarray,
    *,
    causal: bool = False,
    blocks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return dq, dk, dv; the formulas are in attention_gradient.cu."""
    heads = q.shape[1]
    scale = q.shape[-1] ** -0.5
    y, log_total = attention_reference(q, k, v, causal=causal, blocks=blocks)
    k_all = _repeated(k, heads)
    v_all = _repeated(v, heads)
    mask = seen(q.shape[2], k.shape[2], causal, blocks)
    scores = np.where(mask, q @ k_all.swapaxes(-1, -2) * scale, -np.inf)
    p = np.exp(scores - np.where(log_total == -np.inf, 0, log_total)[..., None])
    ds = p * (dy @ v_all.swapaxes(-1, -2) - (dy * y).sum(axis=-1, keepdims=True))
    dk = ds.swapaxes(-1, -2) @ q * scale
    dv = p.swapaxes(-1, -2) @ dy
    shared = (k.shape[0], k.shape[1], heads // k.shape[1], *k.shape[2:])
    return ds @ k_all * scale, dk.reshape(shared).sum(axis=2), dv.reshape(shared).sum(axis=2)


# ---------------------------------------------------------------------------------------- launchers


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    blocks: Array | None = None,
    version: int | None = None,
) -> tuple[Array, Array]:
    """Return y, of q's shape and dtype, and log_total (B, H, T), float32.

    Raises: ShapeError, DtypeError; KernelError if `version` does not fit.
    """
    xp = array_module(q, k, v)
    _check(q, k, v, causal, blocks)
    y = xp.zeros_like(q)
    log_total = xp.full(q.shape[:3], -np.inf, np.float32)
    if q.size and k.size:
        rules = _apart_rules(q, k, causal, blocks)
        _forward(_version("attention", version, rules, q), (q, k, v, y, log_total), rules)
    return y, log_total


def attention_packed(qkv: Array, heads: int, *, version: int | None = None) -> tuple[Array, Array]:
    """Compute causal attention on one array (B, T, 3·H·D) without a copy; it holds q, then k, then
    v of all heads.

    Returns: y (B, T, H·D) and log_total (B, H, T). Raises: ShapeError; KernelError if `version`
    does not fit.
    """
    xp = array_module(qkv)
    rules = _packed_rules(qkv, heads)
    y = xp.zeros((*qkv.shape[:2], qkv.shape[2] // 3), qkv.dtype)
    log_total = xp.full((len(qkv), heads, qkv.shape[1]), -np.inf, np.float32)
    if qkv.size:
        _forward(_version("attention", version, rules, qkv), (qkv, qkv, qkv, y, log_total), rules)
    return y, log_total


def attention_gradient(
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    log_total: Array,
    dy: Array,
    *,
    causal: bool = False,
    blocks: Array | None = None,
    version: int | None = None,
) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv, with the shapes and the dtype of q, k, v. y, log_total: from `attention`;
    dy: the gradient of y.

    Raises: ShapeError, DtypeError; KernelError if `version` does not fit.
    """
    xp = array_module(q, k, v)
    _check(q, k, v, causal, blocks)
    if not y.shape == dy.shape == q.shape or log_total.shape != q.shape[:3]:
        raise ShapeError(
            f"attention kernel: y {y.shape}, dy {dy.shape}, log_total {log_total.shape}; "
            f"they need q's shape {q.shape}, and {q.shape[:3]}"
        )
    dq, dk, dv = (xp.zeros_like(x) for x in (q, k, v))
    if q.size and k.size:
        rules = _apart_rules(q, k, causal, blocks)
        _backward(
            _version("attention_gradient", version, rules, q),
            (q, k, v, y, log_total, dy),
            (dq, dk, dv),
            rules,
        )
    return dq, dk, dv


def attention_packed_gradient(
    qkv: Array, y: Array, log_total: Array, dy: Array, heads: int, *, version: int | None = None
) -> Array:
    """Return the gradient of qkv (B, T, 3·H·D). y, log_total: from `attention_packed`. Raises: as
    attention_gradient."""
    rules = _packed_rules(qkv, heads)
    if (
        not y.shape == dy.shape == (*qkv.shape[:2], qkv.shape[2] // 3)
        or log_total.size * rules.width != y.size
    ):
        raise ShapeError(
            f"attention kernel: y {y.shape}, dy {dy.shape}, log_total {log_total.shape}; "
            f"they do not fit qkv {qkv.shape} with {heads} heads"
        )
    dqkv = array_module(qkv).zeros_like(qkv)
    if qkv.size:
        version = _version("attention_gradient", version, rules, qkv)
        _backward(version, (qkv, qkv, qkv, y, log_total, dy), (dqkv, dqkv, dqkv), rules)
    return dqkv


@dataclass(frozen=True)
class Rules:
    """The sizes and rules of a call. packed: q, k and v are one array, as in attention_packed."""

    batch: int
    heads: int
    queries: int
    width: int
    kv_heads: int
    keys: int
    causal: bool
    blocks: Array | None = None
    packed: bool = False

    def args(self, xp: Any) -> tuple[Any, ...]:
        """Return the sizes and rules as the kernels take them."""
        mask = None if self.blocks is None else xp.ascontiguousarray(self.blocks).view(np.uint8)
        return (
            self.heads,
            self.kv_heads,
            self.queries,
            self.keys,
            self.width,
            self.width**-0.5,
            self.causal,
            mask,
            self.packed,
        )

    def tile(self) -> int:
        """The width of a tile that holds a head; 0 if none does."""
        return next((width for width in WIDTHS if self.width <= width), 0)

    def whole(self, *arrays: Array) -> bool:
        """Return whether every row of a head begins at a multiple of 16 bytes."""
        return self.width * arrays[0].dtype.itemsize % 16 == 0 and begin_aligned(*arrays)


def _forward(version: int, arrays: tuple[Array, ...], rules: Rules) -> None:
    q = arrays[0]
    xp = array_module(arrays[0])
    kind = c_type(q)
    width = rules.tile()
    all_heads = rules.batch * rules.heads
    if version == 1:
        scores = xp.empty((all_heads, rules.queries, rules.keys), np.float32)
        launch(
            SOURCE,
            f"attention_v1<{kind}>",
            grid=(-(-rules.queries // 64), all_heads),
            block=64,
            args=(*arrays, scores, *rules.args(xp)),
        )
    elif version == 2:
        launch(
            SOURCE,
            f"attention_v2<{kind}, {width}>",
            grid=(-(-rules.queries // 32), all_heads),
            block=128,
            args=(*arrays, *rules.args(xp)),
            shared=32 * (3 * width + 1 + 32) * 4,
        )
    else:
        launch(
            SOURCE,
            f"attention_v3<{kind}, {width}>",
            grid=(-(-rules.queries // 64), all_heads),
            block=128,
            args=(*arrays, *rules.args(xp), rules.whole(*arrays[:4])),
            shared=4 * _tile_bytes(width),
        )


def _backward(
    version: int, given: tuple[Array, ...], results: tuple[Array, ...], rules: Rules
) -> None:
    q, k, v, y, log_total, dy = given
    row = array_module(q).empty_like(log_total)
    launch(
        GRADIENTS,
        f"attention_row<{c_type(q)}>",
        grid=-(-row.size // 16),
        block=128,
        args=(
            y,
            dy,
            row,
            row.size,
            rules.heads,
            rules.queries,
            rules.width,
            rules.packed,
            rules.whole(y, dy),
        ),
    )
    run = _naive_gradient if version == 1 else _tiled_gradient
    run(version, (q, k, v, dy, log_total, row), results, rules)


def _naive_gradient(
    version: int, given: tuple[Array, ...], results: tuple[Array, ...], rules: Rules
) -> None:
    q, _, _, dy = given[:4]
    kind = c_type(q)
    all_heads = rules.batch * rules.heads
    xp = array_module(q)
    p, ds = (xp.empty((all_heads, rules.queries, rules.keys), np.float32) for _ in range(2))
    launch(
        GRADIENTS,
        f"attention_dq_v{version}<{kind}>",
        grid=(-(-rules.queries // 64), all_heads),
        block=64,
        args=(*given, results[0], p, ds, *rules.args(xp)),
    )
    launch(
        GRADIENTS,
        f"attention_dkv_v{version}<{kind}>",
        block=64,
        grid=(-(-rules.keys * rules.width // 64), rules.batch * rules.kv_heads),
        args=(
            q,
            dy,
            p,
            ds,
            *results[1:],
            rules.heads,
            rules.kv_heads,
            rules.queries,
            rules.keys,
            rules.width,
            rules.packed,
        ),
    )


def _tiled_gradient(
    version: int, given: tuple[Array, ...], results: tuple[Array, ...], rules: Rules
) -> None:
    width = rules.tile()
    xp = array_module(given[0])
    side, whole = (32, ()) if version == 2 else (64, (rules.whole(*given[:4], *results),))
    for name, rows, heads, outputs, scores in (
        ("dq", rules.queries, rules.heads, results[:1], 1),
        ("dkv", rules.keys, rules.kv_heads, results[1:], 2),
    ):
        four = 4 * 32 * (width + 1) * 4 + scores * 32 * 32 * 4  # tiles of numbers, and of scores
        launch(
            GRADIENTS,
            f"attention_{name}_v{version}<{c_type(given[0])}, {width}>",
            grid=(-(-rows // side), rules.batch * heads),
            block=128,
            args=(*given, *outputs, *rules.args(xp), *whole),
            shared=four if version == 2 else 6 * _tile_bytes(width),
        )


def _tile_bytes(width: int) -> int:
    """Return the bytes of a tile of version 3 in shared memory."""
    return 64 * (width + 8) * 2


def fastest(q: Array) -> int:
    """Return the fastest version that fits: tensor cores for half types; version 1 if a head is
    wider than a tile."""
    return _fastest(q, q.shape[-1])


def _fastest(q: Array, width: int) -> int:
    return 1 if width > WIDTHS[-1] else 3 if q.dtype in LOW_PRECISION else 2


def _version(name: str, version: int | None, rules: Rules, q: Array) -> int:
    """Return the version to run. Raises: KernelError if the wanted one does not take q's dtype or
    the width of its heads."""
    check_version(name, version, VERSIONS)
    if version == 3 and q.dtype not in LOW_PRECISION:
        raise KernelError(
            f"attention version 3 takes float16 and bfloat16, not {q.dtype}; take version 2"
        )
    if version is not None and version > 1 and not rules.tile():
        raise KernelError(
            f"attention version {version} takes heads of at most {WIDTHS[-1]} columns, "
            f"not {rules.width}; take version 1"
        )
    return version or _fastest(q, rules.width)


def _apart_rules(q: Array, k: Array, causal: bool, blocks: Array | None) -> Rules:
    b, heads, t, d = q.shape
    return Rules(b, heads, t, d, k.shape[1], k.shape[2], causal, blocks)


def _packed_rules(qkv: Array, heads: int) -> Rules:
    """Return the rules of a packed call. Raises: ShapeError if qkv does not hold three times
    `heads` heads."""
    if qkv.ndim != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise ShapeError(
            f"attention kernel: qkv {qkv.shape} with {heads} heads; it needs (B, T, 3·heads·D)"
        )
    b, t, n = qkv.shape
    return Rules(b, heads, t, n // (3 * heads), heads, t, causal=True, packed=True)


def _check(q: Array, k: Array, v: Array, causal: bool, blocks: Array | None) -> None:
    if (
        q.ndim != 4
        or k.ndim != 4
        or k.shape != v.shape
        or (len(q), q.shape[3]) != (len(k), k.shape[3])
    ):
        raise ShapeError(
            f"attention kernel: q {q.shape}, k {k.shape}, v {v.shape}; they need shapes (B, H, "
            "T, D), (B, H_kv, S, D), (B, H_kv, S, D)"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"attention kernel: {q.shape[1]} query heads do not divide among {k.shape[1]} key heads"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"attention kernel: causal with {q.shape[2]} queries and {k.shape[2]} keys; they are "
            "the same tokens, so as many"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(
            f"attention kernel: q of {q.dtype}, k of {k.dtype}, v of {v.dtype}; they need one dtype"
        )
    sides = tuple(-(-n // MASK_SIDE) for n in (q.shape[2], k.shape[2]))
    if blocks is not None and (blocks.shape != sides or blocks.dtype != bool):
        raise ShapeError(
            f"attention kernel: blocks {blocks.dtype} {blocks.shape}; they need bool {sides}: "
            f"one for {MASK_SIDE} queries and {MASK_SIDE} keys"
        )
