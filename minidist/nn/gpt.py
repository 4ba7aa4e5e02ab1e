"""GPT: token and position embeddings, a stack of blocks, a norm and an output layer.

    model = GPT(GPTConfig(vocabulary=103, context=128, layers=4, width=128, heads=4))
    model.initialize(seed=0)
    model.loss(inputs, targets).backward()
    model.generate([7], 200, temperature=0.8, seed=0)

Blocks are pre-norm, as in GPT-2. Initial weights are normal with standard deviation 0.02; the 2
projections per layer onto the residual stream have 0.02 / sqrt(2·layers), so that it does not grow
with depth. Source: Radford et al. 2019.
"""

from collections.abc import Sequence

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops.gather import SortedIds, positions_in
from minidist.autograd.tensor import Tensor, no_grad
from minidist.device.backend import Array, beside, index_range, random_uniform, to_host
from minidist.errors import ConfigError, ShapeError
from minidist.nn.attention import CausalSelfAttention
from minidist.nn.balance import add_balance
from minidist.nn.config import STD, GPTConfig
from minidist.nn.layers import MLP, Dropout, DropoutKey, Embedding, LayerNorm, Linear, RMSNorm
from minidist.nn.module import Module
from minidist.nn.moe import Mixture, mixture, mixtures


class Block(Module):
    """Attention, then MLP, each on a normed copy of the stream and added to it: (B, T, width) ->
    (B, T, width)."""

    def __init__(self, config: GPTConfig) -> None:
        norm = LayerNorm if config.norm == "layer" else RMSNorm
        out_std = STD * (2 * config.layers) ** -0.5
        self.norm_attention = norm(config.width, eps=config.norm_eps, dtype=config.dtype)
        self.attention = CausalSelfAttention(config, out_std=out_std)
        self.dropout_attention = Dropout(config.dropout)
        self.norm_mlp = norm(config.width, eps=config.norm_eps, dtype=config.dtype)
        self.mlp: MLP | Mixture = MLP(
            config.width,
            config.hidden,
            activation=config.activation,
            std=STD,
            out_std=out_std,
            dtype=config.dtype,
        )
        self.dropout_mlp = Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Array, key: DropoutKey | None = None) -> Tensor:
        x = self.dropout_attention(
            self.attention(self.norm_attention(x), positions), key, residual=x
        )
        return self.dropout_mlp(self.mlp(self.norm_mlp(x), key), key, residual=x)


