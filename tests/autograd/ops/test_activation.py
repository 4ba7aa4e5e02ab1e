"""Activations and softmax against their formulas, at the edges of what floats hold."""

import math
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.autograd import ops
from minidist.autograd.ops import arithmetic
from minidist.autograd.ops.activation import least
from minidist.autograd.tensor import Parameter, tensor
from minidist.device import account, backend
from minidist.errors import ShapeError

X = np.array([-1e30, -1e4, -30.0, -3.0, -1.0, -1e-8, 0.0, 1e-8, 1.0, 3.0, 30.0, 1e4, 1e30])


def test_gelu_is_its_tanh_form():
    x = np.linspace(-6, 6, 1001)
    formula = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(ops.gelu(x).data, formula, rtol=1e-13, atol=1e-15)
    exact = np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    np.testing.assert_allclose(formula, exact, atol=5e-4)


@pytest.mark.parametrize("kind", ["float64", "float32", "bfloat16"])
def test_a_bias_of_gelu_is_added_first_and_rounded_nowhere(kind):
    rng = np.random.default_rng(4)
    dtype = backend.dtype(kind)
    x, bias, dy = (rng.normal(size=shape).astype(dtype) for shape in ((5, 3, 9), (9,), (5, 3, 9)))
    wide = tensor(backend.widen(x) + backend.widen(bias), requires_grad=True)
    ops.gelu(wide).backward(backend.widen(dy))
    leaves = [tensor(array, requires_grad=True) for array in (x, bias)]
    y = ops.gelu(*leaves)
    y.backward(dy)
    np.testing.assert_array_equal(y.data, ops.gelu(wide.data).data.astype(dtype))
    near = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2.0**-7}[kind]
    np.testing.assert_allclose(
        leaves[0].grad.astype(float), wide.grad.astype(float), rtol=near, atol=near
    )
    np.testing.assert_allclose(
        leaves[1].grad.astype(float), wide.grad.sum(axis=(0, 1)), rtol=9 * near, atol=9 * near
    )
    with pytest.raises(
        ShapeError, match=r"a bias of shape \(5,\) does not fit x \(5, 3, 9\); it needs \(9,\)"
    ):
        ops.gelu(x, bias[:5])


def test_what_gelu_with_a_bias_keeps():
    """One array of x's size, the slope, in which backward writes x's gradient; so where the bias'
    gradient is put off, none but that."""
    x = tensor(np.ones((50, 8)), requires_grad=True)
    bias = Parameter(np.ones(8))
    with account.use(account.MemoryAccount()) as memory:
        y = ops.gelu(x, bias)
        assert memory.now["activations"] == 2 * x.data.nbytes  # the result, and the slope
        slope = weakref.ref(y.node.slope)
        later = y.backward(np.ones((50, 8)), defer_weights=True)
        assert np.shares_memory(slope(), x.grad)
        assert memory.now["gradients"] == 0
        later[0]()
        np.testing.assert_allclose(bias.grad, x.grad.sum(axis=0))


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
def test_large_numbers(name, kind):
    """Far out they are x or 0, and their slopes 1 or 0, without overflow."""
    limit = 1e12 if name == "gelu" else 1e30  # gelu's cube
    x = tensor(np.clip(X, -limit, limit).astype(kind), requires_grad=True)
    y = getattr(ops, name)(x)
    y.sum().backward()
    far = np.abs(x.data) >= 30
    np.testing.assert_allclose(y.data[far], np.maximum(x.data, 0)[far], atol=1e-10)
    np.testing.assert_allclose(x.grad[far], (x.data > 0)[far], atol=1e-10)
    assert np.isfinite(y.data).all() and np.isfinite(x.grad).all()


def over_the_range(kind):
    """Both signs of 0 and of powers up to the largest number, and a closer grid where exponentials
    are floats."""
    kind = backend.dtype(kind)
    largest = float(ml_dtypes.finfo(kind).max)
    far = np.array([0.0, *np.geomspace(float(ml_dtypes.finfo(kind).tiny), largest * 0.999, 501)])
    return np.concatenate(
        [-far, far, np.linspace(-800, 800, 16001), np.linspace(-20, 20, 4001)]
    ).astype(kind)


def gates(x):
    """z, dz/dx, sigmoid(z) and 1 - sigmoid(z) of GELU and of SiLU, in long double."""
    x = x.astype(np.longdouble)
    c = np.sqrt(2 / np.longdouble(np.pi))
    k = np.longdouble(0.044715)
    near = np.clip(x, -1e3, 1e3)
    for name, z, dz in (
        ("gelu", 2 * c * (near + k * near**3), 2 * c * (1 + 3 * k * near**2)),
        ("silu", x.clip(-1e4, 1e4), 1),
    ):
        e = np.exp(-np.abs(np.clip(z, -11000, 11000)))
        small = e / (1 + e)
        large = 1 / (1 + e)
        yield name, z, dz, np.where(z < 0, small, large), np.where(z < 0, large, small)


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_gates_hold_all_digits_over_the_whole_range(kind):
    """Relative errors of values and slopes, in units of the last place, also where they are 1e-30.

    The argument of GELU's exponential is rounded, so its result may be off by as many units as the
    argument is large; slopes are held against the sum of their summands' sizes. Where the sigmoid
    has fewer digits, because it is subnormal, a result may be off by the smallest number times |x|.
    A result below `least` is 0, and no other is.
    """
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("long double is no longer than double here")
    x = over_the_range(kind)
    info = ml_dtypes.finfo(backend.dtype(kind))
    wide = np.finfo("float64" if kind == "float64" else "float32")
    for name, z, dz, h, rest in gates(x):
        lost = float(info.smallest_subnormal) + (1 + np.abs(z)) * (
            1 + np.abs(dz)
        ) * wide.smallest_subnormal * (h < 1)
        allowed = float(info.eps) + 4 * wide.eps * (1 + (np.abs(z) if name == "gelu" else 0))
        leaf = tensor(x, requires_grad=True)
        y = getattr(ops, name)(leaf)
        y.backward(np.ones_like(x))
        value = x * h
        added = np.where(rest * h == 0, 0, x * h * rest * dz)
        for got, want, size in (
            (y.data, value, np.abs(value)),
            (leaf.grad, h + added, h + np.abs(added)),
        ):
            off = np.abs(got.astype(np.longdouble) - want)
            if kind == wide.dtype.name:
                far = np.abs(got[(got != 0) & (x < -1)])
                assert (far >= least(wide.dtype)).all(), "subnormal in the next product"
            off[(got == 0) & (np.abs(want) < 1.01 * least(wide.dtype))] = 0
            worst = np.argmax(off - allowed * size - lost)
            assert (off <= allowed * size + lost).all(), (name, x[worst], got[worst], want[worst])
        if name == "silu":
            gate = tensor(x, requires_grad=True)
            up = tensor(np.ones_like(x), requires_grad=True)
            ops.swiglu(gate, up).backward(np.ones_like(x))
            np.testing.assert_array_equal(gate.grad, leaf.grad)
            np.testing.assert_array_equal(up.grad, y.data)


