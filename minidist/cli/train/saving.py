"""Checkpoints of `minidist train`: every K steps, at the end, and when the job gets a signal to
stop.

Any rank may receive the signal first, so all ranks agree after each step: all save after the same
step, then all end.

With --save-async, a save that is due while another is being written is delayed: until after the
first step that finds the other one complete. So a slow disk gets fewer checkpoints, and no step
waits for it. Only the last save of a run waits.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from minidist.cli.train.progress import ProgressReport
from minidist.cli.train.resume import options_of, text_digest
from minidist.cli.train.save_interval import SaveInterval
from minidist.cli.train.settings import Settings
from minidist.comm.health.failure import AGAIN, say_line
from minidist.errors import CheckpointError
from minidist.launch import Launch
from minidist.launch.membership import current
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.state.manifest import checkpoints, packed, remove, step_folder, step_of
from minidist.parallel.state.save_async import PendingSave
from minidist.parallel.step.step import Batch

LONG = 2.0  # seconds after which a running save is reported


class Stopped(Exception):  # noqa: N818 - no error
    """Raised on all ranks after the same step: the job got a signal to stop."""


class Told:
    """The signal to stop that this process has received; 0: none."""

    number = 0


@contextmanager
def hearing(launch: Launch) -> Iterator[Told]:
    """In the block SIGTERM interrupts nothing and is recorded.

    Under srun also SIGUSR1, which MPICH uses for itself.

    A launcher passes the signal on; a process of a process group may get it twice. Outside the main
    thread it changes nothing: only the main thread may set signal handlers.
    """
    told = Told()

    def note(number: int, frame: FrameType | None) -> None:
        told.number = number

    numbers = [signal.SIGTERM] + [signal.SIGUSR1] * (launch.launcher == "slurm")
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in numbers if here}
    if here and (member := current()) is not None:
        member.saves_when_told()
    try:
        yield told
    finally:
        for number, handler in before.items():  # the end of a rank is not interrupted either
            signal.signal(number, handler if launch.launcher == "alone" else signal.SIG_IGN)


@dataclass
class Saves:
    """The saves of a job: the step and the seconds of each, the number that failed, and the
    counters of SaveInterval.

    Attributes: standstill_seconds  seconds for which each save stops the steps
                step_seconds        seconds of one step, known at the last save
                since               when the run made its first step, seconds of the epoch
                work_seconds        the part of the run's time spent in steps
                saving_seconds      the part of the run's time spent in saves
                restart_seconds     from reading the options to the first step of a process
                interruptions       number of times the run was resumed
                expected_at_first   the goodput that was shown
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    failed: int = 0
    standstill_seconds: list[float] = field(default_factory=list)
    step_seconds: float = 0.0
    since: float = 0.0
    work_seconds: float = 0.0
    saving_seconds: float = 0.0
    restart_seconds: float = 0.0
    interruptions: int = 0
    expected_at_first: float = 0.0