class Output:
    """The loss of logits, and their use in generating text. A strategy that splits logits replaces
    this object."""

    def last(self, x: Tensor) -> Tensor:
        """Return the hidden state of the last token: (B, T, width) -> (B, 1, width)."""
        return x[:, -1:]

    def loss(self, logits: Tensor, targets: Array, *, divisor: float | None) -> Tensor:
        """Return the sum of the cross-entropies of logits (…, vocabulary) and targets (…), divided
        by `divisor`: one number."""
        return ops.cross_entropy(logits, targets, divisor=divisor)

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary: (…, vocabulary)."""
        return logits


class GPT(Module):
    """Token ids (B, T) -> logits (B, T, vocabulary), by embed, blocks and project; a pipeline cuts
    between these."""

    def __init__(self, config: GPTConfig) -> None:
        self.config = config
        self.tokens = Embedding(config.vocabulary, config.width, std=STD, dtype=config.dtype)
        self.positions = (
            Embedding(config.context, config.width, std=STD, dtype=config.dtype)
            if config.positions == "learned"
            else None
        )
        self.dropout = Dropout(config.dropout)
        self.blocks = [Block(config) for _ in range(config.layers)]
        self.norm = (LayerNorm if config.norm == "layer" else RMSNorm)(
            config.width, eps=config.norm_eps, dtype=config.dtype
        )
        self.head = (
            None
            if config.tied
            else Linear(config.width, config.vocabulary, bias=False, std=STD, dtype=config.dtype)
        )
        self.output = Output()
        self.assign_names()
        if config.mixture is not None:
            mixture(self, config.mixture)

    def forward(
        self, ids: Array, positions: Array | None = None, key: DropoutKey | None = None
    ) -> Tensor:
        """Return logits (B, T, vocabulary).

        Args:    ids: (B, T) integers, or SortedIds of them.
                 positions: (T,) global positions; default: 0..T-1. A shard of the sequence passes
                 its own.
                 key: for dropout in training.
        Raises:  ShapeError if ids do not fit.
        """
        return self.project(self.hidden(ids, positions, key))

    def hidden(
        self, ids: Array, positions: Array | None = None, key: DropoutKey | None = None
    ) -> Tensor:
        """Return the output of the last block: (B, T, width). Args, Raises: as forward's."""
        ids = np.asarray(ids) if isinstance(ids, (list, tuple)) else ids
        if len(ids.shape) != 2:
            raise ShapeError(
                f"GPT: ids have shape {ids.shape}; they need shape (sequences, tokens)"
            )
        positions = index_range(ids.shape[1]) if positions is None else positions
        x = self.embed(ids, positions, key)
        positions = positions.ids if isinstance(positions, SortedIds) else beside(positions, x.data)
        for block in self.blocks:
            x = block(x, positions, key)
        return x

    def embed(self, ids: Array, positions: Array, key: DropoutKey | None = None) -> Tensor:
        """Return the embeddings (B, T, width) of ids (B, T) at positions (T,), both better on the
        host (autograd/ops/gather.py).

        Raises:  ShapeError for more tokens than the context holds.
        """
        x = self.tokens(ids)
        if self.positions is not None:
            if positions.shape[0] > self.config.context:
                raise ShapeError(
                    f"GPT: sequences of {positions.shape[0]} tokens are longer than the context of "
                    f"{self.config.context}; shorten them, or build the model with a longer context"
                )
            x = x + self.positions(positions)
        return self.dropout(x, key)

    def project(self, x: Tensor) -> Tensor:
        """Return the logits (…, vocabulary) of x (…, width); those of a slice, if a strategy has
        split the vocabulary."""
        x = self.norm(x)
        return self.tokens.unembed(x) if self.head is None else self.head(x)

    def loss(
        self,
        inputs: Array,
        targets: Array,
        divisor: float | None = None,
        *,
        positions: Array | None = None,
        key: DropoutKey | None = None,
    ) -> Tensor:
        """Return the sum of the cross-entropies of all tokens and of the balance losses, divided by
        `divisor`: one number.

        Args:    inputs, targets: (B, T) integers; positions, key: as forward's.
                 divisor: default: the number of tokens; a strategy passes the global token count.
        """
        targets = np.asarray(targets) if isinstance(targets, (list, tuple)) else targets
        loss = self.output.loss(self(inputs, positions, key), targets, divisor=divisor)
        if self.config.mixture is None:
            return loss
        return add_balance(loss, mixtures(self), targets.size if divisor is None else divisor)

    def generate(
        self, ids: Sequence[int] | Array, count: int, *, temperature: float = 1.0, seed: int = 0
    ) -> np.ndarray:
        """Append `count` tokens to `ids`, each drawn from softmax(logits / temperature) of the
        tokens before it.

        Args:    temperature: 1: the model's probabilities; lower: likelier tokens more often; 0:
                 always the likeliest.
        Returns: (len(ids) + count,) int64: the same for the same weights, arguments and machine.
        Cost:    a forward of up to `context` tokens for each new one.
        Raises:  ConfigError without a first token or with a negative temperature; ShapeError,
                 DtypeError for ids that are not of the vocabulary.
        """
        if not len(ids) or not temperature >= 0.0:
            raise ConfigError(
                "generate: needs at least one token to start from, and a temperature of 0 or more; "
                f"got {len(ids)} tokens, temperature {temperature!r}"
            )
        first = positions_in("generate", np.asarray(ids), self.config.vocabulary)
        text = np.concatenate([first, np.zeros(count, np.int64)])
        chances = random_uniform("generate", seed, range(count), "float64")
        with self.evaluating(), no_grad():
            for stop in range(len(ids), len(text)):
                seen = text[max(0, stop - self.config.context) : stop]
                logits = self.output.whole(self.project(self.output.last(self.hidden(seen[None]))))
                last = to_host(logits.data)[0, 0]
                text[stop] = pick(last, temperature, float(chances[stop - len(ids)]))
        return text


def pick(logits: np.ndarray, temperature: float, chance: float) -> int:
    """Return the id that `chance` in [0, 1) selects, if softmax(logits / temperature) divides that
    interval among the ids."""
    wide = logits.astype(np.float64)
    if temperature == 0.0:
        return int(wide.argmax())
    with np.errstate(over="ignore"):  # by a temperature near 0: -inf, whose exp is 0
        bounds = np.cumsum(np.exp((wide - wide.max()) / temperature))
    return min(int(np.searchsorted(bounds, chance * bounds[-1], side="right")), len(wide) - 1)
