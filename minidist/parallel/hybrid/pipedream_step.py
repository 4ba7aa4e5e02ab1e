"""Chapter 17 · PipeDream in a plan: the step of replicated pipelines that update after each
microbatch.

    rank             dp=0           dp=1        rows of microbatch b are divided between the two
    stage 0       B0 sum update  B0 sum update  sum: the data axis adds up the gradients of one
    stage 1       B0 sum update  B0 sum update  microbatch

A microbatch's loss is its mean over all ranks that divide its rows. So the update is that of one
pipeline (parallel/pipeline/pipedream.py), whose microbatches are the rows b of every replica.
Tensor and context parallelism divide the layers and tokens of a stage, and sum their shared
gradients before each update, as in hybrid_step.py.

Cost: hybrid_step.py's, but the data axis sends its gradients after each of the m microbatches: m
      times 2 (P-1) Ψ.
"""

from typing import Any

from minidist.data.rank_batch import add_losses, rows_of_all, targets_in
from minidist.optim import Optimizer
from minidist.parallel.hybrid.hybrid_step import Hybrid
from minidist.parallel.pipeline.pipedream import PipeDream, StashingPass, refuse_clipping
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.model_axis import add_up
from minidist.parallel.step.step import Batch, micro_parts, rows_of


class HybridPipeDream(Hybrid):
    """This rank's part of a GPT under schedule pipedream.

    Attributes: updates: of the last step, as PipeDream's.
    """

    updates: tuple[tuple[int, int], ...] = ()

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
        assert isinstance(self.pipeline, PipeDream)

        def update() -> None:
            self.data.finish_step()
            add_up(self.summands)
            self.data.update(optimizer, lr=lr, clip=None)
            self.data.begin_step()

        self.data.begin_step()
        parts, sizes = self._microbatches(batch)
        work = StashingPass(self.pipeline, parts, sizes, update)
        self.pipeline.executor.run(work)
        self.updates = tuple(work.updates)
        return LateLoss(add_losses(self.loss_group, work.total / targets_in(batch), batch))

    def _microbatches(self, batch: Batch) -> tuple[list[Any], list[int]]:
        """Return this rank's rows of each microbatch, and the number of its targets on all
        ranks."""
        pieces = self.plan.pieces
        of_all = rows_of_all(batch, self.row_group.size)
        tokens = batch[1].shape[1]
        sizes = [
            tokens * sum(rows_of(rows, size=pieces, rank=number)[0] for rows in of_all)
            for number in range(pieces)
        ]
        return micro_parts(self.part_of(batch), pieces), sizes
