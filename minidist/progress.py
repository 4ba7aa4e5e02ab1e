"""The progress of a long command, shown in one way by all of them.

    with progress("reading") as show:       # on stderr, so results on stdout can go to a file
        show("fitting the constants")       # the present work
        show.at(3, 40, "round 3: gloo")     # and how much of it is done
        show.keep("4 ranks: done")          # a result: a line on stdout, which stays

    a terminal                  one line that changes, and ends with the block; a bar if the total
                                is known
    a dumb terminal, a file     a line on stderr every five seconds, none in the first five

Functions that measure take a Progress, or any function of a text.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Row
from rich.text import Text

from minidist.comm.health.failure import say_line

LINES_EVERY = 5.0  # seconds
LAST_LINES = 5.0  # seconds until the last lines of other processes are there


class Progress:
    """A display of a command's progress. This base class shows only the lines that stay."""

    def __call__(self, text: str) -> None:
        """Show the present work."""

    def at(self, done: int, total: int, text: str = "") -> None:
        """Show that `done` of `total` are done, and `text` about it."""

    def keep(self, line: str) -> None:
        """Print a line that stays: an interrupted command has shown it."""
        print(line, flush=True)

    @contextmanager
    def stderr(self) -> Iterator[int | None]:
        """Context manager: the stderr= of processes that this command starts inside."""
        yield None

    def close(self) -> None:
        """Show nothing from now on; a second call does nothing."""


SILENT = Progress()


class Lines(Progress):
    """Lines of progress, printed at most once every `seconds`.

    Args:    ends: also the first time, and when all is done.
    """

    def __init__(
        self,
        print_line: Callable[[str], Any],
        noun: str,
        *,
        seconds: float = LINES_EVERY,
        ends: bool = True,
    ) -> None:
        self._print_line = print_line
        self._noun = noun
        self._seconds = seconds
        self._ends = ends
        self._last = float("-inf") if ends else time.monotonic()

    def at(self, done: int, total: int, text: str = "") -> None:
        if (self._ends and done == total) or time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            self.keep(f"{self._noun} {done:>{len(str(total))}} of {total}  {text}".rstrip())

    def keep(self, line: str) -> None:
        self._print_line(line)


_SPEAKING = threading.Lock()  # no process is forked while stderr's own lock is held
os.register_at_fork(
    before=_SPEAKING.acquire,
    after_in_parent=_SPEAKING.release,
    after_in_child=_SPEAKING.release,
)


class Spoken(Progress):
    """Lines on stderr where there is no terminal: the present work every `seconds`, from a thread
    of its own, and nothing of a command that is done before."""

    def __init__(self, text: str, seconds: float) -> None:
        self._text = text
        self._seconds = seconds
        self._ended = threading.Event()
        self._speaker = threading.Thread(target=self._speak, name="progress", daemon=True)
        self._speaker.start()

    def _speak(self) -> None:
        begun = time.monotonic()
        while not self._ended.wait(self._seconds):
            with _SPEAKING:
                say_line(f"{self._text} ({time.monotonic() - begun:.0f} s)")

    def __call__(self, text: str) -> None:
        self._text = text

    def at(self, done: int, total: int, text: str = "") -> None:
        self(f"{done} of {total}  {text}".rstrip())

    def close(self) -> None:
        self._ended.set()
        self._speaker.join(LAST_LINES)


class Bar(Progress):
    """A line that keeps its place on a terminal.

    Args:    console: the terminal; noun: the unit that is counted, as "step"; stays: its last state
             stays on the screen.
    """

    def __init__(
        self, console: Console, text: str = "", *, noun: str = "", stays: bool = False
    ) -> None:
        times = TimeRemainingColumn() if noun else TimeElapsedColumn()
        first: list[ProgressColumn] = [TextColumn(noun)] if noun else [SpinnerColumn()]
        self.console = console
        self._row = Row(
            *first,
            _Count(),
            _CountBar(bar_width=None if noun else 20),
            TextColumn("{task.description}"),
            times,
            console=console,
            transient=not stays,
            refresh_per_second=5,
            redirect_stdout=False,
        )
        self._task = self._row.add_task(escape(text), total=None)
        self._row.start()

    def __call__(self, text: str) -> None:
        self._row.update(self._task, description=escape(text))

    def at(self, done: int, total: int, text: str = "") -> None:
        self._row.update(self._task, completed=done, total=total, description=escape(text))

    def keep(self, line: str) -> None:
        if not self.console.stderr:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        # both may be one terminal: remove the line, and show it again below the result
        self._row.stop()
        super().keep(line)
        self._row.start()

    @contextmanager
    def stderr(self) -> Iterator[int | None]:
        """Context manager: lines that these processes print are shown above the line that
        changes."""
        reading, writing = os.pipe()

        def show() -> None:
            with open(reading, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    self.console.print(
                        line.rstrip("\n"), markup=False, highlight=False, soft_wrap=True
                    )

        reader = threading.Thread(target=show, daemon=True)
        reader.start()
        try:
            yield writing
        finally:
            os.close(writing)
            reader.join(LAST_LINES)

    def close(self) -> None:
        self._row.stop()


class _Count(ProgressColumn):
    """The text "3/40", if the total is known."""

    def render(self, task: Task) -> Text:
        return Text("" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


class _CountBar(BarColumn):
    """A bar, if the total is known."""

    def render(self, task: Task) -> Any:
        return Text() if task.total is None else super().render(task)


@contextmanager
def progress(text: str) -> Iterator[Progress]:
    """Context manager: a command that takes long shows its work on stderr, first `text`."""
    console = Console(stderr=True, highlight=False)
    animated = console.is_terminal and not console.is_dumb_terminal
    shown = Bar(console, text) if animated else Spoken(text, LINES_EVERY)
    try:
        yield shown
    finally:
        shown.close()
