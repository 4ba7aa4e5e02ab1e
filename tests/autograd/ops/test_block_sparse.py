"""Block-sparse attention against dense attention under the same mask: any blocks, any side; tiles
that nobody sees."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import needs_compiler

from minidist.autograd import ops
from minidist.autograd.ops import block_sparse as module
from minidist.autograd.ops.block_sparse import SIDE, seen_keys
from minidist.autograd.tensor import tensor
from minidist.errors import ShapeError
from minidist.kernels.attention import MASK_SIDE


def dense(blocks: np.ndarray, side: int) -> Any:
    """Attention with every score in memory, under the mask that the blocks are, as ops so that it
    has gradients."""

    def call(q: Any, k: Any, v: Any) -> Any:
        heads = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        t = q.shape[2]
        k = ops.take(k, heads, dim=1)
        v = ops.take(v, heads, dim=1)
        shown = np.kron(blocks, np.ones((side, side)))[:t, :t] * np.tri(t) > 0
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * q.shape[-1] ** -0.5
        p = ops.softmax(ops.where(~shown, -np.inf, scores))  # a row of -inf alone gives zeros
        return ops.matmul(p, v)

    return call


def run(call: Any, arrays: list[np.ndarray]) -> list[Any]:
    """The result, and the gradients of q, k and v."""
    leaves = [tensor(array, requires_grad=True) for array in arrays]
    y = call(*leaves)
    y.backward(np.random.default_rng(9).normal(size=y.shape).astype(y.dtype))
    return [y.data, *(leaf.grad for leaf in leaves)]


def drawn(seed: int, t: int, kv: int = 2, group: int = 1, d: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(2, heads, t, d)) * 3 for heads in (kv * group, kv, kv)]


def check(arrays: list[np.ndarray], blocks: np.ndarray, side: int, **tolerance: float) -> None:
    """The result and the gradients are those of dense attention under the same mask."""
    ours = run(lambda *leaves: ops.sparse_attention(*leaves, blocks=blocks, side=side), arrays)
    for a, b in zip(
        ours, run(dense(blocks, side), [x.astype("float64") for x in arrays]), strict=True
    ):
        np.testing.assert_allclose(a, b, **tolerance)


@given(
    t=st.integers(1, 13),
    side=st.integers(1, 14),
    kv=st.integers(1, 2),
    group=st.integers(1, 3),
    share=st.sampled_from([0.2, 0.6, 1.0]),
    together=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_blocks(
    t: int, side: int, kv: int, group: int, share: float, together: bool, seed: int
) -> None:
    """Also blocks above the diagonal, which do not count, and queries that see nothing, which get
    zeros."""
    count = -(-t // side)
    blocks = np.random.default_rng(seed).random((count, count)) < share
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SCORES", 1 << 30 if together else 1)
        check(drawn(seed, t, kv, group), blocks, side, rtol=1e-9, atol=1e-11)


def test_queries_that_do_not_see_their_own_block() -> None:
    """They see all keys of the blocks before, without the mask of a diagonal."""
    check(drawn(2, 11), np.array([[1, 0, 0], [1, 0, 0], [1, 1, 0]], bool), 4, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("t", [64, 130, 300])
def test_blocks_of_64_in_both_precisions(t: int) -> None:
    count = -(-t // SIDE)
    blocks = np.eye(count, dtype=bool)
    blocks[:, 0] = True
    check(drawn(0, t), blocks, SIDE, rtol=1e-9, atol=1e-11)
    check([x.astype("float32") for x in drawn(0, t)], blocks, SIDE, rtol=1e-3, atol=1e-4)


def test_all_blocks_are_causal_attention() -> None:
    arrays = drawn(1, 150, kv=1, group=2)
    ours = run(lambda *leaves: ops.sparse_attention(*leaves, blocks=np.ones((3, 3), bool)), arrays)
    for a, b in zip(ours, run(ops.causal_attention, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_tiles_that_are_not_seen_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of scores, forward and backward: as many numbers as the tiles have."""
    computed = []
    original = module._probabilities
    monkeypatch.setattr(
        module, "_probabilities", lambda *args: computed.append(p := original(*args)) or p
    )
    t = 21
    side = 4
    blocks = np.eye(6, dtype=bool) | (np.arange(6) == 1)
    run(lambda *leaves: ops.sparse_attention(*leaves, blocks=blocks, side=side), drawn(0, t, kv=3))
    tiles = 5 * side * side + 1 + 3 * side * side + 1 * side  # the diagonal, and column 1 below it
    assert sum(p.size for p in computed) == 2 * (2 * 3 * tiles)  # twice: sequences × heads × tiles


