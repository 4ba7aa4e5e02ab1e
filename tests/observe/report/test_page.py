"""The page: one file that asks for nothing, texts that cannot break it, every section, lines for
what is missing."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import MODEL_OF_A_VILLAIN, many_ranks, metrics, step_lines, write_run

from minidist.errors import ConfigError
from minidist.observe.report.losses import _running_mean
from minidist.observe.report.page import PROGRAM, in_script, page, sections_of
from minidist.observe.report.run_files import RunFiles, read_run
from minidist.observe.report.section import Chart, PlainTable, Section

SECTIONS = [
    "diagnosis",
    "losses",
    "timeline",
    "overlap",
    "ranks",
    "stragglers",
    "memory",
    "traffic",
    "ledger",
    "links",
    "energy",
    "environment",
]
MOST_BYTES = 3 << 20
MOST_LIBRARY = 1_200_000
REPORT = Path(__file__).parents[3] / "minidist" / "observe" / "report"
OUTSIDE = re.compile(
    r"https?:|//|\burl\(|@import|\bfetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import\("
)


class Parts(HTMLParser):
    """What is in a page: each element with its attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and not self.scripts[-1]:
            self.scripts[-1] = data
        else:
            self.text += data


def report(folder: Path, ledger: tuple[PlainTable, ...] = ()) -> tuple[str, Parts]:
    run = read_run(folder)
    text = page(run, sections_of(run, ledger, [], []))
    return text, Parts(text)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return report(write_run(tmp_path / "run"))[1]


def missing(folder: Path) -> list[str]:
    return re.findall(r"<p class=missing>(.*?)</p>", report(folder)[0])


def numbers(parts: Parts) -> dict[str, Any]:
    return json.loads(parts.scripts[0])


def test_the_page_is_one_small_file_that_asks_for_nothing(tmp_path: Path) -> None:
    text, parts = report(write_run(tmp_path / "run"))
    assert len(text.encode()) < MOST_BYTES
    loads = [
        (tag, name, value)
        for tag, attributes in parts.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster", "background")
    ]
    assert {name for _, name, _ in loads} == {"href"} and all(
        value and value[0] == "#" for *_, value in loads
    )
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & {
        tag for tag, _ in parts.elements
    }
    (policy,) = [
        attributes["content"] for tag, attributes in parts.elements if "http-equiv" in attributes
    ]
    assert policy and policy.startswith("default-src 'none'")
    assert {*PROGRAM} == {path.name for path in REPORT.glob("*.js")}
    assert all((REPORT / file).read_text() in parts.scripts[2] for file in PROGRAM)
    for file in (*PROGRAM, "report.css", "page.html"):
        assert not OUTSIDE.search(re.sub(r"(^|\s)// .*", "", (REPORT / file).read_text())), file


def test_the_library_is_small_and_has_its_licence_beside_it() -> None:
    library = (REPORT / "vendor" / "echarts.min.js").read_text(encoding="utf-8")
    assert len(library.encode()) < MOST_LIBRARY and "</script" not in library
    assert "Apache License" in (REPORT / "vendor" / "LICENSE").read_text()
    assert "Apache ECharts" in (REPORT / "vendor" / "NOTICE").read_text()


def test_an_installed_wheel_has_every_file_of_the_page() -> None:
    setup = (Path(__file__).parents[3] / "setup.cfg").read_text()
    (patterns,) = re.findall(r"^minidist\.observe\.report = (.*)$", setup, re.MULTILINE)
    held = {path for pattern in patterns.split(", ") for path in REPORT.glob(pattern)}
    assert {
        path for path in REPORT.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    } == held


def test_every_section_is_there_and_in_the_contents(parts: Parts) -> None:
    assert [attributes["id"] for tag, attributes in parts.elements if tag == "section"] == SECTIONS
    links = [attributes["href"] for tag, attributes in parts.elements if tag == "a"]
    assert links == ["#diagnosis", *(f"#{key}" for key in SECTIONS)]


