"""What a lesson's code says has its Chinese; a student who asks for it, or whose locale does, gets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filling import fill, right

from minidist import lessons
from minidist.lessons import find, phrases
from minidist.lessons.phrases import Phrases

THERE = lessons.every_lesson()
TOLD = Phrases(
    {
        "{} of {} layers": "{1} 层中的 {0} 层",
        "{} rank": "{} 个 rank",
        "bytes, {}": "{} 的字节数",
        "{} ({} line {})": "{}（{} 第 {} 行）",
        "rank {} of {}": "{1} 的 rank {0}",
        "fill hole {}: {} ({} line {})": "请填空 {}：{}（{} 第 {} 行）",
        "which half? (section 1, step 2)": "哪一半？（第 1 节第 2 步）",
        "copy first: section 1 (hole 4)": "先复制：见第 1 节（空 4）",
        "count them on {}: section 2 (holes 1, 2)": "在 {} 上数一数：见第 2 节（空 1、2）",
    }
)


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("2 of 5 layers", "5 层中的 2 层"),
        ("bytes, 1 rank", "1 个 rank 的字节数"),
        ("copy first: section 1 (hole 4)", "先复制：见第 1 节（空 4）"),
        ("copy first: section 1", "先复制：见第 1 节"),  # as the grader leaves it
        ("count them on 1 rank: section 2", "在 1 个 rank 上数一数：见第 2 节"),
        (
            "fill hole 1: which half? (section 1, step 2) (a.py line 3)",
            "请填空 1：哪一半？（第 1 节第 2 步）（a.py 第 3 行）",
        ),
        ("rank 1 of dp=2", "dp=2 的 rank 1"),
        (
            "rank 0: list index out of range (a.py line 3)",
            "rank 0: list index out of range（a.py 第 3 行）",
        ),
        ("another text", "another text"),
    ],
)
def test_a_text_is_told_in_chinese(english: str, chinese: str) -> None:
    assert TOLD.say(english) == chinese


def test_texts_are_read_from_the_code_of_a_check() -> None:
    source = """
'''A docstring of the check.'''
ANSWERS = {1: "a + b - c"}

def grade(exercise):
    '''Return nothing, in words.'''
    assert exercise, "a text for its author"
    yield expect(f"layers of {ranks:>3d} ranks", known={"one cut, not all": 1})
    yield variant(plain, "p.sum() / size", "p.sum() / ranks"), "loss, alone"
"""
    assert {*phrases.said(source)} == {"layers of {} ranks", "one cut, not all", "loss, alone"}


@pytest.mark.parametrize("lesson", THERE, ids=lambda lesson: lesson.number)
def test_every_text_has_its_chinese(lesson: lessons.Lesson) -> None:
    assert [*phrases.faults(lesson)] == []


@pytest.mark.parametrize(
    ("now", "planted", "found"),
    [
        (
            '"one cut, not all" = "只算了一个阶段边界，没有算全部"',
            "",
            "no Chinese: one cut, not all",
        ),
        ("has no gradient", "has not a gradient", "nothing says: layer {} has not a gradient"),
        ("发给了 rank {}：那", "发给了 rank：那", "gaps: rank {} sends None to rank {}"),
    ],
)
def test_a_planted_fault_is_found(
    now: str, planted: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson = find("10")
    text = lesson.part("zh.toml").read_text(encoding="utf-8")
    assert now in text
    (tmp_path / "zh.toml").write_text(text.replace(now, planted), encoding="utf-8")
    read = phrases._read
    monkeypatch.setattr(
        phrases, "_read", lambda folder: read(tmp_path if folder == lesson.folder else folder)
    )
    assert any(fault.startswith(found) for fault in phrases.faults(lesson))


def minidist(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minidist", *argv],
        env={**os.environ, "LC_ALL": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.parametrize("level", ["holes", "blank"])
def test_an_exercise_in_chinese_is_graded_in_chinese(level: str, tmp_path: Path) -> None:
    copied = minidist("lesson", "10", "--language", "zh", "--copy", str(tmp_path), "--level", level)
    assert copied.returncode == 0, copied.stderr
    file = tmp_path / "exercise_10.py"
    assert "有几个阶段边界，每个边界传几次，每次多大" in file.read_text(encoding="utf-8")
    marks = tmp_path / "results.json"
    graded = minidist("check", "10", str(file), "--gradescope", str(marks), LC_ALL="zh_CN.UTF-8")
    assert graded.returncode == 1
    assert "还没有通过：请填空" in graded.stdout, graded.stdout
    assert json.loads(marks.read_text(encoding="utf-8"))["tests"][5]["name"].startswith(
        "空 6：有几"
    )


def test_a_right_answer_in_a_chinese_file_passes(tmp_path: Path) -> None:
    assert not minidist("lesson", "10", "--language", "zh", "--copy", str(tmp_path)).returncode
    file = tmp_path / "exercise_10.py"
    file.write_text(fill(file.read_text(encoding="utf-8"), right("10")), encoding="utf-8")
    graded = minidist("check", "10", str(file), "--language", "zh")
    assert graded.returncode == 0, graded.stdout
    assert "通过：全部" in graded.stdout


@pytest.mark.parametrize(
    ("argv", "locale", "is_chinese"),
    [
        ([], {"LC_ALL": "zh_CN.UTF-8"}, True),
        ([], {"LC_ALL": "", "LANG": "zh_TW"}, True),
        ([], {"LC_ALL": "en_US.UTF-8", "LANG": "zh_CN.UTF-8"}, False),
        (["--language", "zh"], {}, True),
        (["--language", "en"], {"LC_ALL": "zh_CN.UTF-8"}, False),
    ],
)
def test_the_option_wins_over_the_locale(
    argv: list[str], locale: dict[str, str], is_chinese: bool
) -> None:
    told = minidist("lesson", "10", *argv, **locale, PYTHONUTF8="1").stdout
    assert ("答案：minidist lesson 10 --answers" in told) == is_chinese
    assert ("answers: minidist lesson 10" in told) != is_chinese
