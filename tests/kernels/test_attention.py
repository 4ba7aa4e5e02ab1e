"""Attention: the reference against ops and differences, each version against it in float64, planted
mistakes caught."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import needs_compiler, on_each_device, planted, there, wide

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.errors import DtypeError, KernelError, ShapeError
from minidist.kernels import attention as family
from minidist.kernels import on_cpu
from minidist.kernels.attention import (
    GRADIENTS,
    SOURCE,
    VERSIONS,
    attention,
    attention_gradient,
    attention_gradient_reference,
    attention_packed,
    attention_packed_gradient,
    attention_reference,
    fastest,
    seen,
)

# Rounding, in proportion to the terms of a sum: half types round y, p and ds, and the result.
KINDS = {
    "float32": (np.float32, 2e-6),
    "float16": (np.float16, 2e-3),
    "bfloat16": (ml_dtypes.bfloat16, 1.6e-2),
}
EACH = [
    (version, kind) for version in VERSIONS for kind in KINDS if (version, kind) != (3, "float32")
]
# (B, H, H_kv, T, S, D): a token; groups; several tiles; other keys than queries; columns that are
# not whole packs.
SHAPES = [
    (1, 1, 1, 1, 1, 8),
    (2, 2, 1, 5, 5, 3),
    (1, 2, 2, 33, 33, 16),
    (1, 1, 1, 67, 67, 20),
    (1, 1, 1, 9, 70, 12),
]


def drawn(shape, kind, seed, spread=1.0):
    b, heads, kv_heads, t, s, d = shape
    rng = np.random.default_rng(seed)
    dtype = KINDS[kind][0]
    q, k, v, dy = (
        rng.normal(size=size)
        for size in ((b, heads, t, d), (b, kv_heads, s, d), (b, kv_heads, s, d), (b, heads, t, d))
    )
    return [x.astype(dtype) for x in (q * spread, k, v, dy)]


def sizes(q, k, v, dy, **rules):
    """The same sums as a score (the largest), y, dq, dk and dv, of the terms' absolute values: what
    rounding errors are in proportion to."""
    y, log_total = attention_reference(q, k, v, **rules)
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.where(
        seen(q.shape[2], k.shape[2], rules.get("causal"), rules.get("blocks")),
        q @ k.swapaxes(-1, -2) * scale,
        -np.inf,
    )
    p = np.exp(scores - np.where(log_total == -np.inf, 0, log_total)[..., None])
    ds = p * (abs(dy) @ abs(v).swapaxes(-1, -2) + abs(dy * y).sum(-1, keepdims=True)) * scale
    by_key = [
        (weights.swapaxes(-1, -2) @ abs(x)).reshape(len(k), -1, group, *k.shape[2:]).sum(2)
        for weights, x in ((ds, q), (p, dy))
    ]
    return (abs(q) @ abs(k).swapaxes(-1, -2) * scale).max(initial=0), [
        p @ abs(v),
        ds @ abs(k),
        *by_key,
    ]


def check(device, version, arrays, kind, backward=True, **rules):
    """y, log_total and the gradients, each held against the reference of the same rounded
    inputs."""
    q, k, v, dy = there(device, *arrays)
    exact = [wide(x) for x in arrays]
    mask = rules.get("blocks")
    placed = {**rules, "blocks": None if mask is None else there(device, mask)[0]}
    y, log_total = attention(q, k, v, version=version, **placed)
    ours = [y]
    rights = [attention_reference(*exact[:3], **rules)[0]]
    assert log_total.dtype == np.float32
    np.testing.assert_allclose(
        wide(log_total), attention_reference(*exact[:3], **rules)[1], rtol=1e-5, atol=1e-5
    )
    if backward:
        ours += attention_gradient(q, k, v, y, log_total, dy, version=version, **placed)
        rights += attention_gradient_reference(*exact, **rules)
    largest, terms = sizes(*exact, **rules)
    bound = KINDS[kind][1] + 2e-7 * largest  # a score is rounded before exp
    for name, got, right, size in zip(("y", "dq", "dk", "dv"), ours, rights, terms, strict=False):
        assert (got.dtype, got.shape) == (q.dtype, right.shape)
        np.testing.assert_array_less(
            abs(wide(got) - right), bound * size + 1e-6 * (kind != "float32") + 1e-30, name
        )


# ------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_reference_is_causal_attention_of_ops(kv_heads):
    rng = np.random.default_rng(0)
    q, dy = rng.normal(size=(2, 2, 2, 7, 4))
    k, v = rng.normal(size=(2, 2, kv_heads, 7, 4))
    leaves = [tensor(x, requires_grad=True) for x in (q, k, v)]
    y = ops.causal_attention(*leaves)
    y.backward(dy)
    np.testing.assert_allclose(
        attention_reference(q, k, v, causal=True)[0], y.data, rtol=1e-12, atol=1e-14
    )
    for leaf, ours in zip(
        leaves, attention_gradient_reference(q, k, v, dy, causal=True), strict=True
    ):
        np.testing.assert_allclose(ours, np.asarray(leaf.grad), rtol=1e-11, atol=1e-13)


def test_the_references_gradient_is_the_difference():
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=size) for size in ((1, 2, 66, 2), (1, 1, 3, 2), (1, 1, 3, 2))]
    blocks = np.array([[True], [False]])  # the last two queries see nothing
    dy = rng.normal(size=(1, 2, 66, 2))
    step = 1e-6
    ours = attention_gradient_reference(*arrays, dy, blocks=blocks)
    assert not ours[0][:, :, 64:].any()
    for x, dx in zip(arrays, ours, strict=True):
        for place in list(np.ndindex(x.shape))[::17] + [(0, 0, 0, 0)]:
            results = []
            for sign in (1, -1):
                x[place] += sign * step
                results.append((attention_reference(*arrays, blocks=blocks)[0] * dy).sum())
                x[place] -= sign * step
            np.testing.assert_allclose(
                dx[place], (results[0] - results[1]) / (2 * step), rtol=1e-6, atol=1e-8
            )


def test_log_total():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1, 4, 3))
    scores = np.where(seen(4, 4, True, None), q[0, 0] @ k[0, 0].T / 3**0.5, -np.inf)
    np.testing.assert_allclose(
        attention_reference(q, k, v, causal=True)[1][0, 0], np.log(np.exp(scores).sum(-1))
    )


# ------------------------------------------------------------------------------------- the versions


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize(("version", "kind"), EACH)
@given(shape=st.sampled_from(SHAPES), causal=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=1)
@example(shape=(1, 4, 2, 5, 5, 3), causal=True, seed=0)  # two key heads, each of two query heads
def test_each_version_is_the_reference(device, version, kind, shape, causal, seed):
    with on_cpu.watch(seed=seed):
        check(
            device, version, drawn(shape, kind, seed), kind, causal=causal and shape[3] == shape[4]
        )


@pytest.mark.soak
@on_each_device
@pytest.mark.parametrize(("version", "kind"), EACH)
@given(
    b=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    t=st.integers(1, 140),
    other=st.integers(1, 140),
    d=st.integers(1, 128),
    causal=st.booleans(),
    spread=st.sampled_from([1.0, 8.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_each_version_at_any_shape(
    device, version, kind, b, kv_heads, group, t, other, d, causal, spread, seed
):
    shape = (b, kv_heads * group, kv_heads, t, t if causal else other, d)
    with on_cpu.watch(seed=seed):
        check(device, version, drawn(shape, kind, seed, spread), kind, causal=causal)


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", [(2, 70, 3, 8), (2, 5, 1, 3), (1, 65, 2, 12)], ids=str)
def test_packed_is_the_same_attention(device, version, shape):
    """q, k and v in one array: the bits of three arrays that are copied out of it, forward and
    backward."""
    b, t, heads, d = shape
    rng = np.random.default_rng(0)
    qkv, dy = there(
        device, *(rng.normal(size=(b, t, n * heads * d)).astype(np.float16) for n in (3, 1))
    )

    def by_head(x):  # (B, T, H·D) -> (B, H, T, D), in its own memory
        return there(
            device,
            np.ascontiguousarray(wide(x).reshape(b, t, heads, d).swapaxes(1, 2)).astype(np.float16),
        )[0]

    with on_cpu.watch(seed=1):
        y, log_total = attention_packed(qkv, heads, version=version)
        dqkv = attention_packed_gradient(qkv, y, log_total, dy, heads, version=version)
    apart = [by_head(wide(qkv)[..., i * heads * d : (i + 1) * heads * d]) for i in range(3)]
    right, right_total = attention(*apart, causal=True, version=version)
    np.testing.assert_array_equal(wide(by_head(y)), wide(right))
    np.testing.assert_array_equal(wide(log_total), wide(right_total))
    for i, dx in enumerate(
        attention_gradient(*apart, right, right_total, by_head(dy), causal=True, version=version)
    ):
        np.testing.assert_array_equal(
            wide(by_head(wide(dqkv)[..., i * heads * d : (i + 1) * heads * d])), wide(dx)
        )


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_that_see_each_other(device, version, causal):
    """Block-sparse: 64 queries see 64 keys or do not; queries that see nothing get zeros, and give
    none."""
    blocks = np.array([[False, True], [True, False]])  # causal: the first 64 queries see nothing
    check(
        device,
        version,
        drawn((1, 1, 1, 70, 70, 8), "float16", 0),
        "float16",
        causal=causal,
        blocks=blocks,
    )


@pytest.mark.sampled(every=2)
@needs_compiler
@pytest.mark.parametrize("version", VERSIONS[1:])
def test_tiles_that_nobody_sees_are_not_read(version):
    side = {2: 32, 3: 64}[version]
    q, k, v, _ = drawn((1, 1, 1, 128, 128, 64), "float16", 0)
    tiles = 128 // side
    tile_bytes = side * 64 * 2
    for causal, blocks, visited in (
        (False, None, tiles * tiles),
        (True, None, tiles * (tiles + 1) // 2),
        (False, np.eye(2, dtype=bool), tiles * 64 // side),
    ):
        with on_cpu.watch(count=True) as launches:
            y, _ = attention(q, k, v, causal=causal, blocks=blocks, version=version)
        right, _ = attention_reference(wide(q), wide(k), wide(v), causal=causal, blocks=blocks)
        # the tiles on the diagonal are masked
        np.testing.assert_allclose(wide(y), right, atol=4e-3)
        flags = 0 if blocks is None else tiles * tiles * 128  # a byte a thread and tile
        assert launches[0].loads.bytes - flags == q.nbytes + visited * 2 * tile_bytes


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_extreme_scores(device, version):
    """Scores far above exp's range, and a maximum that grows from tile to tile, forward and
    backward."""
    kind = "float16" if version == 3 else "float32"
    arrays = drawn((1, 1, 1, 5, 70, 4), kind, 0)
    arrays[0][...] = 32
    arrays[1][...] = np.arange(70)[:, None] / 8
    check(device, version, arrays, kind)


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_nan_is_not_lost(device, version):
    q, k, v, _ = drawn((1, 1, 1, 40, 40, 8), "float16", 0)
    k[0, 0, 35, 2] = np.nan  # queries 35 and on see it
    y, log_total = attention(*there(device, q, k, v), causal=True, version=version)
    for result in (wide(y)[0, 0], wide(log_total)[0, 0, :, None]):
        assert np.isnan(result[35:]).all()
        assert np.isfinite(result[:35]).all()


@needs_compiler
def test_the_fastest_version_is_one_that_fits():
    q = np.ones((1, 1, 2, 8), np.float32)
    assert [fastest(x) for x in (q, q.astype(np.float16), np.ones((1, 1, 1, 130)))] == [2, 3, 1]
    y, _ = attention(*(np.ones((1, 1, 2, 130), np.float16) for _ in range(3)))
    np.testing.assert_array_equal(y, 1)
    y, log_total = attention(q[:, :, :0], q, q)
    assert (y.shape, log_total.shape) == ((1, 1, 0, 8), (1, 1, 0))
    for run in (attention, attention_reference):
        y, log_total = run(q, q[:, :, :0], q[:, :, :0])
        assert not y.any()
        assert (log_total == -np.inf).all()


def test_errors():
    q = np.ones((1, 4, 5, 8), np.float32)
    with pytest.raises(ShapeError, match=r"q \(1, 4, 5, 8\), k \(1, 4, 5, 6\)"):
        attention(q, q[..., :6], q[..., :6])
    with pytest.raises(ShapeError, match="4 query heads do not divide among 3 key heads"):
        attention(q, q[:, :3], q[:, :3])
    with pytest.raises(ShapeError, match="causal with 5 queries and 4 keys"):
        attention(q, q[:, :, :4], q[:, :, :4], causal=True)
    with pytest.raises(DtypeError, match="q of float32, k of float16"):
        attention(q, q.astype(np.float16), q)
    with pytest.raises(ShapeError, match=r"blocks bool \(2, 1\); they need bool \(1, 1\)"):
        attention(q, q, q, blocks=np.ones((2, 1), bool))
    with pytest.raises(KernelError, match="version 3 takes float16 and bfloat16, not float32"):
        attention(q, q, q, version=3)
    with pytest.raises(KernelError, match="at most 128 columns, not 130"):
        attention(*(np.ones((1, 1, 2, 130), np.float32) for _ in range(3)), version=2)
    with pytest.raises(KernelError, match="attention has no version 4; choose one of 1, 2, 3"):
        attention(q.astype(np.float16), q.astype(np.float16), q.astype(np.float16), version=4)
    with pytest.raises(ShapeError, match=r"qkv \(4, 5, 8\) with 2 heads"):
        attention_packed(q[0], 2)
    with pytest.raises(ShapeError, match=r"they do not fit qkv \(4, 5, 24\) with 2 heads"):
        attention_packed_gradient(np.ones((4, 5, 24), np.float32), q[0], q[0], q[0, :, :, :7], 2)
    with pytest.raises(ShapeError, match=r"y \(1, 4, 5, 8\), dy \(1, 4, 5\)"):
        attention_gradient(q, q, q, q, q[..., 0], q[..., 0])


# --------------------------------------------------------------------------------- planted mistakes

READ = (
    "        __syncthreads();                                         // before others' "
    "numbers are read\n"
)
OVERWRITE = (
    "        __syncthreads();                                         // before "
    "this stage is overwritten\n"
)
WRITTEN = (
    "        __syncwarp();                                            // its own rows "
    "of {} written\n"
)
# Source, version, words, other words, how often they stand there; what is said (None: nothing, the
# result is wrong).
MISTAKES = {
    "no barrier before k and v are read": (SOURCE, 2, READ, "", 2, "race on|nobody wrote"),
    "no barrier before k and v are overwritten": (SOURCE, 3, OVERWRITE, "", 1, "race on"),
    "nobody waits for the tiles": (
        SOURCE,
        3,
        "cp_async_wait<1>();",
        ";",
        1,
        "copy that nobody waited for",
    ),
    "no syncwarp before p is read": (
        SOURCE,
        2,
        WRITTEN.format("p_tile are"),
        "",
        1,
        "race on|nobody wrote",
    ),
    "y is not scaled down, tiles": (SOURCE, 2, "sum[r][i] *= shrink;", ";", 1, None),
    "total is not scaled down, tiles": (SOURCE, 2, "total[r] * shrink", "total[r]", 1, None),
    "y is not scaled down, fragments": (SOURCE, 3, "sum[j][half * 2] *= shrink, ", "", 1, None),
    "total is not scaled down, fragments": (SOURCE, 3, "total[half] *= shrink;", "", 1, None),
    "lanes of a row do not meet": (
        SOURCE,
        3,
        "+= __shfl_xor_sync(all_lanes, total[half], 2)",
        "*= 1.0f",
        1,
        None,
    ),
    "the mask is that of the next key": (
        SOURCE,
        3,
        "mine, key + lane % 4 * 2",
        "mine, key + 1 + lane % 4 * 2",
        1,
        None,
    ),
    "the diagonal tile counts as seen": (SOURCE, 3, "all.is_edge(first, key)", "false", 1, None),
    "scores are not scaled": (
        SOURCE,
        2,
        "score * scale : minus_infinity",
        "score : minus_infinity",
        1,
        None,
    ),
    "ds without the sum of its row": (
        GRADIENTS,
        3,
        "(dp[j][i] - my_row[i / 2])",
        "dp[j][i]",
        1,
        None,
    ),
    "dk and dv of one head of a group": (
        GRADIENTS,
        2,
        "< (kv_head + 1) * group",
        "< kv_head * group + 1",
        1,
        None,
    ),
    "no barrier before k and v are read, dq": (GRADIENTS, 3, READ, "", 3, "race on|nobody wrote"),
    "numbers of the last tile": (
        GRADIENTS,
        3,
        "[thread % side] = coming;",
        "[thread % side] += 0 * coming;",
        1,
        None,
    ),
}


@pytest.mark.sampled(every=14)
@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes(mistake, tmp_path, monkeypatch):
    source, version, old, new, times, says = MISTAKES[mistake]
    name = "SOURCE" if source is SOURCE else "GRADIENTS"
    kernels = [
        kernel
        for kernel in source.kernels
        if kernel.endswith(("<__half>", "<__half, 64>"))
        and (f"v{version}" in kernel or "row" in kernel)
    ]
    monkeypatch.setattr(family, name, planted(tmp_path, source, kernels, (old, new, times)))
    tokens = 130 if old == OVERWRITE else 70  # the third tile is the first to overwrite one
    arrays = drawn((1, 2, 1, tokens, tokens, 8), "float16", 0, spread=3.0)
    # later tiles raise the maximum
    arrays[1] *= np.linspace(0.5, 2, tokens, dtype=np.float16)[:, None]
    with pytest.raises(
        KernelError if says else AssertionError, match=says or "Not equal|not strictly ordered"
    ):
        check("cpu", version, arrays, "float16", backward=source is GRADIENTS, causal=True)