def test_every_chart_has_numbers_a_name_and_a_function(parts: Parts) -> None:
    charts = [
        attributes["data-chart"] for tag, attributes in parts.elements if "data-chart" in attributes
    ]
    assert charts == [
        "losses",
        "seconds",
        "timeline",
        "overlap",
        "causes",
        "rank_steps",
        "rank_memory",
        "memory",
        "memory_step",
        "traffic",
        "watts",
    ]
    assert set(charts) | {"categories"} == numbers(parts).keys()
    boxes = [attributes for _, attributes in parts.elements if attributes.get("class") == "chart"]
    assert all(
        box["aria-label"] and box["tabindex"] == "0" and box["role"] == "img" for box in boxes
    )
    drawn = (REPORT / "report.js").read_text().partition("const draw = {")[2]
    assert all(re.search(rf"\b{chart}\b", drawn) for chart in (*charts, "stragglers"))


def test_texts_of_the_run_are_shown_and_do_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "<i>run & {{numbers}}")
    told = PlainTable(MODEL_OF_A_VILLAIN, [MODEL_OF_A_VILLAIN], [[MODEL_OF_A_VILLAIN]])
    text, parts = report(folder, (told,))
    assert [tag for tag, _ in parts.elements].count("script") == 3 and not any(
        tag == "i" for tag, _ in parts.elements
    )
    assert "<i>run & {{numbers}}" in parts.text and parts.text.count(MODEL_OF_A_VILLAIN) == 5
    assert "onerror=" not in str([attributes.keys() for _, attributes in parts.elements])


def test_every_place_of_a_text_is_escaped() -> None:
    evil = MODEL_OF_A_VILLAIN
    section = Section(
        "one",
        evil,
        [evil],
        [evil],
        evil,
        [Chart("losses", evil, {"name": evil})],
        [PlainTable(evil, [evil, evil], [[evil, evil], ["x", evil]], (1,))],
    )
    parts = Parts(page(RunFiles(Path("run")), [section]))
    assert parts.text.count(evil) == 11 and [tag for tag, _ in parts.elements].count("script") == 3
    assert sum(attributes.get("aria-label") == evil for _, attributes in parts.elements) == 3


def test_numbers_in_a_script_cannot_end_it() -> None:
    packed = in_script({"name": "</script><!-- &"})
    assert not set("<>&") & set(packed) and json.loads(packed) == {"name": "</script><!-- &"}
    with pytest.raises(ValueError, match="Out of range"):
        in_script(float("nan"))


@pytest.mark.parametrize(
    ("file", "lines"), [("metrics.json", 7), ("metrics.jsonl", 3), ("trace.json", 3), ("steps", 3)]
)
def test_a_missing_file_gives_lines_that_say_how_to_get_it(
    file: str, lines: int, tmp_path: Path
) -> None:
    found = [line for line in missing(write_run(tmp_path / "run", without=(file,))) if file in line]
    assert len(found) == lines and all(";" in line or ":" in line for line in found)
    assert all(line.count("\n") == 0 for line in found)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("metrics.json", "{"),
        ("metrics.json", "{}"),
        ("metrics.json", "[1]"),
        ("trace.json", "nothing"),
        ("steps/00000.jsonl", '[1]\n{"rank": 0}\n{"step": 1}\n{'),
        ("trace.json", '{"traceEvents": [{"ph": "X"}]}'),
        ("metrics.jsonl", '{"step": 1}\n{"step": "2"}\n7\n'),
    ],
)
def test_a_broken_file_is_as_good_as_none(file: str, text: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / file).write_text(text)
    if file == "metrics.jsonl":
        assert read_run(folder).steps == []
    elif file.startswith("steps"):
        assert sorted(read_run(folder).records) == [1] and not missing(folder)[1:]
    else:
        assert any(f"{file} cannot be read" in line for line in missing(folder))


