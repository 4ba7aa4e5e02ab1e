"""Series made short keep their extremes; a terminal's table keeps its cells."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Column
from rich.table import Table as TerminalTable

from minidist.observe.report.section import plain_table, rounded, thinned, thinning_line

VALUES = st.lists(st.none() | st.floats(-1e9, 1e9), max_size=60)


@given(VALUES, st.integers(1, 20))
def test_a_thinned_series_keeps_its_extremes(values: list[float | None], most: int) -> None:
    series = thinned(range(len(values)), values, most)
    known = [value for value in values if value is not None]
    assert (
        len(series["at"])
        == len(series["low"])
        == len(series["high"])
        == len(series["mean"])
        <= most
    )
    assert min((low for low in series["low"] if low is not None), default=None) == min(
        known, default=None
    )
    assert max((high for high in series["high"] if high is not None), default=None) == max(
        known, default=None
    )
    for at, low, high, mean in zip(
        series["at"], series["low"], series["high"], series["mean"], strict=True
    ):
        group = [value for value in values[at : at + series["every"]] if value is not None]
        assert (low is None) == (not group)
        if group:
            assert low <= high and mean == pytest.approx(np.mean(group), rel=1e-9, abs=1e-6)


def test_each_value_is_shown_where_there_is_room_and_the_page_says_when_not() -> None:
    series = thinned([1, 2, 3], [5.0, math.nan, math.inf])
    assert series == {
        "every": 1,
        "at": [1, 2, 3],
        "low": [5.0, None, None],
        "high": [5.0, None, None],
        "mean": [5.0, None, None],
    }
    assert thinning_line(1) == []
    assert "stands for 4 steps" in thinning_line(4)[0]


def test_a_terminals_table_becomes_plain() -> None:
    table = TerminalTable("name", Column("bytes", justify="right"))
    table.add_row("[bold]a[/bold]", "1,024")
    plain = plain_table(table, "title")
    assert (plain.title, plain.head, plain.rows, plain.right) == (
        "title",
        ["name", "bytes"],
        [["a", "1,024"]],
        [1],
    )


def test_rounding_keeps_significant_digits() -> None:
    assert rounded(1234567.0, 3) == 1230000.0 and rounded(0.000123456, 2) == 0.00012
