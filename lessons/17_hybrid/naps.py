"""A step of dp × pp × tp whose stages sleep, so that a machine with fewer cores than ranks shows
what would overlap."""

import time
from typing import Any

import numpy as np

from minidist.observe.timeline import Timeline
from minidist.parallel.pipeline.executor import Executor
from minidist.parallel.pipeline.schedules import make_schedule

NAPPED = 6  # steps; the figure shows the quickest


class Naps:
    """Stages that sleep instead of computing, two layers each, and all-reduce over tp after each as
    real ones do."""

    def __init__(self, mesh: Any, unit: float, numbers: int) -> None:
        self.tp = mesh["tp"]
        self.last = mesh["pp"].size - 1
        self.unit = unit
        self.x = np.zeros(numbers)

    def skips(self, microbatch: int) -> bool:
        """Return False: no microbatch is empty."""
        return False

    def room(self, receive: Any) -> None:
        """Return None: let the executor make a new array."""
        return

    def forward(self, stage: int, microbatch: int, x: Any) -> Any:
        """Sleep as long as two layers' forward."""
        self._layers(self.unit)
        return None if stage == self.last else self.x

    def backward(self, stage: int, microbatch: int, dy: Any, *, whole: bool) -> Any:
        """Sleep twice as long as in forward."""
        self._layers(2 * self.unit)
        return None if stage == 0 else self.x

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """Do nothing: no weights' part was put off."""

    def _layers(self, seconds: float) -> None:
        for _ in range(2):
            time.sleep(seconds / 2)
            self.tp.all_reduce(self.x, algorithm="ring")


def napped(
    mesh: Any, timeline: Timeline, *, microbatches: int, unit: float, numbers: int, gradients: int
) -> None:
    """Run some steps: the pipeline's list, in which tensor shards communicate, then gradients over
    dp."""
    executor = Executor(
        make_schedule("1f1b", mesh["pp"].size, microbatches), mesh["pp"], recorder=timeline
    )
    work = Naps(mesh, unit, numbers)
    for step in range(NAPPED):
        mesh["dp", "pp", "tp"].barrier()
        with timeline.span("step", step=step):
            executor.run(work)
            mesh["dp"].all_reduce(np.zeros(gradients), algorithm="ring")
            with timeline.span("optimizer"):
                time.sleep(unit)
