"""Reshape, transpose, slices, concat, split: values in order, views, errors."""

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.errors import ShapeError

X = np.arange(24.0).reshape(2, 3, 4)


def test_values():
    np.testing.assert_array_equal(ops.reshape(X, (4, -1)).data, X.reshape(4, 6))
    np.testing.assert_array_equal(ops.transpose(X, (2, 0, 1)).data, X.transpose(2, 0, 1))
    np.testing.assert_array_equal(ops.transpose(X, (-1, 0, 1)).data, X.transpose(2, 0, 1))
    np.testing.assert_array_equal(ops.transpose(X).data, X.T)
    np.testing.assert_array_equal(ops.getitem(X, (0, slice(1, None))).data, X[0, 1:])
    np.testing.assert_array_equal(ops.concat([X, X[:1]], dim=0).data, np.concatenate([X, X[:1]]))
    np.testing.assert_array_equal(
        ops.concat([X, X[..., :1]], dim=-1).data, np.concatenate([X, X[..., :1]], -1)
    )


def test_split_into_equal_parts_or_sizes():
    for ours, theirs in (
        (ops.split(X, 3, dim=1), np.split(X, 3, axis=1)),
        (ops.split(X, [1, 0, 3], dim=-1), np.split(X, [1, 1], axis=2)),
    ):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.data, b)
            assert b.size == 0 or np.shares_memory(a.data, X)


def test_errors():
    with pytest.raises(
        ShapeError, match=r"split: dim 1 of shape \(2, 3, 4\) cannot be divided into 2"
    ):
        ops.split(X, 2, dim=1)
    with pytest.raises(ShapeError, match=r"sizes \[1, 1\] do not add up to dim 1"):
        ops.split(X, [1, 1], dim=1)
    with pytest.raises(ShapeError, match="nothing|no arrays"):
        ops.concat([])
    with pytest.raises(ShapeError, match=r"getitem: index 7 does not fit shape \(2, 3, 4\)"):
        ops.getitem(X, 7)


def test_elements_picked_twice_get_both_gradients():
    x = tensor(np.zeros(3), requires_grad=True)
    x[np.array([0, 2, 2])].backward(np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(x.grad, [1.0, 0.0, 5.0])


def test_split_sizes_of_a_small_dtype_are_added_as_numbers():
    first, second = ops.split(np.arange(200.0), np.array([100, 100], np.int8))
    assert first.data[0] == 0.0 and second.data[0] == 100.0
