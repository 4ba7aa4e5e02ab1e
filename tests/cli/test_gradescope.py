"""`minidist check --gradescope`: the marks of each hole as the results file that Gradescope reads."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from assigned import right_ring
from filling import fill, right
from imports import ROOT

from minidist import lessons
from minidist.cli import main
from minidist.cli.gradescope import HoleTest, Results, read_results
from minidist.errors import ConfigError
from minidist.lessons.assignments import assignment, ring
from minidist.lessons.assignments.draws import StudentDraw

HOLES = 6  # of lesson 03
DOCUMENTED = {
    "": {"score", "execution_time", "output", "visibility", "extra_data", "tests"},
    "test": {"score", "max_score", "status", "name", "number", "output", "visibility"},
}
"""Keys of Gradescope's "Autograder Specifications" that we write."""


def exercise(answers: dict[int, str]) -> str:
    return fill(lessons.find("03").part("exercise.py").read_text(encoding="utf-8"), answers)


def checked(text: str | bytes, folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Status and results of `minidist check 03`."""
    file = folder / "exercise_03.py"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    marks = folder / "results.json"
    status = main(["check", "03", str(file), "--gradescope", str(marks), *words])
    return status, json.loads(marks.read_text(encoding="utf-8"))


def scores(marks: dict[str, Any]) -> list[float]:
    return [test["score"] for test in marks["tests"]]


def test_a_right_answer_has_all_points_in_the_documented_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    status, marks = checked(exercise(right("03")), tmp_path)
    assert status == 0 and scores(marks) == [1.0] * HOLES
    assert {*marks} <= DOCUMENTED[""] and marks["output"] == "passed: all 6 holes"
    assert 0 < marks["execution_time"] < 600 and marks["extra_data"] == {"part": "lesson 03"}
    for number, test in enumerate(marks["tests"], 1):
        assert {*test} == DOCUMENTED["test"] and test["number"] == str(number)
        assert test["max_score"] == 1.0 and test["status"] == "passed"
        assert test["visibility"] == "visible" and test["name"].startswith(f"hole {number}: ")


def test_wrong_and_open_holes_have_none_and_say_why(tmp_path: Path) -> None:
    answers = {**right("03"), 1: "(group.rank + step) % group.size"}
    del answers[5]
    status, marks = checked(exercise(answers), tmp_path, "--points", "2.5")
    assert status == 1 and scores(marks) == [0.0, 2.5, 2.5, 2.5, 0.0, 2.5]
    said = [test["output"] for test in marks["tests"]]
    assert "wrong chunk index" in said[0] and said[0].startswith("hole 1: ")
    assert said[4] == "not filled yet" and said[1] == "right" and marks["output"] == said[0]
    assert [test["status"] for test in marks["tests"]].count("passed") == 4
    assert all("\n" not in line for line in said)


@pytest.mark.parametrize(
    "text,words",
    [
        (exercise(right("03")) + "\nraise ValueError('a\\nb')\n", "a b"),
        (exercise({**right("03"), 2: "hole(2, '')"}) + "\nraise ValueError('late')\n", "late"),
        (exercise(right("03")) + "\n\ndef plain_all_reduce(group, x):\n    return x\n", "rank"),
        ("from minidist.comm.collectives.ring import plain_all_reduce\n", "import of minidist"),
        ("def plain_reduce_scatter(group:\n", "SyntaxError: line 1"),
        ("import numpy as np\nnp.os._exit(0)\n", "private name"),
        ("while True:\n    pass\n", "no end within 2 s"),
        (b"\0", "not Python source"),
        ("print('passed')\n", "plain_reduce_scatter"),
    ],
)
def test_a_mistake_outside_the_holes_leaves_no_points(
    text: str | bytes, words: str, tmp_path: Path
) -> None:
    status, marks = checked(text, tmp_path, "--limit", "2" if "while" in str(text) else "60")
    assert status == 1 and scores(marks) == [0.0] * HOLES
    assert {test["output"] for test in marks["tests"]} == {marks["output"]}
    assert words in marks["output"] and "\n" not in marks["output"], marks["output"]


def test_a_process_that_ends_leaves_no_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """own_work.py refuses the ways to end it that are known; here it does not look."""
    monkeypatch.setenv("PYTHONPATH", str(_that_looks_away(tmp_path)), prepend=os.pathsep)
    status, marks = checked("import os\nprint('{}')\nos._exit(0)\n", tmp_path)
    assert status == 1 and scores(marks) == [0.0] * HOLES
    assert "an exit with status 0 before the end of the check" in marks["output"]


def _that_looks_away(folder: Path) -> Path:
    """A folder whose sitecustomize.py lets every answer through."""
    (folder / "sitecustomize.py").write_text(
        "import minidist.own_work as own\nown.borrowed = lambda student, template: None\n"
    )
    return folder


def test_a_file_that_was_not_handed_in_leaves_no_points(tmp_path: Path) -> None:
    marks = tmp_path / "results.json"
    assert main(["check", "03", str(tmp_path / "no.py"), "--gradescope", str(marks)]) == 1
    found = read_results(marks)
    assert found.points == 0 and len(found.tests) == HOLES
    assert "there is no file" in found.output and "minidist lesson 03 --copy" in found.output


def test_the_file_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full while it is written leaves the old marks."""
    checked(exercise({}), tmp_path)
    before = (tmp_path / "results.json").read_bytes()

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    words = ["check", "03", str(tmp_path / "exercise_03.py")]
    assert main([*words, "--gradescope", str(tmp_path / "results.json")]) == 1
    assert (tmp_path / "results.json").read_bytes() == before


@pytest.mark.parametrize(
    "words,complaint",
    [
        (["--points", "2"], "--points goes with --gradescope"),
        (["--points", "0", "--gradescope", "r.json"], "not a number above 0"),
        (["--limit", "-1"], "not a number above 0"),
        (["--gradescope", "/proc/nowhere"], "--gradescope /proc/nowhere"),
    ],
)
def test_bad_options_are_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "03", *words]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_the_files_of_other_autograders_are_read(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(
        '{"score": 44.0, "leaderboard": [], "tests": [{"score": 2.0, "max_score": 2.0, "number": '
        '"1.1", "tags": ["a"]}, {"status": "failed", "number": 2}]}'
    )
    found = read_results(file)
    assert found.points == 44.0 and found.part == "" and len(found.tests) == 2
    assert Results(tests=[HoleTest(score=1.5), HoleTest()]).points == 1.5
    for bad in ("{}", "[]", '{"tests": 3}', '{"tests": [{"score": NaN}]}', '{"score": 1e999}', "x"):
        file.write_text(bad)
        with pytest.raises(ConfigError):
            read_results(file)


# --------------------------------------------------------------------------- docs/teaching/gradescope

SCRIPT = ROOT / "docs" / "teaching" / "gradescope" / "run_autograder"


def autograder(folder: Path, script: str) -> tuple[int, dict[str, Any]]:
    """Run an autograder as Gradescope does, below `folder`; its status and results."""
    (folder / "python" / "bin").mkdir(parents=True)
    (folder / "results").mkdir()
    python = folder / "python" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "AUTOGRADER": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    marks = folder / "results" / "results.json"
    assert marks.is_file(), done.stdout + done.stderr
    return done.returncode, json.loads(marks.read_text(encoding="utf-8"))


def test_the_autograder_of_the_documents_grades_an_exercise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "submission").mkdir()
    (tmp_path / "submission" / "exercise_03.py").write_text(exercise(right("03")))
    status, marks = autograder(tmp_path, SCRIPT.read_text(encoding="utf-8"))
    assert status == 0 and scores(marks) == [1.0] * HOLES


