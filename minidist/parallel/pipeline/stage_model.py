"""StageModel: the stages of a GPT on one rank, and their update; what model parallel and the pipeline share.

Each rank draws and updates its own layers. Together the ranks compute the loss and the norm of the whole gradient. A
tied token table is on both ends of the model, and both ends take the sum of its two gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.optim import Optimizer, sum_of_squares
from minidist.parallel.pipeline.stages import Stages, balanced_layers
from minidist.parallel.step.flat import sum_in_order, trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch, Key, Part, micro_parts, zero_unused


class StageModel(ABC):
    """The stages of a GPT that this rank of a group has: rank r of p has stages r, r + p, …

    Args:    model: weights not yet drawn; the layers of other ranks are taken out of it.
             seed: of the weights; None: the caller draws them. stages: how many there are in all (default: one a rank).
             layers: of each stage (default: as even as possible); key: for dropout; precision: of weights and update.
    Attributes: model: what is left of it; parameters: what the optimizer is made of, those of this rank's stages.
                first, last: whether this rank has an end of the model.
    Raises:  ShardError if the layers do not fit the stages.
    """

    def __init__(self, model: GPT, group: Group, *, seed: int | None, stages: int | None = None,
                 layers: Sequence[int] | None = None, device: str = "cpu", key: Key | None = None,
                 precision: Precision | None = None, recorder: Recorder | None = None) -> None:
        self.config, self.group = model.config, group
        self.precision, self.recorder = precision or Precision(), recorder or Silent()
        self.key: Key = key or (lambda part: None)
        self.layers = list(layers or balanced_layers([1.0] * self.config.layers, stages or group.size))
        self.stages = self.cut(model, group.rank)
        self.model = self.stages.model
        if seed is not None:
            self.model.initialize(seed, device=device)
        self.weights = trainable(self.model.parameters())
        self.parameters = self.precision.masters(self.weights)
        self.first, self.last = group.rank == 0, group.rank == group.size - 1
        self.ends = None                                # the two ends, if both have a tied token table
        if self.config.tied and group.size > 1:
            self.ends = group.split(0 if self.first or self.last else None, axis=group.axis)

    def cut(self, model: GPT, rank: int) -> Stages:
        """Cut `model`, in place, to the stages of a rank."""
        return Stages(model, self.layers, range(rank, len(self.layers), self.group.size))

    @abstractmethod
    def run(self, part: Part, *, divisor: int) -> float:
        """Forward and backward of some rows: adds gradients; returns this rank's share of the loss over `divisor`."""

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same on every rank.

        Args:    as Single.step; clip bounds the norm of the gradient of all stages together.
                 accumulate: in how many runs the rows are taken.
        """
        optimizer.zero_grad()
        share = 0.0
        for part in micro_parts(Part(*batch, first=0), accumulate):
            share += self.run(part, divisor=batch[1].size)
        self.update(optimizer, lr=lr, clip=clip)
        return sum_in_order(self.group, share)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights (in mixed precision the masters), whole, on the host, by dotted path.

        Cost:    one all-gather, counted under `control`. Every rank calls it.
        """
        mine = self.own_state()
        with self.group.ledger.control():
            joined = self.group.all_gather(np.concatenate([mine[name].reshape(-1) for name in mine]), algorithm="ring")
        whole, start = {}, 0
        for rank in range(self.group.size):
            for name, weight in self.cut(GPT(self.config), rank).model.named_parameters():
                whole[name] = joined[start:start + weight.size].reshape(weight.shape).copy()
                start += weight.size
        return {name: whole[name] for name, _ in GPT(self.config).named_parameters()}

    def own_state(self) -> dict[str, np.ndarray]:
        """Copies of the weights of this rank's stages."""
        return self.precision.state_dict(self.model)

    def update(self, optimizer: Optimizer, *, lr: float | None, clip: float | None) -> None:
        """The optimizer's step on this rank's weights, after all backwards.

        Cost:    with a tied table one all-reduce of it between the ends; with clipping one float64 a rank (`control`).
        """
        zero_unused(self.weights)
        self.sum_ends()
        with self.recorder.span("optimizer"):
            self.precision.update(optimizer, self._squares, lr=lr, clip=clip)

    def sum_ends(self) -> None:
        """Sum the two gradients of a tied token table, the embedding's and the output's, on both ends."""
        if self.ends is not None:
            table = self.model.tokens.weight
            with self.recorder.span("wait for the other end's table"):
                self.ends.all_reduce(table.grad, op="sum", out=table.grad, algorithm="ring")

    def _squares(self) -> float:
        """The sum of squares of the whole gradient; a tied table counts once, on rank 0."""
        twice = self.model.tokens.weight if self.ends is not None and self.group.rank else None
        return sum_in_order(self.group, sum_of_squares(p.grad for p in self.weights if p is not twice))
