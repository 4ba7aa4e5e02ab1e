"""Chapter 11 · Pipeline: the layers over the ranks, and microbatches that follow each other through them.

The idea. Each rank holds one stage of the model, a run of neighbouring layers. The batch is cut into microbatches; when
stage 0 has done the first it hands the activations on and takes the second, so all stages work at the same time, each
on another microbatch. Gradients come back the same way. Who does what when is a schedule (schedules.py), a list that is
proved before it runs (schedule_checker.py) and carried out by an executor (executor.py); here is what it computes.

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

PipeDream has no bubble but the first and the last: each microbatch makes an update of its own, at once, on each stage
by itself, while others are on their way. A microbatch's backward must then meet the weights that its forward met; so a
stage that changes them keeps the old ones for those on their way (weight stashing):

    stage 0   F0 F1 F2 B0 update F3 B1 update …   F3 meets weights of which B0 alone is part: p - 1 - stage updates late
    stage 2   .. .. F0 B0 update F1 B1 update …   the last stage is never late

It is not the serial training, but a definite other one: one process that uses weights as late repeats it to the bit of
rounding. Cost: no more messages; p - 1 - stage copies of the stage's weights.

notes:   N0 Pipeline Parallelism; N1 §2.3 (names PipeDream); N2 流水线并行
Source:  Huang et al. 2019; Narayanan et al. 2019 (PipeDream), 2021; Qi et al. 2023.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Tensor, is_grad_enabled, no_grad, tensor
from minidist.comm.group import Group
from minidist.device import account, backend
from minidist.device.backend import Array
from minidist.errors import PlanError
from minidist.nn import GPT
from minidist.nn.balance import of_stage
from minidist.optim import Optimizer
from minidist.parallel.pipeline.executor import Worker
from minidist.parallel.pipeline.schedules import BackwardInput, Instruction, RecvActivation, Schedule
from minidist.parallel.pipeline.stage_model import Layered
from minidist.parallel.pipeline.stages import Arrived, hollow
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import Batch, Key, Part, micro_parts, zero_unused


def plain_gpipe(stage: Callable[[Any, Array, int], Tensor], group: Group, micros: Iterable[Batch],
                divisor: int) -> None:
    """One step of GPipe, without a schedule and without overlap; stage(x, targets, divisor) as in chapter 10."""
    first, last, kept = group.rank == 0, group.rank == group.size - 1, []
    for inputs, targets in micros:                                                 # all forwards
        x = inputs if first else tensor(group.recv(src=group.rank - 1), requires_grad=True)
        y = stage(x, targets, divisor)                                             # the last stage: the loss
        if not last:
            group.send(y.data, dst=group.rank + 1)
        kept.append((x, y))
    for x, y in reversed(kept):                                                    # all backwards
        y.backward(None if last else group.recv(src=group.rank + 1))
        if not first:
            group.send(x.grad, dst=group.rank - 1)


# `Pipeline` below carries out any schedule: the order is a list (schedules.py), checked before it runs, instead of
# these two loops. So backwards can come early (1F1B holds fewer activations), a rank can have several stages, and
# backward can be cut in two (zero bubble). Sends and receives are started early and travel while ranks compute.


class Pipeline(Layered):
    """The stages of a GPT that this rank of a group has, and a worker that trains them.

    Args:    model: weights not yet drawn; what other ranks have is taken out of it, the rest drawn from `seed`.
             group: whose rank r has stages r, r + p, …; schedule: for as many ranks (make_schedule).
             layers: of each stage (default: as even as can be; pipeline/stages.py balances by measured times).
             key: for dropout; precision: of weights and update (default: one dtype for all).
             recorder: is told what runs when.
    Attributes: parameters: what the optimizer is made of: those of this rank's stages.
             always: a microbatch without a row goes through too, for others wait for it on their way (chapter 17).
    Raises:  ScheduleError if the schedule cannot run; ShardError if the layers do not fit its stages.
    """

    # ------------------------------------------------------------------------------------------------- partition

    def __init__(self, model: GPT, group: Group, schedule: Schedule, *, seed: int | None,
                 layers: Sequence[int] | None = None, device: str = "cpu", key: Key | None = None,
                 precision: Precision | None = None, recorder: Recorder | None = None) -> None:
        self.schedule, self.worker = schedule, Worker(schedule, group, recorder=recorder)
        super().__init__(model, group, schedule.stages, seed=seed, layers=layers, device=device, precision=precision,
                         recorder=recorder)
        self.key: Key = key or (lambda part: None)
        self.always = False

    # --------------------------------------------------------------------------------------- forward and backward

    @property
    def loss_scale(self) -> float:
        """What backward multiplies the loss by."""
        return self.precision.scale

    def run(self, part: Part, *, divisor: int) -> float:
        """The schedule once, on rows of the global batch: adds gradients, returns this rank's share of the mean loss.

        It is the sum of the rows' token losses over `divisor` on the last stage's rank, and on each rank the balance
        losses of its mixtures.
        """
        work = _Pass(self, micro_parts(part, self.schedule.microbatches), divisor)
        self.worker.run(work)
        return work.total

    def evaluate(self, part: Part, *, divisor: int) -> float:
        """This rank's share of the loss of some rows, as of `run`: no gradients, no dropout, half the messages."""
        work = _Pass(self, micro_parts(part, self.schedule.microbatches), divisor)
        self.model.eval()
        with no_grad():
            self.worker.run_forwards(work)
        self.model.train()
        return work.total

    def go_back(self, stage: int, y: Tensor, dy: Array | None, *, whole: bool) -> list[WeightGradient]:
        """Backward of a stage's y, whose gradient is dy (None: y is the loss); returns what it puts off unless whole.
        """
        return self.precision.backward(y, dy, defer_weights=not whole)

    def go_back_weights(self, stage: int, put_off: list[WeightGradient]) -> None:
        """What `go_back` of a stage put off."""
        self.precision.backward_weights(put_off)

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
        self.pipeline, self.stages, self.config = pipeline, pipeline.stages, pipeline.config
        self.key, self.parts, self.divisor, self.total = pipeline.key, parts, divisor, 0.0
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}     # from forward to backward: x, y
        self._put_off: dict[tuple[int, int], list[WeightGradient]] = {}

    def skips(self, microbatch: int) -> bool:
        """A microbatch without a row, unless others wait for it on their way."""
        return not self.pipeline.always and not len(self.parts[microbatch].inputs)

    def room(self, receive: Instruction) -> Array:
        """An activation that arrives is kept for backward, a gradient is not."""
        shape = self.stages.between(*self.parts[receive.microbatch].inputs.shape)
        category = "activations" if isinstance(receive, RecvActivation) else "communication"
        device = backend.device_of(next(self.stages.model.parameters()).data)
        return account.current().hold(backend.empty(shape, backend.dtype(self.config.dtype), device), category)

    def forward(self, stage: int, microbatch: int, x: Array | None) -> Array | None:
        """A stage's forward; of its output only the shape is kept."""
        part = self.parts[microbatch]
        start = None if x is None else Arrived(x)
        y = self.stages.forward(stage, part.inputs if start is None else start, targets=part.targets,
                                divisor=self.divisor, key=self.key(part))
        last = stage == self.stages.last
        self.total += of_stage(self.stages.mixtures(stage), self.divisor)
        if last:
            self.total += float(y.item())
        if is_grad_enabled():
            self._kept[stage, microbatch] = start, y if last else hollow(y)
        return None if last else y.data

    def backward(self, stage: int, microbatch: int, dy: Array | None, *, whole: bool) -> Array | None:
        """A stage's backward; in two halves, the gradients of weights are put off."""
        start, y = self._kept.pop((stage, microbatch))
        for layer in self.stages.mixtures(stage):
            layer.balance_scale = self.pipeline.loss_scale / self.divisor
        put_off = self.pipeline.go_back(stage, y, dy, whole=whole)
        if not whole:
            self._put_off[stage, microbatch] = put_off
        return None if start is None else start.grad

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """What backward put off."""
        self.pipeline.go_back_weights(stage, self._put_off.pop((stage, microbatch)))


