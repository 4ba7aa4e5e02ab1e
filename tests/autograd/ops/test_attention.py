"""Causal attention against the plain formula: blocks, kept or recomputed probabilities, groups,
extreme scores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import needs_compiler

from minidist.autograd import ops
from minidist.autograd.ops import attention
from minidist.autograd.tensor import tensor
from minidist.errors import ShapeError


def plain(q, k, v):
    """By the book, with every score in memory, as ops so that it has gradients."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        heads = np.arange(q.shape[1]) // group
        k = ops.take(k, heads, dim=1)
        v = ops.take(v, heads, dim=1)
    scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * q.shape[-1] ** -0.5
    ahead = np.triu(np.ones((q.shape[2], q.shape[2]), bool), 1)
    return ops.matmul(ops.softmax(ops.where(ahead, -np.inf, scores)), v)


def run(call, arrays):
    """Result and gradients."""
    leaves = [tensor(a, requires_grad=True) for a in arrays]
    y = call(*leaves)
    y.backward(np.random.default_rng(9).normal(size=y.shape).astype(y.dtype))
    return [y.data, *(leaf.grad for leaf in leaves)]


def compare(ours, theirs, **tolerance):
    for name, a, b in zip(("y", "q", "k", "v"), ours, theirs, strict=False):
        np.testing.assert_allclose(a, b, **tolerance, err_msg=name)


@given(
    t=st.integers(1, 11),
    block=st.integers(1, 12),
    kv=st.integers(1, 2),
    group=st.integers(1, 3),
    keep=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_block_kept_or_recomputed(t, block, kv, group, keep, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.normal(size=(2, heads, t, 4)) * 3 for heads in (kv * group, kv, kv)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_BLOCK", block)
        patch.setattr(attention, "KEEP_UP_TO", 1000 if keep else 0)
        compare(run(ops.causal_attention, arrays), run(plain, arrays), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("t", [64, 130, 300])
def test_real_sizes_in_float32(t):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(1, 2, t, 16)) for _ in range(3)]
    ours = run(ops.causal_attention, [a.astype("float32") for a in arrays])
    compare(ours, run(plain, arrays), rtol=1e-4, atol=1e-5)


def test_the_packed_form_is_the_plain_one():
    qkv = np.random.default_rng(0).normal(size=(2, 5, 3 * 2 * 4))

    def unpacked(x):
        parts = ops.transpose(ops.reshape(x, (2, 5, 3, 2, 4)), (2, 0, 3, 1, 4))
        y = ops.causal_attention(parts[0], parts[1], parts[2])
        return ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (2, 5, 8))

    compare(
        run(lambda x: ops.causal_attention_packed(x, heads=2), [qkv]),
        run(unpacked, [qkv]),
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("keep", [0, 1000])
def test_extreme_scores(keep, monkeypatch):
    """Scores of ±1e5 must neither overflow nor turn a whole row into zeros over zeros."""
    monkeypatch.setattr(attention, "KEEP_UP_TO", keep)
    q = np.zeros((1, 1, 4, 2), "float32")
    q[0, 0, :, 0] = [400.0, -400.0, 400.0, -400.0]
    k = q.copy()
    v = np.arange(8, dtype="float32").reshape(1, 1, 4, 2)
    y, dq, dk, dv = run(ops.causal_attention, [q, k, v])
    np.testing.assert_allclose(
        y[0, 0],
        [v[0, 0, 0], v[0, 0, 1], (v[0, 0, 0] + v[0, 0, 2]) / 2, (v[0, 0, 1] + v[0, 0, 3]) / 2],
    )
    assert all(np.isfinite(g).all() for g in (dq, dk, dv))


def test_nothing_ahead_is_seen():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 2, 70, 4)) for _ in range(3))
    before = ops.causal_attention(q, k, v).data
    k[:, :, 65:] = 1e3
    v[:, :, 65:] = 1e9
    np.testing.assert_array_equal(ops.causal_attention(q, k, v).data[:, :, :65], before[:, :, :65])


@pytest.mark.sampled(every=2)
@needs_compiler
@pytest.mark.parametrize("packed", [False, True])
def test_by_a_kernel(packed, monkeypatch):
    """What runs on a GPU in half precision, here on the CPU build: the plain path's result and
    gradients, rounded."""
    rng = np.random.default_rng(0)
    if packed:
        arrays = [rng.normal(size=(2, 5, 3 * 2 * 4)).astype("float16")]
    else:
        arrays = [rng.normal(size=(2, heads, 5, 4)).astype("float16") for heads in (2, 1, 1)]

    def call(*leaves):
        return (
            ops.causal_attention_packed(*leaves, heads=2)
            if packed
            else ops.causal_attention(*leaves)
        )

    asked = []
    plain_path = run(call, arrays)
    monkeypatch.setattr(
        attention, "kernel", lambda name, *arrays: asked.append(name) or attention.launcher(name)
    )
    compare(run(call, arrays), plain_path, rtol=2e-3, atol=4e-3)
    assert asked == ["attention"]


def test_errors():
    q = np.ones((2, 4, 5, 8))
    with pytest.raises(ShapeError, match=r"q \(2, 4, 5, 8\), k \(2, 4, 5, 6\)"):
        ops.causal_attention(q, q[..., :6], q[..., :6])
    with pytest.raises(
        ShapeError, match="4 query heads cannot be divided equally among 3 key heads"
    ):
        ops.causal_attention(q, q[:, :3], q[:, :3])
    with pytest.raises(
        ShapeError, match=r"qkv \(2, 4, 10\) with 2 heads; it needs \(B, T, 3·heads·D\)"
    ):
        ops.causal_attention_packed(np.ones((2, 4, 10)), heads=2)