def test_without_waits_the_page_says_how_to_get_causes(tmp_path: Path) -> None:
    assert any(
        "train with --why" in line for line in missing(write_run(tmp_path / "run", waits=False))
    )
    assert not any("--why" in line for line in missing(write_run(tmp_path / "other")))


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder") as none:
        read_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is no run folder") as empty:
        read_run(tmp_path)
    assert "\n" not in f"{none.value}{empty.value}"


def test_losses_that_are_not_finite_are_gaps_and_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    about = metrics() | {"losses": [4.0, float("nan"), 3.8], "validation_loss": float("nan")}
    (folder / "metrics.json").write_text(json.dumps(about))
    (folder / "metrics.jsonl").write_text(step_lines().replace('"loss": 3.9', '"loss": null'))
    parts = report(folder)[1]
    assert numbers(parts)["losses"]["loss"]["mean"] == [4.0, None, 3.8]
    assert (
        "1 of 3 losses are not finite" in parts.text
        and "validation loss is not finite" in parts.text
    )


def test_a_folder_used_twice_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(step_lines(2))
    assert any("is of another run" in line for line in missing(folder))


def test_a_resumed_run_has_one_time_of_a_step(tmp_path: Path) -> None:
    """metrics.jsonl has all three steps, metrics.json those that the newest job made."""
    folder = write_run(tmp_path / "run")
    about = metrics() | {"step_seconds": 0.03, "tokens_per_second": 6400.0 / 3}
    (folder / "metrics.json").write_text(json.dumps(about))
    text = " ".join(report(folder)[1].text.split())
    assert "A step took 10.0 ms (median)" in text
    told = re.search(r"ms a step ?([\d.]+) ?tokens a second ?([\d,]+)", text)
    assert told is not None
    assert told.groups() == ("10.0", "6,400")


def test_energy_that_is_an_estimate_is_called_one(parts: Parts) -> None:
    assert parts.text.count("estimate") == 3 and "joules, an estimate" in parts.text
    assert numbers(parts)["watts"]["estimate"] is True
    assert numbers(parts)["watts"]["watts"]["mean"] == pytest.approx([10.0, 10.0], rel=1e-3)


def test_the_traffic_matrix_has_the_bytes_of_each_pair(parts: Parts) -> None:
    assert numbers(parts)["traffic"] == {
        "ranks": [0, 1],
        "cells": {"dp": [[0, 1, 12288], [1, 0, 12288]]},
    }
    assert "48 of 24,624 bytes have no one receiver" in parts.text


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "steps", "calls"), [(5, 60, 20), pytest.param(300, 2, 110, marks=pytest.mark.soak)]
)
def test_the_page_of_a_large_job_stays_small(ranks: int, steps: int, calls: int) -> None:
    peers = {str(peer): {"dp": 123456789 + peer, "ep": 987654321} for peer in range(ranks)}
    about = metrics(20_000, ranks=ranks)
    about["ranks"] = [rank | {"sent_to": peers} for rank in about["ranks"]]
    lines = [json.loads(line) for line in step_lines(20_000).splitlines()]
    run = RunFiles(Path("run"), about, lines, many_ranks(ranks, steps=steps, calls=calls))
    text = page(run, sections_of(run, [], [], []))
    assert len(text.encode()) < MOST_BYTES
    assert ("Each point stands for 25 steps" in text) and (
        ("spans of the first" in text) == (ranks > 100)
    )
    assert ("The matrix has the first 128 of 300 ranks" in text) == (ranks > 100)


def test_the_running_mean_has_gaps_where_a_loss_is_missing() -> None:
    losses = [1.0, 2.0, None, 4.0, 6.0, float("inf"), 8.0, 10.0]
    assert _running_mean(losses, 2) == [None, 1.5, None, None, 5.0, None, None, 9.0]
    assert _running_mean([3.0], 1) == [3.0]
