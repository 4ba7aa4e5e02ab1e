"""`minidist train --watch`: rank 0 starts `minidist watch` as a second process, which draws; the
ranks lose no time."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from minidist.cli.train.progress import ProgressReport, launcher_terminal, make_report
from minidist.cli.train.settings import Settings
from minidist.launch.launchers import clean_environment
from minidist.launch.own_python import module_command
from minidist.parallel.step.step import Batch
from minidist.terminal import Console

LAST_LOOK = 10.0  # seconds that the view may take to end


def report_of(settings: Settings, console: Console, *, on_terminal: bool) -> ProgressReport:
    """Return the report that shows the progress of a run; an empty one on a quiet console."""
    report = make_report(
        settings.args.steps, console, on_terminal=on_terminal and not settings.args.watch
    )
    return report if console.quiet or not settings.args.watch else Watched(settings.out, report)


class Watched(ProgressReport):
    """A live view of a run, in a process of its own, while the steps are made.

    After them `rest` shows the progress.

    Lines to be shown meanwhile are sent to that process, which prints them above its view.
    """

    def __init__(self, run: Path, rest: ProgressReport) -> None:
        self.rest = rest
        with _terminal() as stdout:
            self._view: subprocess.Popen[str] | None = subprocess.Popen(
                module_command("minidist", "watch", str(run), "--beside-train"),
                stdin=subprocess.PIPE,
                stdout=stdout,
                encoding="utf-8",
                errors="backslashreplace",
                env=clean_environment(os.environ),
            )

    def expect(self, steps: int) -> None:
        self.rest.expect(steps)

    def line(self, text: str) -> None:
        if self._view is not None and self._view.poll() is None:
            with suppress(OSError):
                self._tell(text)
                return
        self.rest.line(text)

    def _tell(self, text: str) -> None:
        assert self._view is not None and self._view.stdin is not None
        self._view.stdin.write(f"{text}\n")
        self._view.stdin.flush()

    def close(self) -> None:
        """End the view with a last look; a second call does nothing."""
        view = self._view
        self._view = None
        if view is None:
            return
        with suppress(OSError):
            assert view.stdin is not None
            view.stdin.close()
        try:
            view.wait(LAST_LOOK)
        except subprocess.TimeoutExpired:
            view.kill()
            view.wait()

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        yield from self.rest.validating(batches)


@contextmanager
def _terminal() -> Iterator[IO[bytes] | None]:
    """Yield the file to draw on: mpirun's terminal if our output goes there through a pipe.

    None stands for our stdout.
    """
    terminal = None if sys.stdout.isatty() else launcher_terminal()
    if terminal is None:
        yield None
        return
    with open(terminal, "wb") as stream:
        yield stream
