"""How far a training run is: a bar on a terminal, plain lines elsewhere, nothing under --quiet."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

from minidist.observe.page import size_text
from minidist.parallel.step.step import Batch

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "srun", "orterun", "prterun")


class Report(Protocol):
    """Is told of each step, and then of each batch of held-out text."""

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        """Step `number` (from 1) ended with `loss`; `sent_bytes` is what this rank has sent so far."""
        ...

    def close(self) -> None:
        """The last step is done."""
        ...

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """The batches, one by one: how many of them are done is shown."""
        ...


class Silence:
    """Says nothing."""

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Say nothing."""

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Say nothing."""
        yield from batches


class Lines:
    """A line now and then: the first step, the last, and at most one every `seconds` between."""

    def __init__(self, steps: int, print_line: Callable[[str], Any], *, seconds: float = 5.0) -> None:
        self.steps, self.print_line, self.seconds = steps, print_line, seconds
        self._last = float("-inf")

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        """Print the step if it is time."""
        now = time.monotonic()
        if number < self.steps and now - self._last < self.seconds:
            return
        self._last = now
        self.print_line(f"step {number:>{len(str(self.steps))}} of {self.steps}  loss {loss:.4f}  "
                        f"{tokens_per_second:,.0f} tokens/s  {size_text(sent_bytes)} sent a rank")

    def close(self) -> None:
        """Nothing is left to print."""

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Print a line at most every `seconds`."""
        self._last = time.monotonic()
        for number, batch in enumerate(batches):
            if time.monotonic() - self._last >= self.seconds:
                self._last = time.monotonic()
                self.print_line(f"held-out text: batch {number:>{len(str(len(batches)))}} of {len(batches)}")
            yield batch


class Bar:
    """A progress bar that stays where it is."""

    def __init__(self, steps: int, console: Console) -> None:
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]:.4f}"), TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TextColumn("{task.fields[sent]} sent a rank"), TimeRemainingColumn(), console=console, refresh_per_second=5)
        self.task = self.progress.add_task("", total=steps, loss=float("nan"), speed=0.0, sent="")
        self.progress.start()

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        """Move the bar."""
        self.progress.update(self.task, completed=number, loss=loss, speed=tokens_per_second,
                             sent=size_text(sent_bytes))

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        self.progress.stop()

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """A bar of its own, which goes when it is full."""
        yield from track(batches, "held-out text", console=self.progress.console, transient=True)


def launcher_terminal() -> str | None:
    """The terminal that mpirun or srun, our ancestor, writes to; None if there is none.

    A launcher reads its ranks' output through pipes, so that rank 0 sees no terminal although its user sits at one, and
    what it prints arrives there unchanged.
    """
    try:
        for parent in psutil.Process().parents():
            if parent.name() in LAUNCHERS:
                target = os.readlink(f"/proc/{parent.pid}/fd/1")
                return target if target.startswith(("/dev/pts/", "/dev/tty")) else None
    except (psutil.Error, OSError):  # another system, or not ours to read: then there is no bar, only lines
        return None
    return None


def make_console() -> tuple[Console, bool]:
    """A console on stdout, and whether a person at a terminal sees it."""
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


def make_report(steps: int, console: Console, *, on_terminal: bool) -> Report:
    """A bar where a person watches, else lines."""
    if on_terminal:
        return Bar(steps, console)
    return Lines(steps, lambda line: console.print(line, markup=False, soft_wrap=True))
