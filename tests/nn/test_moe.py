"""A mixture on one process: beside a loop over tokens, what is dropped, what balances, and what it
refuses."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import global_batch, tiny

from minidist.autograd import ops
from minidist.autograd.tensor import no_grad, tensor
from minidist.errors import ConfigError
from minidist.nn import GPT, DropoutKey, GPTConfig, Mixture, MixtureConfig, mixture
from minidist.nn.moe import loads, mixtures, rebalance
from minidist.parallel.memory.activations import checkpoint_blocks


def layer_of(changes: dict[str, Any] | None = None, **moe: Any) -> Mixture:
    """The first mixture of a small GPT, drawn."""
    model = mixture(GPT(tiny(**(changes or {}))), MixtureConfig(**{"experts": 4, **moe}))
    model.initialize(0)
    for _, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data[...] *= 20.0  # so that the gate has opinions
    return mixtures(model)[0]


def by_hand(layer: Mixture, x: np.ndarray) -> np.ndarray:
    """The layer's result, token by token."""
    config = layer.config
    y = np.zeros_like(x)
    for row in range(len(x)):
        taken = np.zeros(config.experts, int)
        for place, token in enumerate(x[row]):
            scores = token @ layer.scores.weight.data
            p = np.exp(scores - scores.max())
            p /= p.sum()
            liking = p if layer.bias is None else p + layer.bias.data
            for e in np.argsort(-liking, kind="stable")[: config.top_k]:
                taken[e] += 1
                if layer.training and taken[e] > config.places(x.shape[1]):
                    continue
                up = ops.gelu(token @ layer.experts.up.data[e]).data
                if layer.experts.gate is not None:
                    up = ops.silu(token @ layer.experts.gate.data[e]).data * (
                        token @ layer.experts.up.data[e]
                    )
                y[row, place] += p[e] * (up @ layer.experts.down.data[e])
            y[row, place] += sum(shared(token[None]).data[0] for shared in layer.shared)
    return y


@settings(max_examples=25)
@given(
    experts=st.integers(1, 6),
    top_k=st.integers(1, 6),
    capacity=st.sampled_from([None, 0.5, 1.0, 1.5]),
    shared=st.integers(0, 2),
    activation=st.sampled_from(["gelu", "silu"]),
    training=st.booleans(),
    balance=st.sampled_from(["loss", "bias", "none"]),
    tokens=st.integers(0, 7),
    rows=st.integers(0, 3),
)
def test_equals_a_loop_over_tokens(
    experts: int,
    top_k: int,
    capacity: float | None,
    shared: int,
    activation: str,
    training: bool,
    balance: str,
    tokens: int,
    rows: int,
) -> None:
    if top_k > experts or not tokens:
        return
    layer = layer_of(
        {"activation": activation},
        experts=experts,
        top_k=top_k,
        capacity=capacity,
        shared=shared,
        balance=balance,
    )
    if layer.bias is not None:
        layer.bias.data[...] = np.linspace(-0.3, 0.3, experts)
    layer.training = training
    x = np.random.default_rng(tokens).normal(size=(rows, tokens, 8))
    np.testing.assert_allclose(layer(tensor(x)).data, by_hand(layer, x), atol=1e-12)
    if training:
        assert layer.load[0].sum() == rows * tokens * top_k and np.all(
            layer.load[1] <= layer.load[0]
        )


def test_of_a_sequence_the_first_tokens_are_taken() -> None:
    """All want expert 0; three have room, whatever comes later. Without training nothing is
    dropped."""
    layer = layer_of(top_k=1, capacity=2.0)
    layer.scores.weight.data[...] = 0.0  # ties: the first expert
    layer(tensor(np.random.default_rng(0).normal(size=(2, 6, 8))))
    assert layer.routing is not None
    assert layer.routing.kept[..., 0].tolist() == [[True] * 3 + [False] * 3] * 2
    assert layer.load.tolist() == [[12, 0, 0, 0], [6, 0, 0, 0]]
    layer.eval()(tensor(np.ones((1, 6, 8))))
    assert layer.routing.kept.all() and layer.load[0, 0] == 12


