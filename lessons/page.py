"""Print the output of a lesson: tables of measured values and formulas, by rank 0 only, and the
same as JSON.

page = Page(world)
page.table("Bytes a rank sends", ["P", "measured", "2(P-1)/P n"], rows)
page.save(arguments.json)
"""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minidist.comm.group import Group
from minidist.console import written

PLAIN_WIDTH = 110  # columns of output to a pipe or a file; a terminal has its own width
NARROW = 60  # below it, a table whose words do not fit is printed as records


def page_console() -> Console:
    """Return a console as wide as the terminal, or as $COLUMNS says, or of PLAIN_WIDTH."""
    has_width = Console().is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return Console(highlight=False, width=None if has_width else PLAIN_WIDTH)


class Page:
    """Tables and sentences of one run. Every rank may use it; only rank 0's page prints and saves.

    Args:    world: a group of the run; only its rank is read. console: where rank 0 prints
             (default: `page_console()`).
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

    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = ""
    ) -> None:
        """Print a table: the first column is left-aligned, the others right; `note` stands below.

        A cell "ok" is green and a cell that starts with "off" is red: there measured and formula
        differ.
        """
        if not self.writes:
            return
        self.tables.append(
            {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]}
        )
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            caption=note or None,
            caption_justify="left",
            header_style="bold cyan",
        )
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        kept = keep_words(table, [columns, *rows], self.console.width)
        self.console.print()
        if kept or self.console.width >= NARROW:
            self.console.print(table)
            return
        self.console.print(title, style="bold", markup=False)
        for line in records(columns, rows):
            self.console.print(line, markup=False)
        if note:
            self.console.print(note, style="dim", markup=False)

    def save(self, file: str | None) -> None:
        """Write all tables to `file` as JSON: `{"tables": [{"title": ..., "columns": [...], "rows":
        [[...], ...]}]}`.

        Raises: ConfigError if the file cannot be written; OSError if the disk is full.
        """
        if self.writes and file:
            with written("cannot write", file) as draft:
                draft.write_text(json.dumps({"tables": self.tables}, indent=1, default=str) + "\n")


def records(heads: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield a table's rows as lines: the first cell, then `head: cell` of each other cell that is
    not empty."""
    for row in rows:
        yield str(row[0])
        for head, cell in zip(heads[1:], row[1:], strict=True):
            if str(cell):
                yield f"  {head}: {cell}" if str(head) else f"  {cell}"


def keep_words(table: Table, rows: Sequence[Sequence[Any]], width: int) -> bool:
    """Give each column the width of its longest word, where all of them fit into `width`: lines
    break between words.

    Returns: whether they fit.
    """
    longest = [
        max((cell_len(word) for row in rows for word in str(row[index]).split()), default=0)
        for index in range(len(table.columns))
    ]
    if sum(longest) + 3 * len(longest) + 1 > width:
        return False
    for column, least in zip(table.columns, longest, strict=True):
        column.min_width = least
    return True


def _cell(value: Any) -> str:
    """Return a table's cell as rich markup."""
    text = str(value)
    if text == "ok":
        return "[green]ok[/green]"
    if text.startswith("off"):
        return f"[bold red]{text}[/bold red]"
    return escape(text)


def verdict(measured: float, formula: float, tolerance: float = 0.0) -> str:
    """Return "ok" if `measured` is within `tolerance` (a fraction) of `formula`, else the
    difference: "off +12.0 %"."""
    if abs(measured - formula) <= tolerance * abs(formula):
        return "ok"
    return f"off {100 * (measured / formula - 1):+.1f} %" if formula else f"off by {measured:.3g}"
