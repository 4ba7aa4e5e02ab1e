"""Activations and softmax against their formulas, at the edges of what floats hold."""

import math
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.autograd import ops
from minidist.autograd.ops import arithmetic
from minidist.autograd.tensor import Parameter, tensor
from minidist.device import account, backend
from minidist.errors import ShapeError

X = np.array([-1e30, -1e4, -30.0, -3.0, -1.0, -1e-8, 0.0, 1e-8, 1.0, 3.0, 30.0, 1e4, 1e30])


def test_gelu_is_its_tanh_form():
    x = np.linspace(-6, 6, 1001)
    formula = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))
    np.testing.assert_allclose(ops.gelu(x).data, formula, rtol=1e-13, atol=1e-15)
    exact = np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    np.testing.assert_allclose(formula, exact, atol=5e-4)


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16"])
def test_a_bias_of_gelu_is_added_first_and_rounded_nowhere(kind):
    rng, dtype = np.random.default_rng(4), backend.dtype(kind)
    x, bias, dy = (rng.normal(size=shape).astype(dtype) for shape in ((5, 3, 9), (9,), (5, 3, 9)))
    wide = tensor(backend.widen(x) + backend.widen(bias), requires_grad=True)
    ops.gelu(wide).backward(backend.widen(dy))
    leaves = [tensor(array, requires_grad=True) for array in (x, bias)]
    y = ops.gelu(*leaves)
    y.backward(dy)
    np.testing.assert_array_equal(y.data, ops.gelu(wide.data).data.astype(dtype))
    near = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2.0 ** -7}[kind]
    np.testing.assert_allclose(leaves[0].grad.astype(float), wide.grad.astype(float), rtol=near, atol=near)
    np.testing.assert_allclose(leaves[1].grad.astype(float), wide.grad.sum(axis=(0, 1)), rtol=9 * near, atol=9 * near)
    with pytest.raises(ShapeError, match=r"a bias of shape \(5,\) does not fit x \(5, 3, 9\); it needs \(9,\)"):
        ops.gelu(x, bias[:5])


def test_what_gelu_with_a_bias_keeps():
    """One array of x's size, the slope; where the bias' gradient is put off, none but x's own gradient."""
    x, bias = tensor(np.ones((50, 8)), requires_grad=True), Parameter(np.ones(8))
    with account.use(account.MemoryAccount()) as memory:
        y = ops.gelu(x, bias)
        assert memory.now["activations"] == 2 * x.data.nbytes           # the result, and the slope
        slope = weakref.ref(y.node.slope)
        later = y.backward(np.ones((50, 8)), defer_weights=True)
        assert slope() is None
        later[0]()
        np.testing.assert_allclose(bias.grad, x.grad.sum(axis=0))


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
def test_large_numbers(name, kind):
    """Far out they are x or 0, and their slopes 1 or 0, without overflow."""
    limit = 1e12 if name == "gelu" else 1e30         # gelu's cube
    x = tensor(np.clip(X, -limit, limit).astype(kind), requires_grad=True)
    y = getattr(ops, name)(x)
    y.sum().backward()
    far = np.abs(x.data) >= 30
    np.testing.assert_allclose(y.data[far], np.maximum(x.data, 0)[far], atol=1e-10)
    np.testing.assert_allclose(x.grad[far], (x.data > 0)[far], atol=1e-10)
    assert np.isfinite(y.data).all() and np.isfinite(x.grad).all()


def test_silu():
    x = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(ops.silu(x).data, x / (1 + np.exp(-x)), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16"])
def test_swiglu_is_silu_times_up_to_the_bit(kind):
    rng = np.random.default_rng(3)
    gate, up, dy = (rng.normal(size=(5, 9)).astype(backend.dtype(kind)) for _ in range(3))
    results = []
    for call in (ops.swiglu, lambda a, b: ops.silu(a) * b):
        leaves = [tensor(a, requires_grad=True) for a in (gate, up)]
        y = call(*leaves)
        y.backward(dy)
        results.append([y.data, *(leaf.grad for leaf in leaves)])
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ShapeError, match="one shape"):
        ops.swiglu(gate, up[:1])


@pytest.mark.parametrize("name", ["gelu", "silu"])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 65])
def test_any_number_of_blocks_gives_the_same(name, n, monkeypatch):
    x = np.random.default_rng(0).normal(size=(n, 3))
    whole = getattr(ops, name)(x).data
    monkeypatch.setattr(arithmetic, "BLOCK_BYTES", 8 * 8)
    np.testing.assert_array_equal(getattr(ops, name)(x).data, whole)


def test_softmax_rows_stand_alone():
    """The maximum taken off is each row's own: one huge row must not push the others to zero."""
    x = np.array([[1e30, 1e30, 0.0], [1.0, 2.0, 3.0], [-1e30, -1e30, -1e30]])
    e = np.exp([-2.0, -1.0, 0.0])
    np.testing.assert_allclose(ops.softmax(x).data, [[0.5, 0.5, 0.0], e / e.sum(), [1 / 3] * 3], rtol=1e-15)
    np.testing.assert_allclose(ops.log_softmax(x).data[1:], [np.log(e / e.sum()), [np.log(1 / 3)] * 3], rtol=1e-15)


def test_softmax_with_minus_infinity():
    x = tensor(np.array([[-np.inf, 0.0, 0.0], [-np.inf, -np.inf, -np.inf]]), requires_grad=True)
    y = ops.softmax(x)
    np.testing.assert_array_equal(y.data, [[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]])
    y.backward(np.array([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]))
    np.testing.assert_array_equal(x.grad, [[0.0, -0.25, 0.25], [0.0, 0.0, 0.0]])
    assert ops.log_softmax(np.array([-np.inf, 0.0])).data.tolist() == [-np.inf, 0.0]


@given(st.integers(0, 2), st.integers(0, 99))
def test_softmax_along_any_dim(dim, seed):
    x = np.random.default_rng(seed).normal(size=(2, 3, 4)) * 10
    y = ops.softmax(x, dim=dim).data
    np.testing.assert_allclose(y.sum(axis=dim), 1.0)
    np.testing.assert_allclose(np.log(y), ops.log_softmax(x, dim=dim).data, atol=1e-12)
    np.testing.assert_allclose(y, np.exp(x) / np.exp(x).sum(axis=dim, keepdims=True))
