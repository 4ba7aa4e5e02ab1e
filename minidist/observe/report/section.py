"""A section of the report: lines, tables and charts; and `thinned`, which shortens a long series
but keeps its extremes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean
from typing import Any

from rich.table import Table as TerminalTable
from rich.text import Text

MOST_POINTS = 800
"""Largest number of points of a series: about the width of a chart in pixels."""


@dataclass(frozen=True)
class PlainTable:
    """A table of texts. head: cells of the head row; right: indices of the columns that are aligned
    to the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()


@dataclass(frozen=True)
class Chart:
    """A chart that report.js draws. key: name of its function there; label: a description for blind
    readers."""

    key: str
    label: str
    data: dict[str, Any]


@dataclass
class Section:
    """A section of the page.

    Attributes: key      its anchor; title: its heading
                lines    paragraphs, plain text
                missing  one line for each part that the run folder lacks, and how to get it
                code     a command, shown as code before the charts; tables are below the charts
    """

    key: str
    title: str
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    code: str = ""
    charts: list[Chart] = field(default_factory=list)
    tables: list[PlainTable] = field(default_factory=list)


def plain_table(table: TerminalTable, title: str) -> PlainTable:
    """Return a table of the terminal as a table of the page."""
    columns = [
        [Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns
    ]
    head = [Text.from_markup(str(column.header)).plain for column in table.columns]
    right = [place for place, column in enumerate(table.columns) if column.justify == "right"]
    return PlainTable(title, head, [list(row) for row in zip(*columns, strict=True)], right)


def thinned(
    places: Sequence[int], values: Sequence[float | None], most: int = MOST_POINTS
) -> dict[str, Any]:
    """Return a series of at most `most` points, each the lowest, highest and mean of `every`
    consecutive values.

    Args:    places: of the values, as steps. values: None, NaN or infinite means no value.
    Returns: {"every": values per point, "at": first place of each point, "low", "high", "mean":
             None for a point without a value}.
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
    """Return the line that explains a thinned series; [] if each value is shown."""
    return (
        [
            f"Each point stands for {every} {what}s: the band reaches from their lowest to their "
            "highest value, the line is their mean."
        ]
        if every > 1
        else []
    )


def rounded(number: float, digits: int = 6) -> float:
    """Return a number with `digits` significant digits, to make the page smaller."""
    return float(f"{number:.{digits}g}")
