"""Test how ops are made and called: arguments, options, dtypes, errors, several outputs, saved
values."""

import threading

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tape import op, saved
from minidist.autograd.tensor import Parameter, no_grad, tensor
from minidist.errors import DtypeError, GradientError, ShapeError


@op
def swap_scaled(a, b, *, factor=1.0):
    """Two outputs and an option."""
    return (b * factor, a * factor), saved(factor=factor)


@swap_scaled.gradient("a")
def _(node, dy):
    return dy[1] * node.factor


@swap_scaled.gradient("b")
def _(node, dy):
    return dy[0] * node.options["factor"]


def test_several_outputs_and_options():
    a = tensor(np.ones(2), requires_grad=True)
    b = tensor(np.zeros(2), requires_grad=True)
    first, second = swap_scaled(a, b, factor=3.0)
    assert isinstance(swap_scaled(a, b), tuple)
    np.testing.assert_array_equal(second.data, [3.0, 3.0])
    (first * 2.0).sum().backward()  # `second` gets no gradient: zeros
    np.testing.assert_array_equal(a.grad, [0.0, 0.0])
    np.testing.assert_array_equal(b.grad, [6.0, 6.0])


def test_options_may_be_anything():
    class Group:
        size = 4

    @op
    def shared(a, *, group):
        return a / group.size, saved(group=group)

    @shared.gradient("a")
    def _(node, dy):
        return dy / node.group.size

    x = tensor(np.ones(2), requires_grad=True)
    shared(x, group=Group()).sum().backward()
    np.testing.assert_array_equal(x.grad, [0.25, 0.25])


def test_arguments_by_keyword():
    x = np.ones((2, 3))
    w = np.ones((3, 2))
    b = np.ones(2)
    np.testing.assert_array_equal(ops.linear(x, b=tensor(b), w=w).data, ops.linear(x, w, b).data)


def test_numbers_take_the_dtype_of_the_arrays():
    for kind in ("float64", "float32", "float16"):
        x = tensor(np.ones(3, kind))
        for y in (
            x * 2.0,
            2 * x,
            x + np.float64(1),
            1.0 - x,
            x / 3,
            3 / x,
            x**2,
            -x,
            x.sum() * 0.5,
        ):
            assert y.dtype == kind
    assert (
        (tensor(np.arange(3)) + 1).dtype == (tensor(np.arange(3)) * np.int32(2)).dtype == np.int64
    )
    assert ops.add(1.0, 2.0).item() == 3.0


def test_dtypes_do_not_mix():
    a = tensor(np.ones(2, "float32"))
    b = tensor(np.ones((3, 2)))
    with pytest.raises(
        DtypeError, match=r"add: a float32 \(2,\), b float64 \(3, 2\).*ops.cast\(x, 'float32'\)"
    ):
        a + b
    with pytest.raises(DtypeError, match="0.5 does not fit dtype int64"):
        tensor(np.arange(3)) * 0.5
    with pytest.raises(DtypeError, match="only floats have gradients"):
        tensor(np.arange(3), requires_grad=True)
    assert (a + ops.cast(b, "float32")).dtype == np.float32


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: tensor(np.ones(2)) + np.ones(3),
            r"add: a float64 \(2,\), b float64 \(3,\) do not fit",
        ),
        (lambda: ops.reshape(np.ones(6), (4, -1)), r"reshape: x float64 \(6,\) do not fit"),
        (lambda: ops.concat([np.ones((2, 2)), np.ones((3, 3))], dim=0), "concat: parts"),
        (lambda: ops.matmul(np.ones((2, 3)), np.ones((2, 3))), r"matmul: \(2, 3\) @ \(2, 3\)"),
        (lambda: ops.transpose(np.ones((2, 3)), (0, 0)), "transpose"),
    ],
)
def test_shape_errors_name_op_and_shapes(call, message):
    with pytest.raises(ShapeError, match=message):
        call()


def test_gradient_of_an_argument_that_is_not_there():
    with pytest.raises(GradientError, match="add has no argument 'c'; it has a, b"):
        ops.add.gradient("c")


def test_saved_values_by_name():
    w = Parameter(np.ones((2, 2)), name="w")
    x = tensor(np.ones((3, 2)))
    node = ops.linear(x, w).node
    assert node.x is x.data and node.w is w.data and node.shapes == {"x": (3, 2), "w": (2, 2)}
    w.data = np.zeros((2, 2))
    assert node.w is w.data  # by reference
    with pytest.raises(AttributeError, match="linear saved no 'z'; it saved x, w"):
        _ = node.z
    frozen = Parameter(np.ones((2, 2)), requires_grad=False)
    node = ops.linear(tensor(np.ones((3, 2)), requires_grad=True), frozen).node
    frozen.data = np.zeros((2, 2))
    assert node.w is frozen.data  # also of a weight that is not trained


def test_grad_mode_belongs_to_a_thread():
    x = tensor(np.ones(2), requires_grad=True)
    seen = []
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append((x * 2.0).requires_grad))
        thread.start()
        thread.join()
        assert not (x * 2.0).requires_grad
    assert seen == [True]


def test_reprs():
    x = tensor(np.ones(2), requires_grad=True)
    assert (
        "from mul" in repr(x * 2.0) and "requires_grad" in repr(x) and repr(ops.add) == "<op add>"
    )
