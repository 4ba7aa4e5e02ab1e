"""`minidist lesson`: lists, prints, copies; running and drawing are tested with the lessons
themselves."""

import argparse
import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from minidist import lessons
from minidist.cli import main
from minidist.graded_apart import GradedApart
from minidist.grading import Grade, HoleGrade, Result
from minidist.lessons.running import add_out


def test_lists_the_lessons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "--json", str(tmp_path / "lessons.json")]) == 0
    output = capsys.readouterr().out
    rows = json.loads((tmp_path / "lessons.json").read_text(encoding="utf-8"))["lessons"]
    assert [row["lesson"] for row in rows] == [lesson.number for lesson in lessons.in_order()]
    assert sorted(row["lesson"] for row in rows) == [
        lesson.number for lesson in lessons.every_lesson()
    ]
    assert "minidist/parallel/data/ddp.py" in output.replace("\n", "")
    assert all(Path(row["folder"]).is_dir() and row["title"] and row["notes"] for row in rows)


def test_tells_minutes_what_comes_before_and_what_was_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(
        "minidist.cli.gradescope.grade_apart",
        lambda number, check, file, limit: GradedApart(
            Grade(
                number,
                str(file),
                (Result("a task", number in ("00", "03"), "1", "1"),),
                tuple(
                    HoleGrade(hole, "right" if hole > left[number] else "open")
                    for hole in range(1, 6)
                ),
            ),
            "",
        ),
    )
    left = {"00": 0, "03": 0, "04": 2, "05": 5}
    assert [main(["check", number]) for number in left] == [0, 0, 1, 1]
    assert main(["lesson", "--json", str(tmp_path / "lessons.json")]) == 0
    rows = {
        row["lesson"]: row for row in json.loads((tmp_path / "lessons.json").read_text())["lessons"]
    }
    assert rows["03"]["passed"] == time.strftime("%Y-%m-%d") and rows["04"]["passed"] is None
    assert rows["03"]["left"] is None and rows["04"]["left"] == 2 and rows["05"]["left"] is None
    printed = capsys.readouterr().out
    assert rows["03"]["passed"] in printed and re.search("2 of 5[^0-9]+left", printed)
    assert "passed: 2 of 27; next: 01, Launching" in printed
    for number, row in rows.items():
        ahead = list(rows)[: list(rows).index(number)]
        assert set(row["after"]) <= set(ahead) and (row["after"] or number == "00")
        assert 10 <= row["minutes"] <= 120


@pytest.mark.parametrize("columns", [40, 80, 100, 110, 200])
def test_the_list_breaks_between_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(
        "minidist.cli.lesson.page_console", lambda: Console(file=out, width=columns)
    )
    assert main(["lesson"]) == 0
    for lesson in lessons.every_lesson():
        assert {*re.findall(r"\w+", lesson.title, re.ASCII)} <= {
            *re.findall(r"\w+", out.getvalue(), re.ASCII)
        }
        assert columns < 110 or {*re.findall(r"[\w/]+\.py", lesson.module)} <= {
            *out.getvalue().split()
        }
    assert max(map(cell_len, out.getvalue().split("\n"))) <= columns and "…" not in out.getvalue()


