"""Tables of measured beside formula."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from minidist.errors import ConfigError
from minidist.lessons.page import Page, verdict


def page(rank: int = 0) -> tuple[Page, io.StringIO]:
    out = io.StringIO()
    return Page(SimpleNamespace(rank=rank), Console(file=out, width=100)), out


def test_only_rank_0_prints_and_saves(tmp_path: Path) -> None:
    first, out = page()
    other, silence = page(1)
    for each in (first, other):
        each.heading("1  Heading")
        each.say("a sentence [with brackets]")
        each.table("Title", ["name", "value"], [["a", 1], ["b[0]", "ok"]], note="a note")
        each.save(str(tmp_path / f"{each.writes}.json"))
    assert silence.getvalue() == "" and not (tmp_path / "False.json").exists()
    assert all(
        word in out.getvalue() for word in ("Heading", "[with brackets]", "Title", "b[0]", "a note")
    )
    assert json.loads((tmp_path / "True.json").read_text()) == {
        "tables": [
            {"title": "Title", "columns": ["name", "value"], "rows": [["a", 1], ["b[0]", "ok"]]}
        ]
    }


def test_headers_and_cells_break_between_words_at_80_columns() -> None:
    out = io.StringIO()
    titles = [
        "rank and its neighbours",
        "messages measured",
        "messages predicted",
        "bytes measured",
        "bytes predicted",
        "",
    ]
    Page(SimpleNamespace(rank=0), Console(file=out, width=80)).table(
        "Title",
        titles,
        [["hierarchical all_reduce, with a long description of where it runs", 1, 2, 3, 4, "ok"]],
    )
    for word in [*" ".join(titles).split(), "hierarchical", "description"]:
        assert word in out.getvalue(), out.getvalue()


def test_what_cannot_be_written_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot write /proc/nowhere"):
        page()[0].save("/proc/nowhere")


def test_verdicts() -> None:
    assert verdict(100, 100) == "ok" and verdict(101, 100, 0.02) == "ok"
    assert (
        verdict(112, 100) == "off +12.0 %"
        and verdict(50, 100) == "off -50.0 %"
        and verdict(3, 0) == "off by 3"
    )


def test_a_table_without_room_is_printed_as_records() -> None:
    out = io.StringIO()
    narrow = Page(SimpleNamespace(rank=0), Console(file=out, width=30))
    columns = ["collective", "measured", "formula", ""]
    narrow.table(
        "Bytes", columns, [["all_reduce", 123456, "2(P-1)/P", "ok"], ["b", "", 7, ""]], "a note"
    )
    lines = [line.rstrip() for line in out.getvalue().split("\n")]
    assert lines[1:] == [
        "Bytes",
        "all_reduce",
        "  measured: 123456",
        "  formula: 2(P-1)/P",
        "  ok",
        "b",
        "  formula: 7",
        "a note",
        "",
    ]
