"""The interval between saves of `minidist train`, and its goodput: the part of its time spent on
work that is kept.

    δ   seconds for which a save stops the steps: measured, the median of this run's saves; the
        slowest rank's
    M   mean seconds between two interruptions, 86,400 / --interruptions-per-day: given
    τ   √(2 δ M), seconds of work between two saves (survive/interval.py), as steps of the measured
        length

With --save-every auto the first save is made after FIRST steps. It gives the first measurement of
δ, and each later save gives another. The expected goodput is shown when it is known, and again at
the end with the measured one: over the run's time from its first step on, including all time that
was lost or passed until a killed run was resumed.
"""

import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.cli.train.settings import AUTO, Settings
from minidist.comm.group import Group
from minidist.console import plural
from minidist.survive.interval import goodput, steps_between

if TYPE_CHECKING:
    from minidist.cli.train.saving import Saves

DAY = 86_400.0
FIRST = 5  # steps before the first save of `auto`


class SaveInterval:
    """The interval of one run. Every rank has one and makes the same calls.

    Args:       saves: the saves so far, also those of an elastic job's earlier generations.
    Attributes: steps: number of steps between two saves; 0 while it is not known.
    """

    def __init__(self, settings: Settings, saves: "Saves", steps_done: int) -> None:
        self.settings = settings
        self.saves = saves
        self.auto = settings.args.save_every == AUTO
        self.between = DAY / settings.args.interruptions_per_day
        before = (
            settings.resume.about["metrics"].get("interval")
            if settings.resume is not None
            else None
        )
        if before is not None and not saves.since:
            vars(saves).update(before, interruptions=before["interruptions"] + 1)
        saves.since = saves.since or time.time()
        saves.restart_seconds = saves.restart_seconds or time.monotonic() - settings.begun
        self._last = max((step for step in saves.steps if step <= steps_done), default=steps_done)
        self._mark = time.perf_counter()
        self._end = time.time()

    @property
    def save_seconds(self) -> float:
        """Return δ; 0 while nothing is saved."""
        return (
            statistics.median(self.saves.standstill_seconds[-20:])
            if self.saves.standstill_seconds
            else 0.0
        )

    @property
    def steps(self) -> int:
        """Return the number of steps between two saves; 0 while it is not known."""
        return self.best_steps if self.auto else int(self.settings.args.save_every)

    @property
    def best_steps(self) -> int:
        """Return √(2 δ M), in steps; 0 while δ is not known."""
        return (
            steps_between(self.save_seconds, self.between, self.saves.step_seconds)
            if self.save_seconds
            else 0
        )

    def due(self, step: int) -> bool:
        """Return whether the state after step `step` is to be saved, with `auto`."""
        return step - self._last >= (self.steps or FIRST)

    def worked(self) -> None:
        """Count the time since the last call as work: a step has been made."""
        self.saves.work_seconds += self._passed()

    def stood_still(self) -> None:
        """Count the time since the last call as saving: the save after a step is done."""
        self.saves.saving_seconds += self._passed()

    def saved(self, step: int, standstill: float, step_seconds: float, world: Group) -> None:
        """Record how long a save stopped the steps, and the seconds per step; the slowest rank's
        count.

        Cost: an all-reduce.
        """
        with world.ledger.control():
            slowest = world.all_reduce(np.array([standstill, step_seconds]), op="max")
        self.saves.standstill_seconds.append(float(slowest[0]))
        self.saves.step_seconds = float(slowest[1])
        self._last = step

    def expected(self, steps: int) -> float:
        """Return the expected goodput with `steps` steps between saves."""
        return goodput(
            steps * self.saves.step_seconds,
            save=self.save_seconds,
            between=self.between,
            restart=self.saves.restart_seconds,
        )

    def announcement(self) -> str | None:
        """Return a line when the interval becomes known.

        None before, and after it has been returned once.
        """
        if self.saves.expected_at_first or not self.save_seconds:
            return None
        self.saves.expected_at_first = self.expected(self.steps)
        line = (
            f"a save takes {duration(self.save_seconds)}, an interruption comes every "
            f"{duration(self.between)} on average: saving every {self._in_words(self.steps)}, "
            f"expected goodput {self.saves.expected_at_first:.2%}"
        )
        if not self.auto and self.best_steps != self.steps:
            line += (
                f"; --save-every auto: every {self._in_words(self.best_steps)}, "
                f"{self.expected(self.best_steps):.2%}"
            )
        return line

    def about(self) -> dict[str, Any]:
        """Return the measurements that a checkpoint keeps for a resumed run."""
        saves = self.saves
        return {
            "standstill_seconds": saves.standstill_seconds[-20:],
            "step_seconds": saves.step_seconds,
            "since": saves.since,
            "work_seconds": saves.work_seconds,
            "saving_seconds": saves.saving_seconds,
            "interruptions": saves.interruptions,
        }

    def record(self) -> dict[str, Any]:
        """Return the record for metrics.json; parts of the time are between 0 and 1."""
        saves = self.saves
        known = self.save_seconds > 0
        whole = max(self._end - saves.since, saves.work_seconds + saves.saving_seconds)
        return {
            "interruptions_per_day": self.settings.args.interruptions_per_day,
            "save_seconds": self.save_seconds,
            "restart_seconds": saves.restart_seconds,
            "interval_steps": self.steps,
            "interval_seconds": self.steps * saves.step_seconds,
            "expected_at_first": saves.expected_at_first if known else None,
            "expected": self.expected(self.steps) if known else None,
            "measured": saves.work_seconds / whole,
            "work_seconds": saves.work_seconds,
            "saving_seconds": saves.saving_seconds,
            "lost_seconds": whole - saves.work_seconds - saves.saving_seconds,
            "interruptions": saves.interruptions,
        }

    def _passed(self) -> float:
        before = self._mark
        self._mark = time.perf_counter()
        self._end = time.time()
        return self._mark - before

    def _in_words(self, steps: int) -> str:
        return f"{plural(steps, 'step')} ({duration(steps * self.saves.step_seconds)})"


def summary(record: dict[str, Any]) -> str:
    """Return the line at the end of a run: measured and expected goodput."""
    whole = record["work_seconds"] + record["saving_seconds"] + record["lost_seconds"]
    expected = "" if record["expected"] is None else f", expected {record['expected']:.2%}"
    return (
        f"goodput {record['measured']:.2%} in {duration(whole)}{expected} (at "
        f"{record['interruptions_per_day']:g} interruptions a day, a save every "
        f"{plural(record['interval_steps'], 'step')}): saving took "
        f"{duration(record['saving_seconds'])}, "
        f"{plural(record['interruptions'], 'interruption')} and all else "
        f"{duration(record['lost_seconds'])}"
    )


def duration(seconds: float) -> str:
    """Return a time in words: `2.5 ms`, `12 s`, `1.5 h`."""
    for unit, scale in (("d", DAY), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e3:.3g} ms"