class PipeDream(Pipeline):
    """A pipeline whose microbatches each make an update, without waiting for the others.

    Args:    as Pipeline's; the schedule has one stage a rank and whole backwards (1f1b, as the paper; naive is serial).
    Attributes: updates: of the last step (microbatch, version of the weights that it met) in the order in which this
             rank made them, for a replay; version n is the weights after n updates of that step.
    Raises:  PlanError for tied ends, whose sum would make both ends wait for each other, and for balance losses.
    """

    def __init__(self, model: GPT, group: Group, schedule: Schedule, *, seed: int, layers: Sequence[int] | None = None,
                 device: str = "cpu", key: Key | None = None, recorder: Recorder | None = None) -> None:
        if model.config.tied and group.size > 1:
            raise PlanError("PipeDream: a tied output has its table on the first and the last rank, which would have "
                            "to meet for each update; take a model with tied=False, or Pipeline")
        if model.config.mixture is not None and model.config.mixture.balance == "loss":
            raise PlanError("PipeDream: each microbatch's loss has its own scale, which a balance loss does not know; "
                            "take balance=\"bias\", or Pipeline")
        if schedule.chunks > 1 or any(isinstance(i, BackwardInput) for i in schedule.computes(0)):
            raise PlanError(f"PipeDream: schedule {schedule.name} has several stages a rank or backwards in two "
                            f"halves; choose 1f1b")
        super().__init__(model, group, schedule, seed=seed, layers=layers, device=device, key=key, recorder=recorder)
        self.updates: list[tuple[int, int]] = []

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """As many updates as the schedule has microbatches, on a *global* batch; returns the mean of the losses met.

        Each update is by the mean loss of its own microbatch. At the end nothing is on its way.
        Raises:  PlanError for `clip` or `accumulate`: no stage knows the others' gradients, or waits for a second.
        """
        if clip is not None or accumulate != 1:
            raise PlanError(f"PipeDream: clip={clip}, accumulate={accumulate}: each stage updates by itself after each "
                            f"microbatch; leave both out")
        optimizer.zero_grad()
        work = _Stashing(self, micro_parts(Part(*batch, first=0), self.schedule.microbatches), optimizer, lr)
        self.worker.run(work)
        self.updates = work.updates
        return self.sum_shares(work.total / batch[1].size)


