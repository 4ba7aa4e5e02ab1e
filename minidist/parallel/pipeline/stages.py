"""Stages: where a GPT is cut by its layers, how many layers each stage gets, and how a rank's
stages are updated.

    stage 0                    stage 1         stage 2
    embed, blocks 0 and 1      blocks 2, 3     blocks 4 and 5, norm, output

A rank cuts a model whose weights are not drawn yet, and draws what it keeps. Names stay those of
the whole model, so weights and dropout are the same too. With a tied output both ends need the
token table: both have it, and take the sum of its two gradients. `StageModel` is what model
parallel and the pipeline share.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from minidist.autograd.recompute import hollow_array
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, beside, index_range
from minidist.errors import ShardError
from minidist.nn import GPT, Mixture
from minidist.nn.layers import DropoutKey
from minidist.optim import Optimizer, sum_of_squares
from minidist.parallel.step.flat import sum_in_order, trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch, Key, Part, micro_parts, zero_unused


class Stages:
    """The stages of a GPT that one rank has.

    Args:    model: its weights not yet drawn; the layers of other ranks are taken out of it.
             layers: number of layers of each stage of the whole model; own: the numbers of this
             rank's stages.
    Attributes: model: what is left of it, with the names of the whole; last: number of the whole
    model's last stage.
                layers: {stage: its layers}, of this rank's stages.
    Raises:  ShardError if the layers do not add up to the model's, or a stage between the ends has
             none.
    """

    def __init__(self, model: GPT, layers: Sequence[int], own: Sequence[int]) -> None:
        whole = model.config.layers
        if sum(layers) != whole or min(layers) < 0:
            raise ShardError(
                f"stages of {list(layers)} layers for a model of {whole}: they must add up to "
                f"{whole}"
            )
        empty = [stage for stage, count in enumerate(layers[1:-1], start=1) if not count]
        if empty:
            raise ShardError(
                f"stages of {list(layers)} layers: stage {empty[0]} has none; only the first and "
                "the last, which have the embedding and the output, may do without"
            )
        edges = [0, *accumulate(layers)]
        self.last = len(layers) - 1
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
        return [
            mlp
            for layer in self.layers[stage]
            if isinstance(mlp := self.model.blocks[layer].mlp, Mixture)
        ]

    def between(self, rows: int, length: int) -> tuple[int, int, int]:
        """The shape of what is sent between stages, for `rows` sequences of `length` tokens."""
        return rows, length, self.model.config.width

    def forward(
        self,
        stage: int,
        x: Any,
        *,
        targets: Array,
        positions: Array | None = None,
        divisor: float | None = None,
        key: DropoutKey | None = None,
    ) -> Tensor:
        """One stage's forward.

        Args:    x: token ids (B, T) for stage 0, else the activation of the previous stage (B, T,
                 width).
                 targets: ids (B, T), used by the last stage; positions: (T,), default 0 to T-1.
                 divisor: of the loss, default B·T; key: for dropout.
        Returns: the activation (B, T, width); on the last stage the sum of the targets'
        cross-entropies over `divisor`.
        """
        positions = index_range(targets.shape[1]) if positions is None else positions
        if stage == 0:
            x = self.model.embed(x, positions, key)
        positions = beside(positions, x.data)
        for layer in self.layers[stage]:
            x = self.model.blocks[layer](x, positions, key)
        if stage < self.last:
            return x  # type: ignore[no-any-return]
        return self.model.output.loss(self.model.project(x), targets, divisor=divisor)  # type: ignore[no-any-return]


class ArrivedActivation(Tensor):
    """An activation that came from another rank; its gradient is sent there, so it counts as
    communication."""

    __slots__ = ()
    lends_data = True

    def __init__(self, data: Array) -> None:
        super().__init__(data, requires_grad=True)

    def accumulate(self, gradient: Array, *, own: bool = False) -> None:
        """Add to the gradient of a leaf; `own`: nothing else uses the array, so it may be kept."""
        if self.grad is None:
            gradient = account.current().hold(gradient if own else gradient.copy(), "communication")
            own = True
        super().accumulate(gradient, own=own)


def hollow(y: Tensor) -> Tensor:
    """`y` for its backward, without its numbers: they were sent to another rank, and backward needs
    only the shape."""
    return y if y.node is None else Tensor._of(hollow_array(y.data), y.node, y.index)


def balanced_layers(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """The number of layers of each stage that makes the slowest stage fastest, and then the others
    most even.

    Args:    costs: of each layer, in any unit; first, last: costs of the embedding and of the
             output.
    Raises:  ShardError for more stages than there are layers, an embedding and an output.
    """
    edges = [0.0, *accumulate(costs)]
    count = len(costs)
    # layers so far -> slowest, squares, split
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
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


class StageModel(ABC):
    """The stages of a GPT that this rank of a group has: rank r of p has stages r, r + p, … (or as
    `own_stages` says).

    Args:    as Stages. seed: of the weights; None: the caller draws them. stages: in all (default:
             one a rank).
             layers: of each stage (default: as even as possible); key: for dropout; precision: of
             weights and update.
    Attributes: model: what is left of it; parameters: what the optimizer is made of, those of this
    rank's stages.
                first, last: whether this rank has an end of the model.
    """

    cuts: type[Stages] = Stages  # chapter 17 has stages of a shard of the tokens

    def __init__(
        self,
        model: GPT,
        group: Group,
        *,
        seed: int | None,
        stages: int | None = None,
        layers: Sequence[int] | None = None,
        device: str = "cpu",
        key: Key | None = None,
        precision: Precision | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = model.config
        self.group = group
        self.precision = precision or Precision()
        self.recorder = recorder or Silent()
        self.key: Key = key or (lambda part: None)
        self.layers = list(
            layers or balanced_layers([1.0] * self.config.layers, stages or group.size)
        )
        self.stages = self.cut(model, group.rank)
        self.model = self.stages.model
        if seed is not None:
            self.model.initialize(seed, device=device)
        self.weights = trainable(self.model.parameters())
        self.parameters = self.precision.masters(self.weights)
        self.first, self.last = 0 in self.stages.layers, self.stages.last in self.stages.layers
        self.ends = None  # the two ends, if both have a tied token table
        if self.config.tied and self.stages.last not in self.own_stages(0):
            self.ends = group.split(0 if self.first or self.last else None, axis=group.axis)

    def cut(self, model: GPT, rank: int) -> Any:
        """Cut `model`, in place, to the stages of a rank."""
        return self.cuts(model, self.layers, self.own_stages(rank))

    def own_stages(self, rank: int) -> Sequence[int]:
        """The numbers of the stages of a rank, in order."""
        return range(rank, len(self.layers), self.group.size)

    @abstractmethod
    def run(self, part: Part, *, divisor: int) -> float:
        """Forward and backward of some rows: adds gradients; returns this rank's share of the loss
        over `divisor`."""

    def step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same
        on every rank.

        Args:    as Single.step; clip bounds the norm of all stages together; accumulate: how many
                 runs take the rows.
        """
        optimizer.zero_grad()
        share = 0.0
        for part in micro_parts(Part(*batch, first=0), accumulate):
            share += self.run(part, divisor=batch[1].size)
        self.update(optimizer, lr=lr, clip=clip)
        return sum_in_order(self.group, share)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights (masters, in mixed precision), whole, on every rank. Cost: one
        all-gather."""
        mine = self.own_state()
        with self.group.ledger.control():
            joined = self.group.all_gather(
                np.concatenate([mine[name].reshape(-1) for name in mine]), algorithm="ring"
            )
        whole = {}
        start = 0
        for rank in range(self.group.size):
            for name, weight in self.cut(GPT(self.config), rank).model.named_parameters():
                whole[name] = joined[start : start + weight.size].reshape(weight.shape).copy()
                start += weight.size
        return {name: whole[name] for name, _ in GPT(self.config).named_parameters()}

    def own_state(self) -> dict[str, np.ndarray]:
        """Copies of the weights of this rank's stages."""
        return self.precision.state_dict(self.model)

    def update(self, optimizer: Optimizer, *, lr: float | None, clip: float | None) -> None:
        """The optimizer's step on this rank's weights, after all backwards. Cost: sum_ends, and a
        float64 with clip."""
        zero_unused(self.weights)
        self.sum_ends()
        with self.recorder.span("optimizer"):
            self.precision.update(optimizer, self._squares, lr=lr, clip=clip)

    def sum_ends(self) -> None:
        """Sum the two gradients of a tied token table, the embedding's and the output's: an
        all-reduce of both ends."""
        if self.ends is not None:
            table = self.model.tokens.weight
            with self.recorder.span("wait for the other end's table"):
                self.ends.all_reduce(table.grad, op="sum", out=table.grad, algorithm="ring")

    def _squares(self) -> float:
        """The sum of squares of the whole gradient; a tied table counts once, on rank 0."""
        twice = self.model.tokens.weight if self.ends is not None and self.group.rank else None
        return sum_in_order(
            self.group, sum_of_squares(p.grad for p in self.weights if p is not twice)
        )