def test_the_autograder_of_the_documents_draws_for_who_submits(tmp_path: Path) -> None:
    """The answer is of the student whom Gradescope names, and of nobody else."""
    script = SCRIPT.read_text(encoding="utf-8")
    script = script.replace('WHAT="check 03"', 'WHAT="assignment 1"')
    script = script.replace("FILE=exercise_03.py", "FILE=assignment_1.py")
    numbers = ring.drawn(StudentDraw("assignment 1", "autumn 2026", "anna@uni"))
    task = assignment(1, student="anna@uni", course="autumn 2026").task_file
    answers = {1: right_ring(numbers)[1]}
    for student, first in (("anna@uni", 1.0), ("ben@uni", 0.0)):
        root = tmp_path / student
        (root / "submission").mkdir(parents=True)
        (root / "submission" / "assignment_1.py").write_text(fill(task, answers))
        metadata = {"users": [{"email": student, "id": 7, "name": "A"}]}
        (root / "submission_metadata.json").write_text(json.dumps(metadata))
        status, marks = autograder(root, script)
        assert status == 0 and scores(marks) == [first, *[0.0] * 5], marks


def test_the_autograder_fails_where_its_own_lines_are_wrong(tmp_path: Path) -> None:
    script = SCRIPT.read_text(encoding="utf-8").replace('"check 03"', '"check 99"')
    with pytest.raises(AssertionError, match="no lesson '99'"):
        autograder(tmp_path, script)
