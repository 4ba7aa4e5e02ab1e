"""The step of a model whose layers are divided between ranks that all see the whole batch."""

from collections.abc import Mapping

import numpy as np

from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.optim import Optimizer
from minidist.parallel.step.flat import trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.step import Batch, Loss, Part, loss_of, micro_parts, zero_unused
from minidist.parallel.zero.weight_shard import WeightShard, add_up, assemble, cut, squares_once, summands


class SplitModel:
    """A model of which each rank of a group has a part; all of them work on the same rows.

    Args:    model: divided, and drawn; group: among whose ranks.
             outside: the group over which the gradients of weights that are not divided add up; None: whole everywhere.
             loss: of a part of the batch (default: `model.loss`), the same number on all ranks.
             precision: of weights and update (default: one dtype for all); recorder: is told what runs when.
    Attributes: parameters: what the optimizer is made of: this rank's.
    Raises:  MismatchError if weights that all ranks hold do not start equal.
    """

    def __init__(self, model: GPT, group: Group, *, outside: Group | None = None, loss: Loss | None = None,
                 algorithm: str = "ring", precision: Precision | None = None,
                 recorder: Recorder | None = None) -> None:
        self.model, self.group, self.loss, self.algorithm = model, group, loss or loss_of(model), algorithm
        self.precision = precision or Precision()
        self.recorder = recorder or Silent()
        self.weights = trainable(model.parameters())
        self.parameters = self.precision.masters(self.weights)
        self.summands = summands(self.weights, outside)
        check_equal_replicas((p for p in model.parameters() if not isinstance(p, WeightShard)), group,
                             when="before the first step")

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights, in mixed precision the masters, whole, in the serial layout, on every rank.

        Cost:    an all-gather of each divided weight.
        """
        return assemble(self.model, self.precision.state_dict(self.model), self.group)

    def load_state_dict(self, whole: Mapping[str, np.ndarray]) -> None:
        """Take over weights in the serial layout, as `state_dict` or one process gave them: this rank its part.

        Before the optimizer is made, in mixed precision: masters are copies of the weights as they were then.
        Raises:  DataError, ShapeError if they are another model's; nothing changes then.
        """
        self.model.load_state_dict(cut(self.model, whole))

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same on every rank.

        Args:    lr: this step's learning rate (None: the optimizer's own); clip: bound of the gradients' common norm,
                 in which each weight counts once.
                 accumulate: in how many passes the rows are taken.
        """
        optimizer.zero_grad()
        total = 0.0
        for part in micro_parts(Part(*batch, first=0), accumulate):
            if not len(part.inputs):
                continue
            with self.recorder.span("forward", rows=len(part.inputs)):
                loss = self.loss(part, batch[1].size)
            with self.recorder.span("backward"):
                self.precision.backward(loss)
            total += float(loss.item())
        zero_unused(self.weights)
        with self.recorder.span("add up", "communication"):
            add_up(self.summands, algorithm=self.algorithm)
        with self.recorder.span("optimizer"):
            self.precision.update(optimizer, lambda: squares_once(self.weights, self.group), lr=lr, clip=clip)
        return total
