"""Layer norm and RMS norm against their formulas."""

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.ops import arithmetic
from minidist.autograd.tensor import Parameter, tensor
from minidist.errors import ShapeError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 7, 6)) * 3 + 1
W = RNG.normal(size=6)
B = RNG.normal(size=6)


def test_values():
    mean = X.mean(-1, keepdims=True)
    var = X.var(-1, keepdims=True)
    np.testing.assert_allclose(
        ops.layer_norm(X, W, B).data, (X - mean) / np.sqrt(var + 1e-5) * W + B, rtol=1e-12
    )
    root = np.sqrt((X * X).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(ops.rms_norm(X, W, eps=1e-3).data, X / root * W, rtol=1e-12)


def test_far_from_zero_in_float32():
    """The mean goes first: var as mean(x²) - mean² would lose everything here."""
    x = (X + 10_000.0).astype("float32")
    wide = x.astype("float64")
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    ones = np.ones(6, "float32")
    zeros = np.zeros(6, "float32")
    np.testing.assert_allclose(ops.layer_norm(x, ones, zeros).data, expected, atol=2e-3)


@pytest.mark.parametrize("height", [1, 2, 34, 35])
def test_any_number_of_blocks(height, monkeypatch):
    def run():
        x = tensor(X, requires_grad=True)
        w = Parameter(W.copy())
        b = Parameter(B.copy())
        y = ops.layer_norm(x, w, b)
        y.backward(np.cos(X))
        return y.data, x.grad, w.grad, b.grad

    whole = run()
    monkeypatch.setattr(arithmetic, "BLOCK_BYTES", height * 6 * 8)
    for a, c in zip(run(), whole, strict=True):
        np.testing.assert_allclose(a, c, rtol=1e-12, atol=1e-14)


def test_empty_and_errors():
    assert ops.layer_norm(np.ones((0, 6)), W, B).shape == (0, 6)
    with pytest.raises(
        ShapeError, match=r"layer_norm: b \(5,\) does not fit x \(5, 7, 6\); it needs shape \(6,\)"
    ):
        ops.layer_norm(X, W, np.ones(5))
    with pytest.raises(ShapeError, match="rms_norm: w"):
        ops.rms_norm(X, np.ones((1, 6)))
