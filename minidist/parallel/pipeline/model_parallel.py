"""Chapter 10 · Model parallel: the layers over the ranks, batch after batch, and its idle time.

The idea. The model does not fit on one device, so each rank holds some neighbouring layers. A batch
goes through the layers of rank 0, then of rank 1, and so on; its gradients go back the same way.
One rank works, the others wait:

    rank 0   F .. .. .. .. .. B B | F .. ..           activations  (B, T, width)  ---> next rank
    rank 1   .. F .. .. B B .. .. | .. F ..           gradients    the same shape <--- next rank
    rank 2   .. .. F B B .. .. .. | .. .. F           loss on the last

What each rank holds, Ψ parameters on p ranks:

    parameters, gradients, optimizer     Ψ/p each, if layers have equal sizes
    activations                          of its own layers, for the whole batch

Cost, per step, over all ranks, B sequences of T tokens:

    send         2 × B × T × width elements per boundary; p - 1 boundaries
    all_reduce   with a tied output and p > 1: one, of the token table, between the two ends
    control      one float64 per rank for the loss; with clipping, one for the norm; with a Trainer
                 two digests of the batch with each
    idle         (p-1)/p of the ranks' time, for any division of the layers: the step takes as long
                 as on one rank

Of the two problems in the notes, communication (N0:227) is small, because only activations are
sent. Waiting (N0:228) is the reason why the pipeline (chapter 11) also cuts the batch.

notes:   N0 Model Parallelism; N1 §2.2 says "model parallel" and means tensor parallelism (chapter
         12)
"""

from collections.abc import Callable
from typing import Any

from minidist.autograd.tensor import Tensor, no_grad, tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.nn import GPT
from minidist.parallel.pipeline.instructions import RecvActivation, RecvGradient, Schedule
from minidist.parallel.pipeline.stages import StageModel, StagePass
from minidist.parallel.step.step import Part, micro_parts


def plain_model_parallel(
    layers: Callable[[Any, Array, int], Tensor],
    group: Group,
    inputs: Array,
    targets: Array,
    divisor: int,
) -> None:
    """Run one batch forward through all ranks and backward; layers(x, targets, divisor) are this
    rank's, the last rank's return the loss."""
    first = group.rank == 0
    last = group.rank == group.size - 1
    x = inputs if first else tensor(group.recv(src=group.rank - 1), requires_grad=True)  # wait
    y = layers(x, targets, divisor)  # the last: the loss
    if not last:
        group.send(y.data, dst=group.rank + 1)
    y.backward(None if last else group.recv(src=group.rank + 1))  # wait, longer
    if not first:
        group.send(x.grad, dst=group.rank - 1)


# `ModelParallel` below makes each rank's layers out of a GPT and trains them. It shares the code of
# a stage with the pipeline (stages.py): a tied output, whose token table is at both ends (one
# all-reduce of its gradient), clipping by the norm of all ranks' gradients, and a boundary that
# keeps only the shape of a sent array, not the numbers. A Trainer uses it for schedule="naive".


class ModelParallel(StageModel):
    """The layers of a GPT that this rank of a group has: rank r has stage r.

    strategy = ModelParallel(GPT(config), group, seed=0)
    loss = strategy.step(batch, AdamW(strategy.parameters, lr))

    Args:    as StageModel; schedule: the naive one: its microbatches go forward and back one after
             another (default: one microbatch with all rows).
    """

    def __init__(
        self,
        model: GPT,
        group: Group,
        schedule: Schedule | None = None,
        *,
        seed: int | None,
        **options: Any,
    ) -> None:
        self.microbatches = 1 if schedule is None else schedule.microbatches
        if schedule is not None:
            self.schedule = schedule
        super().__init__(model, group, seed=seed, **options)

    def run(self, part: Part, *, divisor: int, last: bool = True) -> float:
        """Run some rows forward and backward, as PassLoop.run; the last rank returns all of the
        loss except balance losses of mixtures."""
        work = StagePass(self, micro_parts(part, self.microbatches), divisor)
        for number in range(len(work.parts)):
            if not work.skips(number):
                self.forward(work, number)
                self.backward(work, number)
        return work.total

    def evaluate(self, part: Part, *, divisor: int) -> float:
        """Return the loss without gradients, as StageModel.evaluate."""
        work = StagePass(self, micro_parts(part, self.microbatches), divisor)
        with self.model.evaluating(), no_grad():
            for number in range(len(work.parts)):
                if not work.skips(number):
                    self.forward(work, number)
        return work.total

    def forward(self, work: StagePass, number: int) -> None:
        """Receive the previous rank's activation of a microbatch, compute this rank's and send it
        to the next rank."""
        rank = self.group.rank
        x = None
        if not self.first:
            with self.recorder.span("wait for the activation"):
                x = self.group.recv(src=rank - 1, out=work.room(RecvActivation(rank, number)))
        with self.recorder.span("forward", rows=len(work.parts[number].inputs)):
            y = work.forward(rank, number, x)
        if y is not None:
            self.group.send(y, dst=rank + 1)

    def backward(self, work: StagePass, number: int) -> None:
        """Add this rank's gradients of a microbatch; send the gradient of its input to the previous
        rank."""
        rank = self.group.rank
        dy = None
        if not self.last:
            with self.recorder.span("wait for the gradient"):
                dy = self.group.recv(src=rank + 1, out=work.room(RecvGradient(rank, number)))
        with self.recorder.span("backward"):
            dx = work.backward(rank, number, dy, whole=True)
        if dx is not None:
            self.group.send(dx, dst=rank - 1)
