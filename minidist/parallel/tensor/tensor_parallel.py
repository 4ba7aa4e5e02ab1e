"""Chapter 12 · Tensor parallelism: each layer's matrices are cut, and the ranks multiply at the
same time.

The idea. A matrix product can be cut by columns, Y = X [A1 A2] = [X A1  X A2], and by rows,
Y = [X1 X2] [A1; A2] = X1 A1 + X2 A2. Put the two behind each other: the outputs of the first
product are exactly the inputs that the second needs on the same rank. An MLP is columns, gelu,
rows; attention is columns (the rank's heads), softmax, rows. Nothing is sent between them; after
the product by rows the ranks' summands are added up.

    forward     x -- f -- A1 -- gelu -- B1 --+                 f: x as it is           (backward: all-reduce)
                  +- f -- A2 -- gelu -- B2 --+- g -- + bias    g: all-reduce           (backward: as it is)

f and g are Megatron's names; here they are TensorRegion.enter and leave (tensor_layers.py). N2:156
draws an all-gather after a column linear; none is needed.

What each rank holds of a block of width h, P ranks:

    weight (serial)            each rank
    attention.qkv  (h, 3h)     the columns of its heads: of queries, of keys and of values
    attention.out  (h, h)      the rows of its heads; whole bias
    mlp.up, gate   (h, 4h)     columns
    mlp.down       (4h, h)     rows; whole bias
    tokens         (V, h)      rows: a slice of the vocabulary; a tied table is the head too
    head           (h, V)      columns: the logits of a slice
    norms, positions, biases of row linears: whole on all ranks; their gradients are equal without
    any message

Sizes need not divide: heads, hidden numbers and vocabulary are cut as numpy.array_split does. With
fewer key heads than ranks, several ranks hold the same key head; they divide its query heads and
sum its gradient.

Cost, per step, all ranks together, in numbers (ring; B sequences of T tokens, L blocks):

    blocks       2(P-1) × 4 L B T h      2 all-reduces a block forward (g), 2 backward (f); 6 in all
                                         for a block that is computed again (chapter 19), because
                                         its forward runs twice
    embedding    2(P-1) × B T h          forward
    head         2(P-1) × B T h          backward
    loss         2(P-1) × 3 B T          maxima; sums and the targets' logits
    key heads    2(P-K) × L (h + 1) × 2 D for K key heads of width D, if P > K: gradients, after the
                 last backward
    experts      2(P-1) × L B T E        gradients of the gates' probabilities, of E experts
                                         (chapter 18); each shared expert is a region too: 2
                                         all-reduces
    control      with clipping three float64 a rank: its part of the norm, in which each weight
                 counts once, and two digests of its batch (these only under a Trainer). Before a
                 Trainer's first step and each 100th: six more

The messages of a step, in order; `TensorRegion.leave` is g, `enter` is f:

    before     BatchMeeting                  six float64 a rank over the world, before the first step
                                             and each 100th
    forward    SplitEmbedding        leave   B T h
               RowLinear, 2 a block  leave   B T h each
               SplitOutput.loss              maxima B T; sums and the targets' logits 2 B T
    backward   head, or tied table   enter   B T h
               MLP, qkv of a block   enter   B T h each
    after it   key heads, if shared          their gradients, over the ranks that hold the same
                                             head: add_up (step/model_axis.py)
    clipping   gradient_norm                 an all-gather over tp: norm, digests of the batch
    loss       none: all ranks have it

N2:158 calls this volume small. It exceeds data parallel's 2(P-1) × 12 L h² as soon as B T > 3h.

Memory: divided, except activations outside the regions (the residual stream, norms, dropout);
chapter 13 divides them.

notes:   N0 Tensor Parallelism, N2 张量并行
Source:  Shoeybi et al. 2019, "Megatron-LM" (1909.08053; N0:256 cites 2104.04473, its successor).
"""

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT, GPTConfig
from minidist.nn.weight_shard import WeightShard
from minidist.parallel.step.model_axis import ModelAxis
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.tensor.tensor_layers import TensorRegion, shared_numbers, split_gpt


