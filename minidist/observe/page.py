"""What a lesson prints: tables of measured beside formula, once, from rank 0, and the same numbers as JSON.

    page = Page(world)
    page.table("Bytes a rank sends", ["P", "measured", "2(P-1)/P n"], rows)
    page.save(arguments.json)
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from minidist.errors import ConfigError

PLAIN_WIDTH = 110  # of what is piped or written to a file; a terminal has its own


def page_console() -> Console:
    """Where pages are printed: as wide as the terminal, or PLAIN_WIDTH."""
    return Console(highlight=False, width=None if Console().is_terminal else PLAIN_WIDTH)


class Page:
    """Tables and sentences of one run. Every rank may write to it; only rank 0's page prints and saves."""

    def __init__(self, world: Any, console: Console | None = None) -> None:
        self.writes = world.rank == 0
        self.console = console or page_console()
        self.tables: list[dict[str, Any]] = []

    def say(self, text: str = "") -> None:
        """One paragraph."""
        if self.writes:
            self.console.print(text, markup=False)

    def heading(self, text: str) -> None:
        """A line of its own before a group of tables."""
        if self.writes:
            self.console.print()
            self.console.rule(f"[bold]{text}", align="left", style="dim")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> None:
        """A table: the first column is a name (left), the others are figures (right); `note` stands below it.

        A cell that is "ok" is green and one that starts with "off" is red, so that a reader sees at once where
        measured and formula part.
        """
        if not self.writes:
            return
        self.tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})
        table = Table(title=title, title_justify="left", title_style="bold", caption=note or None,
                      caption_justify="left", header_style="bold cyan")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        self.console.print()
        self.console.print(table)

    def save(self, file: str | None) -> None:
        """All tables as JSON: `{"tables": [{"title": ..., "columns": [...], "rows": [[...], ...]}]}`.

        Raises: ConfigError if the file cannot be written.
        """
        if self.writes and file:
            try:
                Path(file).write_text(json.dumps({"tables": self.tables}, indent=1, default=str) + "\n")
            except OSError as error:
                raise ConfigError(f"cannot write {file}: {error.strerror}") from error


def _cell(value: Any) -> str:
    """A table's cell as rich markup."""
    text = str(value)
    if text == "ok":
        return "[green]ok[/green]"
    if text.startswith("off"):
        return f"[bold red]{text}[/bold red]"
    return text.replace("[", "\\[")


def size_text(nbytes: float) -> str:
    """`3.0 MiB`, `1.5 KiB`, `12 B`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes:.0f} B"


def verdict(measured: float, formula: float, tolerance: float = 0.0) -> str:
    """"ok" where `measured` is within `tolerance` (a fraction) of `formula`, else how far off it is."""
    if abs(measured - formula) <= tolerance * abs(formula):
        return "ok"
    return f"off {100 * (measured / formula - 1):+.1f} %" if formula else f"off by {measured:.3g}"
