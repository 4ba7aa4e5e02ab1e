"""Tensors: making them, their operators and views, what they refuse."""

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, Tensor, tensor
from minidist.device import account
from minidist.errors import ConfigError, ShapeError


def test_making_tensors():
    array = np.arange(6.0).reshape(2, 3)
    x = tensor(array)
    assert x.data is array and (x.shape, x.ndim, x.size, len(x)) == ((2, 3), 2, 6, 2)
    assert tensor([1, 2]).dtype == np.int64 and tensor(2.5).dtype == np.float64
    assert tensor(x, dtype="bfloat16").dtype.name == "bfloat16"
    assert tensor(array, requires_grad=True).requires_grad
    with pytest.raises(ConfigError, match="unknown dtype 'float33'; choose one of float64"):
        tensor(array, dtype="float33")


def test_operators_match_numpy():
    a = np.array([[1.0, 2.0], [3.0, 4.0]])
    b = np.array([[0.5, 1.5], [2.5, 3.5]])
    x = tensor(a)
    y = tensor(b)
    for ours, theirs in [
        (x + y, a + b),
        (x - y, a - b),
        (x * y, a * b),
        (x / y, a / b),
        (x @ y, a @ b),
        (-x, -a),
        (x**3, a**3),
        (2.0 + x, 2 + a),
        (2.0 - x, 2 - a),
        (2.0 / x, 2 / a),
        (b + x, b + a),
        (b - x, b - a),
        (b * x, b * a),
        (b @ x, b @ a),
        (x[0], a[0]),
        (x[:, 1], a[:, 1]),
        (x.reshape(4), a.reshape(4)),
        (x.reshape((1, -1)), a.reshape(1, 4)),
        (x.transpose(), a.T),
        (x.transpose(1, 0), a.T),
        (x.transpose((0, 1)), a),
        (x.sum(), a.sum()),
        (x.sum(0), a.sum(0)),
        (x.mean(1, keepdims=True), a.mean(1, keepdims=True)),
    ]:
        assert isinstance(ours, Tensor)
        np.testing.assert_array_equal(ours.data, theirs)


def test_rows_one_by_one():
    x = tensor(np.arange(4.0).reshape(2, 2), requires_grad=True)
    first, second = x
    assert first.data.tolist() == [0.0, 1.0] and second.requires_grad


def test_views_share_memory():
    x = tensor(np.ones((2, 3)))
    for y in (x.reshape(3, 2), x.transpose(), x[0], x.detach()):
        assert np.shares_memory(y.data, x.data)


def test_item_and_detach():
    x = tensor(np.array([2.0]), requires_grad=True)
    assert (x * 2.0).item() == 4.0 and not (x * 2.0).detach().requires_grad
    with pytest.raises(ShapeError, match=r"shape \(2,\)"):
        tensor(np.ones(2)).item()


def test_no_silent_arrays():
    with pytest.raises(TypeError, match="use its .data"):
        np.asarray(tensor(np.ones(2)))


def test_parameters_are_counted_as_such():
    with account.use(account.MemoryAccount()) as memory:
        p = Parameter(np.ones(100), name="p")
        assert memory.now["parameters"] == 800
        p.data = np.ones(50)
        assert memory.now["parameters"] == 400
        (p * 2.0).sum().backward()
        assert memory.now["gradients"] == 400
        p.zero_grad()
        assert memory.now["gradients"] == 0


@pytest.mark.parametrize("name", ["relu", "tanh", "exp", "log", "sqrt", "max"])
def test_a_method_is_the_op_of_its_name(name: str) -> None:
    numbers = np.array([[0.5, 2.0], [3.0, 0.25]])
    x, y = tensor(numbers, requires_grad=True), tensor(numbers, requires_grad=True)
    by_method, by_op = getattr(x, name)(), getattr(ops, name)(y)
    by_method.sum().backward()
    by_op.sum().backward()
    assert np.array_equal(by_method.data, by_op.data) and np.array_equal(x.grad, y.grad)


def test_comparisons_are_arrays_without_gradient() -> None:
    x = tensor(np.array([1.0, 2.0, 3.0]), requires_grad=True)
    assert (x > 2).tolist() == [False, False, True] and (x >= x).all() and not (x < x).any()
    assert (x >= 2).tolist() == [False, True, True]
    ops.where(x > 1, x, 0.0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 1, 1]
    assert x == x and len({x, tensor(x.data)}) == 2, "== is the identity: tensors are keys"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("softmax", "write minidist.ops.softmax(x, …)"),
        ("view", "write x.reshape(…)"),
        ("T", "write x.transpose()"),
        ("colour", "a Tensor has no 'colour'"),
    ],
)
def test_a_method_that_is_missing_names_the_op(name: str, says: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(tensor(np.ones(2)), name)
    assert str(caught.value).endswith(says)
