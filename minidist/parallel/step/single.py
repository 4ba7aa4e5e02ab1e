"""Chapter 00 · One device: the training step that every strategy must reproduce.

    disk --data--> CPU --batch--> device:  forward -> loss -> backward -> clip -> optimizer

One process holds everything and sees the whole batch. It is the yardstick: "parallel equals serial"
means this serial.

What fills the memory, for Ψ parameters (bytes):

                     float32 + Adam     mixed precision + Adam (the notes)
    parameters       4Ψ                 2Ψ   (fp16)
    gradients        4Ψ                 2Ψ   (fp16)
    optimizer        8Ψ   (m, v)        12Ψ  (fp32 master weights, m, v)
    together         16Ψ                16Ψ
    activations      grow with batch × context × width × layers, and with context² where scores are
                     kept; A passes (`accumulate`) keep those of one pass at a time

Both columns give 16 bytes a parameter, for different reasons.

Cost:    no messages.
notes:   N0 无并行训练, N2 显存占用分析, N4 §4
"""

from collections.abc import Iterable

from minidist.nn import GPT, Module
from minidist.optim import Optimizer, squares_of
from minidist.parallel.step.flat import trainable
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch, Loss, Part, loss_of, micro_parts, zero_unused
from minidist.parallel.step.strategy import Strategy


def plain_single(model: GPT, optimizer: Optimizer, batches: Iterable[Batch]) -> float:
    """Training on one device: batches of inputs and targets, each (B, T); returns the last loss."""
    for inputs, targets in batches:
        loss = model.loss(inputs, targets, divisor=targets.size)  # forward: activations pile up
        loss.backward()  # they go, gradients come
        optimizer.step()  # with Adam two moments a parameter
        optimizer.zero_grad()
    return float(loss.item())


# `Single` below is the same step. It adds what a Trainer asks of every strategy: several passes a
# batch (chapter 08), master weights in mixed precision (chapter 09), clipping, and a loss that the
# host need not wait for on a GPU.


class Single(Strategy):
    """The training step of one process.

    Args:    loss: of a batch (default: `model.loss`); precision: of weights and update (default:
             one dtype for all).
             recorder: is told what runs when.
    Attributes: parameters: what the optimizer is made of.
    """

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
        self.weights = trainable(model.parameters())
        self.parameters = self.precision.masters(self.weights)
        self.recorder = recorder or Silent()
        self._late: list[LateLoss] = []  # of steps that the device may still be at

    def step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> float:
        """One step on `batch`; returns its mean loss. Args: as Strategy.step."""
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
        """As `step`; on a GPU the loss is still on its way, and the host goes on."""
        optimizer.zero_grad()
        total = LateLoss()
        self._late = [late for late in self._late if not late.done()] + [total]
        for part in micro_parts(Part(*batch, first=0), accumulate):
            if not len(part.inputs):
                continue
            with self.recorder.span("forward", rows=len(part.inputs)):
                loss = self.loss(part, batch[1].size)
            with self.recorder.span("backward"):
                self.precision.backward(loss)
            total.add(loss)
        with self.recorder.span("optimizer"):
            zero_unused(self.weights)
            self.precision.update(
                optimizer, lambda: squares_of(p.grad for p in self.weights), lr=lr, clip=clip
            )
        return total
