"""What a terminal shows while `minidist bench` measures."""

from rich.console import Console
from rich.status import Status


class Progress:
    """A line that changes while contenders take turns, and lines that stay."""

    def __init__(self, console: Console, status: Status) -> None:
        self.console, self.status = console, status

    def __call__(self, text: str) -> None:
        """Show `text` in the line that changes."""
        self.status.update(text)

    def keep(self, line: str) -> None:
        """Print a result that is already known: an interrupted run has shown it."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