def test_the_balance_loss_and_its_gradient() -> None:
    """Σ over tokens of weight · E · Σ f p; T · weight of a sequence that is even, and the loss has
    it over divisor."""
    model = mixture(GPT(tiny()), MixtureConfig(experts=4, top_k=2, balance_weight=0.5))
    model.initialize(0)
    inputs, targets = global_batch(0, 3, model.config)
    total = model.loss(inputs, targets, 100).item()
    layers = mixtures(model)
    balance = sum(layer.balance.item() for layer in layers if layer.balance is not None)
    assert 0.0 < abs(balance - 2 * 0.5 * inputs.size) < 0.2 * inputs.size  # near even at the start
    model.eval()
    assert total == pytest.approx(
        model.loss(inputs, targets, 100).item() + balance / 100, rel=1e-12
    )
    layer = layer_of(top_k=2, balance_weight=0.5)
    x = np.random.default_rng(0).normal(size=(2, 6, 8))
    y = layer(tensor(x))
    assert layer.balance is not None and layer.routing is not None
    layer.balance_scale = 1.0  # what the model's loss tells it
    y.backward(np.zeros(y.shape))
    f = np.stack([np.bincount(row.reshape(-1), minlength=4) / 12 for row in layer.routing.chosen])
    weight = tensor(layer.scores.weight.data.copy(), requires_grad=True)
    ops.sum(ops.softmax(ops.linear(x, weight)) * (0.5 * 4 * f[:, None, :])).backward()
    np.testing.assert_allclose(layer.scores.weight.grad, weight.grad, rtol=1e-12)


def test_biases_move_against_the_load_and_only_choose() -> None:
    model = mixture(
        GPT(tiny(layers=1)), MixtureConfig(experts=3, top_k=1, balance="bias", bias_rate=0.25)
    )
    model.initialize(0)
    rebalance(model, np.array([[[9, 1, 2], [9, 1, 2]]]))
    layer = mixtures(model)[0]
    assert layer.bias is not None and layer.bias.data.tolist() == [-0.25, 0.25, 0.25]
    assert "blocks.0.mlp.bias" in model.state_dict() and not layer.bias.requires_grad
    assert loads(model).sum() == 0


def test_noise_is_of_the_token_and_only_in_training() -> None:
    layer = layer_of(noise=1.0)
    x = tensor(np.random.default_rng(0).normal(size=(3, 6, 8)))
    whole = layer(x, DropoutKey.of_sequences(1, 5, 0, 3, 6)).data
    part = layer(tensor(x.data[2:]), DropoutKey.of_sequences(1, 5, 2, 1, 6)).data
    np.testing.assert_allclose(part, whole[2:], rtol=1e-12)
    assert not np.allclose(
        part, layer(tensor(x.data[2:]), DropoutKey.of_sequences(1, 5, 0, 1, 6)).data
    )
    assert not np.allclose(whole, layer(x, DropoutKey.of_sequences(1, 6, 0, 3, 6)).data)
    with pytest.raises(
        ConfigError,
        match=r"'blocks.0.mlp' with noise 1.0 is in training mode but got no key; pass key=",
    ):
        layer(x)
    layer.eval()(x)


@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_a_block_computed_again_counts_once(balance: str) -> None:
    """And has the same gradients."""
    gradients = []
    for checkpoint in ("none", "all"):
        model = mixture(GPT(tiny()), MixtureConfig(experts=4, balance=balance, balance_weight=0.5))
        model.initialize(0)
        checkpoint_blocks(model, checkpoint)
        inputs, targets = global_batch(0, 3, model.config)
        model.loss(inputs, targets).backward()
        with no_grad():
            model.loss(inputs, targets)
        assert loads(model)[:, 0].sum() == 2 * 2 * inputs.size
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        np.testing.assert_allclose(gradients[1][name], gradient, atol=1e-15)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"experts": 0}, "0 experts, top_k=2"),
        ({"experts": 2, "top_k": 3}, "top_k from 1 to the number of experts"),
        ({"experts": 2, "capacity": 0.0}, "capacity is 0.0; it must be above 0, or None"),
        ({"experts": 2, "balance": "luck"}, "'luck'; choose one of loss, bias, none"),
        ({"experts": 2, "noise": -1.0}, "noise -1.0"),
    ],
)
def test_a_config_that_cannot_work_says_what_would(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MixtureConfig(**values)


def test_a_model_becomes_a_mixture_before_it_is_drawn_and_writes_text() -> None:
    model = GPT(tiny())
    model.initialize(0)
    with pytest.raises(ConfigError, match="initialized already; call mixture before"):
        mixture(model, MixtureConfig(experts=2))
    model = mixture(GPT(tiny()), MixtureConfig(experts=2, capacity=1.0, noise=0.1))
    model.initialize(0)
    assert len(model.generate([1], 8)) == 9


def test_a_config_with_a_mixture_builds_one_and_survives_json() -> None:
    config = tiny(mixture=MixtureConfig(experts=3, top_k=1, shared=1))
    assert len(mixtures(GPT(config))) == config.layers
    assert GPTConfig(**json.loads(json.dumps(config.as_dict()))) == config
    assert mixture(GPT(tiny()), MixtureConfig(experts=3, top_k=1, shared=1)).config == config