class _Stashing(_Pass):
    """A run in which each backward ends in an update, and old weights are kept for the microbatches that met them."""

    def __init__(self, pipeline: PipeDream, parts: list[Part], optimizer: Optimizer, lr: float | None) -> None:
        super().__init__(pipeline, parts, 1)
        self.weights, self.optimizer, self.lr = pipeline.weights, optimizer, lr
        self.recorder, self.version, self.updates = pipeline.recorder, 0, list[tuple[int, int]]()
        self._met: dict[int, int] = {}                  # microbatch on its way -> version that its forward met
        self._stash: dict[int, list[Array]] = {}        # version -> weights

    def forward(self, stage: int, microbatch: int, x: Array | None) -> Array | None:
        """With the newest weights."""
        self._met[microbatch] = self.version
        return super().forward(stage, microbatch, x)

    def backward(self, stage: int, microbatch: int, dy: Array | None, *, whole: bool) -> Array | None:
        """With the weights that forward met, from the mean of the microbatch's losses; then an update of the newest."""
        met, newest = self._met.pop(microbatch), [weight.data for weight in self.weights]
        if dy is None:
            size = self.parts[microbatch].targets.size
            start, loss = self._kept[stage, microbatch]
            self._kept[stage, microbatch] = start, loss * (1.0 / size)
        self._put(self._stash.get(met, newest))
        dx = super().backward(stage, microbatch, dy, whole=whole)
        self._put(newest)
        if met not in self._met.values():
            self._stash.pop(met, None)
        self._update(microbatch, met)
        return dx

    def _put(self, arrays: list[Array]) -> None:
        for weight, array in zip(self.weights, arrays, strict=True):
            weight.data = array

    def _update(self, microbatch: int, met: int) -> None:
        """Update in place, after a copy of the weights for those on their way that have met them."""
        if self.version in self._met.values():
            self._stash[self.version] = [account.current().hold(weight.data.copy(), "parameters")
                                         for weight in self.weights]
        with self.recorder.span("optimizer", microbatch=microbatch):
            zero_unused(self.weights)
            self.pipeline.precision.update(self.optimizer, lambda: 0.0, lr=self.lr, clip=None)
        self.optimizer.zero_grad()
        self.updates.append((microbatch, met))
        self.version += 1
