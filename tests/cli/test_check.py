"""`minidist check`: its exit status, its JSON, and what it says of a student's broken file."""

import json
import re
import sys
from pathlib import Path

import pytest

from minidist.cli import main


@pytest.mark.parametrize("number", ["00", "01", "03", "07"])
def test_the_exercise_as_it_comes_is_not_yet_passed(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", number]) == 1
    said = " ".join(capsys.readouterr().out.split())
    holes = {"00": 8, "01": 7, "03": 6, "07": 6}[number]
    assert re.search(
        rf"not yet: fill hole 1: .+ \(exercise\.py line \d+\); {holes} holes left$", said
    ), said


def test_json(tmp_path: Path) -> None:
    assert main(["check", "03", "--json", str(tmp_path / "grade.json")]) == 1
    grade = json.loads((tmp_path / "grade.json").read_text())
    assert (
        grade["lesson"] == "03"
        and not grade["passed"]
        and grade["results"][-1]["mistake"] == "not filled yet"
    )


@pytest.mark.parametrize(
    "code,words",
    [
        ("def plain_reduce_scatter(group, chunks:\n", ["SyntaxError", "line 1"]),
        ("x = 1 / 0\n", ["division by zero", "line 1"]),
        ("def other():\n    pass\n", ["plain_reduce_scatter"]),
        ("raise SystemExit(0)\n", ["SystemExit", "line 1"]),
        (
            "def plain_reduce_scatter(group, chunks):\n    group.recv(src=(group.rank - 1) % "
            "group.size)\n",
            ["deadlock"],
        ),
        ("def plain_reduce_scatter(group, chunks):\n    return None\n", ["wrong chunk index"]),
        (
            "def plain_reduce_scatter(group, chunks):\n    raise KeyError('mine')\n",
            ["mine", "mine.py line 2"],
        ),
    ],
)
def test_whatever_the_code_does_is_a_grade(
    code: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    assert main(["check", "03", str(file)]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert all(word in output for word in words), output


@pytest.mark.parametrize(
    "arguments,complaint",
    [
        (["99"], "no lesson '99'"),
        (["03", "nowhere.py"], "no file nowhere.py"),
        (["03", "--json", "/proc/nowhere"], "--json /proc/nowhere: No such file"),
        (["03", "x" * 300 + ".py"], "no file xxx"),
        (["03", sys.executable], "null bytes"),
        (["03", str(Path(__file__).with_name("train"))], "is a folder"),
        (["03", "setup.cfg"], "not a Python file"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize("content", [b"x = '\xff'\n", b"# coding: klingon\n", b"\0"])
def test_what_is_no_text_is_bad_input(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_bytes(content)
    assert main(["check", "03", str(tmp_path / "mine.py")]) == 2
    assert "is not Python source" in capsys.readouterr().err
