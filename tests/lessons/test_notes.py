"""The index of the lecture notes covers them, and what a story quotes of them stands on the line
that it cites."""

import re
from pathlib import Path

import pytest

from minidist import lessons
from minidist.lessons.finding import ROW

ROOT = lessons.FOLDER.parent
NOTES = sorted((ROOT.parent / "shared" / "notes").glob("*.txt"))
"""The five documents, where they lie beside the repository: they are not part of it."""
needs_notes = pytest.mark.skipif(
    len(NOTES) != 5, reason="the five documents are not in ../shared/notes"
)

CITED = re.compile(r"N([0-4]):(\d+)(?:[-–](\d+))?((?:, \d+\b(?!,?\d))*)")


def index() -> list[tuple[int, int, int, str, set[str]]]:
    """The rows of NOTES.md: document, first and last line, section, numbers of the lessons."""
    text = (lessons.FOLDER / "NOTES.md").read_text(encoding="utf-8")
    return [
        (int(d[1]), int(first), int(last), section, set(re.findall(r"\[(\d\d)\]", taught)))
        for d, first, last, section, taught in ROW.findall(text)
    ]


def sources() -> list[Path]:
    """Every file that may cite the notes."""
    paths = [
        path
        for name in ("minidist", "benchmarks", "lessons", "kernels")
        for path in (ROOT / name).rglob("*")
    ]
    return [
        path
        for path in [*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md"), *paths]
        if path.suffix in (".md", ".py") and path.name not in ("NOTES.md", "NOTES.zh.md")
    ]


def english() -> list[Path]:
    """The sources whose Chinese words are all the notes' own; a Chinese text marks them by 「」."""
    return [path for path in sources() if not path.name.endswith(".zh.md")]


def citations(text: str) -> list[tuple[int, int, int, str]]:
    """Document, first and last line, and the text from there to the next citation or the end of the
    paragraph."""
    found = []
    for match in CITED.finditer(text):
        behind = re.split(r"\n\s*\n|\n *[*|] |N[0-4]:\d", text[match.end() :], maxsplit=1)[0]
        lines = [int(line) for line in re.findall(r"\d+", match[4])]
        found += [(int(match[1]), int(match[2]), int(match[3] or match[2]), behind)]
        found += [(int(match[1]), line, line, "") for line in lines]
    return found


def not_said(chinese: str, documents: list[list[str]]) -> list[str]:
    """The quotations 「…」 of a Chinese text that stand on no line which their paragraph cites."""
    wrong = []
    for paragraph in re.split(r"\n\s*\n|\n *[*|] ", chinese):
        ranges = [(place[0], place[1], place[2]) for place in citations(paragraph)]
        said = "\n".join(
            "\n".join(documents[document][first - 1 : last]) for document, first, last in ranges
        )
        if ranges:
            wrong += [
                words
                for words in re.findall("「(.+?)」", paragraph, re.DOTALL)
                if words not in said.replace("**", "")
            ]
    return wrong


def numbered_sections() -> dict[tuple[int, str], list[tuple[int, int, set[str]]]]:
    """Return the first and last line and the lessons of each row of the index, by document and
    number of a section.

    A section has the rows of its parts too: 10 has those of 10.1 to 10.7.
    """
    found: dict[tuple[int, str], list[tuple[int, int, set[str]]]] = {}
    for document, first, last, section, taught in index():
        for number in re.findall(r"(?:^|; )(\d+(?:\.\d+)?)[. ]", section):
            for level in {number, number.split(".")[0]}:
                found.setdefault((document, level), []).append((first, last, taught))
    return found


def cited_sections(text: str) -> list[tuple[int, str, str]]:
    """Return document, number, and what is said behind it, of each section that is cited as `N2
    §10.5` or `…, §11.2`.

    A § behind `Source:` or in another paragraph belongs to a paper.
    """
    marks = re.compile(r"\bN([0-4])\b|§(\d+(?:\.\d+)?)(?:–(\d+))?|Source:|\n\s*\n")
    document = None
    found = []
    for mark in marks.finditer(text):
        if mark[2] is None:
            document = mark[1] and int(mark[1])
        elif document is not None:
            behind = re.split(r"[|;\n]|§|, N\d", text[mark.end() :], maxsplit=1)[0]
            numbers = range(int(mark[2]), int(mark[3]) + 1) if mark[3] else [mark[2]]
            found += [(document, str(number), behind) for number in numbers]
    return found


def chapter_of(path: Path, text: str) -> str | None:
    """Return the number of the lesson that a file belongs to, if its folder or its first words say
    so."""
    lesson = re.match(r"(\d\d)_", path.parent.name) or re.match(r'"""Chapters? (\d\d)', text)
    return lesson[1] if lesson else None


def quoted_before(text: str) -> list[tuple[int, int, int, str]]:
    """Document, first and last line, and what is quoted right before a citation in brackets.

    That is the paragraph of a block quote from its beginning, or the last words in Chinese; …
    stands for what is left out.
    """
    found = []
    for match in re.finditer(rf"\({CITED.pattern}", text):
        paragraph = re.split(r"\n(?!>)|\n> *(?=\n)", text[: match.start()])[-1]
        said = (
            paragraph
            if re.match(r"\s*>", paragraph)
            else "".join(re.findall(r"[\u3400-\u9fff][^\s「」]*$", paragraph.rstrip(" 」*")))
        )
        found += [
            (int(match[1]), int(match[2]), int(match[3] or match[2]), part)
            for part in said.split("…")
            if re.search(r"[\u3400-\u9fff]", part)
        ]
    return found


def bare(text: str) -> str:
    """Without what differs between a note and a quotation of it: line ends, marks of Markdown, bars
    of a table."""
    return re.sub(r"[\s>*`|:]", "", text)


def test_the_index_has_every_line_once_and_every_lesson() -> None:
    rows = index()
    for document in range(5):
        spans = [(first, last) for d, first, last, *_ in rows if d == document]
        assert spans[0][0] == 1
        assert all(
            last + 1 == first for (_, last), (first, _) in zip(spans, spans[1:], strict=False)
        ), document
    taught = set().union(*(row[-1] for row in rows))
    assert {lesson.number for lesson in lessons.every_lesson()} <= taught


def test_a_lesson_stands_in_the_index_where_it_cites() -> None:
    missing = []
    for lesson in lessons.every_lesson():
        for document, line, *_ in citations(lesson.part("README.md").read_text(encoding="utf-8")):
            taught = next(
                (row[-1] for row in index() if row[0] == document and row[1] <= line <= row[2]),
                set(),
            )
            missing += (
                []
                if lesson.number in taught
                else [f"lesson {lesson.number} cites N{document}:{line}"]
            )
    assert not missing


def test_a_section_that_is_cited_exists_and_belongs_to_that_chapter() -> None:
    sections = numbered_sections()
    wrong = list[str]()
    count = 0
    for path in sources():
        text = path.read_text(encoding="utf-8")
        chapter = chapter_of(path, text)
        for document, number, _ in cited_sections(text):
            count += 1
            rows = sections.get((document, number), [])
            lessons_there = set().union(*(taught for _, _, taught in rows))
            where = f"{path.relative_to(ROOT)} cites N{document} §{number}"
            if not rows:
                wrong.append(f"{where}, which is no section")
            elif chapter and chapter not in lessons_there:
                wrong.append(
                    f"{where}, of which NOTES.md knows the lessons {sorted(lessons_there)}, not "
                    f"{chapter}"
                )
    assert not wrong
    assert count > 130


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("notes: N2 §9.3 支持 (N2:432); N4 §1.", [(2, "9.3", " 支持 (N2:432)"), (4, "1", ".")]),
        ("N4 §1, §3.", [(4, "1", ", "), (4, "3", ".")]),
        ("N4 §4–5\n\n§6", [(4, "4", ""), (4, "5", "")]),
        ("N3 §1. Source: Zhao, §3.2.2; N1 §2", [(3, "1", ". Source: Zhao, "), (1, "2", "")]),
    ],
)
def test_sections_are_found(text: str, found: list[tuple[int, str, str]]) -> None:
    assert cited_sections(text) == found


