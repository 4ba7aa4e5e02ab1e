"""The page of the family: it has every algorithm, with the formulas that the ledgers are held
against."""

import re
from pathlib import Path

import pytest

from minidist import lessons
from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.cost.volume import FORMULAS
from minidist.grading import load_module
from minidist.launch import run

PAGE = lessons.FOLDER / "COLLECTIVES.md"
family = load_module(lessons.find("02").part("family.py"), "02")


YOUNGER: set[tuple[str, str]] = set()
"""Rows without times: algorithms that came after the page was measured. The next measurement
empties this."""


def rows() -> dict[tuple[str, str], list[str]]:
    """The page's rows by verb and algorithm."""
    found = {}
    verb = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        verb = line[3:] if line.startswith("## ") else verb
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and verb in ALGORITHMS and cells[0] not in ("algorithm", "---"):
            found[verb, cells[0]] = cells[1:]
    return found


def test_the_page_has_every_algorithm_with_its_formulas() -> None:
    told = {pair: cells[:3] for pair, cells in rows().items()}
    assert told == {
        (verb, name): [
            FORMULAS[verb, name].messages,
            FORMULAS[verb, name].nbytes,
            FORMULAS[verb, name].steps,
        ]
        for verb in ALGORITHMS
        for name in ALGORITHMS[verb]
    }


def test_every_row_has_times_and_each_column_a_fastest() -> None:
    for (verb, name), cells in rows().items():
        times = cells[3:-1]
        assert len(times) == (3 if verb == "barrier" else 9), name
        assert all(re.fullmatch(r"–|\d+|\*\*\d+\*\*", time) for time in times)
        assert (times.count("–") == len(times)) == ((verb, name) in YOUNGER), name
    for verb in ALGORITHMS:
        columns = zip(
            *(cells[3:-1] for (of, _), cells in rows().items() if of == verb), strict=True
        )
        assert all(any(time.startswith("**") for time in column) for column in columns), verb


def test_what_is_measured_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "SIZES", {"1 KiB": 1024})
    monkeypatch.setattr(family, "ROUNDS", 1)
    monkeypatch.setattr(family, "BUDGET", 0.0)
    figures = {
        (verb, name, size): seconds
        for verb, name, size, seconds in run(family.measured_calls, size=2)[0]
    }
    assert {(verb, name) for verb, name, _ in figures} == {
        (verb, name)
        for verb in ALGORITHMS
        for name in ALGORITHMS[verb]
        if name not in ("native", "shared")
    }
    everywhere = {"TCP": figures, "shm": figures, "MPI": figures}
    family.write_page(everywhere, {"2": {"tcp": {"1024": 5e-5}}}, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert text.count(family.BEGIN) == text.count(family.END) == 1
    assert text.count("\n## ") == len(ALGORITHMS) + 1 and "| **" in text
    assert "| tcp | 50 |" in text
