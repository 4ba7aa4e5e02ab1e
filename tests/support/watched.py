"""Run folders that minidist watch looks at: recorded steps of a job that never ran."""

import json
import time
from pathlib import Path

from flights import VirtualJob

from minidist.device.account import CATEGORIES
from minidist.observe.step_log import STEP_LOG, StepLog, StepState

SECONDS = 0.2  # of a step


class WatchedRun:
    """A run folder with the recorders of `size` ranks, which call after 50 ms of each step, and
    reduce in 50 ms.

    Args: alive: whether the ranks' processes run; slow: a rank that computes 80 ms longer, from
    step `since` on; quiet:
          seconds since the newest record.
    """

    def __init__(
        self,
        folder: Path,
        size: int = 4,
        *,
        steps: int = 20,
        of: int = 50,
        alive: bool = True,
        slow: int | None = None,
        since: int = 0,
        quiet: float = 0.0,
        limit: int | None = 64 << 20,
        log: bool = True,
    ) -> None:
        self.folder = folder
        self.size = size
        self.of = of
        self.job = VirtualJob(folder / "flight", size, alive=alive)
        self.begin = -SECONDS * steps - quiet
        lines = StepLog(folder / STEP_LOG, goes_on=False)
        for step in range(steps):
            late = {rank: 0.08 if rank == slow and step >= since else 0.0 for rank in range(size)}
            now = self.begin + SECONDS * step
            for rank in range(size):
                self.job.step(rank, step, now)
                self.job.call(
                    rank, now + 0.05 + late[rank], now + 0.1 + max(late.values()), axis="dp"
                )
                with self.job.at(rank, now + SECONDS - 0.001):
                    memory = [10 * place + rank << 10 for place in range(len(CATEGORIES))]
                    self.job.flights[rank].state(
                        memory, [*memory, sum(memory)], limit, 2.0 * step, "estimate"
                    )
            if log:
                lines.write(self.state(step + 1).line(time.time() + now))
        for rank in range(size):
            self.job.step(rank, steps, self.begin + SECONDS * steps)
        lines.close()

    def state(self, step: int) -> StepState:
        """Return what rank 0 tells of a step."""
        return StepState(
            step=step,
            steps=self.of,
            loss=4.0 - step / 20,
            seconds=SECONDS,
            tokens_per_second=5120.0,
            sent_bytes={"dp": {"all_reduce": 16}},
            memory={"total": 1},
            joules=2.0 * step,
            energy_source="estimate",
        )

    def finish(self) -> None:
        """Write metrics.json."""
        (self.folder / "metrics.json").write_text(
            json.dumps({"losses": [2.0] * self.of, "validation_loss": 1.5})
        )

    def end(self, *ranks: int, why: str = "") -> None:
        """These ranks leave the job, now."""
        for rank in ranks:
            with self.job.at(rank, 0.0):
                self.job.flights[rank].end(why)