def test_keys_that_are_not_seen_change_nothing() -> None:
    q, k, v = drawn(0, 12)
    blocks = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)
    before = ops.sparse_attention(q, k, v, blocks=blocks, side=4).data
    k[:, :, :4] = 1e3
    v[:, :, :4] = 1e9
    np.testing.assert_array_equal(
        ops.sparse_attention(q, k, v, blocks=blocks, side=4).data[:, :, 8:], before[:, :, 8:]
    )


def test_runs_of_keys() -> None:
    blocks = np.array([[0, 1, 1], [1, 1, 0], [1, 0, 1]], bool)
    assert seen_keys(blocks, 11, 4) == [
        (slice(4, 8), (slice(0, 8),), 4),
        (slice(8, 11), (slice(0, 4), slice(8, 11)), 3),
    ]
    assert seen_keys(np.zeros((0, 0), bool), 0, 4) == []


def test_extreme_scores() -> None:
    """Scores of ±1e5 neither overflow nor turn a row into zeros over zeros."""
    q = np.zeros((1, 1, 4, 2), "float32")
    q[0, 0, :, 0] = [400.0, -400.0, 400.0, -400.0]
    v = np.arange(8, dtype="float32").reshape(1, 1, 4, 2)
    y, *gradients = run(
        lambda *leaves: ops.sparse_attention(*leaves, blocks=np.ones((2, 2), bool), side=2),
        [q, q.copy(), v],
    )
    np.testing.assert_allclose(
        y[0, 0],
        [v[0, 0, 0], v[0, 0, 1], (v[0, 0, 0] + v[0, 0, 2]) / 2, (v[0, 0, 1] + v[0, 0, 3]) / 2],
    )
    assert all(np.isfinite(g).all() for g in gradients)


@needs_compiler
def test_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU in half precision, here on the CPU build: the array path's result and
    gradients, rounded."""
    assert SIDE == MASK_SIDE
    arrays = [
        np.random.default_rng(0).normal(size=(1, heads, 70, 4)).astype("float16")
        for heads in (2, 1, 1)
    ]
    blocks = np.array([[True, True], [False, True]])
    by_arrays = run(lambda *leaves: ops.sparse_attention(*leaves, blocks=blocks), arrays)
    monkeypatch.setattr(module, "fits_kernel", lambda q: True)
    by_kernel = run(lambda *leaves: ops.sparse_attention(*leaves, blocks=blocks), arrays)
    for a, b in zip(by_kernel, by_arrays, strict=True):
        np.testing.assert_allclose(a.astype("float64"), b.astype("float64"), rtol=2e-3, atol=4e-3)


def test_errors() -> None:
    q = np.ones((1, 2, 5, 4))
    with pytest.raises(
        ShapeError,
        match=r"blocks \(2, 2\) of side 2; 5 tokens need a side .* of shape \(3, 3\)",
    ):
        ops.sparse_attention(q, q, q, blocks=np.ones((2, 2), bool), side=2)
    with pytest.raises(ShapeError, match="of side 0; 5 tokens need a side of at least 1"):
        ops.sparse_attention(q, q, q, blocks=np.ones((2, 2), bool), side=0)
    with pytest.raises(
        ShapeError, match="sparse_attention: 2 query heads cannot be divided equally among 3"
    ):
        k = np.ones((1, 3, 5, 4))
        ops.sparse_attention(q, k, k, blocks=np.ones((1, 1), bool))
