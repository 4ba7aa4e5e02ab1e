"""Progress of a training run: a bar on a terminal, plain lines elsewhere, nothing under --quiet."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from minidist.console import size_text
from minidist.parallel.step.step import Batch
from minidist.progress import LINES_EVERY, Bar, Lines, Progress
from minidist.terminal import Console

HELD_OUT = "held-out text: batch"
LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "srun", "orterun", "prterun")


class ProgressReport:
    """A display of the progress of a run: each step, then each batch of held-out text.

    This base class shows nothing (--quiet).
    """

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        """Show step `number` (from 1) with its `loss`; `sent_bytes`: of this rank, in all steps of
        the job so far."""

    def expect(self, steps: int) -> None:
        """Change the number of steps that the run will make."""

    def input(self) -> AbstractContextManager[None]:
        """Mark a block in which the training waits for its batch."""
        return nullcontext()

    def line(self, text: str) -> None:
        """Show a line, once. Any thread may call it."""

    def close(self) -> None:
        """End the part of the training steps."""

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yield the batches one by one, and show the number that is done."""
        yield from batches


class Shown(ProgressReport):
    """A display of the steps on `steps_shown`, and then of held-out text on the result of
    `for_batches`."""

    def __init__(
        self, steps: int, steps_shown: Progress, for_batches: Callable[[], Progress]
    ) -> None:
        self.steps = steps
        self._steps_shown = steps_shown
        self._for_batches = for_batches

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        self._steps_shown.at(
            number,
            self.steps,
            f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  "
            f"{size_text(sent_bytes)} sent so far",
        )

    def expect(self, steps: int) -> None:
        self.steps = steps

    def line(self, text: str) -> None:
        self._steps_shown.keep(text)

    def close(self) -> None:
        self._steps_shown.close()

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        shown = self._for_batches()
        try:
            for number, batch in enumerate(batches):
                shown.at(number, len(batches))
                yield batch
        finally:
            shown.close()


def launcher_terminal() -> str | None:
    """Return the terminal of mpirun or srun, our ancestor, which passes on what rank 0 writes to a
    pipe; None without one."""
    import psutil  # here: the other ranks do not need it

    # another system, or no permission: lines instead of a bar
    with suppress(psutil.Error, OSError):
        for parent in psutil.Process().parents():
            if parent.name() in LAUNCHERS:
                target = os.readlink(f"/proc/{parent.pid}/fd/1")
                return target if target.startswith(("/dev/pts/", "/dev/tty")) else None
    return None


def make_console() -> tuple[Console, bool]:
    """Return a console on stdout, and whether it is shown on a terminal."""
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
    """Return a bar on a terminal, else lines; an empty report on a quiet console."""
    if console.quiet:
        return ProgressReport()
    if on_terminal:
        return Shown(
            steps, Bar(console, noun="step", stays=True), lambda: Bar(console, noun=HELD_OUT)
        )
    return line_report(steps, lambda line: console.print(line, markup=False, soft_wrap=True))


def line_report(
    steps: int, print_line: Callable[[str], Any], *, seconds: float = LINES_EVERY
) -> ProgressReport:
    """Return a report with a line for the first and the last step, and at most one every `seconds`
    between; same for held-out text."""
    return Shown(
        steps,
        Lines(print_line, "step", seconds=seconds),
        lambda: Lines(print_line, HELD_OUT, seconds=seconds, ends=False),
    )
