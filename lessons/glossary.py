"""The terms of the course, each once, in both languages: glossary.toml.

for term in terms():
    print(term.en, term.zh, term.means)
"""

import sys
from functools import cache
from pathlib import Path

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from minidist.lessons.finding import sections

FILE = Path(__file__).with_name("glossary.toml")


class Term(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A term: English and Chinese, what it means in one line of each, where the notes use it
    ("N2:481"; "" where they do not), and other Chinese for it that a sentence may need."""

    en: str
    zh: str
    means: str
    means_zh: str
    notes: str = ""
    also: tuple[str, ...] = ()


@cache
def terms() -> tuple[Term, ...]:
    """Return all terms, in the order of the course."""
    found = tomllib.loads(FILE.read_text(encoding="utf-8"))["term"]
    return msgspec.convert(tuple(found), tuple[Term, ...])


def row_of(line: str) -> str:
    """Return the anchor in NOTES.md of a line of the notes: n2-459 of "N2:475"."""
    document, _, number = line.partition(":")
    for place in sections():
        there, _, lines = place.where.partition(":")
        first, _, last = lines.partition("-")
        if there == document and int(first) <= int(number) <= int(last):
            return f"{document.lower()}-{first}"
    raise ValueError(f"{line}: no section of NOTES.md has it")
