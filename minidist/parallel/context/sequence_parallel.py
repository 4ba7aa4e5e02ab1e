"""Chapter 13 · Sequence parallelism, Megatron's: outside the tensor-parallel regions, each rank has
some of the tokens.

The idea. Tensor parallelism (chapter 12) divides what lies inside its regions. Norms, dropout and
the residual stream lie outside; every rank computes and keeps the same numbers there, P times in
all. They work token by token, so outside the *sequence* can be cut. An all-reduce is a
reduce-scatter and an all-gather; the outside part fits between the two:

    tensor      … B_r -- all-reduce ------ + residual, dropout, norm: whole --------------------- A_r …
    sequence    … B_r -- reduce-scatter -- + residual, dropout, norm: T/P tokens -- all-gather -- A_r …

So only the edges of a region change: enter gathers the tokens (backward: reduce-scatter), leave
scatters the sums (backward: all-gather).

    outside     residual stream, norms, dropout: own tokens, cut as numpy.array_split does (dim 1)
    inside      all tokens, own heads and hidden numbers; rotary positions are those of all tokens
    weights     norms, positions, biases of row linears: whole on all ranks; each rank's gradient is
                that of its tokens

Cost, a step, all ranks together, in numbers (ring; B sequences of T tokens, T' = P ceil(T/P), L
blocks, R of them computed again):

    blocks      (P-1) × (4 L + 2 R) B h (T + T')        as tensor parallel if P divides T; half of
                                                        them all-gathers
    ends        (P-1) × 2 B h (T + T')                  embedding and head
    loss        2(P-1) × 3 B T
    outside     2(P-1) × numbers of the weights outside, after the last backward
    key heads   as in chapter 12

Memory: what lies outside is divided too, except two gathered inputs a block that the weights'
gradients need: 2 h a token stay whole. (Korthikanti et al. gather them again in backward.)

notes:   N2 序列并行 draws context parallelism, which cuts attention itself (ring_attention.py)
Source:  Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
"""

from functools import partial

import numpy as np

from minidist.autograd.ops import collectives
from minidist.autograd.ops.collectives import shard_of
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT, GPTConfig
from minidist.nn.moe import Sequences
from minidist.nn.weight_shard import WeightShard
from minidist.parallel.context.token_shard import TOKENS, pick, shard_dropouts
from minidist.parallel.step.model_axis import ModelAxis
from minidist.parallel.tensor.tensor_layers import (
    SplitOutput,
    TensorRegion,
    shared_numbers,
    split_gpt,
)
from minidist.parallel.tensor.tensor_parallel import TensorParallel


def plain_sequence_mlp(
    x: Array, up: Array, down: Array, bias: Array, dy: Array, group: Group
) -> tuple[Array, ...]:
    """Run chapter 12's MLP where x and dy are this rank's tokens (own, h), equally many on all
    ranks: return y, dx, and the gradients of `up`, `down` and `bias`."""
    whole_x = group.all_gather(x, algorithm="ring")  # f: gather all tokens
    inner = whole_x @ up
    active = np.maximum(inner, 0)
    # g: the sums of the own tokens
    y = group.reduce_scatter(active @ down, algorithm="ring").reshape(x.shape)
    whole_dy = group.all_gather(dy, algorithm="ring")  # g backward
    ddown = active.T @ whole_dy
    dinner = (whole_dy @ down.T) * (inner > 0)
    dup = whole_x.T @ dinner
    dx = group.reduce_scatter(dinner @ up.T, algorithm="ring").reshape(x.shape)  # f backward
    dbias = group.all_reduce(dy.sum(axis=0), algorithm="ring")  # outside: own tokens', so add up
    return y + bias, dx, dup, ddown, dbias


# The real one puts these gathers and scatters at the borders of chapter 12's regions and keeps
# everything outside them (norms, dropout, the residual stream) on own tokens. It takes numbers of
# tokens that the ranks do not divide evenly.


