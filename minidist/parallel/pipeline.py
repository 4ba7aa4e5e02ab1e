"""Chapter 11 · Pipeline: the layers over the ranks, and microbatches that follow each other through them.

The idea. Each rank holds one stage of the model, a run of neighbouring layers. The batch is cut into microbatches; when
stage 0 has done the first it hands the activations on and takes the second, so all stages work at the same time, each
on another microbatch. Gradients come back the same way. Who does what when is a schedule (schedules.py), a list that is
proved before it runs (schedule_checker.py) and carried out by a worker (common/worker.py); here is what it computes.

    rank 0   embed, blocks 0-1     x ---> F0 F1 F2 F3 .. .. B0 B0 …      activations  (B/m, T, width) ---> next stage
    rank 1   blocks 2-3                   .. F0 F1 F2 .. B0 B0 …         gradients    the same shape  <--- next stage
    rank 2   blocks 4-5, norm, output     .. .. F0 B0 B0 …               loss over all targets of the batch

Who holds what, Ψ parameters and L layers in S = v·p stages, v stages a rank:

    parameters, gradients, optimizer   of the rank's own layers: Ψ/p, where layers are alike
    activations                        of its own layers, for as many microbatches as the schedule holds at once. A
                                       stage's output is not among them: backward needs its shape alone
    tied output                        the token table at both ends, with the same gradient

Cost, a step, over all ranks, B sequences of T tokens:

    send          2 × B × T × width elements a boundary between stages; S - 1 boundaries. None among one rank's own
    all_reduce    with a tied output and p > 1: one, of the token table, between the two ends
    control       one float64 a rank for the loss; with clipping, one for the norm

The loss of a microbatch is the sum of its token losses over the targets of the *whole* batch; so microbatches and
passes add up to the mean, however many rows they have. One without a row is left out on every rank.

The notes' steps (N0, "Pipeline Parallelism"):

    1  a big batch is cut into small ones.          2  GPU 0 hands the first on as soon as it is done;
    3  and goes on with the second at once.         4  so all work at the same time, without waiting.
       Nearly: in the bubble, at the beginning and at the end, they still wait (N0's own second problem).

notes:   N0 Pipeline Parallelism; N1 §2.3; N2 流水线并行
Source:  Huang et al. 2019; Narayanan et al. 2021; Qi et al. 2023.
"""

from collections.abc import Sequence

from minidist import account, backend
from minidist.backend import Array
from minidist.backward import WeightGradient
from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.optim import Optimizer
from minidist.parallel.accumulation import micro_parts
from minidist.parallel.common.layered import Layered
from minidist.parallel.common.precision import Precision
from minidist.parallel.common.recorder import Recorder
from minidist.parallel.common.stages import Arrived, hollow
from minidist.parallel.common.update import Batch, Key, Part
from minidist.parallel.common.worker import Worker
from minidist.parallel.schedules import Instruction, RecvActivation, Schedule
from minidist.tensor import Tensor


class Pipeline(Layered):
    """The stages of a GPT that this rank of a group has, and a worker that trains them.

    Args:    model: weights not yet drawn; what other ranks have is taken out of it, the rest drawn from `seed`.
             group: whose rank r has stages r, r + p, …; schedule: for as many ranks (make_schedule).
             layers: of each stage (default: as even as can be; common/stages.py balances by measured times).
             key: for dropout; precision: of weights and update (default: one dtype for all).
             recorder: is told what runs when.
    Attributes: parameters: what the optimizer is made of: those of this rank's stages.
    Raises:  ScheduleError if the schedule cannot run; ShardError if the layers do not fit its stages.
    """

    # ------------------------------------------------------------------------------------------------- partition

    def __init__(self, model: GPT, group: Group, schedule: Schedule, *, seed: int, layers: Sequence[int] | None = None,
                 device: str = "cpu", key: Key | None = None, precision: Precision | None = None,
                 recorder: Recorder | None = None) -> None:
        self.schedule, self.worker = schedule, Worker(schedule, group, recorder=recorder)
        super().__init__(model, group, schedule.stages, seed=seed, layers=layers, device=device, precision=precision,
                         recorder=recorder)
        self.key: Key = key or (lambda part: None)

    # --------------------------------------------------------------------------------------- forward and backward

    def run(self, part: Part, *, divisor: int) -> float:
        """The schedule once, on rows of the global batch: adds gradients, returns this rank's share of the mean loss.

        Only the last stage's rank has a share; it is the sum of the rows' token losses over `divisor`.
        """
        work = _Pass(self, micro_parts(part, self.schedule.microbatches), divisor)
        self.worker.run(work)
        return work.total

    # ------------------------------------------------------------------------------------------------------ step

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same on every rank.

        Args:    lr: this step's learning rate (None: the optimizer's own); clip: bound of the norm of the gradient of
                 all stages together. accumulate: how often the schedule runs, each time on as many microbatches.
        """
        optimizer.zero_grad()
        share = 0.0
        for part in micro_parts(Part(*batch, first=0), accumulate):
            share += self.run(part, divisor=batch[1].size)
        self.update(optimizer, lr=lr, clip=clip)
        return self.sum_shares(share)


class _Pass:
    """What one run of the schedule computes on this rank (a worker's Work)."""

    def __init__(self, pipeline: Pipeline, parts: list[Part], divisor: int) -> None:
        self.stages, self.precision, self.config = pipeline.stages, pipeline.precision, pipeline.config
        self.key, self.parts, self.divisor, self.total = pipeline.key, parts, divisor, 0.0
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}     # from forward to backward: x, y
        self._put_off: dict[tuple[int, int], list[WeightGradient]] = {}

    def skips(self, microbatch: int) -> bool:
        """A microbatch without a row."""
        return not len(self.parts[microbatch].inputs)

    def room(self, receive: Instruction) -> Array:
        """An activation that arrives is kept for backward, a gradient is not."""
        shape = (*self.parts[receive.microbatch].inputs.shape, self.config.width)
        category = "activations" if isinstance(receive, RecvActivation) else "communication"
        device = backend.device_of(next(self.stages.model.parameters()).data)
        return account.current().hold(backend.empty(shape, backend.dtype(self.config.dtype), device), category)

    def forward(self, stage: int, microbatch: int, x: Array | None) -> Array | None:
        """A stage's forward; of its output only the shape is kept."""
        part = self.parts[microbatch]
        start = None if x is None else Arrived(x)
        y = self.stages.forward(stage, part.inputs if start is None else start, targets=part.targets,
                                divisor=self.divisor, key=self.key(part))
        if stage == self.stages.last:
            self.total += float(y.item())
            self._kept[stage, microbatch] = start, y
            return None
        self._kept[stage, microbatch] = start, hollow(y)
        return y.data

    def backward(self, stage: int, microbatch: int, dy: Array | None, *, whole: bool) -> Array | None:
        """A stage's backward; in two halves, the gradients of weights are put off."""
        start, y = self._kept.pop((stage, microbatch))
        put_off = self.precision.backward(y, dy, defer_weights=not whole)
        if not whole:
            self._put_off[stage, microbatch] = put_off
        return None if start is None else start.grad

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """What backward put off."""
        for gradient in self._put_off.pop((stage, microbatch)):
            gradient()
