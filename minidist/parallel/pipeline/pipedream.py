"""Chapter 11 · PipeDream: a pipeline whose stages update after each microbatch, without waiting for
the others.

It has no bubble except at the begin and the end. Each microbatch makes an update of its own on each
stage, while other microbatches are in progress. The backward of a microbatch must then see the same
weights as its forward, so a stage that changes its weights keeps the old ones for the microbatches
in progress (weight stashing):

    stage 0   F0 F1 F2 B0 update F3 B1 update …   F3 sees the update of B0 only: p - 1 - stage
                                                  updates late
    stage 2   .. .. F0 B0 update F1 B1 update …   the last stage is never late

This is not the serial training, but one process that uses weights equally late gives the same
result, up to rounding.

Several replicas (chapter 17, parallel/hybrid/pipedream_step.py) divide the rows of each microbatch,
and sum its gradients before each update.

Cost: the messages of the pipeline (pipeline.py) without those of clipping, and p - 1 - stage copies
      of the stage's weights.

notes:   N1 §2.3 (names PipeDream)
Source:  Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training".
"""

from collections.abc import Callable, Sequence
from typing import Any

from minidist.comm.group import Group
from minidist.data.rank_batch import add_losses
from minidist.device import account
from minidist.device.backend import Array
from minidist.errors import PlanError
from minidist.nn import GPT, GPTConfig
from minidist.optim import Optimizer
from minidist.parallel.pipeline.instructions import BackwardInput, Schedule
from minidist.parallel.pipeline.pipeline import Pipeline
from minidist.parallel.pipeline.stages import StagePass
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.step import Batch, Part, micro_parts


def check_pipedream(config: GPTConfig, schedule: Schedule) -> None:
    """Raise PlanError for a model or schedule that cannot be updated stage by stage."""
    if config.tied and schedule.ranks > 1:
        raise PlanError(
            "PipeDream: a tied output has its table on the first and the last rank, which would "
            "have to exchange gradients at each update; use a model with tied=False, or Pipeline"
        )
    if config.mixture is not None and config.mixture.balance == "loss":
        raise PlanError(
            "PipeDream: each microbatch's loss has its own scale, which a balance loss does not "
            "know; "
            'use balance="bias", or Pipeline'
        )
    if schedule.chunks > 1 or any(isinstance(i, BackwardInput) for i in schedule.computes(0)):
        raise PlanError(
            f"PipeDream: schedule {schedule.name} has several stages per rank, or backwards in "
            "two halves; choose 1f1b"
        )


def refuse_clipping(clip: float | None, accumulate: int) -> None:
    """Raise PlanError: no stage knows the others' gradients, or waits for a second pass."""
    if clip is not None or accumulate != 1:
        raise PlanError(
            f"PipeDream: clip={clip}, accumulate={accumulate}: each stage updates separately "
            "after each microbatch; leave both out"
        )


class PipeDream(Pipeline):
    """A pipeline whose microbatches each make an update, without waiting for the others.

    Args:    as Pipeline; the schedule has one stage per rank and whole backwards (pipedream, or
             1f1b, which is the same order; naive is serial).
    Attributes: updates: of the last step: (microbatch, version of the weights that it used), in the
                order in which this rank made them; version n is the weights after n updates of that
                step.
    Raises:  PlanError for a tied output, whose two ends would wait for each other, and for balance
             losses.
    """

    own_updates = True

    def __init__(self, model: GPT, group: Group, schedule: Schedule, **options: Any) -> None:
        check_pipedream(model.config, schedule)
        super().__init__(model, group, schedule, **options)
        self.updates: list[tuple[int, int]] = []

    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """Make one update for each microbatch of a *global* batch, by its own mean loss; return the
        mean of all losses.

        Raises:  PlanError for `clip` or `accumulate`.
        """
        refuse_clipping(clip, accumulate)

        def update() -> None:
            self.data.finish_step()
            self.data.update(optimizer, lr=lr, clip=None)
            self.data.begin_step()

        self.data.begin_step()
        parts = micro_parts(Part(*batch, first=0), self.schedule.microbatches)
        work = StashingPass(self, parts, [part.targets.size for part in parts], update)
        self.executor.run(work)
        self.updates = work.updates
        return LateLoss(add_losses(self.group, work.total / batch[1].size, batch))


class StashingPass(StagePass):
    """A run in which each backward ends in an update; old weights are kept for the microbatches
    that have used them.

    Args:    parts: this rank's rows of each microbatch; sizes: targets of each on all ranks that
             divide its rows.
             update: sums the gradients of one microbatch over those ranks, updates in place, and
             forgets them.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        parts: list[Part],
        sizes: Sequence[int],
        update: Callable[[], None],
    ) -> None:
        super().__init__(pipeline, parts, 1)
        self.weights = pipeline.weights
        self.sizes = sizes
        self.update = update
        self.recorder = pipeline.recorder
        self.version = 0
        self.updates = list[tuple[int, int]]()
        self._used: dict[int, int] = {}  # microbatch in progress -> version that its forward used
        self._stash: dict[int, list[Array]] = {}  # version -> weights

    def skips(self, microbatch: int) -> bool:
        """Return whether no rank has a row of the microbatch. If some have one, this rank sums
        gradients with them."""
        return not self.sizes[microbatch]

    def forward(self, stage: int, microbatch: int, x: Array | None) -> Array | None:
        """Compute forward with the newest weights."""
        self._used[microbatch] = self.version
        return super().forward(stage, microbatch, x)

    def backward(
        self, stage: int, microbatch: int, dy: Array | None, *, whole: bool
    ) -> Array | None:
        """Compute backward with the weights of the forward, from the mean of the microbatch's
        losses; then update the newest weights."""
        used = self._used.pop(microbatch)
        newest = [weight.data for weight in self.weights]
        if dy is None:
            start, loss = self.kept[stage, microbatch]
            self.kept[stage, microbatch] = start, loss * (1.0 / self.sizes[microbatch])
        self._put(self._stash.get(used, newest))
        dx = super().backward(stage, microbatch, dy, whole=whole)
        self._put(newest)
        if used not in self._used.values():
            self._stash.pop(used, None)
        self._update(microbatch, used)
        return dx

    def _put(self, arrays: list[Array]) -> None:
        for weight, array in zip(self.weights, arrays, strict=True):
            weight.place(array)

    def _update(self, microbatch: int, used: int) -> None:
        """Update in place; first copy the weights if a microbatch in progress has used them."""
        if self.version in self._used.values():
            self._stash[self.version] = [
                account.current().hold(weight.data.copy(), "parameters") for weight in self.weights
            ]
        with self.recorder.span("optimizer", microbatch=microbatch):
            self.update()
        self.updates.append((microbatch, used))
        self.version += 1
