"""`minidist lesson N2:398` and `minidist lesson 流水线`: the lesson of a line of the notes, or of a
word."""

import pytest

from minidist.cli import main
from minidist.lessons import every_lesson
from minidist.lessons.finding import Passage, find_places, sections


def test_a_line_of_the_notes_has_one_section() -> None:
    section = Passage("N2:381-401", "10.3 MoE专用并行优化", ("18",))
    for line in ("N2:381", "N2:398", "N2:401"):
        assert find_places(line) == [section]
    assert find_places("N2:380") != [section] and find_places("N2:9999") == []


def test_every_section_has_lessons_that_are_there() -> None:
    numbers = {lesson.number for lesson in every_lesson()}
    found = [*sections()]
    assert len(found) > 60
    assert {number for place in found for number in place.lessons} <= numbers


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("流水线", "11"),
        ("梯度压缩", "21"),
        ("张量并行", "12"),
        ("Ring all-reduce", "03"),
        ("NESTEROV", "21"),  # stands in no heading
    ],
)
def test_a_word_has_a_lesson(word: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", word]) == 0
    assert f"read it:  minidist lesson {first}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [["zzz"], ["N2:9999"], ["N9:1"], ["流水线", "--answers"], ["3x"], ["N2:398", "-n", "2"]],
)
def test_what_is_nowhere_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("minidist lesson: ") and error.count("\n") == 1 and words[0] in error
