"""The step of a model whose layers or sequences are divided between ranks that all see the whole
batch.

After the last backward some gradients are still summands, one on each rank of a group:

    shards that several ranks hold (key heads, experts)                        summed over their sharers
    undivided weights, if each rank has the gradient of own tokens or rows     summed over `everyone`
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import array_module
from minidist.errors import GradientError
from minidist.nn import GPT
from minidist.nn.weight_shard import WeightShard, assemble, cut
from minidist.optim import Optimizer, sum_of_squares
from minidist.parallel.step.flat import Piece, sum_in_order, trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.step import Batch, Loss, Part, loss_of, micro_parts, zero_unused


class SplitModel:
    """A model divided between the ranks of a group.

    Args:    model: with weights drawn; everyone: the ranks that share the batch, if several groups
             (default: `group`).
             loss: of a part of the batch (default: `model.loss`), the same number on all ranks.
             precision: of weights and update (default: one dtype for all).
    Attributes: parameters: what the optimizer is made of.
    Raises:  MismatchError if weights that all ranks hold do not start equal.
    """

    sums_undivided = False  # whether each rank has the gradients of its own tokens or rows alone

    def __init__(
        self,
        model: GPT,
        group: Group,
        *,
        everyone: Group | None = None,
        loss: Loss | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.model = model
        self.group = group
        self.everyone = group if everyone is None else everyone
        self.loss = loss or loss_of(model)
        self.precision = precision or Precision()
        self.weights = trainable(model.parameters())
        self.parameters = self.precision.masters(self.weights)
        self.summands = summands(self.weights, self.everyone if self.sums_undivided else None)
        check_equal_replicas(
            (p for p in model.parameters() if not isinstance(p, WeightShard)),
            group,
            when="before the first step",
        )

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights (or masters), whole, on every rank. Cost: one all-gather for each
        divided weight."""
        return assemble(self.model, self.precision.state_dict(self.model), self.group)

    def load_state_dict(self, whole: Mapping[str, np.ndarray]) -> None:
        """Take this rank's part of weights in the serial layout, before masters are copied from
        them.

        Raises:  DataError, ShapeError if the weights are another model's; nothing changes then.
        """
        self.model.load_state_dict(cut(self.model, whole))

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

        Args:    as Single.step; clip bounds the norm of the whole gradient, in which each weight
                 counts once.
        """
        optimizer.zero_grad()
        total = 0.0
        for part in micro_parts(Part(*batch, first=0), accumulate):
            if len(part.inputs):
                total += self.add_gradients(part, batch[1].size)
        self.update(optimizer, lr=lr, clip=clip)
        return total

    def add_gradients(self, part: Part, divisor: int) -> float:
        """Forward and backward of some rows; returns the sum of their losses over `divisor`."""
        loss = self.loss(part, divisor)
        self.precision.backward(loss)
        return float(loss.item())

    def update(self, optimizer: Optimizer, *, lr: float | None, clip: float | None) -> None:
        """Sum the gradients that are summands; then the optimizer's step."""
        zero_unused(self.weights)
        add_up(self.summands)
        self.precision.update(
            optimizer, lambda: squares_once(self.weights, self.everyone), lr=lr, clip=clip
        )


# ---------------------------------------------------------------------------------- sums over ranks


class Summand(NamedTuple):
    """A gradient, or with ZeRO this rank's piece of it, that must be summed over the ranks of
    `group`."""

    parameter: Parameter | Piece
    group: Group


def summands(parameters: Iterable[Parameter], outside: Group | None = None) -> list[Summand]:
    """The gradients that are summands after backward; those of undivided weights over `outside`, if
    it is given."""
    groups = [
        (p, p.sharers if isinstance(p, WeightShard) else outside)
        for p in parameters
        if p.requires_grad
    ]
    return [Summand(p, group) for p, group in groups if group is not None and group.size > 1]


def add_up(parts: Sequence[Summand]) -> None:
    """All-reduce summands in place; call it once a step, after the last backward.

    Cost:    one ring all-reduce for each group and dtype, of all its gradients, in the order of the
             parameters.
    Raises:  GradientError for a parameter without a gradient.
    """
    runs: dict[tuple[int, str], list[Summand]] = {}
    for part in parts:
        if part.parameter.grad is None:
            raise GradientError(
                f"{part.parameter.name!r} has no gradient to add up; call zero_unused first"
            )
        runs.setdefault((part.group.id, part.parameter.grad.dtype.name), []).append(part)
    for run in runs.values():
        gradients: list[Any] = [part.parameter.grad for part in run]
        xp = array_module(*gradients)
        flat = account.current().hold(
            xp.concatenate([grad.reshape(-1) for grad in gradients]), "communication"
        )
        run[0].group.all_reduce(flat, out=flat, algorithm="ring")
        start = 0
        for grad in gradients:
            grad[...] = flat[start : start + grad.size].reshape(grad.shape)
            start += grad.size


def squares_once(parameters: Iterable[Parameter], group: Group) -> float:
    """The sum of the squares of the whole gradient, the same bits on every rank; each weight counts
    once.

    Shards count on the rank that has them, shared shards on their first sharer, other weights on
    rank 0.
    Cost:    one all-gather of a float64 a rank, counted under `control`.
    """
    return sum_in_order(
        group, sum_of_squares(p.grad for p in parameters if counts_at(p, group.rank))
    )


def counts_at(parameter: Parameter, rank: int) -> bool:
    """Whether this rank counts a parameter in the norm, so that every number counts on one rank."""
    return parameter.first_sharer() if isinstance(parameter, WeightShard) else rank == 0
