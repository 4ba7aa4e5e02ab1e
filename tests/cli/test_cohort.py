"""`minidist cohort`: the points of each student, what to teach again, and files that cannot be
read."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from minidist.cli import main


def marks(*scores: float, part: str = "lesson 03", told: str = "wrong chunk") -> dict[str, Any]:
    return {
        "extra_data": {"part": part},
        "tests": [
            {
                "name": f"hole {number}: its task",
                "score": score,
                "max_score": 2.0,
                "output": "right" if score == 2.0 else f"{told}\nmore",
            }
            for number, score in enumerate(scores, 1)
        ],
    }


def write(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def cohort(folder: Path, *words: str) -> tuple[int, dict[str, Any], list[list[str]]]:
    """Status, JSON and CSV of the command."""
    out = folder.parent / "out"
    out.mkdir(exist_ok=True)
    files = ["--json", str(out / "c.json"), "--csv", str(out / "c.csv")]
    status = main(["cohort", str(folder), *words, *files])
    rows = list(csv.reader((out / "c.csv").read_text(encoding="utf-8").splitlines()))
    return status, json.loads((out / "c.json").read_text(encoding="utf-8")), rows


def test_points_by_student_and_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grades = tmp_path / "grades"
    write(grades / "03" / "anna.json", marks(2, 2, 0))
    write(grades / "03" / "ben.json", marks(2, 0, 0))
    write(grades / "a1" / "anna" / "results.json", marks(2, part="assignment 1"))
    status, found, rows = cohort(grades)
    assert status == 0 and rows == [
        ["student", "assignment 1", "lesson 03", "total"],
        ["anna", "2.0", "4.0", "6.0"],
        ["ben", "", "2.0", "2.0"],
    ]
    assert found["students"][0] == {
        "student": "anna",
        "points": {"assignment 1": 2.0, "lesson 03": 4.0},
        "total": 6.0,
    }
    printed = capsys.readouterr().out
    assert "2 students" in printed and "What to teach again" in printed


def test_what_to_teach_again(tmp_path: Path) -> None:
    """How many have each hole right, and what the others are told: first lines, most frequent
    first."""
    grades = tmp_path / "grades"
    for student, told in (("a", "off by one"), ("b", "off by one"), ("c", "a deadlock")):
        write(grades / f"{student}.json", marks(2, 0, 1, told=told))
    write(grades / "d.json", marks(2, 2, 2))
    _, found, _ = cohort(grades)
    assert [(test["right"], test["students"]) for test in found["tests"]] == [
        (4, 4),
        (1, 4),
        (1, 4),
    ]
    assert found["tests"][0]["told"] == []
    assert found["tests"][1]["told"] == [
        {"line": "off by one", "times": 2},
        {"line": "a deadlock", "times": 1},
    ]


def test_the_better_of_two_files_counts_once(tmp_path: Path) -> None:
    grades = tmp_path / "grades"
    write(grades / "1" / "anna.json", marks(2, 2))
    write(grades / "2" / "anna.json", marks(0, 2))
    _, found, rows = cohort(grades)
    assert rows[1:] == [["anna", "4.0", "4.0"]]
    assert [test["students"] for test in found["tests"]] == [1, 1]


def test_a_bad_file_is_one_line_and_the_others_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grades = tmp_path / "grades"
    write(grades / "anna.json", marks(2))
    write(grades / "bad.json", "{")
    write(grades / "deep.json", "[" * 5000)
    write(grades / "nan.json", '{"tests": [{"score": NaN, "max_score": 1}]}')
    write(grades / "other.json", '{"model": "gpt2"}')
    write(grades / "huge.json", " " * ((1 << 24) + 1))
    (grades / "folder.json").mkdir()
    status, found, rows = cohort(grades, str(tmp_path / "gone.json"))
    assert status == 1 and [row[0] for row in rows] == ["student", "anna"]
    names = {Path(name).stem for name in found["unread"]}
    assert names == {"bad", "deep", "nan", "other", "huge", "folder", "gone"}
    assert capsys.readouterr().err.count("\n") == 7


def test_a_file_of_another_autograder_counts(tmp_path: Path) -> None:
    grades = tmp_path / "grades"
    write(grades / "anna.json", {"score": 44.0, "tests": []})
    _, _, rows = cohort(grades)
    assert rows == [["student", "results", "total"], ["anna", "44.0", "44.0"]]


def test_control_characters_and_markup_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grades = tmp_path / "grades"
    write(grades / "[red]x.json", marks(0, told="[bold]\x1b[31mtold"))
    assert main(["cohort", str(grades)]) == 0
    printed = capsys.readouterr().out
    assert "[red]x" in printed and "[bold]\\x1b[31mtold" in printed and "\x1b" not in printed


def test_an_empty_folder_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cohort", str(tmp_path)]) == 2
    assert "has no results files" in capsys.readouterr().err
