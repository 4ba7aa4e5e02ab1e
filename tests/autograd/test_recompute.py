"""Stretches of the tape that are written again in backward."""

import gc
import itertools
import weakref
from typing import Any

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.recompute import Stretch, recompute
from minidist.autograd.tensor import Parameter, Tensor, no_grad, tensor
from minidist.device import account
from minidist.errors import GradientError


def weights(*shape: int, name: str = "w", seed: int = 0) -> Parameter:
    return Parameter(np.random.default_rng(seed).normal(size=shape), name=name)


def gradients(through: Any, *, defer: bool = False) -> tuple[list[np.ndarray], list[str]]:
    """All gradients, and the order in which weights were final, of two layers and a weight used at
    both ends."""
    x = tensor(weights(3, 4, seed=1).data, requires_grad=True)
    first = weights(4, 4, name="first")
    shared = weights(4, 4, name="shared", seed=2)
    final: list[str] = []
    for parameter in (first, shared):
        parameter.hooks.append(lambda p: final.append(p.name))

    def layer(h: Tensor, scale: float) -> Tensor:
        return ops.gelu(ops.linear(ops.linear(h, first), shared)) * scale

    h = through(layer, ops.linear(x, shared), 0.5)
    h = through(layer, h, scale=2.0)
    deferred = ops.linear(h, shared).sum().backward(defer_weights=defer)
    for gradient in deferred:
        gradient()
    return [t.grad for t in (x, first, shared)], final


def plainly(function: Any, *args: Any, **options: Any) -> Tensor:
    return function(*args, **options)


def within(function: Any, *args: Any, **options: Any) -> Tensor:
    """A stretch inside a stretch."""
    return recompute(lambda *inner: recompute(function, *inner, **options), *args)


@pytest.mark.parametrize("through", [recompute, within])
@pytest.mark.parametrize("defer", [False, True])
def test_the_same_bits_and_each_weight_final_once(through: Any, defer: bool) -> None:
    expected, order = gradients(plainly, defer=defer)
    found, found_order = gradients(through, defer=defer)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert order == found_order == ["first", "shared"]


def test_nothing_of_the_inside_stays() -> None:
    inner: list[weakref.ref[np.ndarray]] = []

    def square(h: Tensor) -> Tensor:
        middle = h * h
        inner.append(weakref.ref(middle.data))
        return middle * middle

    x = tensor(np.arange(3.0), requires_grad=True)
    with account.use(account.MemoryAccount()) as memory:
        y = recompute(square, x)
        assert inner[0]() is None and memory.now["activations"] == x.data.nbytes + y.data.nbytes
        assert isinstance(y.node, Stretch)
        y.sum().backward()
    np.testing.assert_array_equal(x.grad, 4 * np.arange(3.0) ** 3)
    gc.collect()
    assert len(inner) == 2 and inner[1]() is None


def test_without_gradients_it_is_the_function() -> None:
    x = tensor(np.ones(2), requires_grad=True)
    calls = itertools.count()

    def count(h: Tensor) -> Tensor:
        next(calls)
        return h * 3.0

    with no_grad():
        assert recompute(count, x).node is None
    assert recompute(count, x.detach()).node is None and next(calls) == 2
    assert recompute(lambda h: h, x) is x


def test_what_it_refuses() -> None:
    x = tensor(np.ones(2), requires_grad=True)
    w = weights(2, name="w")
    calls = itertools.count()
    with pytest.raises(GradientError, match="returned a tuple; it must return one Tensor"):
        recompute(lambda h: (h * 2.0, h), x)

    def fickle(h: Tensor) -> Tensor:
        return h * w if next(calls) == 0 else h * 2.0

    with pytest.raises(GradientError, match="fickle used other weights in the second run"):
        recompute(fickle, x).sum().backward()


def test_a_second_backward_says_what_to_do() -> None:
    x = tensor(np.ones(2), requires_grad=True)
    loss = recompute(lambda h: h * h, x).sum()
    loss.backward()
    with pytest.raises(GradientError, match="run the forward again"):
        loss.backward()


class Kept:
    """Holds a copy, and says when it is asked for."""

    def __init__(self, told: list[str], x: np.ndarray) -> None:
        self.told = told
        self.copy = x.copy()
        self.name = f"{len(told)}"
        told.append(f"keep {self.name}")

    def prefetch(self) -> None:
        self.told.append(f"prefetch {self.name}")

    def take(self) -> np.ndarray:
        self.told.append(f"take {self.name}")
        return self.copy


def test_what_is_put_away_is_asked_for_one_stretch_ahead() -> None:
    """A leaf that does not lend its array keeps it."""
    told: list[str] = []
    layers = [weights(4, 4, name=f"w{i}", seed=i) for i in range(4)]
    start = tensor(weights(3, 4, seed=9).data, requires_grad=True)

    def forward(keep: Any) -> Tensor:
        h = start
        for i, layer in enumerate(layers):
            h = (
                recompute(lambda x, w: ops.gelu(ops.linear(x, w)), h, layer, keep=keep)
                if i != 2
                else h @ layer
            )
        return h

    forward(None).backward(np.ones((3, 4)))
    plain = [np.array(p.grad) for p in (start, *layers)]
    for p in (start, *layers):
        p.zero_grad()
    y = forward(lambda x: Kept(told, x))
    # inputs of layers 1 and 3; that of 0 is a leaf, 2 is no stretch
    assert told == ["keep 0", "keep 1"]
    y.backward(np.ones((3, 4)))
    assert told[2:] == ["take 1", "prefetch 0", "take 0"]
    for p, gradient in zip((start, *layers), plain, strict=True):
        np.testing.assert_array_equal(p.grad, gradient)


def test_a_leaf_that_lends_its_array_is_hollow_until_backward() -> None:
    class Lent(Tensor):
        __slots__ = ()
        lends_data = True

    array = weights(3, 4, seed=9).data
    told = []
    w = weights(4, 4)
    x = Lent(array.copy(), requires_grad=True)
    alive = weakref.ref(x.data)
    y = recompute(ops.linear, x, w, keep=lambda x: Kept(told, x))
    assert alive() is None
    assert x.shape == (3, 4)
    assert x.data.strides == (0, 0)
    y.backward(np.ones((3, 4)))
    np.testing.assert_array_equal(x.data, array)
    np.testing.assert_allclose(x.grad, np.ones((3, 4)) @ w.data.T)
