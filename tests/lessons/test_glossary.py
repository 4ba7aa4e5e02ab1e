"""Each term of the course stands once, in both languages, on a line of the notes that is there."""

import re
from collections import Counter

import pytest

from minidist.lessons.finding import find_places
from minidist.lessons.glossary import FILE, terms

SENTENCE = 110  # characters of one line of meaning
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def twice(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def test_each_term_stands_once_in_each_language() -> None:
    assert len(terms()) > 150
    assert twice([term.en for term in terms()]) == [] == twice([term.zh for term in terms()])


def test_each_term_has_one_line_of_meaning_in_each_language() -> None:
    for term in terms():
        assert CHINESE.search(term.zh) and CHINESE.search(term.means_zh), term.en
        assert not CHINESE.search(term.en + term.means), term.en
        assert max(len(term.means), len(term.means_zh)) < SENTENCE, term.en
        assert not term.means.endswith(".") and not term.means_zh.endswith("。"), term.en


@pytest.mark.parametrize("term", [term for term in terms() if term.notes], ids=lambda term: term.en)
def test_one_section_of_the_notes_has_the_line(term) -> None:
    assert len(find_places(term.notes)) == 1


def test_a_term_twice_is_found() -> None:
    """The planted fault of the first test."""
    names = re.findall(r'^en = "(.*)"$', FILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) == len(terms())
    assert twice([*names, names[3]]) == [names[3]]
