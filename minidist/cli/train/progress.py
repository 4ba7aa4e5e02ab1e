"""Progress of a training run: a bar on a terminal, plain lines elsewhere, nothing under --quiet."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

from minidist.console import size_text
from minidist.parallel.step.step import Batch

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "srun", "orterun", "prterun")


class ProgressReport:
    """Shows the progress of a run: each step, then each batch of held-out text. This one shows nothing (--quiet)."""

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        """Show step `number` (from 1) with its `loss`; `sent_bytes` of this rank so far."""

    def line(self, text: str) -> None:
        """Show a line, once. Any thread may call it."""

    def close(self) -> None:
        """End the part of the training steps."""

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the batches one by one, and show how many are done."""
        yield from batches


class Lines(ProgressReport):
    """Prints a line for the first step, for the last, and at most one every `seconds` between."""

    def __init__(self, steps: int, print_line: Callable[[str], Any], *, seconds: float = 5.0) -> None:
        self.steps, self.print_line, self.seconds = steps, print_line, seconds
        self._last = float("-inf")

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        if number == self.steps or time.monotonic() - self._last >= self.seconds:
            self._last = time.monotonic()
            self.print_line(f"step {number:>{len(str(self.steps))}} of {self.steps}  loss {loss:.4f}  "
                            f"{tokens_per_second:,.0f} tokens/s  {size_text(sent_bytes)} sent a rank")

    def line(self, text: str) -> None:
        self.print_line(text)

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        self._last = time.monotonic()
        for number, batch in enumerate(batches):
            if time.monotonic() - self._last >= self.seconds:
                self._last = time.monotonic()
                self.print_line(f"held-out text: batch {number:>{len(str(len(batches)))}} of {len(batches)}")
            yield batch


class Bar(ProgressReport):
    """A progress bar that stays in its place on the screen; held-out text gets a second one, which goes when full."""

    def __init__(self, steps: int, console: Console) -> None:
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]:.4f}"), TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("{task.fields[sent]} sent a rank"), TimeRemainingColumn(), console=console, refresh_per_second=5)
        self.task = self.progress.add_task("", total=steps, loss=float("nan"), speed=0.0, sent="")
        self.progress.start()

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        self.progress.update(self.task, completed=number, loss=loss, speed=tokens_per_second,
                             sent=size_text(sent_bytes))

    def line(self, text: str) -> None:
        self.progress.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        yield from track(batches, "held-out text", console=self.progress.console, transient=True)


def launcher_terminal() -> str | None:
    """The terminal of mpirun or srun, our ancestor, which passes on what rank 0 writes to a pipe; None without one."""
    import psutil  # here: the other ranks do without it

    with suppress(psutil.Error, OSError):   # another system, or no permission: lines instead of a bar
        for parent in psutil.Process().parents():
            if parent.name() in LAUNCHERS:
                target = os.readlink(f"/proc/{parent.pid}/fd/1")
                return target if target.startswith(("/dev/pts/", "/dev/tty")) else None
    return None


def make_console() -> tuple[Console, bool]:
    """A console on stdout, and whether it is shown on a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False), True
    terminal = launcher_terminal()
    if terminal is None:
        return Console(highlight=False, width=120), False
    try:
        with open(terminal, "rb") as stream:
            columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 100
    return Console(highlight=False, force_terminal=True, width=columns or 100), True


def make_report(steps: int, console: Console, *, on_terminal: bool) -> ProgressReport:
    """A bar on a terminal, else lines; nothing on a console that is quiet."""
    if console.quiet:
        return ProgressReport()
    if on_terminal:
        return Bar(steps, console)
    return Lines(steps, lambda line: console.print(line, markup=False, soft_wrap=True))
