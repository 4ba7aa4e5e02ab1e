"""Reductions against NumPy, and what low precision would get wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.device import backend
from minidist.errors import ShapeError


@pytest.mark.parametrize("name", ["sum", "mean", "max", "var"])
@given(
    shape=st.lists(st.integers(1, 3), max_size=3).map(tuple), keepdims=st.booleans(), data=st.data()
)
def test_values(name, shape, keepdims, data):
    x = np.random.default_rng(0).normal(size=shape)
    some = (
        st.lists(st.sampled_from(range(len(shape))), unique=True).map(tuple) if shape else st.none()
    )
    dims = data.draw(st.none() | some)
    result = getattr(ops, name)(x, dim=dims, keepdims=keepdims)
    np.testing.assert_allclose(
        result.data, getattr(np, name)(x, axis=dims, keepdims=keepdims), rtol=1e-12, atol=1e-15
    )


def test_one_dim_and_wrong_dims():
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(ops.sum(x, dim=-1).data, [3.0, 12.0])
    for dim in (2, -3, (0, 5)):
        with pytest.raises(ShapeError, match=r"an array of shape \(2, 3\) has no dim"):
            ops.sum(x, dim=dim)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_long_sums_in_low_precision(kind):
    ones = np.ones((4096, 2)).astype(backend.dtype(kind))
    assert float(ops.sum(ones[:, 0]).data) == 4096.0
    assert float(ops.mean(ones).data) == 1.0
    np.testing.assert_array_equal(ops.sum(ones, dim=0).data.astype("float32"), [4096.0, 4096.0])


def test_ties_share_the_gradient_of_a_maximum():
    x = tensor(np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), requires_grad=True)
    ops.max(x, dim=1).backward(np.array([1.0, 3.0]))
    np.testing.assert_array_equal(x.grad, [[0.0, 0.5, 0.5], [1.0, 1.0, 1.0]])


def test_integers_are_summed_as_integers():
    assert ops.sum(np.arange(5)).dtype == np.int64 and ops.sum(np.arange(5)).item() == 10
