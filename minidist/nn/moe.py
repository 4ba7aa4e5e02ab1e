"""Mixture of experts: many MLPs in place of one; each token uses a few of them.

    model = GPT(GPTConfig(…, mixture=MixtureConfig(experts=8, top_k=2)))
    model = mixture(GPT(config), MixtureConfig(experts=8, top_k=2))         # the same

A gate scores the experts for each token. The k best compute, and their results are added, weighted
by the gate's probabilities. So a model has many weights and uses few of them for a token.

    x (B, T, h) ── gate ── + noise ── softmax ── p (B, T, E)
    p ── top k of p + bias (on few nodes: expert_nodes.py) ── capacity ── rows by expert
    y = Σ over the token's kept experts e of  p[e] · expert_e(x)  +  Σ of shared experts(x)

The result does not depend on how the batch is cut into parts: capacity, dropping and balance loss
are per sequence, noise is keyed by (layer, seed, step, global token), and loads are summed over the
whole step before biases move.
Source:  Shazeer et al. 2017 (1701.06538), noisy top-k; Fedus et al. 2021 (2101.03961), capacity and
         balance loss; Dai et al. 2024 (2401.06066), shared experts; Wang et al. 2024 (2408.15664),
         balance only by bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops.experts import place_rows, places_in_runs, top_positions
from minidist.autograd.recompute import computed_again
from minidist.autograd.tensor import Tensor, is_grad_enabled
from minidist.device import backend
from minidist.device.backend import LOW_PRECISION, Array, array_module, random_normal, to_host
from minidist.errors import ConfigError
from minidist.nn.balance import begin_balance
from minidist.nn.config import STD, GPTConfig, MixtureConfig
from minidist.nn.expert_nodes import NewestChoices, limit_to_nodes
from minidist.nn.hooks import take_along
from minidist.nn.layers import MLP, DropoutKey, Linear
from minidist.nn.module import Module
from minidist.nn.weights import ZEROS, Init, Weight

if TYPE_CHECKING:
    from minidist.nn.gpt import GPT


@dataclass(frozen=True)
class Routing:
    """The experts of a layer's tokens."""

    chosen: Array  # (B, T, k) integers: the experts of each token, best first
    kept: Array  # (B, T, k) bool: False for a dropped choice
    # (B, whole T, k): the choices of the whole sequences if they are needed, else `chosen`
    sequences: Array


class Sequences:
    """The tokens of a mixture as whole sequences; a strategy that cuts sequences replaces this
    object."""

    def joined(self, chosen: Array) -> Array:
        """Return the choices of the whole sequences, in token order: (B, own, k) -> (B, T, k)."""
        return chosen

    def parted(self, kept: Array) -> Array:
        """Return the part for the tokens of this rank, the reverse of `joined`: (B, T, k) -> (B,
        own, k)."""
        return kept

    def keys(self, tokens: Array) -> Array:
        """Return the keys of the tokens that the gate gets here: (B, T) -> (B, own)."""
        return tokens

    def total(self, share: Array) -> Array:
        """Return the sum of one number over all ranks that have tokens of these sequences."""
        return share


class Experts(Module):
    """`count` MLPs without biases; their weights are stacked along the first dim. Args: as
    MLP's."""

    def __init__(
        self, count: int, width: int, hidden: int, *, activation: str, out_std: float, dtype: Any
    ) -> None:
        self.count = count
        into = (count, width, hidden)
        out = (count, hidden, width)
        self.gate = Weight(into, Init("normal", STD), dtype=dtype) if activation == "silu" else None
        self.up = Weight(into, Init("normal", STD), dtype=dtype)
        self.down = Weight(out, Init("normal", out_std), dtype=dtype)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the results (R, width) of rows (R, width) that are sorted by expert; `counts`: the
        number of each expert's rows."""
        up = ops.grouped_linear(rows, self.up, counts=counts)
        inner = (
            ops.gelu(up)
            if self.gate is None
            else ops.swiglu(ops.grouped_linear(rows, self.gate, counts=counts), up)
        )
        return ops.grouped_linear(inner, self.down, counts=counts)

    def mixed(self, x: Tensor, weights: Tensor, chosen: Array, kept: Array) -> Tensor:
        """Return the weighted sum of the results of each token's kept experts: x (T, width), the
        others (T, k) -> (T, width)."""
        placement = place_rows(self.places(chosen), kept, experts=self.count)
        rows = ops.to_experts(x, placement)
        results = self(rows, to_host(placement.counts).tolist())
        of_rows = ops.take(weights.reshape(weights.size), placement.choices)
        return ops.from_experts(results, of_rows, placement)

    def places(self, chosen: Array) -> Array:
        """Return the numbers by which the rows of these experts are sorted: the experts' own,
        unless they are divided."""
        return chosen


