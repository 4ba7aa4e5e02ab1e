"""Arithmetic against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from op_strategies import CASES

from minidist.autograd import ops
from minidist.autograd.ops.arithmetic import unbroadcast
from minidist.autograd.tensor import tensor
from minidist.device import backend
from minidist.errors import DtypeError


@pytest.mark.parametrize(
    "name, theirs",
    [
        ("add", np.add),
        ("sub", np.subtract),
        ("mul", np.multiply),
        ("div", np.divide),
        ("neg", np.negative),
        ("exp", np.exp),
        ("log", np.log),
        ("tanh", np.tanh),
        ("sqrt", np.sqrt),
    ],
)
def test_values(name, theirs):
    @given(CASES[name])
    def run(case):
        result = case.call(*case.arrays)
        np.testing.assert_array_equal(result.data, theirs(*case.arrays))
        assert isinstance(result.data, np.ndarray)

    run()


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 7, -1, -2, 0.5, 1.5, np.float64(2)])
def test_powers(exponent):
    a = np.array([0.5, 1.0, 3.0], "float32")
    y = ops.power(a, exponent)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y.data, a ** np.float32(exponent), rtol=1e-6)


def test_even_powers_of_negative_numbers_have_gradients():
    x = tensor(np.array([-2.0, 0.0, 3.0]), requires_grad=True)
    (x**2 + x**3).sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data + 3 * x.data**2)


def test_exponent_must_be_a_number():
    with pytest.raises(DtypeError, match="plain number, not Tensor|plain number, not ndarray"):
        ops.power(np.ones(2), tensor(np.ones(2)))


def test_where_keeps_what_it_did_not_choose_out_of_the_gradient():
    x = tensor(np.array([0.0, 4.0]), requires_grad=True)
    y = ops.where(x.data > 0, x, 1.0)
    np.testing.assert_array_equal(y.data, [1.0, 4.0])
    y.backward(np.array([np.inf, 2.0]))
    np.testing.assert_array_equal(x.grad, [0.0, 2.0])


def test_cast_there_and_back():
    x = tensor(np.array([1.0, 1e-3], "float32"), requires_grad=True)
    y = ops.cast(x, "bfloat16")
    assert y.dtype == backend.dtype("bfloat16")
    y.sum().backward()
    assert x.grad.dtype == np.float32


def test_unbroadcast_sums_low_precision_in_float32():
    ones = np.ones((4096, 2), backend.dtype("bfloat16"))
    np.testing.assert_array_equal(unbroadcast(ones, (1, 2)).astype("float32"), [[4096.0, 4096.0]])


@pytest.mark.filterwarnings("ignore:divide by zero|invalid value|overflow")
@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16"])
def test_powers_at_the_edges(kind):
    """Compute as PyTorch does: x ** 0 is 1 everywhere and its slope 0; otherwise the slope is n x
    ** (n - 1), by IEEE's rules."""
    inf = np.inf
    nan = np.nan
    x = [-inf, -2.0, -0.0, 0.0, 4.0, inf, nan]
    for n, want, slope in [
        (0, [1] * 7, [0] * 7),
        (0.0, [1] * 7, [0] * 7),
        (1, x, [1] * 7),
        (2, [inf, 4, 0, 0, 16, inf, nan], [-inf, -4, 0, 0, 8, inf, nan]),
        (3, [-inf, -8, 0, 0, 64, inf, nan], [inf, 12, 0, 0, 48, inf, nan]),
        (5, [-inf, -32, 0, 0, 1024, inf, nan], [inf, 80, 0, 0, 1280, inf, nan]),
        (-1, [0, -0.5, -inf, inf, 0.25, 0, nan], [0, -0.25, -inf, -inf, -0.0625, 0, nan]),
        (-2, [0, 0.25, inf, inf, 0.0625, 0, nan], [0, 0.25, inf, -inf, -0.03125, 0, nan]),
        (0.5, [nan, nan, 0, 0, 2, inf, nan], [0, nan, inf, inf, 0.25, 0, nan]),
        (1.5, [inf, nan, 0, 0, 8, inf, nan], [nan, nan, 0, 0, 3, inf, nan]),
    ]:
        leaf = tensor(x, dtype=kind, requires_grad=True)
        y = leaf**n
        y.backward(np.ones_like(y.data))
        np.testing.assert_array_equal(y.data.astype(float), want, err_msg=f"x ** {n}")
        np.testing.assert_array_equal(leaf.grad.astype(float), slope, err_msg=f"x ** {n}")


def test_the_slope_of_a_quotient_does_not_square_the_divisor():
    """b² would be 0 or infinite in float32."""
    a, b = (
        tensor(np.array(x, np.float32), requires_grad=True) for x in ([1e-30, 1e30], [1e-25, 1e25])
    )
    (a / b).sum().backward()
    np.testing.assert_allclose(b.grad, [-1e20, -1e-20], rtol=1e-6)
