"""The output of a lesson: tables of measured values beside formulas, printed by rank 0 alone, and the same as JSON.

    page = Page(world)
    page.table("Bytes a rank sends", ["P", "measured", "2(P-1)/P n"], rows)
    page.save(arguments.json)
"""

import json
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minidist.comm.group import Group
from minidist.console import written

PLAIN_WIDTH = 110  # columns of output to a pipe or a file; a terminal has its own width


def page_console() -> Console:
    """A console as wide as the terminal, or of PLAIN_WIDTH."""
    return Console(highlight=False, width=None if Console().is_terminal else PLAIN_WIDTH)


class Page:
    """Tables and sentences of one run. Every rank may use it; only rank 0's page prints and saves.

    Args:    world: a group of the run; only its rank is read. console: where rank 0 prints (default: `page_console()`).
    """

    def __init__(self, world: Group, console: Console | None = None) -> None:
        self.writes = world.rank == 0
        self.console = console or page_console()
        self.tables: list[dict[str, Any]] = []

    def say(self, text: str = "") -> None:
        """Print one paragraph."""
        if self.writes:
            self.console.print(text, markup=False)

    def heading(self, text: str) -> None:
        """Print a heading above a group of tables."""
        if self.writes:
            self.console.print()
            self.console.rule(f"[bold]{text}", align="left", style="dim")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> None:
        """Print a table: the first column is left-aligned, the others right; `note` stands below.

        A cell "ok" is green and a cell that starts with "off" is red: there measured and formula differ.
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
        keep_words(table, [columns, *rows], self.console.width)
        self.console.print()
        self.console.print(table)

    def save(self, file: str | None) -> None:
        """Write all tables to `file` as JSON: `{"tables": [{"title": ..., "columns": [...], "rows": [[...], ...]}]}`.

        Raises: ConfigError if the file cannot be written; OSError if the disk is full.
        """
        if self.writes and file:
            with written("cannot write", file) as draft:
                draft.write_text(json.dumps({"tables": self.tables}, indent=1, default=str) + "\n")


def keep_words(table: Table, rows: Sequence[Sequence[Any]], width: int) -> None:
    """Give each column the width of its longest word, where all of them fit into `width`: lines break between words."""
    longest = [max((cell_len(word) for row in rows for word in str(row[index]).split()), default=0)
               for index in range(len(table.columns))]
    if sum(longest) + 3 * len(longest) + 1 <= width:
        for column, least in zip(table.columns, longest, strict=True):
            column.min_width = least


def _cell(value: Any) -> str:
    """A table's cell as rich markup."""
    text = str(value)
    if text == "ok":
        return "[green]ok[/green]"
    if text.startswith("off"):
        return f"[bold red]{text}[/bold red]"
    return escape(text)


def verdict(measured: float, formula: float, tolerance: float = 0.0) -> str:
    """"ok" if `measured` is within `tolerance` (a fraction) of `formula`, else the difference: "off +12.0 %"."""
    if abs(measured - formula) <= tolerance * abs(formula):
        return "ok"
    return f"off {100 * (measured / formula - 1):+.1f} %" if formula else f"off by {measured:.3g}"
