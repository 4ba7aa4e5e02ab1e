"""Arrays of size 0: what NumPy and PyTorch define has that value, and gradients of the right
shapes. The rest is one of our errors."""

from itertools import product

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.errors import ShapeError
from minidist.nn import Linear

SHAPES = [(0,), (0, 3), (3, 0), (2, 0, 3), (2, 3, 0), (0, 0)]


def ids(*shape):
    return np.zeros(shape, int)


def cases():
    """(name, op, shapes of its arguments)"""
    for s in SHAPES:
        for name in (
            "gelu",
            "silu",
            "relu",
            "softmax",
            "log_softmax",
            "exp",
            "log",
            "tanh",
            "sqrt",
            "neg",
            "sum",
        ):
            yield name, getattr(ops, name), [s]
        for name in ("add", "mul", "div", "swiglu"):
            yield name, getattr(ops, name), [s, s]
        for name in ("softmax", "log_softmax", "sum"):
            yield (
                f"{name} along the first dim",
                lambda x, name=name: getattr(ops, name)(x, dim=0),
                [s],
            )
        yield "gelu with a bias", ops.gelu, [s, s[-1:]]
        yield "layer_norm", ops.layer_norm, [s, s[-1:], s[-1:]]
        yield "rms_norm", ops.rms_norm, [s, s[-1:]]
        yield "power", lambda x: x**0 + x**-1, [s]
        yield "broadcast", ops.mul, [s, (1,) * len(s)]
        for n in (0, 4):
            yield "linear", ops.linear, [s, (s[-1], n), (n,)]
            yield "unembed", ops.unembed, [s, (n, s[-1])]
        if s[-1]:
            yield (
                "cross_entropy",
                lambda x: ops.cross_entropy(x, ids(*x.shape[:-1]), divisor=7),
                [s],
            )
    for rows, columns, some in product((0, 5), (0, 3), ((0,), (2, 0), (2,))):
        if rows or not np.prod(some):
            yield (
                "embedding",
                lambda table, some=some: ops.embedding(table, ids(*some)),
                [(rows, columns)],
            )
            yield "take", lambda x, some=some: ops.take(x, ids(*some), dim=1), [(columns, rows)]
    for b, heads, kv, t, d in [
        (2, 2, 2, 0, 4),
        (0, 4, 2, 3, 4),
        (2, 0, 0, 3, 4),
        (2, 4, 2, 3, 0),
        (2, 4, 2, 0, 4),
    ]:
        yield (
            "causal_attention",
            ops.causal_attention,
            [(b, heads, t, d), (b, kv, t, d), (b, kv, t, d)],
        )
        if heads:
            packed = (b, t, 3 * heads * d)
            yield (
                "packed attention",
                lambda x, heads=heads: ops.causal_attention_packed(x, heads=heads),
                [packed],
            )
        yield "rotary", lambda x: ops.rotary(x, np.arange(x.shape[-2])), [(b, t, d)]
    for a, b in [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0)), ((0, 2, 3), (1, 3, 4))]:
        yield "matmul", ops.matmul, [a, b]
    yield (
        "grouped_linear",
        lambda x, w: ops.grouped_linear(x, w, counts=[0, 0]),
        [(0, 3), (2, 3, 4)],
    )
    yield (
        "grouped_linear",
        lambda x, w: ops.grouped_linear(x, w, counts=[2, 0]),
        [(2, 0), (2, 0, 4)],
    )


@pytest.mark.parametrize("kind", ["float64", "bfloat16"])
def test_ops(kind):
    for name, function, shapes in cases():
        leaves = [tensor(np.ones(shape), dtype=kind, requires_grad=True) for shape in shapes]
        y = function(*leaves)
        y.backward(np.ones_like(y.data))
        for leaf in leaves:
            assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype, (name, shapes)


def test_what_sums_over_nothing_is_zero():
    x, w, b = (tensor(np.ones(shape), requires_grad=True) for shape in ((0, 3), (3, 2), (2,)))
    y = ops.linear(x, w, b)
    y.backward(np.ones_like(y.data))
    assert not w.grad.any() and not b.grad.any()
    np.testing.assert_array_equal(
        ops.linear(np.ones((2, 0)), np.ones((0, 3)), np.arange(3.0)).data, [[0, 1, 2]] * 2
    )
    layer = Linear(0, 3, dtype="float64")
    layer.initialize(1)
    assert layer(tensor(np.ones((2, 0)))).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:invalid value|divide by zero|Mean of empty")
def test_the_mean_of_nothing_is_nan_and_its_maximum_an_error():
    for name in ("mean", "var"):
        for shape, dim in (((0,), None), ((3, 0), 1), ((3, 0), 0)):
            x = tensor(np.ones(shape), requires_grad=True)
            y = getattr(ops, name)(x, dim=dim)
            assert np.isnan(y.data).all()
            y.backward(np.ones_like(y.data))
            assert x.grad.shape == shape
    assert np.isnan(ops.cross_entropy(np.ones((0, 3)), ids(0)).item())
    for call, message in (
        (lambda: ops.max(np.ones((3, 0))), "no identity"),
        (lambda: ops.cross_entropy(np.ones((2, 0)), ids(2)), "outside the vocabulary"),
        (lambda: ops.embedding(np.ones((0, 3)), ids(2)), "a table of 0 rows"),
        (lambda: ops.causal_attention_packed(np.ones((2, 3, 0)), heads=0), "with 0 heads"),
    ):
        with pytest.raises(ShapeError, match=message):
            call()