class Saver:
    """A writer of checkpoints of one run; every rank has one and makes the same calls.

    Args:    trainer: with the state that the job begins with. report: shows that a save takes long.
             saves: those of the job so far; new ones are appended.
    """

    def __init__(
        self, trainer: Trainer, settings: Settings, told: Told, report: ProgressReport, saves: Saves
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.told = told
        self.report = report
        self.saves = saves
        rate = settings.args.interruptions_per_day
        self.interval = SaveInterval(settings, saves, trainer.steps_done) if rate else None
        self._tell_interval()
        self._pending: tuple[int, PendingSave] | None = None  # the step and its save
        self._writing = False  # a save of some rank was under way when stopping() was last called
        # a save is due and delayed; the line on the slow disk is printed
        self._put_off = self._told_late = False
        self._speaks = trainer.world.rank == 0
        self._about: dict[str, Any] = {}
        if self._speaks:
            text = settings.text
            self._about = {
                "options": options_of(settings.args),
                "vocabulary": text.symbols,
                "data": {"source": text.source, "sha256": text_digest(text)},
            }
        self._before = {
            step
            for folder in checkpoints(settings.out)
            if (step := step_of(folder)) is not None and step <= trainer.steps_done
        }

    def due(self, step: int) -> bool:
        """Return whether the state after step `step` is to be saved."""
        args = self.settings.args
        if self.interval is not None and self.interval.auto:
            return step == args.steps or self.interval.due(step)
        return step == args.steps or bool(step % args.save_every == 0)

    def stopping(self) -> int:
        """Return the signal to stop that any rank has received, or 0; the same on every rank.

        It also sets `_writing` to the same value on every rank.

        Cost: an all-reduce.
        """
        world = self.trainer.world
        writing = self._pending is not None and not self._pending[1].done()
        if world.size == 1:
            self._writing = writing
            return self.told.number
        with world.ledger.control():
            number, any_writing = world.all_reduce(
                np.array([self.told.number, int(writing)]), op="max"
            ).tolist()
        self._writing = bool(any_writing)
        return int(number)

    def heeding(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches one by one.

        Raises: Stopped between two of them, if a rank has received a signal to stop.
        """
        for batch in batches:
            if self.stopping():
                raise Stopped
            yield batch

    def after_step(
        self, losses: Sequence[float], step_seconds: Callable[[], float], **histories: Sequence[int]
    ) -> None:
        """Save if it is due. Every rank calls it. Raises: Stopped, once the state is saved, if the
        job is to stop.

        Args:    losses: of all steps; histories: further lists with a number per step, for the
                 checkpoint.
        """
        if self.interval is not None:
            self.interval.worked()
        step = self.trainer.steps_done
        stop = self.stopping()
        self._put_off = self.due(step) or self._put_off
        if stop or (self._put_off and (not self._writing or step == self.settings.args.steps)):
            self._put_off = False
            self._save_timed(losses, step_seconds(), histories)
        elif self._put_off:
            self._tell_late(step)
        if stop:
            self.settle()
            raise Stopped

    def _tell_late(self, step: int) -> None:
        """Print once that the disk is too slow for the interval between saves."""
        if self._speaks and not self._told_late and self._pending is not None:
            say_line(
                f"minidist train: the save after step {step} is put off: the disk still writes "
                f"that of step {self._pending[0]}; the steps continue; save less often, or to a "
                "faster disk"
            )
        self._told_late = True

    def _save_timed(
        self, losses: Sequence[float], step_seconds: float, histories: Mapping[str, Sequence[int]]
    ) -> None:
        """Save, and measure how long the steps stop: it decides when the next save is due."""
        interval = self.interval
        if interval is None:
            self.save(losses, step_seconds, histories)
            return
        start = time.perf_counter()
        self.save(losses, step_seconds, histories)
        interval.saved(
            self.trainer.steps_done, time.perf_counter() - start, step_seconds, self.trainer.world
        )
        interval.stood_still()
        self._tell_interval()

    def _tell_interval(self) -> None:
        """Print the interval once it is known: in a resumed run at its start, else after the first
        save."""
        if self.interval is not None and (line := self.interval.announcement()) is not None:
            self.report.line(line)

    def save(
        self, losses: Sequence[float], step_seconds: float, histories: Mapping[str, Sequence[int]]
    ) -> None:
        """Write a checkpoint, or with --save-async begin to.

        A failure prints one line, and the run continues.
        """
        self.settle()
        step = self.trainer.steps_done
        start = time.perf_counter()
        folder = step_folder(self.settings.out, step)
        about = self._described(losses, step_seconds, histories) if self._speaks else {}
        with self.trainer.recorder.span("checkpoint", step=step - 1):
            if self.settings.args.save_async:
                self._pending = step, self.trainer.start_save(folder, **about)
                return
            try:
                with self._shown(folder):
                    self.trainer.save(folder, **about)
            except CheckpointError as error:
                self.saves.failed += 1
                if self._speaks:
                    say_line(f"minidist train: {error}; the run continues")
                return
        self._saved(step, time.perf_counter() - start)

    def _described(
        self, losses: Sequence[float], step_seconds: float, histories: Mapping[str, Sequence[int]]
    ) -> dict[str, Any]:
        """Return what the manifest says of the run.

        Measured times are included only if a resumed job uses them, so that equal runs write equal
        checkpoints.
        """
        metrics: dict[str, Any] = {"losses": packed(losses, "<f8")}
        if histories or self.interval is not None:
            metrics["step_seconds"] = step_seconds
        metrics |= {name: packed(history, "<i4") for name, history in histories.items()}
        if self.interval is not None:
            metrics["interval"] = self.interval.about()
        return {**self._about, "metrics": metrics}

    def settle(self) -> None:
        """Wait for a save that is written in the background.

        If it fails, the error has been printed already.
        """
        if self._pending is None:
            return
        (step, pending) = self._pending
        self._pending = None
        try:
            pending.wait()
        except CheckpointError:
            self.saves.failed += 1
        else:
            self._saved(step, pending.seconds)
        if self.interval is not None:
            self.interval.stood_still()

    def _saved(self, step: int, seconds: float) -> None:
        """Record a complete checkpoint, and remove the oldest."""
        self.saves.steps.append(step)
        self.saves.seconds.append(seconds)
        if self._speaks:
            self._remove_old()

    def farewell(self) -> int:
        """Print how to continue the run, when all ranks have stopped.

        Returns: the exit status, 1 without a checkpoint.
        """
        there = checkpoints(self.settings.out)
        if not self._speaks:
            return AGAIN if there else 1
        where = (
            f"; continue with `minidist train --resume {self.settings.out}`"
            if there
            else "; no checkpoint is there"
        )
        say_line(
            f"minidist train: told to stop after step {self.trainer.steps_done} of "
            f"{self.settings.args.steps}"
            + (
                f", saved in {there[-1]}"
                if there and step_of(there[-1]) == self.trainer.steps_done
                else ""
            )
            + where
        )
        return AGAIN if there else 1

    def record(self) -> dict[str, Any]:
        """Return the record for metrics.json: the newest checkpoint, and the step and seconds of
        each save."""
        there = checkpoints(self.settings.out)
        return {
            "folder": str(there[-1]) if there else None,
            "steps": self.saves.steps,
            "seconds": self.saves.seconds,
            "failed": self.saves.failed,
            "goodput": self.interval and self.interval.record(),
        }

    def _remove_old(self) -> None:
        """Remove all checkpoints except this run's newest `keep`.

        This includes checkpoints of later steps than the step it resumed from.
        """
        there = checkpoints(self.settings.out)
        ours = [folder for folder in there if step_of(folder) in {*self._before, *self.saves.steps}]
        try:
            for folder in there:
                if folder not in ours[-self.settings.args.keep :]:
                    remove(folder)
        except OSError as error:
            say_line(
                f"minidist train: an old checkpoint in {self.settings.out} stays: {error.strerror}"
            )

    @contextmanager
    def _shown(self, folder: Path) -> Iterator[None]:
        """Print a line if the block takes long."""
        start = time.perf_counter()
        timer = threading.Timer(LONG, self.report.line, [f"saving {folder} …"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if time.perf_counter() - start >= LONG:
            self.report.line(f"saved {folder} in {time.perf_counter() - start:.1f} s")
