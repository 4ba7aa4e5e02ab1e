"""No figure of the lessons is older than the code it shows, but those that are known to be."""

import json
import re
from pathlib import Path

import pytest

from minidist.lessons import drawn, mermaid, stamps

FIGURES = {figure.name: figure for figure in drawn.figures()}
DIAGRAMS = sorted(drawn.lessons.FOLDER.glob("*/figure.mmd"))


def test_no_figure_is_older_than_the_code_it_shows() -> None:
    found = stamps.older([*FIGURES.values()], stamps.read_stamps(drawn.STAMPS))
    assert not found, "\n".join(
        f"{script}: its figure is older than {', '.join(files)}; redraw it (python -m "
        f"minidist.lessons.drawn --redraw {Path(script).parent.name[:2]}), or look at it and say "
        "--same or --later"
        for script, files in found.items()
    )


def test_a_figure_that_is_known_to_be_older_is_older() -> None:
    kept = stamps.read_stamps(drawn.STAMPS)
    assert set(kept) == set(FIGURES)
    known = [name for name, stamp in kept.items() if stamp.get("older")]
    assert [name for name in known if not stamps.changed(FIGURES[name], kept[name])] == []


def test_every_picture_has_a_script() -> None:
    there = {
        path for lesson in drawn.lessons.every_lesson() for path in lesson.folder.glob("*.png")
    }
    assert {
        picture for figure in FIGURES.values() for picture in drawn.pictures(figure.script)
    } >= there
    assert len(FIGURES) > 20 and len(there) >= len(FIGURES)


def test_a_chinese_picture_is_of_the_same_script_as_the_english_one(tmp_path: Path) -> None:
    names = ("figure.mmd", "figure.png", "figure.zh.png", "hosts.png", "hosts.zh.png", "other.png")
    for name in names:
        (tmp_path / name).touch()
    found = {
        script: [path.name for path in drawn.pictures(tmp_path / script)]
        for script in drawn.SCRIPTS
    }
    assert found == {
        "figure.py": ["figure.mmd", "figure.png", "figure.zh.png", "other.png"],
        "hosts.py": ["hosts.png", "hosts.zh.png"],
    }


def test_what_a_figure_shows() -> None:
    shown = set(FIGURES["lessons/07_ddp/figure.py"].stamp()["code"])
    assert {
        "lessons/07_ddp/figure.py",
        "lessons/07_ddp/experiments.py",
        "minidist/parallel/data/ddp.py",
    } <= shown
    zero = set(FIGURES["lessons/14_zero1/figure.py"].stamp()["code"])
    assert {
        "lessons/zero_lab.py",
        "lessons/zero_figures.py",
        "minidist/parallel/zero/zero1.py",
    } <= zero


@pytest.mark.parametrize(
    ("lesson", "module"),
    [
        ("00_one_device", "minidist/autograd/ops/attention.py"),
        ("00_one_device", "minidist/parallel/zero/memory_formula.py"),
        ("02_collectives", "minidist/simulate/message_times.py"),
        ("26_survive", "minidist/observe/storm_figure.py"),
    ],
)
def test_what_a_script_imports_of_the_library_is_shown_too(lesson: str, module: str) -> None:
    assert module in FIGURES[f"lessons/{lesson}/figure.py"].stamp()["code"]


def test_comments_docstrings_and_blank_lines_do_not_count() -> None:
    plain = "def f(x):\n    return x + 1\n"
    told = (
        '"""Module."""\n\n# why\ndef f(x):\n    """Doc,\n    two lines."""\n\n    return '
        "x + 1    # one more\n"
    )
    assert stamps.significant(told) == stamps.significant(plain)
    assert stamps.significant(plain.replace("+ 1", "+ 2")) != stamps.significant(plain)
    assert "'# no comment'" in stamps.significant("x = '# no comment'\n")


def test_a_change_of_code_or_picture_is_named(tmp_path: Path) -> None:
    ring = FIGURES["lessons/03_ring/figure.py"]
    fresh = ring.stamp()
    assert stamps.older([ring], {ring.name: fresh}) == {}
    for part, file in (("code", "minidist/comm/collectives/ring.py"), ("pictures", "figure.png")):
        stale = json.loads(json.dumps(fresh))
        stale[part][file] = "0" * 8
        assert stamps.older([ring], {ring.name: stale}) == {ring.name: [file]}
    stamps.write_stamps(tmp_path / "drawn.json", {ring.name: fresh})
    assert stamps.read_stamps(tmp_path / "drawn.json") == {ring.name: fresh}


@pytest.mark.parametrize("draws", [True, False])
def test_only_a_figure_that_was_drawn_is_stamped(
    draws: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drawn, "STAMPS", tmp_path / "drawn.json")
    monkeypatch.setattr(drawn.FigureScript, "renew", lambda figure: draws)
    stamps.write_stamps(drawn.STAMPS, {"lessons/03_ring/figure.py": {"older": True}, "gone.py": {}})
    monkeypatch.setattr("sys.argv", ["drawn", "--redraw", "03"])
    assert drawn.main() == (not draws)
    assert list(stamps.read_stamps(drawn.STAMPS)) == ["lessons/03_ring/figure.py"]
    assert ("older" in stamps.read_stamps(drawn.STAMPS)["lessons/03_ring/figure.py"]) == (not draws)


@pytest.mark.parametrize("file", DIAGRAMS, ids=lambda file: file.parent.name[:2])
def test_a_diagram_as_text_has_all_that_is_written_in_it(file: Path) -> None:
    diagram = file.read_text(encoding="utf-8")
    text = mermaid.as_text(diagram)
    for node in re.findall(r'\["(.*?)"\]', diagram):
        assert node.replace("<br/>", " ") in text
    arrows = len(re.findall(r"(?:->>|-->)", diagram)) - len(re.findall(r"(\w+)->>\1:", diagram))
    assert text.count("→") + text.count("↔") == arrows
    assert max(map(len, text.splitlines())) <= 76 and not re.search(
        "->>|-->|<br/>|participant", text
    )


def test_a_gantt_chart_as_text_keeps_its_times() -> None:
    assert mermaid.as_text(
        "gantt\n title Two\n section a\n F1 :0, 2\n B1 :4, 6\n section bb\n F1 :2, 4\n"
    ) == ("Two\n  a  F1..B1\n  bb ..F1..")
    assert mermaid.as_text("mindmap\n root") == "mindmap\n root"
