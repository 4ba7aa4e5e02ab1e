"""The list of lessons in README.md, the table in lessons/README.md and the syllabus in
docs/teaching, made from the heads of the stories; each story's links to its sections of the notes,
made from NOTES.md; and the terms of docs/words.md, made from glossary.toml.

    python -m minidist.lessons.table      # write all again

A test fails where a list or a table and a head differ.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from minidist import lessons
from minidist.files import whole
from minidist.lessons import Lesson
from minidist.lessons.finding import find_places, sections
from minidist.lessons.glossary import terms

ROOT = lessons.FOLDER.parent
BEGIN = "<!-- made by: python -m minidist.lessons.table -->"
END = "<!-- end -->"
WEEKS = (
    "00 01",
    "02 03",
    "04 05",
    "06 07 25",
    "08 09 19",
    "14 15 16",
    "10 11",
    "12 13",
    "17 24",
    "18 20",
    "21 22",
    "23 26",
)
"""The lessons of each week of a course, each after those that it builds on (lessons.AFTER)."""
HEADS = {
    "en": "| lesson | chapter | notes | modules |",
    "zh": "| 课 | 内容 | 笔记 | 模块 |",
}
SET_IN = {3: "1 set", 5: "1 due", 8: "2 set", 10: "2 due, 3 set", 12: "3 due"}
"""{week: assignments}; each is set in the week after the lessons that it needs."""


def short_list(there: list[Lesson], language: str = "en") -> list[str]:
    """Return the list of README.md: number and title of each lesson, a line per lesson."""
    rows = []
    for lesson in there:
        title = lesson.title_in(language).split(" (")[0]
        story = f"lessons/{lesson.folder.name}/{lesson.story(language).name}"
        rows.append(f"- [{lesson.number}]({story}) {title}")
    return rows


def long_table(there: list[Lesson], language: str = "en") -> list[str]:
    """Return the table of lessons/README.md: each lesson with its notes and all of its modules."""
    rows = [HEADS[language], "| --- | --- | --- | --- |"]
    for lesson in there:
        story = f"[{lesson.number}]({lesson.folder.name}/{lesson.story(language).name})"
        modules = ", ".join(f"[`{module}`](../{module})" for module in lesson.modules)
        rows.append(f"| {story} | {lesson.title_in(language)} | {lesson.notes} | {modules} |")
    return rows


def syllabus(there: list[Lesson]) -> list[str]:
    """Return the table of docs/teaching/README.md: the lessons of each week, their minutes and
    holes, and the assignments."""
    numbered = {lesson.number: lesson for lesson in there}
    rows = ["| week | lessons | minutes | holes | assignment |", "| --- | --- | --- | --- | --- |"]
    for week, numbers in enumerate(WEEKS, 1):
        mine = [numbered[number] for number in numbers.split()]
        links = [
            f"[{one.number}](../../lessons/{one.folder.name}/README.md) {one.title.split(' (')[0]}"
            for one in mine
        ]
        minutes = sum(one.minutes for one in mine)
        count = sum(one.holes for one in mine)
        rows.append(
            f"| {week} | {'; '.join(links)} | {minutes} | {count} | {SET_IN.get(week, '')} |"
        )
    return rows


def words(_: list[Lesson]) -> list[str]:
    """Return the table of docs/words.md: each term, its Chinese, what it means, and where the notes
    use it."""
    rows = ["| term | 中文 | what it means | notes |", "| --- | --- | --- | --- |"]
    for term in terms():
        link = ""
        if term.notes:
            (section,) = find_places(term.notes)
            link = f"[{term.notes}](../lessons/NOTES.md#{section.anchor})"
        rows.append(f"| {term.en} | {term.zh} | {term.means} | {link} |".replace("|  |", "| |"))
    return rows


def links_to_notes(lesson: Lesson) -> list[str]:
    """Return the line of a story that links its sections in NOTES.md, those it teaches first, and
    its Chinese twin."""
    chinese = " [中文](README.zh.md)" * lesson.part("README.zh.md").is_file()
    return [f"In the notes: {', '.join(_places(lesson, 'NOTES.md'))}.{chinese}"]


def links_in_chinese(lesson: Lesson) -> list[str]:
    """Return the same line of the story's Chinese twin."""
    notes = "NOTES.zh.md" if (lessons.FOLDER / "NOTES.zh.md").is_file() else "NOTES.md"
    return [f"笔记中的位置：{'、'.join(_places(lesson, notes))}。[English](README.md)"]


def _places(lesson: Lesson, notes: str) -> list[str]:
    """Return links to a lesson's sections in NOTES.md or its twin, those it teaches first."""
    held = [place for place in sections() if lesson.number in place.lessons]
    held.sort(key=lambda place: place.lessons.index(lesson.number) > 0)
    return [f"[{place.where}](../{notes}#{place.anchor})" for place in held]


TABLES: dict[Path, Callable[[list[Lesson]], list[str]]] = {
    ROOT / "README.md": short_list,
    ROOT / "README.zh.md": partial(short_list, language="zh"),
    lessons.FOLDER / "README.md": long_table,
    lessons.FOLDER / "README.zh.md": partial(long_table, language="zh"),
    ROOT / "docs" / "words.md": words,
    ROOT / "docs" / "teaching" / "README.md": syllabus,
}
"""{document: the function that makes its list or table}."""


def renewed(text: str, table: list[str]) -> str:
    """Return a document's text with `table` between its marks."""
    first = text.index(BEGIN) + len(BEGIN)
    last = text.index(END, first)
    return "\n".join([text[:first], *table, text[last:]])


def main() -> None:
    """Write the table of each document and the links of each story again."""
    there = lessons.every_lesson()
    parts = {document: table(there) for document, table in TABLES.items()}
    for lesson in there:
        parts[lesson.part("README.md")] = links_to_notes(lesson)
        if (chinese := lesson.part("README.zh.md")).is_file():
            parts[chinese] = links_in_chinese(lesson)
    for document, part in parts.items():
        fresh = renewed(document.read_text(encoding="utf-8"), part)
        with whole(document) as draft:
            draft.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
