"""The tables of lessons say what the heads of the stories say, and the heads say what is so."""

import ast
import re
from pathlib import Path

import pytest

from minidist import holes, lessons
from minidist.lessons import Lesson
from minidist.lessons.finding import sections
from minidist.lessons.table import (
    ROOT,
    SET_IN,
    TABLES,
    WEEKS,
    links_in_chinese,
    links_to_notes,
    renewed,
)

LESSONS = lessons.every_lesson()
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
each_document = pytest.mark.parametrize("document", TABLES, ids=lambda path: path.parent.name)


def head(lesson: Lesson) -> list[str]:
    """Return the cells notes, module, run and grade of a story's head."""
    lines = lesson.part("README.md").read_text(encoding="utf-8").splitlines()
    assert lines[2:4] == ["| notes | module | run | grade |", "| --- | --- | --- | --- |"]
    return [cell.strip() for cell in lines[4].strip("|").split("|")]


@each_document
def test_a_table_is_made_from_the_heads(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert renewed(text, TABLES[document](LESSONS)) == text, (
        f"{document.relative_to(ROOT)} is older than the head of a lesson's README.md: "
        "run `python -m minidist.lessons.table`"
    )


@pytest.mark.parametrize(
    "document",
    [ROOT / "README.md", lessons.FOLDER / "README.md"],
    ids=lambda path: path.parent.name,
)
@pytest.mark.parametrize(
    ("now", "stale"),
    [
        ("no rank in the middle", "nobody in the middle"),
        ("[26](", "[27]("),
        ("20_offload/README.md", "20_disk/README.md"),
    ],
)
def test_a_stale_cell_is_found_and_put_right(document: Path, now: str, stale: str) -> None:
    text = document.read_text(encoding="utf-8")
    table = TABLES[document](LESSONS)
    planted = text.replace(now, stale, 1)
    assert planted != text
    assert renewed(planted, table) != planted
    assert renewed(planted, table) == text


def test_a_stale_term_is_found_and_put_right() -> None:
    document = ROOT / "docs" / "words.md"
    text = document.read_text(encoding="utf-8")
    planted = text.replace("| 全归约 |", "| 全规约 |", 1)
    assert planted != text
    assert renewed(planted, TABLES[document](LESSONS)) == text


def test_a_stale_module_is_found_in_the_table_of_the_lessons() -> None:
    document = lessons.FOLDER / "README.md"
    text = document.read_text(encoding="utf-8")
    planted = text.replace("data/ddp.py", "data/ddp_old.py", 1)
    assert planted != text
    assert renewed(planted, TABLES[document](LESSONS)) == text


@each_lesson
def test_a_head_names_modules_that_exist_and_its_own_commands(lesson: Lesson) -> None:
    _, modules, run, grade = head(lesson)
    assert modules == ", ".join(f"`{module}`" for module in lesson.modules)
    assert [module for module in lesson.modules if not (ROOT / module).exists()] == []
    script = f"python lessons/{lesson.folder.name}/lesson.py"
    assert re.fullmatch(rf"`(mpirun -n \d )?{re.escape(script)}`", run)
    assert grade == f"`minidist check {lesson.number}`"


@each_lesson
def test_a_module_that_names_its_chapter_names_this_one(lesson: Lesson) -> None:
    for module in lesson.modules:
        if module.endswith(".py"):
            text = (ROOT / module).read_text(encoding="utf-8")
            told = re.match(r"Chapter (\d\d)", ast.get_docstring(ast.parse(text)) or "")
            assert told is None or told[1] == lesson.number, module


@each_lesson
def test_a_story_links_its_sections_of_the_notes_which_link_it(lesson: Lesson) -> None:
    text = lesson.part("README.md").read_text(encoding="utf-8")
    assert renewed(text, links_to_notes(lesson)) == text, "run `python -m minidist.lessons.table`"
    _links_and_is_linked(lesson, text, "")
    if (twin := lesson.part("README.zh.md")).is_file():
        text = twin.read_text(encoding="utf-8")
        assert renewed(text, links_in_chinese(lesson)) == text
        _links_and_is_linked(lesson, text, ".zh")


def _links_and_is_linked(lesson: Lesson, text: str, mark: str) -> None:
    """Hold a story's text to the index of its language, whose names have `mark`."""
    index = (lessons.FOLDER / f"NOTES{mark}.md").read_text(encoding="utf-8")
    links = re.findall(rf"\]\(\.\./NOTES{re.escape(mark)}\.md#(n\d-\d+)\)", text)
    assert len(links) == sum(lesson.number in place.lessons for place in sections()) > 0
    for link in links:
        row = index.split(f'<a id="{link}"></a>')[1].split("\n")[0]
        assert f"[{lesson.number}]({lesson.folder.name}/README{mark}.md)" in row


def test_the_weeks_of_the_course_have_each_lesson_after_those_that_it_builds_on() -> None:
    assert len(WEEKS) == 12
    week_of = {number: week for week, numbers in enumerate(WEEKS, 1) for number in numbers.split()}
    assert sorted(week_of) == [lesson.number for lesson in LESSONS]
    assert sum(len(numbers.split()) for numbers in WEEKS) == len(LESSONS)
    for lesson in LESSONS:
        assert all(week_of[before] <= week_of[lesson.number] for before in lesson.after)
    needed = {1: "03", 2: "11", 3: "24"}  # an assignment is set in a week after its lesson
    for number, lesson in needed.items():
        weeks = [week for week, told in SET_IN.items() if f"{number} set" in told]
        assert len(weeks) == 1 and weeks[0] > week_of[lesson]
        assert [week for week, told in SET_IN.items() if f"{number} due" in told] > weeks


def test_the_holes_of_a_lesson_are_all_counted() -> None:
    """Also those whose call stands on several lines."""
    for lesson in LESSONS:
        template = ast.parse(lesson.part("exercise.py").read_text(encoding="utf-8"))
        assert lesson.holes == len(holes.tasks(template)), lesson.number
