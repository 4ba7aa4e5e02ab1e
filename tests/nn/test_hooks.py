"""Hooks: what runs when, forward and backward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor, no_grad, tensor
from minidist.nn import GPT, Embedding, GPTConfig, Linear, Module


class Chain(Module):
    """Its parts one after the other."""

    def __init__(self, *parts: Module) -> None:
        self.parts = list(parts)

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


class Both(Module):
    """Two outputs, each from a part of its own."""

    def __init__(self) -> None:
        self.left = Linear(3, 3)
        self.right = Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Nothing(Module):
    """Hands its argument on."""

    def forward(self, x: Any) -> Any:
        return x


def watch(model: Module, names: dict[str, Module]) -> list[str]:
    """Note everything that happens: hooks of the named modules, and parameters whose gradient is
    final."""
    model.initialize(0)
    log: list[str] = []

    def noting(kind: str, name: str) -> Callable[..., None]:
        return lambda *_: log.append(f"{kind} {name}")

    for name, module in names.items():
        module.register_forward_pre_hook(noting("before", name))
        module.register_forward_hook(noting("after", name))
        module.register_backward_pre_hook(noting("enter", name))
        module.register_backward_hook(noting("done", name))
    for parameter in model.parameters():
        parameter.hooks.append(lambda parameter: log.append(f"final {parameter.name}"))
    return log


def x(rows: int = 2, *, requires_grad: bool = False) -> Tensor:
    return tensor(np.ones((rows, 3), "float32"), requires_grad=requires_grad)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_order_on_nested_modules(requires_grad: bool) -> None:
    """Also when the first input asks for no gradient, and where an outer and an inner result are
    one Tensor."""
    a = Linear(3, 3)
    b = Linear(3, 3)
    inner = Chain(b)
    model = Chain(a, inner)
    log = watch(model, {"model": model, "a": a, "inner": inner, "b": b})
    loss = model(x(requires_grad=requires_grad)).sum()
    assert log == [
        "before model",
        "before a",
        "after a",
        "before inner",
        "before b",
        "after b",
        "after inner",
        "after model",
    ]
    log.clear()
    loss.backward()
    assert log[:3] == ["enter model", "enter inner", "enter b"]
    assert sorted(log[3:5]) == ["final parts.1.parts.0.bias", "final parts.1.parts.0.weight"]
    assert log[5:8] == ["done b", "done inner", "enter a"]
    assert sorted(log[8:10]) == ["final parts.0.bias", "final parts.0.weight"]
    assert log[10:] == ["done a", "done model"]


def test_a_module_of_ids_is_done_too() -> None:
    table = Embedding(5, 3)
    log = watch(table, {"table": table})
    table(np.array([1, 2])).sum().backward()
    assert log == ["before table", "after table", "enter table", "final weight", "done table"]


def test_a_module_used_twice_runs_its_hooks_twice() -> None:
    shared = Linear(3, 3, bias=False)
    model = Chain(shared, shared)
    log = watch(model, {"shared": shared})
    loss = model(x()).sum()
    log.clear()
    loss.backward()
    assert log == [
        "enter shared",
        "done shared",
        "enter shared",
        "final parts.0.weight",
        "done shared",
    ]


def test_several_outputs_enter_once_also_when_one_is_unused() -> None:
    for used in ([0], [1], [0, 1]):
        model = Both()
        log = watch(model, {"both": model, "left": model.left, "right": model.right})
        results = model(x())
        log.clear()
        sum((results[i] for i in used[1:]), results[used[0]]).sum().backward()
        assert log[0] == "enter both" and log[-1] == "done both"
        assert log.count("enter both") == log.count("done both") == 1
        assert ("enter left" in log) == (0 in used) and ("done right" in log) == (1 in used)


def test_a_module_that_hands_its_argument_on() -> None:
    before = Linear(3, 3)
    nothing = Nothing()
    after = Linear(3, 3)
    model = Chain(before, nothing, after)
    log = watch(model, {"nothing": nothing, "before": before, "after": after})
    loss = model(x()).sum()
    log.clear()
    loss.backward()
    assert [entry for entry in log if "final" not in entry] == [
        "enter after",
        "done after",
        "enter nothing",
        "done nothing",
        "enter before",
        "done before",
    ]


def test_hooks_leave_results_and_gradients_alone() -> None:
    config = GPTConfig(vocabulary=7, context=5, layers=2, width=8, heads=2, dtype="float64")
    ids = np.random.default_rng(0).integers(0, 7, (2, 5))
    gradients = []
    for hooked in (False, True):
        model = GPT(config)
        model.initialize(0)
        calls: list[Module] = []
        if hooked:
            for module in model.modules():
                module.register_backward_pre_hook(calls.append)
                module.register_backward_hook(calls.append)
        loss = model.loss(ids, ids)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()] + [loss.data])
        # loss() calls the parts of the model that forward reaches, each once; dropout modules stand
        # in each block
        assert len(calls) == (2 * len(list(model.modules())) if hooked else 0)
    assert all(np.array_equal(a, b) for a, b in zip(*gradients, strict=True))


def test_mixed_dtypes_pass() -> None:
    class Halves(Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return ops.cast(x, "float16"), x * 2.0

    module = Halves()
    calls: list[Module] = []
    module.register_backward_hook(calls.append)
    start = x(requires_grad=True)
    half, double = module(start)
    (ops.cast(half, "float32") + double).sum().backward()
    assert half.dtype == np.float16 and calls == [module]
    assert start.grad is not None and np.all(start.grad == 3)


def test_weights_put_off_come_after_the_module_is_done() -> None:
    layer = Linear(3, 3, bias=False)
    log = watch(layer, {"layer": layer})
    loss = layer(x(requires_grad=True)).sum()
    log.clear()
    later = loss.backward(defer_weights=True)
    assert log == ["enter layer", "done layer"]
    for gradient in later:
        gradient()
    assert log == ["enter layer", "done layer", "final weight"]


def test_forward_hooks_may_replace() -> None:
    layer = Linear(3, 3, bias=False)
    layer.initialize(0)
    plain = layer(x()).data
    first = layer.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))
    second = layer.register_forward_hook(lambda module, args, result: result + 1.0)
    np.testing.assert_allclose(layer(x()).data, 2 * plain + 1, rtol=1e-6)
    first.remove()
    np.testing.assert_allclose(layer(x()).data, plain + 1, rtol=1e-6)
    second.remove()
    assert np.array_equal(layer(x()).data, plain)


def test_handles_remove_once_and_only_theirs() -> None:
    layer = Linear(3, 3)
    log: list[str] = []
    layer.initialize(0)
    first = layer.register_backward_hook(lambda module: log.append("first"))
    layer.register_backward_hook(lambda module: log.append("second"))
    first.remove()
    first.remove()
    layer(x()).sum().backward()
    assert log == ["second"]


def test_hooks_without_gradients() -> None:
    """Nothing to go back through: forward hooks run, backward hooks do not, and no node is left."""
    layer = Linear(3, 3)
    log = watch(layer, {"layer": layer})
    with no_grad():
        assert layer(x()).node is None
    nothing = Nothing()
    nothing.register_backward_hook(lambda module: log.append("never"))
    assert nothing(x()).node is None and nothing(np.arange(3)).shape == (3,)
    assert log == ["before layer", "after layer"]


def test_a_hook_that_fails_stops_backward() -> None:
    layer = Linear(3, 3)
    layer.initialize(0)

    def fail(module: Module) -> None:
        raise RuntimeError("from the hook")

    layer.register_backward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="from the hook"):
        layer(x()).sum().backward()