@needs_notes
def test_what_is_said_of_a_section_stands_in_it() -> None:
    """Words in Chinese behind its number, and a line in brackets."""
    documents = [path.read_text(encoding="utf-8").splitlines() for path in NOTES]
    sections = numbered_sections()
    wrong = list[str]()
    count = 0
    for path in english():
        for document, number, behind in cited_sections(path.read_text(encoding="utf-8")):
            rows = sections[document, number]
            within = "\n".join(
                "\n".join(documents[document][first - 1 : last]) for first, last, _ in rows
            )
            where = f"{path.relative_to(ROOT)} cites N{document} §{number}"
            for words in re.findall(r"[\u3400-\u9fff]+", behind):
                count += 1
                wrong += [] if words in within else [f"{where}, which does not say {words}"]
            for line in map(int, re.findall(rf"\(N{document}:(\d+)", behind)):
                inside = any(first <= line <= last for first, last, _ in rows)
                wrong += [] if inside else [f"{where}, in which line {line} does not lie"]
    assert not wrong
    assert count > 20


@needs_notes
def test_the_index_ends_and_names_sections_as_the_notes_do() -> None:
    for document, path in enumerate(NOTES):
        text = path.read_text(encoding="utf-8")
        rows = [row for row in index() if row[0] == document]
        assert rows[-1][2] == len(text.splitlines())
        for _, first, last, section, _ in rows:
            within = "\n".join(text.splitlines()[first - 1 : last])
            for name in section.split("; "):
                assert name in within, (document, first, name)


@needs_notes
def test_a_quotation_stands_on_the_line_that_is_cited() -> None:
    documents = [path.read_text(encoding="utf-8").splitlines() for path in NOTES]
    checked = 0
    before = 0
    wrong = list[str]()
    own_words = {*english()}
    for path in sources():
        for document, first, last, behind in citations(path.read_text(encoding="utf-8")):
            where = f"{path.relative_to(ROOT)} cites N{document}:{first}"
            cited = "\n".join(documents[document][first - 1 : last])
            if not cited.strip():
                wrong.append(f"{where}, an empty line or none")
            quoted = re.findall("「(.+?)」", behind, re.DOTALL) if path in own_words else []
            for quotation in quoted:
                checked += 1
                if quotation not in cited.replace("**", ""):
                    wrong.append(f"{where}, which does not say {quotation}")
        told = path.read_text(encoding="utf-8")
        if path not in own_words:
            wrong += [f"{path.relative_to(ROOT)}: {words}" for words in not_said(told, documents)]
            continue
        for document, first, last, said in quoted_before(told):
            before += 1
            if bare(said) not in bare("\n".join(documents[document][first - 1 : last])):
                wrong.append(
                    f"{path.relative_to(ROOT)} cites N{document}:{first}, which does not say "
                    f"{said.strip()}"
                )
    assert not wrong
    assert checked >= 25 and before >= 40, (checked, before)
