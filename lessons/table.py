"""The list of lessons in README.md and the table in lessons/README.md, made from the heads of the stories.

    python -m minidist.lessons.table      # write both again

A test fails where a list or a table and a head differ.
"""

from minidist import lessons
from minidist.files import whole
from minidist.lessons import Lesson

ROOT = lessons.FOLDER.parent
BEGIN = "<!-- made by: python -m minidist.lessons.table -->"
END = "<!-- end -->"


def short_list(there: list[Lesson]) -> list[str]:
    """Return the list of README.md: number and title of each lesson, a line per lesson."""
    rows = []
    for lesson in there:
        title = lesson.title.split(" (")[0]
        rows.append(f"- [{lesson.number}](lessons/{lesson.folder.name}/README.md) {title}")
    return rows


def long_table(there: list[Lesson]) -> list[str]:
    """Return the table of lessons/README.md: each lesson with its notes and all of its modules."""
    rows = ["| lesson | chapter | notes | modules |", "| --- | --- | --- | --- |"]
    for lesson in there:
        story = f"[{lesson.number}]({lesson.folder.name}/README.md)"
        modules = ", ".join(f"[`{module}`](../{module})" for module in lesson.modules)
        rows.append(f"| {story} | {lesson.title} | {lesson.notes} | {modules} |")
    return rows


TABLES = {ROOT / "README.md": short_list, lessons.FOLDER / "README.md": long_table}
"""{document: the function that makes its list or table}."""


def renewed(text: str, table: list[str]) -> str:
    """Return a document's text with `table` between its marks."""
    first = text.index(BEGIN) + len(BEGIN)
    last = text.index(END, first)
    return "\n".join([text[:first], *table, text[last:]])


def main() -> None:
    """Write the table of each document again."""
    there = lessons.every_lesson()
    for document, table in TABLES.items():
        fresh = renewed(document.read_text(encoding="utf-8"), table(there))
        with whole(document) as draft:
            draft.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
