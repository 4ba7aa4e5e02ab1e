"""Top-k, places in runs, grouped products, there and back: values and errors. Gradients:
test_gradients.py."""

import fake_gpu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_checks import needs_compiler

from minidist.autograd import ops
from minidist.autograd.ops import experts
from minidist.autograd.ops.experts import place_rows, places_in_runs, top_positions
from minidist.autograd.tensor import tensor
from minidist.device.backend import dtype, to_host
from minidist.errors import ShapeError


def test_the_largest_first_and_of_equals_the_first() -> None:
    scores = np.array([[1.0, 5.0, 5.0, 2.0], [3.0, 0.0, -1.0, 3.0]])
    assert top_positions(scores, 2).tolist() == [[1, 2], [0, 3]]
    assert top_positions(scores.astype("float16"), 3).tolist() == [[1, 2, 3], [0, 3, 1]]
    assert top_positions(np.zeros((0, 4)), 2).shape == (0, 2)


@given(st.lists(st.integers(0, 4), max_size=20))
def test_places_count_the_equal_ids_before(ids: list[int]) -> None:
    expected = [ids[:place].count(one) for place, one in enumerate(ids)]
    assert places_in_runs(np.array(ids, int)).tolist() == expected


def test_each_run_of_rows_has_its_own_matrix() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3))
    w = rng.normal(size=(3, 3, 2))
    y = ops.grouped_linear(x, w, counts=[2, 0, 3]).data
    np.testing.assert_allclose(y, np.concatenate([x[:2] @ w[0], x[2:] @ w[2]]))


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16"])
def test_there_and_back_is_take_times_and_add_to_the_bit(kind: str) -> None:
    """Tokens 0 and 3 go to two experts, 1 to one, and 2 to none; weights are rounded before they
    are added."""
    rng = np.random.default_rng(1)
    chosen = np.array([[2, 0], [1, 0], [0, 1], [0, 2]])
    kept = np.array([[1, 1], [0, 1], [0, 0], [1, 1]], bool)
    placement = place_rows(chosen, kept, experts=3)
    assert placement.tokens.tolist() == [0, 1, 3, 0, 3]
    assert placement.experts.tolist() == [0, 0, 0, 2, 2]
    assert placement.counts.tolist() == [3, 0, 2]
    assert placement.slots.tolist() == [[0, 3], [-1, 1], [-1, -1], [2, 4]]
    x, dy, weights = (rng.normal(size=size).astype(dtype(kind)) for size in ((4, 3), (4, 3), 5))
    scatter = np.eye(4, dtype=x.dtype)[:, placement.tokens]  # (tokens, rows)
    results = []
    for plain in (False, True):
        leaves = [tensor(x, requires_grad=True), tensor(weights, requires_grad=True)]
        rows = (
            ops.take(leaves[0], placement.tokens) if plain else ops.to_experts(leaves[0], placement)
        )
        y = (
            ops.matmul(scatter, rows * leaves[1].reshape(5, 1))
            if plain
            else ops.from_experts(rows, leaves[1], placement)
        )
        y.backward(dy)
        results.append([rows.data, y.data, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-15)


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_on_a_gpu_by_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels round once where the plain path rounds several times."""
    cupy = fake_gpu.install(monkeypatch)
    asked = []
    find = experts.kernel
    monkeypatch.setattr(
        experts,
        "kernel",
        lambda name, *arrays: find(name, *arrays) and (asked.append(name) or find(name, *arrays)),
    )
    rng = np.random.default_rng(1)
    bound = {"float32": 1e-6, "bfloat16": 2e-2}[kind]
    chosen = rng.permuted(np.tile(np.arange(4), (7, 1)), axis=1)[:, :2]
    kept = rng.random((7, 2)) < 0.7
    x, dy, weights = (
        rng.normal(size=size).astype(dtype(kind)) for size in ((7, 5), (7, 5), kept.sum())
    )
    results = []
    for put in (np.array, cupy.asarray):
        placement = place_rows(put(chosen), put(kept), experts=4)
        leaves = [tensor(put(array), requires_grad=True) for array in (x, weights)]
        y = ops.from_experts(ops.to_experts(leaves[0], placement), leaves[1], placement)
        y.backward(put(dy))
        results.append(
            [
                to_host(array).astype(np.float64)
                for array in (y.data, *(leaf.grad for leaf in leaves))
            ]
        )
    for want, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, atol=bound * np.abs(want).max())
    assert asked == ["to_experts", "from_experts", "from_experts_gradient", "from_experts"]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ShapeError, match=r"counts \[2, 2\] do not fit 5 rows of 2 groups; pass one count per group"
    ):
        ops.grouped_linear(np.ones((5, 3)), np.ones((2, 3, 4)), counts=[2, 2])
    with pytest.raises(ShapeError, match=r"x \(5, 3\) does not fit w \(2, 4, 3\)"):
        ops.grouped_linear(np.ones((5, 3)), np.ones((2, 4, 3)), counts=[2, 3])
    placement = place_rows(np.array([[0], [1]]), experts=2)
    with pytest.raises(ShapeError, match=r"x \(3, 1\) does not fit 2 tokens"):
        ops.to_experts(np.ones((3, 1)), placement)
    with pytest.raises(ShapeError, match=r"results \(2, 1\) and weights \(3,\) do not fit 2 rows"):
        ops.from_experts(np.ones((2, 1)), np.ones(3), placement)
    with pytest.raises(ShapeError, match="the same shape"):
        place_rows(np.ones((2, 1), int), np.ones((1, 2), bool), experts=2)


@pytest.mark.parametrize("dtype", ["int8", ">i2", "uint8", "uint64"])
def test_counts_and_choices_of_any_integer_dtype(dtype: str) -> None:
    """Their sums and differences are of whole numbers, not of the dtype."""
    x = np.random.default_rng(0).normal(size=(200, 2))
    w = np.random.default_rng(1).normal(size=(3, 2, 2))
    counts = np.array([100, 90, 10])
    expected = ops.grouped_linear(x, w, counts=counts.tolist()).data
    small = ops.grouped_linear(x, w, counts=counts.astype(dtype)).data
    np.testing.assert_array_equal(small, expected)
    chosen = np.array([[2, 0], [1, 2], [0, 1]])
    placed = place_rows(chosen.astype(dtype), experts=3)
    assert placed.experts.tolist() == place_rows(chosen, experts=3).experts.tolist()
    assert placed.counts.tolist() == [2, 2, 2]
