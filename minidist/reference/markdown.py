"""Helpers of the pages: head, tables, blocks."""

from collections.abc import Iterable, Sequence

MADE_BY = "<!-- made by: python -m minidist.reference -->"


def head(title: str, *paragraphs: str) -> list[str]:
    """Return the first lines of a page: its title, how it is made, and paragraphs."""
    lines = [f"# {title}", "", MADE_BY]
    for paragraph in paragraphs:
        lines += ["", paragraph]
    return lines


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table, with an empty line before it."""
    lines = ["", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return lines + [f"| {' | '.join(cell(each) for each in row)} |" for row in rows]


def cell(text: str) -> str:
    """Return a text as a cell: on one line, with `|` and `<` as letters."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Return a text in backticks."""
    return f"`{text}`"


def block(text: str) -> list[str]:
    """Return a text as a block of its own, with an empty line before it."""
    return ["", "```text", *(line.rstrip() for line in text.strip("\n").splitlines()), "```"]


def page(lines: Iterable[str]) -> str:
    """Return lines as the text of a page."""
    return "\n".join(lines).rstrip() + "\n"
