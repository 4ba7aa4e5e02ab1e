"""One protocol: the interface of a strategy for a Trainer, and of the strategy of a data axis for
chapter 17.

The step is one loop (`PassLoop.start_step`); a chapter defines its parts:

    begin_step         forget the gradients of the previous step
    run                forward and backward of some rows: for each pass of the rank's rows
    finish_step        sum the gradients that are not yet summed over ranks
    conclude           the loss of the whole batch, and the optimizer's step

Servers, replicas in one process, local steps and PipeDream have a `start_step` of their own.

A data axis (DDP, ZeRO, one process) runs a pass in two parts: forward, backward; the `last` backward
sums over the ranks (ZeRO-2 and 3: each backward, within this copy; the last also over the copies).
A pipeline (chapter 17) computes the passes itself, and asks the data axis only for the backward of
its stages.
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
from minidist.optim import Optimizer
from minidist.parallel.step.flat import Flat, untrained
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.step import Batch, Counted, Loss, Part, loss_of, micro_parts, part_of


class Collective(NamedTuple):
    """A collective of a step, of an array of `nbytes`; `once`: only this group makes the call;
    parallel groups do not."""

    verb: str
    nbytes: int
    group: Group
    once: bool = False
    # bytes of all its ranks, if a scheme compresses; -1: the numbers decide
    sent: int | None = None


class Strategy(ABC):
    """The training of a model, a step at a time.

    Attributes: model, loss, precision, recorder; parameters: the arguments for the optimizer.
                asynchronous: each rank makes steps of its own, so the ranks are never at the same
                step.
                common_state_of: the object that has the common state (steps, common_state,
                begin_at), if ranks have weights and state of their own (local steps); None: ranks
                are equal.
                scheme: the form in which gradients are sent, if the strategy has a choice.
                pipeline: runs this rank's stages (a StageModel), if there are several.
    """

    model: Module
    loss: Any
    precision: Precision
    recorder: Recorder
    parameters: list[Any]
    asynchronous = False
    common_state_of: Any = None
    scheme: Scheme | None = None
    pipeline: Any = None

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
        """Make one step on the *global* batch, the same on every rank; return its mean loss, the
        same on every rank.

        Args:    optimizer: made of `self.parameters`; lr: the learning rate of this step (None: the
                 optimizer's own).
                 clip: bound of the norm of the whole gradient; accumulate: the number of passes
                 for a rank's rows.
        """
        return self.start_step(batch, optimizer, lr=lr, clip=clip, accumulate=accumulate).wait()

    @abstractmethod
    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """Make a step, as `step`; on a GPU the loss may not have arrived yet."""

    # --------------------------------------------------------------------------------------- weights

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all weights, in mixed precision the masters, whole, on the host, by
        dotted path."""
        return self.precision.state_dict(self.model)

    def frozen(self, *, changes: bool) -> Iterator[tuple[Parameter, range, Array]]:
        """Yield weights that no gradient changes, as the bias of a gate: each with the elements
        that this rank has of it.

        Their numbers are flat and valid until the next is requested; `changes`: writes to them are
        kept.
        """
        for p in self.model.parameters():
            if untrained(p) and (p.size <= 1 or any(p.data.strides)):  # not another rank's
                yield p, range(p.size), p.data.reshape(-1)

    def state_replaced(self) -> None:  # noqa: B027 - where weights lie in one place, nothing follows
        """Update the weights that follow from the optimizer's tensors, after these were written
        from outside.

        Every rank calls it.
        """

    def summand_of(self, parameter: Parameter) -> tuple[int, int]:
        """Return (index, count) of this rank among the ranks outside the data axis that also sum
        this gradient."""
        return 0, 1

    def traffic(self, passes: int) -> list[Collective]:
        """Return the collectives of gradients and weights in a step of `passes` backward passes;
        none on one rank."""
        return []

    # ----------------------------------------------------------------------------------- evaluation

    def evaluating(self) -> AbstractContextManager[Any]:
        """Context manager: `loss_share` may be called inside; at its end weights that evaluation
        gathered are freed."""
        return nullcontext()

    def readers(self, everyone: Group) -> tuple[Group, int]:
        """Return (group, k): the first k ranks of the group divide the rows of an evaluation.
        `everyone`: the ranks left."""
        return everyone, everyone.size

    def loss_share(self, part: Part) -> float:
        """Return the sum of the losses of some rows, without gradients; this rank may have no
        row."""
        return float(self.loss(part, 1).item()) if len(part.inputs) else 0.0

    def sum_shares(self, loss: float, tokens: int, group: Group) -> tuple[float, float]:
        """Return losses and tokens of all readers, added in rank order. Cost: one all-gather of two
        float64 per rank, `control`."""
        with group.ledger.control():
            shares = np.empty((group.size, 2))
            group.all_gather(np.array([[loss, tokens]], dtype=np.float64), out=shares)
        sums = shares.sum(axis=0)
        return float(sums[0]), float(sums[1])

    def finish(self) -> Collection[int]:
        """End the training after the last step. Returns the ranks that were lost before."""
        return ()

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """Compare a digest of the weights over the ranks of `group` that hold them whole. Every
        rank calls it.

        Raises:  MismatchError naming the ranks that differ.
        """
        check_equal_replicas(self.model.parameters(), group, when=when)


class PassLoop(Strategy):
    """A strategy whose step is the loop: passes over the rank's rows, then the update."""

    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """Make a step, as Strategy.start_step."""
        self.begin_step()
        loss = LateLoss()  # this rank's share of it
        divisor = targets_in(batch)
        for number, part in enumerate(micro_parts(self.part_of(batch), accumulate), start=1):
            loss.add(self.run(part, divisor=divisor, last=number == accumulate))
        self.finish_step()
        return self.conclude(loss, batch, optimizer, lr=lr, clip=clip)

    # -------------------------------------------------------------------------- the parts of a step

    @abstractmethod
    def begin_step(self) -> None:
        """Forget the gradients of the previous step."""

    @abstractmethod
    def part_of(self, batch: Batch) -> Part:
        """Return this rank's rows of a global batch; views, and perhaps none."""

    @abstractmethod
    def run(self, part: Part, *, divisor: int, last: bool) -> Tensor | float | None:
        """Run forward and backward of some rows: add their gradients.

        Args:    divisor: the targets of all ranks' rows; last: no other pass of the step follows.
        Returns: this rank's share of the mean loss: the sum of its losses over `divisor`; None: zero.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """Sum the gradients over the ranks after the last pass, if no pass has done it."""

    @abstractmethod
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


class DataAxis(PassLoop):
    """Ranks that divide a batch's rows and sum gradients; the step is PassLoop's. Args: as DDP."""

    # True: a rank without a row runs too, because others wait for it
    computes_without_rows = False
    # True: each backward ends in sums, as no rank keeps whole gradients
    reduces_each_pass: ClassVar[bool] = False
    # `updated()` are pieces, each rank has the state of its own (ZeRO)
    divides_state: ClassVar[bool] = True
    # what the span of the update carries: the notes' step
    update_notes: ClassVar[dict[str, str]] = {}
    flats: Sequence[Flat] = ()  # runs of parameters of which this rank updates chunks (ZeRO)
    # this rank belongs to the first copy of the state (with DDP: rank 0)
    first_copy = True
    weights: list[Parameter]  # that learn
    counted: Counted  # what this rank counts in the norm
    _summed = True  # a backward that was this step's last has run

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
        """Return this rank's rows of a global batch; views, and perhaps none."""
        return part_of(batch, size=self.group.size, rank=self.group.rank)

    def set_segments(
        self, segments: Sequence[Sequence[Module]], order: Sequence[tuple[int, bool]] = ()
    ) -> None:
        """Split the model into segments (stages), each a list of modules; `order` lists (segment,
        whether forward) of one pass."""

    def begin_step(self) -> None:
        """Begin a step, as PassLoop.begin_step."""
        self._summed = False
        for parameter in self.weights:
            parameter.zero_grad()
        if self.scheme is not None:
            self.scheme.begin_step(self.precision.scale)

    def begin_pass(self) -> None:
        """Prepare for a pass whose forward a pipeline computes; else `forward` does it."""

    def forward(self, part: Part, *, divisor: int) -> Tensor | None:
        """Return this rank's share of the mean loss: the sum of its losses over `divisor`, the
        targets of all ranks.

        Without a row it returns None: a share of zero. With ZeRO-3 a rank without a row computes
        too.
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
                 defer: do not compute the gradients of weights, but return them for
                 backward_weights; not in the last.
        """

    @abstractmethod
    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        """Compute the gradients that a backward of the segment has deferred."""

    def run(self, part: Part, *, divisor: int, last: bool) -> Tensor | None:
        """Run forward and backward of some rows, as PassLoop.run."""
        with self.recorder.span("forward", rows=len(part.inputs)):
            share = self.forward(part, divisor=divisor)
        self.backward(share, last=last)
        return share

    def finish_step(self) -> None:
        """Sum the gradients when all backwards of the step are over, unless one of them was the
        last."""
        if not self._summed:  # a last backward with nothing to compute: it makes the sums
            self.backward(None, last=True)

    def conclude(
        self,
        share: LateLoss,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
    ) -> LateLoss:
        """Make the update and return the loss, as PassLoop.conclude. Cost: one all-gather of a
        record per rank, under `control`."""
        mine = share.wait()
        with self.recorder.span("loss", "communication", share=mine):
            loss = add_losses(self.group, mine, batch)
        self.update(optimizer, lr=lr, clip=clip)
        return LateLoss(loss)

    def updated(self) -> list[tuple[Parameter, Any]]:
        """Return the parameters that learn, each with the part that this rank updates: itself, or
        with ZeRO a piece."""
        return [(parameter, parameter) for parameter in self.counted.tensors]

    def update(
        self,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
        counted: Counted | None = None,
    ) -> None:
        """Make the optimizer's step. Args: as `step`; counted: in place of this axis's, if others
        have gradients too. Cost: as gradient_norm, if the norm is needed."""
        with self.recorder.span("optimizer", **self.update_notes):
            self.precision.update(optimizer, counted or self.counted, lr=lr, clip=clip)

    def loss_share(self, part: Part) -> float:
        """Return the sum of the losses of some rows, as Strategy.loss_share."""
        share = self.forward(part, divisor=1)
        return 0.0 if share is None else float(share.item())
