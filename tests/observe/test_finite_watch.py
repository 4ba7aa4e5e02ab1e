"""The first number that is not finite: found in the layer and op that made it, in forward and in
backward."""

import numpy as np
import pytest

from minidist.autograd import tape
from minidist.nn import GPT, GPTConfig
from minidist.observe.finite_watch import FiniteWatch

CONFIG = GPTConfig(vocabulary=11, context=6, layers=3, width=8, heads=2)
IDS = np.arange(12).reshape(2, 6) % 11


def watched(break_it=lambda model: None):
    """Return what is told of one forward and backward of a model."""
    model = GPT(CONFIG)
    told = []
    model.initialize(0)
    watch = FiniteWatch(model, lambda *words: told.append(words))
    break_it(model)
    with np.errstate(all="ignore"):
        model.loss(IDS, IDS).backward()
    watch.close()
    assert not any(module._hooks and module._hooks["forward"] for module in model.modules())
    return told


def broken(function, at, value):
    """The function, whose result number `at` has one bad number."""
    calls = []

    def wrapped(*args, **options):
        result = function(*args, **options)
        calls.append(1)
        array = result[0] if isinstance(result, tuple) else result
        if len(calls) == at:
            array.reshape(-1)[3] = value
        return result

    return wrapped


def test_a_healthy_model_is_not_told_of():
    assert watched() == []


@pytest.mark.parametrize(
    "name", ["blocks.1.mlp.up.weight", "blocks.0.attention.qkv.weight", "blocks.2.mlp.up.weight"]
)
def test_a_weight(name):
    def bad(model):
        dict(model.named_parameters())[name].data[1, 2] = np.inf

    ((layer, op, way, _),) = watched(bad)
    assert (layer, op, way) == (name[:8], f"weight {name}", "forward")


@pytest.mark.parametrize(
    ("op", "at", "layer"),
    [
        ("gelu", 2, "blocks.1"),
        ("gelu", 3, "blocks.2"),
        ("linear", 1, "blocks.0"),
        ("layer_norm", 1, "blocks.0"),
        ("causal_attention_packed", 2, "blocks.1"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_op_of_forward(op, at, layer, value, monkeypatch):
    monkeypatch.setattr(tape.REGISTRY[op], "forward", broken(tape.REGISTRY[op].forward, at, value))
    ((where, made_by, way, _),) = watched()
    assert (where, made_by, way) == (layer, op, "forward")


@pytest.mark.parametrize(("at", "layer"), [(1, "blocks.2"), (2, "blocks.1")])
def test_a_layer_of_backward(at, layer, monkeypatch):
    gelu = tape.REGISTRY["gelu"]
    monkeypatch.setitem(gelu.gradients, "x", broken(gelu.gradients["x"], at, np.nan))
    assert watched() == [(layer, "backward", "backward", "nan")]
