"""`minidist lesson`: lists, prints, copies; running and drawing are tested with the lessons themselves."""

import json
from pathlib import Path

import pytest

from minidist import lessons
from minidist.cli import main


def test_lists_the_lessons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "--json", str(tmp_path / "lessons.json")]) == 0
    output = capsys.readouterr().out
    rows = json.loads((tmp_path / "lessons.json").read_text(encoding="utf-8"))["lessons"]
    assert [row["lesson"] for row in rows] == [lesson.number for lesson in lessons.every_lesson()]
    assert "minidist/parallel/data/ddp.py" in output.replace("\n", "")
    assert all(Path(row["folder"]).is_dir() and row["title"] and row["notes"] for row in rows)


def test_prints_a_story_without_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "03"]) == 0
    output = capsys.readouterr().out
    assert "no rank in the middle" in output and "lesson 03 --answers" in output
    assert "2·3/4" not in output and "sequenceDiagram" not in output
    assert main(["lesson", "3", "--answers"]) == 0
    assert "2·3/4" in capsys.readouterr().out


def test_copies_an_exercise_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "03", "--copy", str(tmp_path)]) == 0
    assert "hole(1" in (tmp_path / "exercise_03.py").read_text()
    assert main(["lesson", "03", "--copy", str(tmp_path)]) == 2
    assert "already there" in capsys.readouterr().err


@pytest.mark.parametrize("arguments,complaint", [
    (["99"], "no lesson '99'; choose one of 00, 01, 02, 03, 04, 05"),
    (["03_wrong"], "no lesson '03_wrong'"),
    (["03", "-n", "0"], "at least 1"),
    (["03", "--copy", "/proc/nowhere"], "cannot write"),
    (["03", "--figure", "--out", "/nowhere"], "not a folder"),
])
def test_bad_input_is_one_line(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
