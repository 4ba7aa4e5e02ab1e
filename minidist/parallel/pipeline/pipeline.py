"""Chapter 11 · Pipeline: the layers over the ranks, and microbatches that follow each other through
them.

The idea. Each rank holds one stage of the model, some neighbouring layers. The batch is cut into
microbatches. When stage 0 has computed the first one, it sends the activations to the next stage
and takes the second, so all stages work at the same time. Gradients go back the same way. The order
of the work is a schedule (schedules.py): lists of instructions, which are proved
(schedule_checker.py) and then run (executor.py). This module computes what the instructions ask.

    rank 0   embed, blocks 0-1     x ---> F0 F1 F2 .. .. .. .. B0 B0     activations  (B/m, T, width) ---> next stage
    rank 1   blocks 2-3                   .. F0 F1 .. .. B0 B0 F2 …      gradients    the same shape  <--- next stage
    rank 2   blocks 4-5, norm, output     .. .. F0 B0 B0 F1 B1 B1 …      loss over all targets of the batch

What each rank holds, Ψ parameters and L layers in S = v·p stages, v stages per rank:

    parameters, gradients, optimizer   of the rank's own layers: Ψ/p, if layers have equal sizes
    activations                        of its own layers, for as many microbatches as the schedule
                                       holds at once, without the stage's output: backward needs
                                       only its shape
    tied output                        the token table at both ends, with the same gradient

Cost, per step, over all ranks, B sequences of T tokens:

    send          2 × B × T × width elements per boundary between stages on two ranks; S - 1
                  boundaries if p > 1
    all_reduce    with a tied output and p > 1: one, of the token table, between the two ends
    control       one float64 per rank for the loss; with clipping, one for the norm; with a Trainer
                  two digests of the batch with each

The loss of a microbatch is the sum of its token losses, divided by the targets of the *whole*
batch, so microbatches and passes of any number of rows add up to the mean. Every rank leaves out a
microbatch without rows.

The notes' steps (N0, "Pipeline Parallelism"):

    1  A big batch is cut into small ones.
    2  GPU 0 passes the first one on as soon as it is done,
    3  and continues with the second at once.
    4  So all work at the same time, without waiting. Nearly: in the bubble, at the beginning and at
       the end, they still wait (N0's own second problem).

notes:   N0 Pipeline Parallelism; N1 §2.3; N2 流水线并行
Source:  Huang et al. 2019; Narayanan et al. 2021; Qi et al. 2023.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from minidist.autograd.tensor import Tensor, no_grad, tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import ScheduleError
from minidist.nn import GPT, Module
from minidist.parallel.pipeline.executor import Executor
from minidist.parallel.pipeline.instructions import BackwardWeights, Forward, Schedule
from minidist.parallel.pipeline.stages import StageModel, StagePass
from minidist.parallel.step.step import Batch, Part, micro_parts


def plain_gpipe(
    stage: Callable[[Any, Array, int], Tensor], group: Group, micros: Iterable[Batch], divisor: int
) -> None:
    """Run one step of GPipe without a schedule and without overlap; stage(x, targets, divisor) is
    as in chapter 10."""
    first = group.rank == 0
    last = group.rank == group.size - 1
    kept = []
    for inputs, targets in micros:  # all forwards
        x = inputs if first else tensor(group.recv(src=group.rank - 1), requires_grad=True)
        y = stage(x, targets, divisor)  # the last stage: the loss
        if not last:
            group.send(y.data, dst=group.rank + 1)
        kept.append((x, y))
    for x, y in reversed(kept):  # all backwards
        y.backward(None if last else group.recv(src=group.rank + 1))
        if not first:
            group.send(x.grad, dst=group.rank - 1)


# `Pipeline` below runs any schedule: the order is a list (schedules.py), checked before it runs,
# instead of these two loops. So backwards can run early (1F1B holds fewer activations), a rank can
# have several stages, and backward can be cut in two (zero bubble). Sends and receives are started
# early and run while ranks compute.


class Pipeline(StageModel):
    """The stages of a model that this rank of a group has, and the executor that trains them.

        schedule = make_schedule("1f1b", world.size, 8)     # of pipeline/schedules.py
        pipeline = Pipeline(GPT(config), world, schedule, seed=0)
        optimizer = AdamW(pipeline.parameters, lr=1e-3)
        loss = pipeline.step((inputs, targets), optimizer)  # the global batch, on each rank
        Pipeline([Front(), Middle(), Back()], world, schedule, seed=0)    # three stages of one's own

    Args:    model: a GPT, or a list of modules, one for each stage; their weights not yet drawn.
             group: the ranks; schedule: checked, for as many ranks as the group has, says how many
             stages there are; seed, options: as StageModel's.
    Raises:  ScheduleError if the schedule is another, or PipeDream's; ShardError if the layers or
             modules do not fit its stages.
    """

    own_updates = False  # whether each backward ends in an update (pipedream.py)

    def __init__(
        self,
        model: GPT | Sequence[Module],
        group: Group,
        schedule: Schedule,
        *,
        seed: int | None,
        **options: Any,
    ) -> None:
        if schedule.updates and not self.own_updates:
            raise ScheduleError(
                f"schedule {schedule.name} updates after each backward, but a Pipeline updates "
                "once per step; use PipeDream, or choose 1f1b"
            )
        self.schedule = schedule
        self.executor = Executor(schedule, group, recorder=options.get("recorder"))
        super().__init__(model, group, seed=seed, stages=schedule.stages, **options)

    def own_stages(self, rank: int) -> Sequence[int]:
        """Return the stages of a rank, as the schedule places them."""
        return self.schedule.stages_of(rank)

    def order(self) -> list[tuple[int, bool]]:
        """Return the schedule's order of this rank's computes, as StageModel.order."""
        return [
            (each.stage // self.group.size, isinstance(each, Forward))
            for each in self.schedule.computes(self.group.rank)
            if not isinstance(each, BackwardWeights)
        ]

    def run(self, part: Part, *, divisor: int, last: bool = True) -> float:
        """Run the schedule once on rows of the global batch; add gradients, return this rank's
        share of the loss.

        With mixtures each rank's share holds its balance losses; else the rank of the last stage
        has all. `last` is not used: finish_step sums.
        """
        work = StagePass(self, micro_parts(part, self.schedule.microbatches), divisor)
        self.executor.run(work)
        return work.total

    def evaluate(self, part: Part, *, divisor: int) -> float:
        """Return this rank's share of the loss, as `run`, but without gradients and dropout, for
        half the messages."""
        work = StagePass(self, micro_parts(part, self.schedule.microbatches), divisor)
        with self.model.evaluating(), no_grad():
            self.executor.run(work, backwards=False)
        return work.total
