"""The measured pages: every file of results once, newest first, with names of today."""

import json
import re

import pytest
from imports import ROOT
from made_pages import ON_DISK, made

from minidist.reference.headlines import headline
from minidist.reference.measured import measured_pages, notes_by_file, page_name

RESULTS = ROOT / "benchmarks" / "results"
MEASURED = "docs/measured/"
FILES = [
    file
    for file in RESULTS.rglob("*.json")
    if "machine" in json.loads(file.read_text(encoding="utf-8"))
]


def measured() -> dict[str, str]:
    """Return the measured pages by the names of their files."""
    return {
        name.removeprefix(MEASURED): text
        for name, text in made().items()
        if name.startswith(MEASURED)
    }


def test_every_file_of_results_is_on_one_page() -> None:
    everything = "\n".join(text for name, text in measured().items() if name != "README.md")
    for file in FILES:
        name = file.relative_to(RESULTS)
        assert everything.count(f"[{name}]") == 1, name


@pytest.mark.parametrize("name", [name for name in ON_DISK if name.startswith(MEASURED)])
def test_the_newest_comes_first(name: str) -> None:
    dates = re.findall(r"^## .*, (\d{4}-\d\d-\d\d)$", made()[name], re.MULTILINE)
    assert dates == sorted(dates, reverse=True)
    assert dates or name == f"{MEASURED}README.md"


def test_no_file_and_no_page_has_an_old_name() -> None:
    for file in FILES:
        values = json.loads(file.read_text(encoding="utf-8"))
        values.pop("renamed", None)
        assert "sockets" not in json.dumps(values), file
    for name, text in measured().items():
        tables = re.sub(r"(bare|by bare) sockets", "", text)
        assert "sockets" not in tables, name


def test_every_file_has_a_note_or_lies_under_gpu() -> None:
    notes = notes_by_file((RESULTS / "README.md").read_text(encoding="utf-8"))
    names = {str(file.relative_to(RESULTS)) for file in FILES}
    assert {name for name in names if not name.startswith("gpu/")} - set(notes) == set()
    assert set(notes) - names - {"twenty-plans-intel.md"} == set()


def test_a_name_with_an_ending_stands_for_files_with_the_same_ending() -> None:
    text = (
        "| `a-shm-x.json`, `b-…` | `minidist bench VERB` | read |\n| `c.json`, `.png` | x | y |\n"
    )
    assert notes_by_file(text) == {"a-shm-x.json": "read", "b-shm-x.json": "read", "c.json": "y"}


def test_a_headline_is_computed_from_the_figures() -> None:
    seconds = {"2": {"shm": {"1024": 9.0, "1048576": 2.0}, "MPI_X": {"1024": 1.0, "1048576": 3.0}}}
    told = headline({"what": "all-reduce", "seconds": seconds})
    assert told == "shm from 1 MiB up 1.50 (2 ranks) times as fast as MPICH"
    rows = [
        {"name": "minidist", "ranks": 2, "zero": 3, "step_seconds": 1.0},
        {"name": "FSDP1", "ranks": 2, "zero": 3, "step_seconds": 3.0},
        {"name": "FSDP2", "ranks": 2, "zero": 3, "step_seconds": 2.0},
    ]
    told = headline({"what": "step", "rows": rows, "zero": [3]})
    assert told == "ZeRO-3 on 2: 2.00 times PyTorch's speed"
    alone = [
        {"name": "minidist", "ranks": 2, "zero": 0, "step_seconds": 2.0},
        {"name": "separate", "ranks": 2, "zero": 0, "step_seconds": 1.0},
        {"name": "PyTorch", "ranks": 2, "zero": 0, "step_seconds": 3.0},
    ]
    told = headline({"what": "step", "rows": alone, "zero": None, "plans": []})
    assert told == "2 ranks: 1.50 times PyTorch's speed"
    used = [row | {"processor_seconds": 1.5 * row["ranks"]} for row in alone]
    told = headline({"what": "step", "rows": used, "zero": None, "plans": []})
    assert told == "2 ranks: 1.50 times PyTorch's speed (1.00 in processor time)"


def test_a_planted_result_comes_first_on_a_page_of_its_own(tmp_path) -> None:
    (tmp_path / "README.md").write_text("| `new.json` | x | what was read |\n")
    values = json.loads((RESULTS / "step-amd.json").read_text(encoding="utf-8"))
    values["machine"] |= {"processor": "New One", "date": "2030-01-01T00:00:00+00:00"}
    (tmp_path / "new.json").write_text(json.dumps(values))
    pages = measured_pages(tmp_path)
    assert set(pages) == {"README.md", "new-one.md"}
    assert page_name("New One") == "new-one"
    assert "## step, 2030-01-01" in pages["new-one.md"]
    assert "what was read" in pages["new-one.md"]
