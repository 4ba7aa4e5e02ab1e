"""Stages: where a GPT is cut by its layers, and how many layers each stage gets.

    stage 0                    stage 1         stage 2
    embed, blocks 0 and 1      blocks 2, 3     blocks 4 and 5, norm, output

A rank cuts a model whose weights are not drawn yet, and draws what it keeps. Names stay those of the whole model, so
weights and dropout are the same too. With a tied output both ends need the token table, and both have it.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.autograd.tensor import Tensor
from minidist.device import account
from minidist.device.backend import Array, array_module, beside
from minidist.errors import ShardError
from minidist.nn import GPT, Mixture
from minidist.nn.layers import DropoutKey


class Stages:
    """The stages of a GPT that one rank has.

    Args:    model: its weights not yet drawn; the layers of other ranks are taken out of it.
             layers: number of layers of each stage of the whole model; own: the numbers of this rank's stages.
    Attributes: model: what is left of it, with the names of the whole; last: number of the whole model's last stage.
                layers: {stage: its layers}, of this rank's stages.
    Raises:  ShardError if the layers do not add up to the model's, or a stage between the ends has none.
    """

    def __init__(self, model: GPT, layers: Sequence[int], own: Sequence[int]) -> None:
        whole = model.config.layers
        if sum(layers) != whole or min(layers) < 0:
            raise ShardError(f"stages of {list(layers)} layers for a model of {whole}: they must add up to {whole}")
        empty = [stage for stage, count in enumerate(layers[1:-1], start=1) if not count]
        if empty:
            raise ShardError(f"stages of {list(layers)} layers: stage {empty[0]} has none; only the first and the "
                             f"last, which have the embedding and the output, may do without")
        edges, self.last = [0, *accumulate(layers)], len(layers) - 1
        self.layers = {stage: range(edges[stage], edges[stage + 1]) for stage in own}
        cut: Any = model
        self.model: Any = cut
        cut.blocks = {layer: model.blocks[layer] for stage in own for layer in self.layers[stage]}
        if 0 not in own:
            cut.positions = None
            if not (model.config.tied and self.last in own):
                cut.tokens = None
        if self.last not in own:
            cut.norm = cut.head = None

    def mixtures(self, stage: int) -> list[Mixture]:
        """The mixtures of a stage's blocks."""
        return [mlp for layer in self.layers[stage] if isinstance(mlp := self.model.blocks[layer].mlp, Mixture)]

    def between(self, rows: int, length: int) -> tuple[int, int, int]:
        """The shape of what is sent between stages, for `rows` sequences of `length` tokens."""
        return rows, length, self.model.config.width

    def forward(self, stage: int, x: Any, *, targets: Array, positions: Array | None = None,
                divisor: float | None = None, key: DropoutKey | None = None) -> Tensor:
        """One stage's forward.

        Args:    x: token ids (B, T) for stage 0, else the activation of the previous stage (B, T, width).
                 targets: ids (B, T), used by the last stage; positions: (T,), default 0 to T-1.
                 divisor: of the loss, default B·T; key: for dropout.
        Returns: the activation (B, T, width); on the last stage the sum of the targets' cross-entropies over `divisor`.
        """
        positions = np.arange(targets.shape[1]) if positions is None else positions
        if stage == 0:
            x = self.model.embed(x, positions, key)
        positions = beside(positions, x.data)
        for layer in self.layers[stage]:
            x = self.model.blocks[layer](x, positions, key)
        if stage < self.last:
            return x    # type: ignore[no-any-return]
        return self.model.output.loss(self.model.project(x), targets, divisor=divisor)  # type: ignore[no-any-return]


class ArrivedActivation(Tensor):
    """An activation that came from another rank; its gradient is sent there, so it counts as communication."""

    __slots__ = ()

    def __init__(self, data: Array) -> None:
        super().__init__(data, requires_grad=True)

    def accumulate(self, gradient: Array, *, own: bool = False) -> None:
        """Add to the gradient of a leaf; `own`: nothing else uses the array, so it may be kept."""
        if self.grad is None:
            gradient, own = account.current().hold(gradient if own else gradient.copy(), "communication"), True
        super().accumulate(gradient, own=own)


def hollow(y: Tensor) -> Tensor:
    """`y` for its backward, without its numbers: they were sent to another rank, and backward needs only the shape."""
    if y.node is None:
        return y
    xp = array_module(y.data)
    return Tensor._of(xp.broadcast_to(xp.zeros((), y.dtype), y.shape), y.node, y.index)


def balanced_layers(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """The number of layers of each stage that makes the slowest stage fastest, and then the others most even.

    Args:    costs: of each layer, in any unit; first, last: costs of the embedding and of the output.
    Raises:  ShardError for more stages than there are layers, an embedding and an output.
    """
    edges = [0.0, *accumulate(costs)]
    count = len(costs)
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}   # layers so far -> slowest, squares, split
    for stage in range(stages):
        extra = first * (stage == 0) + last * (stage == stages - 1)
        least = 0 if stage in (0, stages - 1) else 1
        choices: dict[int, tuple[float, float, list[int]]] = {}
        for start, (slowest, squares, split) in best.items():
            for stop in range(start + least, count + 1):
                cost = edges[stop] - edges[start] + extra
                choice = (max(slowest, cost), squares + cost * cost, [*split, stop - start])
                choices[stop] = min(choices.get(stop, (math.inf, math.inf, [])), choice)
        best = choices
    if count not in best:
        raise ShardError(f"{count} layers cannot fill {stages} stages; take at most {count + 2}")
    return best[count][2]
