"""Chapter 12 · Tensor parallelism: each layer's matrices are cut, and the ranks multiply at the same time.

The idea. A matrix product falls apart along columns, Y = X [A1 A2] = [X A1  X A2], and along rows,
Y = [X1 X2] [A1; A2] = X1 A1 + X2 A2. Put the two behind each other, and the pieces that the first makes are the pieces
that the second needs: an MLP is columns, gelu, rows, and attention is columns (a rank's heads), softmax, rows. Between
them nothing travels; after the rows the summands are added up.

    forward     x ── f ── A1 ── gelu ── B1 ──┐                 f: as it is             (backward: all-reduce)
                  ├─ f ── A2 ── gelu ── B2 ──┴─ g ── + bias    g: all-reduce           (backward: as it is)

f and g are Megatron's names; here they are ops.collectives.copy_to and reduce_from, of a Region
(tensor/tensor_layers.py). N2:156 has an all-gather after a column linear; none is needed.

Who holds what, of a block of width h, P ranks:

    weight (serial)            each rank
    attention.qkv  (h, 3h)     the columns of its heads: of queries, of keys and of values
    attention.out  (h, h)      the rows of its heads; bias whole
    mlp.up, gate   (h, 4h)     columns
    mlp.down       (4h, h)     rows; bias whole
    tokens         (V, h)      rows: a slice of the vocabulary; tied, it is the head too
    head           (h, V)      columns: the logits of a slice
    norms, positions, biases of row linears: whole on all, with gradients that are equal without being sent

Sizes need not divide: heads, hidden numbers and vocabulary are cut as numpy.array_split does. Of fewer key heads than
ranks each is held by several ranks, which divide its query heads and add up its gradient.

Cost, a step, all ranks together, in numbers (ring; B sequences of T tokens, L blocks):

    blocks       2(P-1) × 4 L B T h      2 all-reduces a block forward (g), 2 backward (f); with blocks computed again
                                         (chapter 19) 6: their forward runs twice
    embedding    2(P-1) × B T h          forward
    head         2(P-1) × B T h          backward
    loss         2(P-1) × 3 B T          maxima; sums and targets' logits
    key heads    2(P-K) × L (h + 1) × 2 D for K of them, P > K, of width D: gradients, after the last backward
    experts      2(P-1) × L B T E        the gates' chances backward, of E experts (chapter 18); each shared expert is
                                         a region too: 2 all-reduces
    control      with clipping one float64: each weight counts once in the norm

"The volume is small" (N2:158): beside data parallel's 2(P-1) × 12 L h² it is more from B T > 3h on.

Memory: weights, gradients and optimizer state are divided, and so are the activations inside the regions; what lies
outside (the residual stream, norms, dropout) each rank keeps whole, which chapter 13 goes on to divide.

notes:   N0 Tensor Parallelism, N2 张量并行
Source:  Shoeybi et al. 2019, "Megatron-LM" (1909.08053; N0:256 cites 2104.04473, which is its successor).
"""

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT, GPTConfig
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import Loss
from minidist.parallel.tensor.split_gpt import shared_numbers, split_gpt
from minidist.parallel.tensor.split_model import SplitModel
from minidist.parallel.tensor.tensor_layers import (
    ColumnLinear,
    Region,
    RowLinear,
    SplitEmbedding,
    SplitMLP,
    SplitOutput,
)

__all__ = ["ColumnLinear", "Region", "RowLinear", "SplitEmbedding", "SplitMLP", "SplitOutput", "TensorParallel",
           "activations_sent", "elements_sent", "tensor_parallel"]


def plain_tensor_mlp(x: Array, up: Array, down: Array, bias: Array, dy: Array, group: Group) -> tuple[Array, ...]:
    """An MLP forward and backward; `up` has this rank's columns, `down` its rows: y, dx, and their gradients."""
    inner = x @ up                                                   # (n, h) (h, own) -> (n, own): complete
    active = np.maximum(inner, 0)                                    # number by number: no rank needs another's
    y = group.all_reduce(active @ down, algorithm="ring") + bias     # g: (n, own) (own, h) are summands
    ddown = active.T @ dy                                            # g backward: dy is whole on all ranks, as it is
    dinner = (dy @ down.T) * (inner > 0)
    dup = x.T @ dinner
    dx = group.all_reduce(dinner @ up.T, algorithm="ring")           # f backward: all columns used x, so add up
    return y, dx, dup, ddown


# The real one is made of layers (tensor_layers.py) whose f and g are differentiable collectives, so backward follows
# from forward. It cuts attention (by heads), the embedding and the loss (by vocabulary) in the same way, whatever the
# sizes, and draws each rank's slice of the weights alone.


def tensor_parallel(model: GPT, group: Group, *, algorithm: str = "ring") -> GPT:
    """Cut a GPT between the ranks of `group`, in place; then `model.initialize(seed)` draws this rank's part.

    Args:    algorithm: of the all-reduces; pinned, so that the same run gives the same bits.
    Raises:  as split_gpt.
    """
    split_gpt(model, Region(group, algorithm))
    return model


def elements_sent(config: GPTConfig, *, ranks: int, tokens: int, recomputed: int = 0) -> int:
    """Numbers that all ranks together send in a step along the axis, whatever the number of passes: the cost above.

    Args:    tokens: of the batch, B·T; recomputed: how many blocks are computed again in backward.
    """
    return activations_sent(config, ranks=ranks, tokens=tokens, recomputed=recomputed) + shared_numbers(config, ranks)


def activations_sent(config: GPTConfig, *, ranks: int, tokens: int, recomputed: int = 0) -> int:
    """Of these, what does not wait for the last backward. Args: as elements_sent."""
    regions = 2 + (config.mixture.shared if config.mixture else 0)
    crossings = regions * (2 * config.layers + recomputed) + 2
    activations = 2 * (ranks - 1) * tokens * (crossings * config.width + 3)
    return activations + gates_sent(config, ranks=ranks, tokens=tokens)


def gates_sent(config: GPTConfig, *, ranks: int, tokens: int) -> int:
    """Of these, the gradients of the chances of a mixture's gates. Args: as elements_sent."""
    return 2 * (ranks - 1) * tokens * config.layers * config.mixture.experts if config.mixture else 0


class TensorParallel(SplitModel):
    """A GPT cut by `tensor_parallel`, trained on batches that every rank of the group sees whole.

        model = tensor_parallel(GPT(config), group)
        model.initialize(seed)
        strategy = TensorParallel(model, group)
        loss = strategy.step(batch, AdamW(strategy.parameters, lr))

    The step is one process's step: forward, backward, update. What travels does so inside forward and backward.
    Args:    as SplitModel.
    """

    def __init__(self, model: GPT, group: Group, *, loss: Loss | None = None, algorithm: str = "ring",
                 precision: Precision | None = None, recorder: Recorder | None = None) -> None:
        super().__init__(model, group, loss=loss, algorithm=algorithm, precision=precision, recorder=recorder)
