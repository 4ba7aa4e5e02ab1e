"""What every story must have: a prediction before its run, an answer for each broken run, no hole's
code in the open, the numbers of its output, and what comes next."""

import ast
import re

import pytest
from filling import right

from minidist import lessons
from minidist.grading import load_module

NUMBERS = [lesson.number for lesson in lessons.every_lesson()]
SHORT = 24  # characters of code: less is a name or a constant, which a story may say
each_lesson = pytest.mark.parametrize("number", NUMBERS)


def story(number: str) -> str:
    """A lesson's README."""
    return lessons.find(number).part("README.md").read_text(encoding="utf-8")


def folded(text: str) -> str:
    """What is hidden until the reader opens it."""
    return "\n".join(re.findall(r"<details>.*?</details>", text, re.DOTALL))


def unfolded(text: str) -> str:
    """What every reader sees."""
    return re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)


def bare(code: str) -> str:
    """Code without what a formatter chooses: spaces, and the kind of quotes."""
    return re.sub(r"\s+", "", code).replace("'", '"')


def section(text: str, title: str) -> str:
    """The text of a section, its head and what is below it."""
    found = re.search(rf"^## [\d.]+ {title}$.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"no section {title}"
    return found[0]


@each_lesson
def test_a_prediction_comes_before_the_run(number: str) -> None:
    before = story(number).split(section(story(number), "Run it"))[0]
    asked = re.findall(
        r"^> \*\*Predict\.\*\* .*?^<details><summary>What came out",
        before,
        re.DOTALL | re.MULTILINE,
    )
    assert asked, "no block '> **Predict.** …' with a folded 'What came out' before 'Run it'"


@each_lesson
def test_each_broken_run_has_a_question_and_a_folded_answer(number: str) -> None:
    broken = section(story(number), "Break it")
    for name in load_module(lessons.find(number).part("lesson.py"), number).BREAKS:
        assert f"`{name}`" in unfolded(broken), f"--break {name} is not told"
        assert f"`{name}`" in folded(broken), f"--break {name} has no folded answer"


@each_lesson
def test_no_hole_stands_open_in_the_story(number: str) -> None:
    told = bare(unfolded(story(number)))
    for hole, code in right(number).items():
        lines = [bare(line) for line in code.splitlines()]
        shown = [line for line in lines if len(line) >= SHORT and line in told]
        assert not shown, f"hole {hole} stands in the story: {shown[0]}"


@each_lesson
def test_the_output_has_the_numbers_of_the_storys_sections(number: str) -> None:
    told = [float(found) for found in re.findall(r"^##+ (\d+(?:\.\d)?)\.? ", story(number), re.M)]
    calls = [
        call
        for call in ast.walk(ast.parse(lessons.find(number).part("lesson.py").read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "heading"
    ]
    calls.sort(key=lambda call: call.lineno)
    headings = [ast.unparse(call.args[0]).lstrip("f").strip("'\"") for call in calls]
    given = [float(found[1]) for head in headings if (found := re.match(r"(\d+(\.\d)?)  ", head))]
    assert given == sorted(given) and set(given) <= set(told), given


@each_lesson
def test_the_story_ends_with_what_is_next(number: str) -> None:
    last = story(number).rstrip().split("\n\n")[-1]
    assert last.startswith("Next: "), last[:60]