def plain_tensor_mlp(
    x: Array, up: Array, down: Array, bias: Array, dy: Array, group: Group
) -> tuple[Array, ...]:
    """Run an MLP forward and backward; `up` has this rank's columns, `down` its rows. Return y, dx,
    and the gradients of `up` and `down`."""
    inner = x @ up  # (n, h) (h, own) -> (n, own): complete
    active = np.maximum(inner, 0)  # number by number: no rank needs another's
    # g: (n, own) (own, h), terms of a sum
    y = group.all_reduce(active @ down, algorithm="ring") + bias
    ddown = active.T @ dy  # g backward: dy is whole on all ranks, as it is
    dinner = (dy @ down.T) * (inner > 0)
    dup = x.T @ dinner
    # f backward: all columns used x, so add up
    dx = group.all_reduce(dinner @ up.T, algorithm="ring")
    return y, dx, dup, ddown


# The real one is made of layers (tensor_layers.py) whose f and g are differentiable collectives, so
# backward follows from forward. It cuts attention (by heads), the embedding and the loss (by
# vocabulary) in the same way, for any sizes, and draws only each rank's slice of the weights.


def tensor_parallel(model: GPT, group: Group) -> GPT:
    """Cut a GPT between the ranks of `group`, in place; then its weights may be drawn. Raises: as
    split_gpt."""
    split_gpt(model, TensorRegion(group))
    return model


class TensorParallel(ModelAxis):
    """The ranks that divide a GPT's layers, and see the same batch; making it cuts the model, in
    place.

    strategy = parallelize(GPT(config), Mesh(group, tp=group.size), Plan(tp=group.size), seed=0)
    loss = strategy.step(batch, AdamW(strategy.parameters, lr))  # as a Trainer with this plan does
    """

    def __init__(self, model: GPT, group: Group) -> None:
        super().__init__(model, group)
        tensor_parallel(model, group)

    def sums_over(self, parameter: Parameter) -> Group | None:
        """Return the ranks that hold the same key head (asked by Hybrid._summands)."""
        return parameter.sharers if isinstance(parameter, WeightShard) else None

    def counts(self, parameter: Parameter) -> bool:
        """Return whether this rank counts a weight in sums over all weights (asked by
        Hybrid._counts)."""
        if isinstance(parameter, WeightShard):
            return parameter.first_sharer()
        return self.group.rank == 0

    def held_alike(self, parameter: Parameter) -> bool:
        """Return whether several ranks hold this weight, whole or as the same shard (asked by
        lay_out)."""
        return not isinstance(parameter, WeightShard) or parameter.sharers is not None

    def check_shared(self, *, when: str) -> None:
        """Raise unless the shared weights are equal on all ranks, as ModelAxis.check_shared."""
        alike = [p for p in self.model.parameters() if self.held_alike(p)]
        shared = [p for p in alike if isinstance(p, WeightShard)]
        check_equal_replicas((p for p in alike if p not in set(shared)), self.group, when=when)
        if shared and shared[0].sharers is not None:
            check_equal_replicas(shared, shared[0].sharers, when=when)


# --------------------------------------------------------------------------------------------- cost


def elements_sent(config: GPTConfig, *, ranks: int, tokens: int, recomputed: int = 0) -> int:
    """Return the count of numbers that all ranks together send along the axis in a step, in all its
    passes: the cost above.

    Args:    tokens: of the batch, B·T; recomputed: how many blocks are computed again in backward.
    """
    return activations_sent(
        config, ranks=ranks, tokens=tokens, recomputed=recomputed
    ) + shared_numbers(config, ranks)


def activations_sent(config: GPTConfig, *, ranks: int, tokens: int, recomputed: int = 0) -> int:
    """Return the part of `elements_sent` that is sent inside forward and backward, with the same
    arguments."""
    regions = 2 + (config.mixture.shared if config.mixture else 0)
    crossings = regions * (2 * config.layers + recomputed) + 2
    activations = 2 * (ranks - 1) * tokens * (crossings * config.width + 3)
    return activations + gates_sent(config, ranks=ranks, tokens=tokens)


def gates_sent(config: GPTConfig, *, ranks: int, tokens: int) -> int:
    """Return the part of `elements_sent` that is gradients of a mixture's gates."""
    return (
        2 * (ranks - 1) * tokens * config.layers * config.mixture.experts if config.mixture else 0
    )
