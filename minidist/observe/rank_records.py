"""Chapter 25 · Records of a Trainer's steps on each rank: rank_steps.py, with the Trainer's tokens,
loss and weight digests.

records = RankRecords(trainer, run, context=128)            # on every rank, before its first step
with records.input(): batch = next(batches)
trainer.step(batch)
records.step_done(number)                                   # from 1
records.close()
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from minidist.observe.finite_watch import FiniteWatch
from minidist.observe.rank_steps import StepRecorder
from minidist.observe.replica_digest import replica_digests
from minidist.observe.timeline import Timeline
from minidist.parallel.hybrid.hybrid import Trainer

DIGEST_EVERY = 50


class RankRecords:
    """A recorder of a Trainer's steps on this rank, in `run`; made by the thread that trains.

    Args:    batch, context: sequences of a global batch, and tokens of one sequence.
             digest_every: steps between two digests of the weights; 0: none.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: str | Path,
        *,
        batch: int,
        context: int,
        digest_every: int = DIGEST_EVERY,
    ) -> None:
        self.trainer = trainer
        self.every = digest_every
        self.tokens = batch * context
        self.context = context
        self.recorder = StepRecorder(
            trainer.world,
            run,
            goes_on=trainer.steps_done > 0,
            first_step=trainer.steps_done,
            alike=self._stage(),
        )
        self.watch = FiniteWatch(trainer.model, self.recorder.not_finite)

    def _stage(self) -> str:
        return f"pp{self.trainer.mesh.coordinates['pp']}"

    def begin_anew(self) -> None:
        """Leave out the time since the last step. If the plan has changed, watch its model."""
        if self.watch.model is not self.trainer.model:
            self.watch.close()
            self.watch = FiniteWatch(self.trainer.model, self.recorder.not_finite)
        self.recorder.begin_anew(self._stage())

    def input(self) -> AbstractContextManager[None]:
        """Return a context that records the wait for the batch."""
        return self.recorder.input()

    def step_done(self, number: int) -> None:
        """Record the end of step `number`, from 1."""
        self.recorder.step = number - 1
        digest = replica_digests(self.trainer) if self.every and number % self.every == 0 else None
        self.recorder.step_done(digest=digest or None, **self._own())

    def _own(self) -> dict[str, Any]:
        """Return the tokens of this rank in the step, and their mean loss if the strategy reports
        it."""
        timeline = self.trainer.recorder
        if not isinstance(timeline, Timeline):
            return {}
        rows, share = timeline.take_own()
        tokens = rows * self.context // self.trainer.mesh.shape["cp"]
        return {
            "tokens": tokens or None,
            "loss": round(share * self.tokens / tokens, 6)
            if share is not None and tokens
            else None,
        }

    def close(self) -> None:
        """Stop recording; a second call does nothing."""
        self.watch.close()
        self.recorder.close()
