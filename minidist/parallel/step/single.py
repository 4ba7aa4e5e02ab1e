"""Chapter 00 · One device: the training step that every strategy must reproduce.

    disk --data--> CPU --batch--> device:  forward -> loss -> backward -> clip -> optimizer

One process holds everything and sees the whole batch. It is the reference: "parallel equals serial"
means this serial.

The memory, for Ψ parameters (bytes):

                     float32 + Adam     mixed precision + Adam (the notes)
    parameters       4Ψ                 2Ψ   (fp16)
    gradients        4Ψ                 2Ψ   (fp16)
    optimizer        8Ψ   (m, v)        12Ψ  (fp32 master weights, m, v)
    together         16Ψ                16Ψ
    activations      grow with batch × context × width × layers, and with context² where scores are
                     kept; A passes (`accumulate`) keep those of one pass at a time

Both columns give 16 bytes per parameter, for different reasons.

Cost:    no messages.
notes:   N0 无并行训练, N2 显存占用分析, N4 §4
"""

from collections.abc import Iterable

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Tensor
from minidist.device.backend import Array
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.step.flat import trainable
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch, Counted, Loss, Part, loss_of, zero_unused
from minidist.parallel.step.strategy import DataAxis


def plain_single(model: GPT, optimizer: Optimizer, batches: Iterable[Batch]) -> float:
    """Train on one device with batches of (inputs, targets), each (B, T); return the last loss."""
    for inputs, targets in batches:
        loss = model.loss(inputs, targets, divisor=targets.size)  # forward: activations grow
        loss.backward()  # frees them, makes gradients
        optimizer.step()  # with Adam two moments a parameter
        optimizer.zero_grad()
    return float(loss.item())


# `Single` below is the same step. It adds what a Trainer asks of every strategy: several passes a
# batch (chapter 08), master weights in mixed precision (chapter 09), clipping, and a loss that the
# host need not wait for on a GPU.


class Single(DataAxis):
    """The training step of one process: PassLoop.start_step (step/strategy.py), without a sum.

    In chapter 17 it is the data axis of a replica that has no other.

    Args:    loss: of a batch (default: `model.loss`); precision: of weights and update (default:
             one dtype for all).
             recorder: gets the spans of work.
    Attributes: parameters: the arguments for the optimizer.
    """

    divides_state = False

    def __init__(
        self,
        model: Module,
        *,
        loss: Loss | None = None,
        precision: Precision | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.loss = loss or loss_of(model)
        self.precision = precision or Precision()
        self.recorder = recorder or Silent()
        self.weights = trainable(model.parameters())
        self.parameters = self.precision.masters(self.weights)
        self.counted = Counted(self.weights)
        self._late: list[LateLoss] = []  # of steps that the device may still be at

    def part_of(self, batch: Batch) -> Part:
        """Return the whole batch."""
        return Part(*batch, first=0)

    def backward(
        self,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        segment: int = 0,
        last: bool = True,
        defer: bool = False,
    ) -> list[WeightGradient]:
        """Add the gradients of a pass. Args, Returns: as DataAxis.backward."""
        if share is None:
            return []
        with self.recorder.span("backward"):
            return self.precision.backward(share, dy, defer_weights=defer)

    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        """Compute the gradients that a backward has deferred."""
        self.precision.backward_weights(deferred)

    def finish_step(self) -> None:
        """Give weights that no pass has reached a gradient of zero."""
        zero_unused(self.weights)

    def conclude(
        self,
        share: LateLoss,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
    ) -> LateLoss:
        """Make the update and return the loss, as PassLoop.conclude; on a GPU the host continues
        before the loss arrives."""
        self.update(optimizer, lr=lr, clip=clip)
        self._late = [late for late in self._late if not late.done()] + [share]
        return share
