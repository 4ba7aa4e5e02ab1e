"""The terms of the course, each once, in both languages: glossary.toml.

for term in terms():
    print(term.en, term.zh, term.means)
"""

from functools import cache
from pathlib import Path

import msgspec

from minidist.reading import read_toml

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
    return msgspec.convert(read_toml(FILE)["term"], tuple[Term, ...])
