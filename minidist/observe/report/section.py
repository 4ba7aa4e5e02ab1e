"""A section of the report: lines, tables and charts; and how a long series becomes short and keeps
its extremes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any

from rich.table import Table as TerminalTable
from rich.text import Text

MOST_POINTS = 800
"""The most points of a series: about the pixels of a chart's width."""


@dataclass(frozen=True)
class PlainTable:
    """Cells are texts; `right`: the numbers of columns that are aligned to the right. head: cells
    of the head."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()


@dataclass(frozen=True)
class Chart:
    """A chart that report.js draws. key: its function there; label: what it shows, for a blind
    reader."""

    key: str
    label: str
    data: dict[str, Any]


@dataclass
class Section:
    """A section of the page.

    Attributes: key      its anchor; title: its heading
                lines    paragraphs, plain text
                missing  one line for each thing that the run folder lacks: what it is and how to
                         get it
                code     a command, shown as such, before the charts; tables stand below them
    """

    key: str
    title: str
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    code: str = ""
    charts: list[Chart] = field(default_factory=list)
    tables: list[PlainTable] = field(default_factory=list)


def plain_table(table: TerminalTable, title: str) -> PlainTable:
    """A table of the terminal as one of the page; its last row is the sum where the terminal draws
    a line above it."""
    columns = [
        [Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns
    ]
    head = [Text.from_markup(str(column.header)).plain for column in table.columns]
    right = [place for place, column in enumerate(table.columns) if column.justify == "right"]
    return PlainTable(title, head, [list(row) for row in zip(*columns, strict=True)], right)


def thinned(
    places: Sequence[int], values: Sequence[float | None], most: int = MOST_POINTS
) -> dict[str, Any]:
    """A series of at most `most` points, each of `every` neighbours: their lowest, highest and mean
    value.

    Args:    places: of the values, as steps. values: None, NaN or infinite: there is none.
    Returns: {"every": neighbours of a point, "at": first place of each, "low", "high", "mean": None
    where no neighbour
             has a value}.
    """
    every = max(1, -(-len(places) // most))
    groups = [
        [value for value in values[start : start + every] if value is not None and isfinite(value)]
        for start in range(0, len(places), every)
    ]
    return {
        "every": every,
        "at": list(places[::every]),
        "low": [min(group, default=None) for group in groups],
        "high": [max(group, default=None) for group in groups],
        "mean": [fmean(group) if group else None for group in groups],
    }


def thinning_line(every: int, what: str = "step") -> list[str]:
    """What to say of a thinned series; nothing if each value is shown."""
    return (
        [
            f"Each point stands for {every} {what}s: the band reaches from their lowest to their "
            "highest value, the line is their mean."
        ]
        if every > 1
        else []
    )


def rounded(number: float, digits: int = 6) -> float:
    """A number with so many significant digits: fewer letters in the page."""
    return float(f"{number:.{digits}g}")