class Mixture(Module):
    """Experts in place of a block's MLP: (B, T, width) -> (B, T, width).

    Args:    of_model: the sizes and choices of the model; config: those of the mixture; layer: its
             number.
    Attributes: routing         of the newest forward
                load            (2, experts) integers: tokens that chose each expert, and tokens
                                that it took, in training since the last `clear`; a block computed
                                again counts once
                newest          the choices of the newest tokens (expert_nodes.py); None, the
                                default, keeps none
                balance         the balance loss of the newest forward, a sum over tokens, one
                                number; or None
                balance_scale   the gradient of that loss; set before backward arrives here
    """

    def __init__(self, of_model: GPTConfig, config: MixtureConfig, layer: int = 0) -> None:
        self.config = config
        self.layer = layer
        hidden = config.hidden or of_model.hidden
        dtype = of_model.dtype
        out_std = STD * (2 * of_model.layers) ** -0.5
        self.scores = Linear(of_model.width, config.experts, bias=False, std=STD, dtype=dtype)
        self.experts = Experts(
            config.experts,
            of_model.width,
            hidden,
            activation=of_model.activation,
            out_std=out_std,
            dtype=dtype,
        )
        self.shared = [
            MLP(
                of_model.width,
                hidden,
                activation=of_model.activation,
                std=STD,
                out_std=out_std,
                dtype=dtype,
            )
            for _ in range(config.shared)
        ]
        self.bias: Weight | None = None
        if config.balance == "bias":
            low = backend.dtype(dtype) in LOW_PRECISION
            self.bias = Weight((config.experts,), ZEROS, dtype="float32" if low else dtype)
            # `rebalance` moves it
            self.bias.requires_grad = False
            self.bias.stays_whole = True
        self.sequences = Sequences()
        self.routing: Routing | None = None
        self.newest: NewestChoices | None = None
        self.balance: Array | None = None
        self.balance_scale = 0.0
        self.clear()

    def clear(self) -> None:
        """Set the load to zero."""
        self.load = np.zeros((2, self.config.experts), np.int64)

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        """Return the mixture's result for x. Raises: ConfigError in training with noise and without
        a key."""
        chances = ops.softmax(self._scores(x, key))
        rows = self.enter(x)
        weights = self.enter(chances)
        self.routing = self.route(weights.data)
        y = self.leave(self._apply(rows, weights, self.routing))
        for expert in self.shared:
            y = y + expert(x)
        return self._balanced(y, chances) if self.training and self.config.balance == "loss" else y

    def enter(self, x: Tensor) -> Tensor:
        """Return the experts' input, made from the gate's; a strategy that cuts experts' matrices
        overrides it."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Return the mixture's output, made from the experts' results; overridden together with
        `enter`."""
        return y

    # ------------------------------------------------------------------------------------- the gate

    def _scores(self, x: Tensor, key: DropoutKey | None) -> Tensor:
        """Return the scores (B, T, experts) of x (B, T, width), in float32 at least, with noise in
        training."""
        scores = self.scores(x)
        if scores.dtype in LOW_PRECISION:
            scores = ops.cast(scores, "float32")
        if not self.training or self.config.noise == 0.0:
            return scores
        if key is None:
            raise ConfigError(
                f"mixture {self.path!r} with noise {self.config.noise} is in training mode but got "
                "no key; pass key=DropoutKey(seed, step, tokens) to the model, or call model.eval()"
            )
        xp = array_module(scores.data)
        tokens = xp.asarray(self.sequences.keys(key.tokens), dtype="int64")
        places = tokens[..., None] * self.config.experts + xp.arange(self.config.experts)
        noise = random_normal(f"{self.path}/noise/{key.step}", key.seed, places, scores.dtype)
        noisy: Tensor = scores + noise * scores.dtype.type(self.config.noise)
        return noisy

    def route(self, chances: Array) -> Routing:
        """Route each token to its k likeliest experts, after adding biases; `chances`: (B, T,
        experts), the gate's.

        In training an expert takes the first tokens of each sequence, up to its capacity. So no
        later token decides whether a token is dropped, as a causal model requires.
        """
        config = self.config
        scores = chances if self.bias is None else chances + self.bias.data
        if config.node_limit is not None:
            scores = limit_to_nodes(
                scores, config.node_of(self.layer), config.node_limit, config.top_k
            )
        chosen = top_positions(scores, config.top_k)
        xp = array_module(chosen)
        kept = xp.ones(chosen.shape, bool)
        whole = chosen
        if self.training and (config.capacity is not None or config.balance == "loss"):
            whole = self.sequences.joined(chosen)
        if self.training and config.capacity is not None:
            places = places_in_runs(self._runs(whole)).reshape(whole.shape)
            kept = self.sequences.parted(places < config.places(whole.shape[1]))
        if self.training and is_grad_enabled() and not computed_again():
            for number, ids in enumerate((chosen.reshape(-1), chosen[kept])):
                self.load[number] += to_host(xp.bincount(ids, minlength=config.experts))
            if self.newest is not None:
                self.newest.add(chosen, kept)
        return Routing(chosen, kept, whole)

    def _runs(self, chosen: Array) -> Array:
        """Return the number of each choice's pair (sequence, expert): (B, T, k) -> (B·T·k,)."""
        sequence = array_module(chosen).arange(len(chosen), dtype="int64")[:, None, None]
        return (sequence * self.config.experts + chosen).reshape(-1)

    def _balanced(self, y: Tensor, chances: Tensor) -> Tensor:
        """Return y, connected to the gradient of the balance loss; set `balance` to the loss
        itself.

        The loss is the sum over tokens of weight · E · Σ_e f_e p_e, where f_e is the share of the
        choices in the token's sequence that fell on e: weight · T for a sequence if all are equal.
        No gradient passes through f.
        """
        assert self.routing is not None
        chosen = self.routing.sequences
        experts = self.config.experts
        counts = array_module(chosen).bincount(self._runs(chosen), minlength=len(chosen) * experts)
        factor = counts.reshape(-1, 1, experts) * (
            self.config.balance_weight * experts / (self.config.top_k * chosen.shape[1])
        )
        factor = factor.astype(chances.dtype)
        if not computed_again():
            self.balance = self.sequences.total((chances.data * factor).sum())
        return take_along(y, begin_balance(chances, factor, layer=self, dtype=y.dtype))

    # ---------------------------------------------------------------------------------- the experts

    def _apply(self, x: Tensor, chances: Tensor, routing: Routing) -> Tensor:
        """Return the sum of the experts' results for each token, weighted by `chances`."""
        width = x.shape[-1]
        experts = self.config.experts
        top_k = self.config.top_k
        chosen, kept = (each.reshape(-1, top_k) for each in (routing.chosen, routing.kept))
        tokens = array_module(chosen).arange(len(chosen), dtype="int64")[:, None]
        weights = ops.take(chances.reshape(chances.size), (tokens * experts + chosen).reshape(-1))
        weights = ops.cast(weights, x.dtype) if weights.dtype != x.dtype else weights
        y = self.experts.mixed(
            x.reshape(x.size // width, width), weights.reshape(len(chosen), top_k), chosen, kept
        )
        return y.reshape(x.shape)


# --------------------------------------------------------------------------------------- in a model


def mixture(model: "GPT", config: MixtureConfig) -> "GPT":
    """Replace the MLP of every block by a mixture, in place; afterwards `model.initialize(seed)`
    draws the weights.

    Returns: the model.
    Raises:  ConfigError if the weights are drawn already.
    """
    if any(getattr(parameter, "drawn", True) for parameter in model.parameters()):
        raise ConfigError(
            "mixture: the model's weights are initialized already; call mixture before model.initialize"
        )
    for layer, block in enumerate(model.blocks):
        block.mlp = Mixture(model.config, config, layer)
    model.config = replace(model.config, mixture=config)
    model.assign_names()
    return model


def mixtures(model: Module) -> list[Mixture]:
    """Return the mixtures of a model, first layer first."""
    return [module for module in model.modules() if isinstance(module, Mixture)]


def loads(model: Module) -> np.ndarray:
    """Return the loads of all mixtures (see Mixture.load), in this process since `clear`: (layers,
    2, experts) integers."""
    layers = mixtures(model)
    return np.stack([layer.load for layer in layers]) if layers else np.zeros((0, 2, 0), np.int64)


def rebalance(model: Module, counted: np.ndarray) -> None:
    """Move biases against the loads of a whole step, and clear the loads. Call it once a step,
    after the update.

    The bias of an expert chosen more often than the mean falls by bias_rate, that of the others
    rises; biases do not enter the weights of the results.
    Args:    counted: `loads` of the step, summed over all ranks that share the batch.
    """
    for layer, (chosen, _) in zip(mixtures(model), counted, strict=True):
        if layer.bias is not None:
            xp = array_module(layer.bias.data)
            step = layer.config.bias_rate * np.sign(chosen.mean() - chosen)
            layer.bias.data[...] += xp.asarray(step, layer.bias.dtype)
        layer.clear()
