"""One protocol: what a Trainer asks of any strategy, and what chapter 17 asks of the strategy of a
data axis.

The step is one loop (`start_step`) for one process, DDP, ZeRO, pipelines and all that is composed
of them; a chapter says what its parts do:

    begin_step         forget the gradients of the previous step
    run                forward and backward of some rows: for each pass of the rank's rows
    finish_step        sum what is still to be summed over ranks
    conclude           the loss of the whole batch, and the optimizer's step

Where a step has other parts, a strategy has its own `start_step`: servers, replicas in one process,
local steps, and PipeDream.

A data axis (DDP, ZeRO, one process) runs a pass in three parts: begin_pass, forward, backward; the
`last` backward sums over the ranks. Chapter 17 calls these parts itself, because its passes go
through other axes too.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.data.rank_batch import add_losses, targets_in
from minidist.device.backend import Array
from minidist.nn import Module
from minidist.optim import Optimizer, squares_of
from minidist.parallel.step.flat import Flat, Squares, untrained
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.step import Batch, Loss, Part, loss_of, micro_parts, part_of


class Collective(NamedTuple):
    """A collective of a step, of an array of `nbytes`; `once`: made by this group alone, and by no
    group like it."""

    verb: str
    nbytes: int
    group: Group
    once: bool = False
    # bytes of all its ranks, if a scheme compresses; -1: the numbers decide
    sent: int | None = None


class Strategy(ABC):
    """Trains a model, a step at a time.

    Attributes: model, loss, precision, recorder; parameters: what the optimizer is made of.
                asynchronous: each rank makes steps of its own, so the ranks are never together
                between two steps.
                diverged: of ranks with weights and state of their own (local steps): what they have
                in common.
                scheme: how gradients travel, where a strategy lets one choose.
    """

    model: Module
    loss: Any
    precision: Precision
    recorder: Recorder
    parameters: list[Any]
    asynchronous = False
    diverged: Any = None
    scheme: Scheme | None = None

    @property
    def data_axis(self) -> "Strategy":
        """The strategy itself, or its data axis if it is composed."""
        return self

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

        Args:    optimizer: made of `self.parameters`; lr: the learning rate of this step (None: the
                 optimizer's own).
                 clip: bound of the norm of the whole gradient; accumulate: in how many passes a
                 rank takes its rows.
        """
        return self.start_step(batch, optimizer, lr=lr, clip=clip, accumulate=accumulate).wait()

    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """As `step`; on a GPU the loss may still be on its way."""
        self.begin_step()
        loss = LateLoss()  # this rank's share of it
        for number, part in enumerate(micro_parts(self.part_of(batch), accumulate), start=1):
            loss.add(self.run(part, divisor=targets_in(batch), last=number == accumulate))
        self.finish_step()
        return self.conclude(loss, batch, optimizer, lr=lr, clip=clip)

    # -------------------------------------------------------------------------- the parts of a step

    def begin_step(self) -> None:
        """Forget the gradients of the previous step."""
        raise NotImplementedError

    def part_of(self, batch: Batch) -> Part:
        """This rank's rows of a global batch; views, and perhaps none."""
        raise NotImplementedError

    def run(self, part: Part, *, divisor: int, last: bool) -> Tensor | float | None:
        """Forward and backward of some rows: add their gradients.

        Args:    divisor: the targets of all ranks' rows; last: no other pass of the step follows.
        Returns: this rank's share of the mean loss: the sum of its losses over `divisor`; None: zero.
        """
        raise NotImplementedError

    def finish_step(self) -> None:
        """After the last pass: sum the gradients over the ranks, where no pass has done it."""
        raise NotImplementedError

    def conclude(
        self,
        share: LateLoss,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
    ) -> LateLoss:
        """Make the optimizer's step. Args: share: of this rank; the others as `step`.

        Returns: the sum of all ranks' shares, the same bits on every rank.
        """
        raise NotImplementedError

    # --------------------------------------------------------------------------------------- weights

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights, in mixed precision the masters, whole, on the host, by dotted
        path."""
        return self.precision.state_dict(self.model)

    def frozen(self, *, changes: bool) -> Iterator[tuple[Parameter, range, Array]]:
        """Weights that no gradient moves, as the bias of a gate: each with the elements that this
        rank has of it.

        Their numbers are flat and live until the next is asked for; `changes`: what is written is
        kept.
        """
        for p in self.model.parameters():
            if untrained(p) and (p.size <= 1 or any(p.data.strides)):  # not another rank's
                yield p, range(p.size), p.data.reshape(-1)

    def state_replaced(self) -> None:  # noqa: B027 - where weights lie in one place, nothing follows
        """The optimizer's tensors were written from outside: bring the weights that follow from
        them up to date.

        Every rank calls it.
        """

    def summand_of(self, parameter: Parameter) -> tuple[int, int]:
        """(which, of how many): beside the data axis, over whose ranks the gradient of a parameter
        is summed."""
        return 0, 1

    def traffic(self, passes: int) -> list[Collective]:
        """The collectives of gradients and weights in a step of so many backward passes; none on
        one rank."""
        return []

    # ----------------------------------------------------------------------------------- evaluation

    def evaluating(self) -> AbstractContextManager[Any]:
        """Where `loss_share` may be called; at its end what evaluation has gathered is freed."""
        return nullcontext()

    def readers(self, everyone: Group) -> tuple[Group, int]:
        """(group, k): its first k ranks divide the rows of an evaluation. `everyone`: the ranks
        left."""
        return everyone, everyone.size

    def loss_share(self, part: Part) -> float:
        """The sum of the losses of some rows, of which this rank may have none; without
        gradients."""
        return float(self.loss(part, 1).item()) if len(part.inputs) else 0.0

    def sum_shares(self, loss: float, tokens: int, group: Group) -> tuple[float, float]:
        """Losses and tokens of all readers, in rank order. Cost: one all-gather of two float64 a
        rank, `control`."""
        with group.ledger.control():
            shares = np.empty((group.size, 2))
            group.all_gather(np.array([[loss, tokens]], dtype=np.float64), out=shares)
        sums = shares.sum(axis=0)
        return float(sums[0]), float(sums[1])

    def finish(self) -> Collection[int]:
        """After the last step. Returns the ranks that were lost on the way."""
        return ()

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """Compare a digest of the weights over the ranks of `group` that hold them whole. Every
        rank calls it.

        Raises:  MismatchError naming the ranks that differ.
        """
        check_equal_replicas(self.model.parameters(), group, when=when)


class DataAxis(Strategy):
    """Ranks of a group that divide the rows of a batch and sum their gradients. Args: as DDP."""

    # True: a rank without a row runs too, as others gather with it
    computes_without_rows: ClassVar[bool] = False
    # True: each backward ends in sums, as no rank keeps whole gradients
    reduces_each_pass: ClassVar[bool] = False
    # `updated()` are pieces, each rank has the state of its own (ZeRO)
    divides_state: ClassVar[bool] = True
    # what the span of the update carries: the notes' step
    update_notes: ClassVar[dict[str, str]] = {}
    flats: Sequence[Flat] = ()  # runs of parameters of which this rank updates chunks (ZeRO)
    # this rank belongs to the first copy of the state (with DDP: rank 0)
    first_copy = True
    _summed = True  # this step's gradients are summed over the ranks

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        loss: Loss | None,
        algorithm: str,
        precision: Precision | None,
        recorder: Recorder | None,
    ) -> None:
        self.model = model
        self.group = group
        self.algorithm = algorithm
        self.loss = loss or loss_of(model)
        self.precision = precision or Precision()
        self.recorder = recorder or Silent()
        self.first_copy = group.rank == 0

    def part_of(self, batch: Batch) -> Part:
        """This rank's rows of a global batch; views, and perhaps none."""
        return part_of(batch, size=self.group.size, rank=self.group.rank)

    def set_segments(
        self, segments: Sequence[Sequence[Module]], order: Sequence[tuple[int, bool]] = ()
    ) -> None:
        """The model runs in segments (stages), each some modules; in a pass by `order`: (segment,
        whether forward)."""

    def begin_step(self) -> None:
        """As Strategy's."""
        self._summed = False
        self.model.zero_grad()
        if self.scheme is not None:
            self.scheme.begin_step(self.precision.scale)

    def begin_pass(self) -> None:
        """A forward is about to run."""

    def forward(self, part: Part, *, divisor: int) -> Tensor | None:
        """This rank's share of the mean loss: the sum of its losses over `divisor`, the targets of
        all ranks.

        None without a row: a share of zero. With ZeRO-3 a rank without a row computes too.
        """
        return self.loss(part, divisor) if len(part.inputs) or self.computes_without_rows else None

    @abstractmethod
    def backward(
        self,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        segment: int = 0,
        last: bool = True,
        defer: bool = False,
    ) -> list[WeightGradient]:
        """Add the gradients of a pass; the `last` backward of a step leaves their sums over all
        ranks.

        Args:    share: what forward gave, None without a row; dy: its gradient, where it is an
                 activation and no loss.
                 segment: the number of the segment that computed it.
                 defer: put off the gradients of weights, and return them for backward_weights; not
                 in the last.
        """

    @abstractmethod
    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        """Compute what a backward of the segment has put off."""

    def run(self, part: Part, *, divisor: int, last: bool) -> Tensor | None:
        """As Strategy's."""
        self.begin_pass()
        with self.recorder.span("forward", rows=len(part.inputs)):
            share = self.forward(part, divisor=divisor)
        self.backward(share, last=last)
        return share

    def finish_step(self) -> None:
        """All backwards of the step are over: sum the gradients, unless one of them was the
        last."""
        if not self._summed:  # nothing to compute: this only starts the sums (all, in a pipeline)
            self.backward(None)

    def conclude(
        self,
        share: LateLoss,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
    ) -> LateLoss:
        """As Strategy's. Cost: one all-gather of a record a rank, under `control`."""
        mine = share.wait()
        with self.recorder.span("loss", "communication", share=mine):
            loss = add_losses(self.group, mine, batch)
        self.update(optimizer, lr=lr, clip=clip)
        return LateLoss(loss)

    @abstractmethod
    def updated(self) -> list[tuple[Parameter, Any]]:
        """The parameters that learn, each with what this rank updates of it: itself, or with ZeRO a
        piece."""

    def squares(self) -> float | Array:
        """Return the sum of the squares of the whole gradient, the same number on every rank.

        Cost:    none where every rank has the whole gradient, as here.
        """
        return squares_of(piece.grad for _, piece in self.updated())

    def update(
        self,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
        squares: Squares | None = None,
    ) -> None:
        """The optimizer's step. Args: as `step`; squares: in place of this axis's, if others have
        gradients too."""
        with self.recorder.span("optimizer", **self.update_notes):
            self.precision.update(optimizer, squares or self.squares, lr=lr, clip=clip)

    def loss_share(self, part: Part) -> float:
        """As Strategy's."""
        self.begin_pass()
        share = self.forward(part, divisor=1)
        return 0.0 if share is None else float(share.item())
