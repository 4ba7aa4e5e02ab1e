"""Matrix products: values, any leading dims, errors."""

import fake_gpu
import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter
from minidist.device import backend, cublas
from minidist.errors import ShapeError

RNG = np.random.default_rng(0)


def test_values():
    x = RNG.normal(size=(2, 3, 4))
    w = RNG.normal(size=(4, 5))
    b = RNG.normal(size=5)
    np.testing.assert_allclose(ops.linear(x, w, b).data, x @ w + b, rtol=1e-13)
    np.testing.assert_allclose(ops.linear(x, w).data, x @ w, rtol=1e-13)
    np.testing.assert_allclose(ops.linear(x[0, 0], w).data, x[0, 0] @ w, rtol=1e-13)
    np.testing.assert_allclose(
        ops.linear(x.transpose(1, 0, 2), w).data, x.transpose(1, 0, 2) @ w, rtol=1e-13
    )
    np.testing.assert_allclose(ops.unembed(x, w.T).data, x @ w, rtol=1e-13)
    assert ops.linear(x[:0], w, b).shape == (0, 3, 5)


def test_the_bias_gradient_of_many_rows_in_low_precision():
    kind = backend.dtype("bfloat16")
    b = Parameter(np.zeros(2, kind))
    y = ops.linear(np.zeros((4096, 3), kind), np.zeros((3, 2), kind), b)
    y.backward(np.ones((4096, 2), kind))
    np.testing.assert_array_equal(b.grad.astype("float32"), [4096.0, 4096.0])


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: ops.linear(np.ones((2, 3)), np.ones((4, 5))),
            r"linear: x \(2, 3\) does not fit w \(4, 5\)",
        ),
        (
            lambda: ops.linear(np.ones((2, 4)), np.ones((4, 5)), np.ones(4)),
            r"bias \(4,\).*needs shape \(5,\)",
        ),
        (
            lambda: ops.unembed(np.ones((2, 3)), np.ones((3, 5))),
            r"unembed: x \(2, 3\) does not fit the table \(3, 5\)",
        ),
        (lambda: ops.matmul(np.ones(3), np.ones((3, 5))), r"matmul: \(3,\) @ \(3, 5\).*two dims"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_low_precision_on_a_gpu_is_multiplied_as_it_is(monkeypatch):
    """By tensor cores: the product is rounded, then the bias added and rounded again. A sum is one
    operation there."""
    cupy = fake_gpu.install(monkeypatch)
    kind = backend.dtype("bfloat16")
    rng = np.random.default_rng(4)
    x, w, b = (rng.normal(size=shape).astype(kind) for shape in ((2, 3, 5), (5, 4), (4,)))
    multiplied = []
    real = cublas.Products.multiply
    monkeypatch.setattr(
        cublas.Products,
        "multiply",
        lambda self, a, b, out=None: multiplied.append(a.dtype) or real(self, a, b, out),
    )
    there = [cupy.asarray(array) for array in (x, w, b)]
    product = (x.astype("float32").reshape(-1, 5) @ w.astype("float32")).astype(kind)
    y = ops.linear(*there).data
    np.testing.assert_array_equal(
        backend.to_host(y), (product.astype("float32") + b).astype(kind).reshape(2, 3, 4)
    )
    assert multiplied == [kind]
    np.testing.assert_array_equal(
        backend.to_host(ops.add(y, y).data), ops.add(*[backend.to_host(y)] * 2).data
    )
    np.testing.assert_array_equal(
        backend.to_host(ops.mul(y, y).data), ops.mul(*[backend.to_host(y)] * 2).data
    )
