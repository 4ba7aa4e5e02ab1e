"""Find the lesson of a line of the notes, or of a word.

    find_places("N2:398")     the section around the line, and its lessons
    find_places("流水线")      the sections, lessons and headings that have the word

`minidist lesson N2:398` prints them. The sections are those of NOTES.md.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minidist.lessons import Lesson, every_lesson

LINE = re.compile(r"N([0-4]):([1-9][0-9]{0,5})")
ROW = re.compile(r'^\| <a id="n\d-\d+"></a>(N[0-4]):(\d+)-(\d+) \| (.*?) \| (.*?) \|', re.MULTILINE)
"""A row of NOTES.md: document, first and last line, section, links to lessons."""

MOST = 12  # places of a word


@dataclass(frozen=True)
class Passage:
    """A section of the notes or of a lesson.

    Attributes: where: lines of the notes, as "N2:381-401", or a lesson's section, as "11, 3.2";
                title: of the section; lessons: their numbers, the first teaches it.
    """

    where: str
    title: str
    lessons: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """Return the anchor of the section's row in NOTES.md, as n0-211 of "N0:211-231"."""
        return self.where.partition("-")[0].lower().replace(":", "-")


def find_places(question: str) -> list[Passage]:
    """Return the places of a line of the notes ("N2:398") or of a word, the best first; [] if there
    is none."""
    if LINE.fullmatch(question):
        return [place for place in sections() if _covers(place, question)]
    word = question.casefold()
    found = [place for place in sections() if word in place.title.casefold()]
    for lesson in every_lesson():
        found += [place for place in _headings(lesson) if word in place.title.casefold()]
    return found[:MOST] or _in_the_text(word)


def sections() -> Iterator[Passage]:
    """Yield every section of the notes, in their order."""
    text = Path(__file__).with_name("NOTES.md").read_text(encoding="utf-8")
    for document, first, last, title, lessons in ROW.findall(text):
        yield Passage(
            f"{document}:{first}-{last}", title, tuple(re.findall(r"\[(\d\d)\]", lessons))
        )


def _covers(place: Passage, line: str) -> bool:
    """Return whether a section has a line, such as "N2:398"."""
    document, _, number = line.partition(":")
    there, _, lines = place.where.partition(":")
    first, _, last = lines.partition("-")
    return there == document and int(first) <= int(number) <= int(last)


def _headings(lesson: Lesson) -> Iterator[Passage]:
    """Yield a lesson's title and its sections' headings."""
    yield Passage(lesson.number, lesson.title, (lesson.number,))
    text = lesson.part("README.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for number, title in re.findall(r"^##+ (\d[\d.]*)\.? +(.+)$", text, re.MULTILINE):
        yield Passage(f"{lesson.number}, {number}", title, (lesson.number,))


def _in_the_text(word: str) -> list[Passage]:
    """Return the lessons whose text has the word, the one that has it most often first."""
    counts = {
        lesson: lesson.part("README.md").read_text(encoding="utf-8").casefold().count(word)
        for lesson in every_lesson()
    }
    best = sorted((lesson for lesson in counts if counts[lesson]), key=lambda one: -counts[one])
    return [
        Passage(lesson.number, f"{lesson.title}: {counts[lesson]} times", (lesson.number,))
        for lesson in best[:MOST]
    ]