class SequenceRegion(TensorRegion):
    """A region that gathers all tokens on entry, and gives each rank the sums of its own tokens on
    exit."""

    def enter(self, x: Tensor) -> Tensor:
        """(B, own, width) -> (B, T, width)."""
        return collectives.all_gather(x, dim=TOKENS, group=self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Summands (B, T, width) -> sums (B, own, width)."""
        return collectives.reduce_scatter(x, dim=TOKENS, group=self.group)

    def sequences(self) -> Sequences:
        """Return the tokens that a mixture's gate sees: the own tokens."""
        return OutsideSequences(self.group)


class OutsideSequences(Sequences):
    """The tokens of a gate that sees the own tokens; its probabilities enter the region before it
    routes."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def keys(self, tokens: Array) -> Array:
        return pick(tokens, partial(shard_of, group=self.group), TOKENS)

    def total(self, share: Array) -> Array:
        """Return the sum of one number over all ranks, as Sequences.total. Cost: an all-reduce of
        one number, counted under `control`."""
        with self.group.ledger.control():
            return self.group.all_reduce(share, algorithm="direct")


class SequenceOutput(SplitOutput):
    """Logits of all tokens and a slice of the vocabulary, from hidden states of the own tokens."""

    def last(self, x: Tensor) -> Tensor:
        """Return the last token, as a sequence of one token that is cut again: (B, own, width) ->
        (B, 1 or 0, width)."""
        group = self.region.group
        whole = collectives.gather_copies(x, dim=TOKENS, group=group)
        return collectives.take_shard(whole[:, -1:], dim=TOKENS, group=group)


def sequence_parallel(model: GPT, group: Group) -> GPT:
    """Cut a GPT's layers as chapter 12 does, and the sequence between them. Raises: as
    split_gpt."""
    region = SequenceRegion(group)
    split_gpt(model, region)
    model.output = SequenceOutput(model.config.vocabulary, region)
    shard_dropouts(model, partial(shard_of, group=group))
    model.assign_names()
    return model


class SequenceParallel(TensorParallel):
    """Tensor parallelism in which the ranks also divide the tokens outside the regions."""

    def __init__(self, model: GPT, group: Group) -> None:
        ModelAxis.__init__(self, model, group)
        sequence_parallel(model, group)

    def sums_over(self, parameter: Parameter) -> Group | None:
        """Return the ranks that sum a weight's gradient: those of TensorParallel, or for a whole
        weight all, as each has the gradient of its own tokens."""
        return parameter.sharers if isinstance(parameter, WeightShard) else self.group

    def own_tokens(self, length: int) -> slice:
        """Return this rank's tokens of a sequence, outside the regions."""
        return shard_of(length, group=self.group)


# --------------------------------------------------------------------------------------------- cost


def elements_sent(config: GPTConfig, *, ranks: int, sequences: int, recomputed: int = 0) -> int:
    """Return the count of numbers that all ranks together send along the axis in a step, in all its
    passes: the cost above.

    Args:    sequences: of config.context tokens; recomputed: how many blocks are computed again in
             backward.
    """
    once = 2 * (ranks - 1) * outside_numbers(config) + shared_numbers(config, ranks)
    return (
        activations_sent(
            config, config.context, ranks=ranks, sequences=sequences, recomputed=recomputed
        )
        + once
    )


def outside_numbers(config: GPTConfig) -> int:
    """Return the count of numbers of the weights outside the regions: norms, biases of row linears,
    positions, a mixture's gates."""
    of_norm = (2 if config.norm == "layer" else 1) * config.width
    positions = config.context * config.width if config.positions == "learned" else 0
    of_block = 2 * of_norm + 2 * config.width
    # experts have no bias; a gate, and a bias for each shared expert
    if config.mixture is not None:
        of_block += (config.mixture.experts + config.mixture.shared - 1) * config.width
    return config.layers * of_block + of_norm + positions


def activations_sent(
    config: GPTConfig, tokens: int, *, ranks: int, sequences: int, recomputed: int = 0
) -> int:
    """Return the part of `elements_sent` that is sent inside forward and backward, for sequences of
    `tokens` tokens."""
    padded = ranks * -(-tokens // ranks)
    crossings = (2 + (config.mixture.shared if config.mixture else 0)) * (
        2 * config.layers + recomputed
    ) + 2
    activations = (
        (ranks - 1) * sequences * (crossings * config.width * (tokens + padded) + 2 * 3 * tokens)
    )
    return activations + gates_sent(
        config, tokens, ranks=ranks, sequences=sequences, recomputed=recomputed
    )


def gates_sent(
    config: GPTConfig, tokens: int, *, ranks: int, sequences: int, recomputed: int = 0
) -> int:
    """Return the part of `activations_sent` that is probabilities of a mixture's gates, and their
    gradients."""
    padded = ranks * -(-tokens // ranks)
    experts = config.mixture.experts if config.mixture else 0
    return (
        (ranks - 1)
        * sequences
        * experts
        * (config.layers * (tokens + padded) + recomputed * tokens)
    )
