"""The generated pages are as new as the code and the results."""

import subprocess
import sys

import pytest
from imports import ROOT
from made_pages import ON_DISK, made

import minidist.reference.pages as pages
from minidist.cli import COMMANDS, parser_for
from minidist.errors import ConfigError
from minidist.reference.command_line import command_line_page
from minidist.reference.markdown import cell, table


@pytest.mark.parametrize("name", ON_DISK)
def test_a_page_is_what_is_made_from_the_code(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == made()[name], (
        f"{name} is older than what it is made of: run `python -m minidist.reference`"
    )


def test_the_pages_that_say_they_are_made_are_those_that_are_made() -> None:
    assert sorted(made()) == ON_DISK


def test_no_page_holds_what_differs_by_machine() -> None:
    for name, text in made().items():
        assert " at 0x" not in text, name
        assert "/root/" not in text and "/home/" not in text, name


def test_a_changed_option_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = command_line_page()
    parser = parser_for("sample")
    parser.add_argument("--louder", help="a planted option")
    usual = {name: parser_for(name) for name in COMMANDS} | {"sample": parser}
    monkeypatch.setattr("minidist.reference.command_line.parser_for", usual.__getitem__)
    after = command_line_page()
    assert after != before
    assert "| `--louder` `LOUDER` | a planted option |" in after


def test_every_option_of_every_command_is_there_but_hidden_ones() -> None:
    text = command_line_page()
    assert "==SUPPRESS==" not in text
    for name in COMMANDS:
        assert f"\n## minidist {name}\n" in text
    for option in ("--zero", "--local-steps", "--metrics-port", "--what-if", "--confirm"):
        assert f"`{option}`" in text


def test_a_cell_keeps_a_table_whole() -> None:
    assert cell("a|b\n <c>") == "a\\|b &lt;c>"
    assert table(["x"], [["1"]]) == ["", "| x |", "| --- |", "| 1 |"]


def test_outside_a_clone_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with pytest.raises(ConfigError, match="clone"):
        pages.every_page()


def test_the_command_writes_nothing_where_all_is_new() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minidist.reference"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