@pytest.mark.parametrize("number", ["01", "07", "19"])
def test_a_story_at_80_columns_cuts_no_word(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head is a line a field: the commands can be read and copied. 01 has a wide table of long
    names."""
    out = io.StringIO()
    monkeypatch.setattr("minidist.cli.lesson.page_console", lambda: Console(file=out, width=80))
    assert main(["lesson", number]) == 0
    shown = [line.strip() for line in out.getvalue().split("\n")]
    folder = lessons.find(number).folder.name
    assert any(
        line.endswith(f"python lessons/{folder}/lesson.py") for line in shown if "run: " in line
    )
    assert f"• grade: minidist check {number}" in shown and not re.search(r"\w…", out.getvalue())


@pytest.mark.parametrize("number", ["00", "07", "24"])
def test_a_story_at_40_columns_keeps_the_words_of_its_tables(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr("minidist.cli.lesson.page_console", lambda: Console(file=out, width=40))
    assert main(["lesson", number]) == 0
    assert max(map(cell_len, out.getvalue().split("\n"))) <= 40
    shown = {*re.findall(r"[a-z]+", out.getvalue())}
    text = lessons.find(number).part("README.md").read_text(encoding="utf-8")
    story = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)  # shown with --answers
    cells = "".join(re.findall(r"^\|.*\|$", re.sub(r"`[^`\n]*`", "", story), re.MULTILINE))
    words = {word for word in re.findall(r"(?<![/\w])[a-z]+(?![\w/])", cells) if len(word) < 30}
    assert words <= shown


def test_the_list_heeds_the_columns_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["lesson"]) == 0
    assert max(map(cell_len, capsys.readouterr().out.split("\n"))) <= 40


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["01", "--out", "x"], "--out goes with --figure"),
        (
            ["01", "--figure", "--break", "one-rank-dies"],
            "argument --break: not allowed with argument --figure",
        ),
        (["01", "--level", "blank"], "--level goes with --copy"),
        (["01", "--copy", "x", "-n", "2"], "not allowed with argument --copy"),
        (["01", "--answers", "--json", "x"], "--json does not go with --answers"),
        (["--figure"], "--figure needs the number of a lesson, e.g. minidist lesson 03 --figure"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lesson", *arguments]) == 2
    told = capsys.readouterr()
    assert complaint in told.err and told.err.count("\n") == 1 and not told.out
    assert not [*tmp_path.iterdir()]


def test_a_broken_run_from_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "03", "--break", "stop-early"]) == 0
    assert capfd.readouterr().out.strip()


@pytest.mark.parametrize("out", [["--out", "new/folder"], []])
def test_a_figure_goes_to_a_folder_of_the_users(
    out: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder is made; the lesson's own figure is never written over."""
    given: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    slow = [sys.executable, "-c", "import time; time.sleep(0.2); print('drawn')"]
    start = subprocess.run
    monkeypatch.setattr(
        "subprocess.run",
        lambda argv, **options: given.append(argv) or start(slow, **options),
    )
    monkeypatch.setattr("minidist.progress.LINES_EVERY", 0.05)
    assert main(["lesson", "03", "--figure", *out]) == 0
    told = capsys.readouterr()
    assert told.out == "drawn\n" and "drawing the figure of lesson 03" in told.err
    assert Path("new/folder").is_dir() == bool(out) and given[0][2:] == out
    parser = argparse.ArgumentParser()
    add_out(parser, lessons.find("03").folder)
    folder = parser.parse_args(given[0][2:]).out
    assert folder == Path(*out[1:] or ["figures/03_ring"]) and folder.is_dir()


def test_prints_a_story_without_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "03"]) == 0
    output = capsys.readouterr().out
    assert "no rank in the middle" in output and "lesson 03 --answers" in output
    assert "2·3/4" not in output and "rank 3 → rank 0: c2 (3)" not in output
    assert main(["lesson", "3", "--answers"]) == 0
    output = capsys.readouterr().out
    assert "2·3/4" in output
    assert "rank 3 → rank 0: c2 (3)" in output and "sequenceDiagram" not in output


def test_copies_an_exercise_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "03", "--copy", str(tmp_path)]) == 0
    assert re.search(r"\bhole\(\s*1,", (tmp_path / "exercise_03.py").read_text())
    assert main(["lesson", "03", "--copy", str(tmp_path / "\x1b[31m")]) == 0
    assert capsys.readouterr().out.count(r"\x1b[31m/exercise_03.py") == 2
    assert main(["lesson", "03", "--copy", str(tmp_path)]) == 2
    assert "already there" in capsys.readouterr().err


def test_copies_only_the_heads_of_an_exercise(tmp_path: Path) -> None:
    assert main(["lesson", "10", "--copy", str(tmp_path), "--level", "blank"]) == 0
    copied = (tmp_path / "exercise_10.py").read_text()
    assert "def idle(times):" in copied and "y.backward(None" not in copied


@pytest.mark.parametrize(
    "arguments,complaint",
    [
        (["99"], "no lesson '99'; choose one of 00, 01, 02, 03, 04, 05"),
        (["03_wrong"], "no lesson '03_wrong'"),
        (["03", "-n", "0"], "at least 1"),
        (["03", "--copy", "/proc/nowhere"], "cannot write"),
        (["03", "--figure", "--out", "/proc/nowhere"], "cannot be made as a folder"),
        (["03", "--break", "send-frist"], "lesson 03 has no --break 'send-frist'; choose one of"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lesson", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