@pytest.mark.parametrize("kind", ["float64", "float32"])
@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_a_gate_gives_the_same_bits_among_other_numbers(name, kind):
    """Few of a block are far out, all, or none, and the bounds of float32 and float64 differ."""

    def value_and_slope(x, bias):
        leaf = tensor(x, requires_grad=True)
        y = ops.gelu(leaf, bias) if name == "gelu" else ops.silu(leaf)
        y.backward(np.ones_like(x))
        return np.stack([y.data, leaf.grad])

    x = np.append(over_the_range(kind), [np.nan]).astype(kind)
    for bias in (None, np.zeros(1, kind)) if name == "gelu" else (None,):
        together = value_and_slope(x[:, None], bias)[..., 0]
        for chosen in (
            *(np.abs(x) <= bound for bound in (9.0, 20.0, 80.0, 700.0)),
            np.abs(x) > 1e3,
            np.isnan(x),
        ):
            np.testing.assert_array_equal(
                value_and_slope(x[chosen, None], bias)[..., 0], together[:, chosen]
            )


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_the_slope_of_tanh_holds_all_digits(kind):
    leaf = tensor(over_the_range(kind), requires_grad=True)
    ops.tanh(leaf).backward(np.ones_like(leaf.data))
    t = np.exp(-2 * np.abs(leaf.data.astype(np.longdouble)).clip(0, 5000))
    info = ml_dtypes.finfo(leaf.dtype)
    wide = np.finfo("float64" if kind == "float64" else "float32")
    np.testing.assert_allclose(
        leaf.grad.astype(np.longdouble),
        4 * t / (1 + t) ** 2,
        rtol=float(info.eps) + 8 * wide.eps,
        atol=8 * float(info.smallest_subnormal),
    )


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_softmax_holds_all_digits(kind):
    """Hold each chance relative to itself, though the difference to the row's maximum is rounded;
    logarithms relative to 1."""
    x = over_the_range(kind)
    x = np.stack([x, np.zeros_like(x)], axis=-1)
    wide_x = x.astype(np.longdouble)
    away = wide_x - wide_x.max(axis=-1, keepdims=True)
    total = np.exp(away).sum(axis=-1, keepdims=True)
    info = ml_dtypes.finfo(x.dtype)
    wide = np.finfo("float64" if kind == "float64" else "float32")
    p = np.exp(away) / total
    lost = 2 * max(float(info.smallest_subnormal), float(wide.smallest_subnormal))
    off = np.abs(ops.softmax(x).data.astype(np.longdouble) - p)
    assert (off <= p * (float(info.eps) + 4 * wide.eps * (1 + np.abs(away))) + lost).all()
    logs = away - np.log(total)
    off = np.abs(ops.log_softmax(x).data.astype(np.longdouble) - logs)
    assert (off <= np.abs(logs) * float(info.eps) + 4 * wide.eps).all()


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
    with pytest.raises(ShapeError, match="the same shape"):
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
    np.testing.assert_allclose(
        ops.softmax(x).data, [[0.5, 0.5, 0.0], e / e.sum(), [1 / 3] * 3], rtol=1e-15
    )
    np.testing.assert_allclose(
        ops.log_softmax(x).data[1:], [np.log(e / e.sum()), [np.log(1 / 3)] * 3], rtol=1e-15
    )


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


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_gelu_may_lie_where_x_lay(kind: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 257)).astype(kind)
    bias = rng.standard_normal(257).astype(kind)
    # far out: computed apart
    x[3, 5] = 40.0
    x[4, 6] = -40.0
    dy = rng.standard_normal(x.shape).astype(kind)
    gradients = []
    for overwrite in (False, True):
        source = tensor(x.copy(), requires_grad=True)
        b = tensor(bias, requires_grad=True)
        y = ops.gelu(source, b, overwrite=overwrite)
        assert np.shares_memory(y.data, source.data) is overwrite
        assert np.array_equal(source.data, x) is not overwrite
        y.backward(dy)
        gradients.append((y.data, source.grad, b.grad))
    for kept, overwritten in zip(*gradients, strict=True):
        np.testing.assert_array_equal(kept, overwritten)


def test_gelu_leaves_an_x_that_is_not_to_be_overwritten() -> None:
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    for part in (x, x.T, x.astype("float16"), x[:, ::2]):
        before = part.copy()
        ops.gelu(part)
        np.testing.assert_array_equal(part, before)
