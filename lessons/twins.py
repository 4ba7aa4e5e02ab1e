"""A document and its Chinese twin, README.md and README.zh.md, held together section by section.

    python -m minidist.lessons.twins                 # what differs, of every pair
    python -m minidist.lessons.twins --same 10       # both languages say the same: stamp the sections of 10
    python -m minidist.lessons.twins --same README.md    # the same of one document, by its whole path

What code can compare, it compares: the numbers of sections, commands, code, printed blocks, links,
pictures, anchors, folds, numbers, and the terms of the glossary. A command's remark may be in either
language. Where no section has a number, its place counts. What table.py writes into a document is
left out: it makes both languages. What a sentence says code cannot compare. So
twins.json keeps a stamp of each section: the digests of both languages, from the time when somebody
read both. English that has changed since, beside Chinese that has not, is a fault; if both have
changed, the stamp waits for --same.
"""

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

from minidist import lessons
from minidist.files import whole
from minidist.lessons.glossary import Term, terms
from minidist.lessons.table import BEGIN, END

STAMPS = lessons.FOLDER / "twins.json"
ROOT = lessons.FOLDER.parent
HEAD = "0"  # the number of what stands before the first section
SECTION = re.compile(r"^(##+) (\d+(?:\.\d+)*)\.? .*$", re.MULTILINE)
HEADING = re.compile(r"^##+ .*$", re.MULTILINE)
MADE = re.compile(rf"(?<={BEGIN}).*?(?={END})", re.DOTALL)
REMARK = re.compile(r"(?:^|(?<=\s))# .*$", re.MULTILINE)  # of a command
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]*)\)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
TRANSLATED = re.compile(r"^> \*[^*].*\*$", re.MULTILINE)  # a quotation's, which only English needs

Stamp = list[str]
"""Digest of the English section, digest of the Chinese."""


def twin_of(document: Path) -> Path:
    """Return the path of a document's Chinese twin."""
    return document.with_name(f"{document.stem}.zh.md")


def pairs() -> list[Path]:
    """Return every English document that has a twin."""
    places = [
        ROOT / "README.md",
        *lessons.FOLDER.glob("*.md"),
        *lessons.FOLDER.glob("*_*/README.md"),
    ]
    places += (ROOT / "docs").rglob("*.md")
    return sorted(path for path in places if twin_of(path).is_file())


def sections(text: str) -> dict[str, str]:
    """Return the text of each section by its number; HEAD's is what stands before the first."""
    text = MADE.sub("", text)
    found = dict[str, str]()
    number = HEAD
    begin = 0
    heads = [(head, head[2]) for head in SECTION.finditer(text)]
    if not heads:
        heads = [(head, str(place)) for place, head in enumerate(HEADING.finditer(text), 1)]
    for head, its_number in heads:
        found[number] = text[begin : head.start()]
        number = its_number
        begin = head.end()
    found[number] = text[begin:]
    return found


def differences(english: str, chinese: str) -> Iterator[str]:
    """Yield what differs between a document's text and its twin's."""
    there = sections(english)
    twin = sections(chinese)
    if [*there] != [*twin]:
        yield f"sections {', '.join(there)} beside {', '.join(twin)}"
    for number in there.keys() & twin.keys():
        for what, mine, theirs in _measures(there[number], twin[number]):
            if mine != theirs:
                yield f"section {number}, {what}: {_apart(mine, theirs)}"
        yield from (
            f"section {number}: stars that do not close: {line}" for line in _stars(twin[number])
        )
        yield from (
            f"section {number}: {term.en} without {term.zh}"
            for term in terms()
            if _has(there[number], term) and not _has_chinese(twin[number], term)
        )


def _measures(english: str, chinese: str) -> Iterator[tuple[str, Counter[str], Counter[str]]]:
    """Yield name and counts of everything that both languages have alike."""
    for what, measure in (
        ("code", _fences),
        ("comments", lambda text: re.findall(r"<!--.*?-->", text, re.DOTALL)),
        ("links", _links),
        ("anchors", lambda text: re.findall(r'<a id="[^"]*">', text)),
        ("folds", lambda text: re.findall(r"</?details>", text)),
        ("code in lines", lambda text: re.findall(r"`[^`\n]+`", FENCE.sub("", text))),
        ("rows of tables", _rows),
        ("numbers", _numbers),
    ):
        yield what, Counter(measure(english)), Counter(measure(chinese))


def _fences(text: str) -> list[str]:
    """Return the blocks of code; of a remark behind a command only that it is there."""
    return [
        re.sub(r" +#", " #", REMARK.sub("#", fence)) if fence.startswith("```sh\n") else fence
        for fence in FENCE.findall(text)
    ]


def _links(text: str) -> list[str]:
    """Return where links and pictures lead; a twin links to twins, and shows pictures in Chinese."""
    return [
        mark + re.sub(r"\.zh\.(md|png)", r".\1", to).partition("#")[0]
        for mark, to in LINK.findall(text)
    ]


def _rows(text: str) -> list[str]:
    """Return how many cells each row of a table has."""
    rows = re.findall(r"^\|(.*)\|$", FENCE.sub("", text), re.MULTILINE)
    return [str(len(row.split("|"))) for row in rows]


def _numbers(text: str) -> list[str]:
    """Return the numbers that a reader sees, outside of code and links: 4,096 as 4096, 07 as 7, and
    0.13 billion as the 1.3 of 1.3 亿."""
    told = TRANSLATED.sub("", FENCE.sub("", text))
    plain = re.sub(r"`[^`\n]+`|\]\([^)]*\)|<!--.*?-->", "", told, flags=re.DOTALL)
    plain = re.sub(r"(\d+(?:\.\d+)?) billion", lambda found: f"{10 * float(found[1]):g}", plain)
    return [f"{float(found.replace(',', '')):g}" for found in NUMBER.findall(plain)]


def _stars(text: str) -> Iterator[str]:
    """Yield the lines that show stars: behind a full stop and before a letter, stars do not end bold
    letters."""
    for token in MarkdownIt().enable("table").parse(text):
        for child in token.children or ():
            if child.type == "text" and "**" in child.content:
                yield child.content


def _has(text: str, term: Term) -> bool:
    """Return whether an English text uses the term as a word."""
    words = re.sub(r"`[^`\n]+`|<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    return any(
        re.search(
            rf"(?<![\w-]){re.escape(name)}s?(?![\w-])",
            words,
            re.IGNORECASE if name.islower() else 0,
        )
        for name in term.en.split(", ")
        if name == term.en or len(term.en.split(", ")) == len(term.zh.split("，"))
    )


def _has_chinese(text: str, term: Term) -> bool:
    """Return whether a Chinese text uses the term, or one of its names."""
    names = [re.sub(r" ?[(（].*[)）]", "", name) for name in term.zh.split("，")]
    return any(name in text for name in [*names, *term.also])


def _apart(mine: Counter[str], theirs: Counter[str]) -> str:
    """Return what only one side has, in few words."""
    more = [f"{key[:60]!r}" for key in (mine - theirs).elements()]
    less = [f"{key[:60]!r}" for key in (theirs - mine).elements()]
    return f"only in English {', '.join(more[:4]) or 'nothing'}; only in Chinese {', '.join(less[:4]) or 'nothing'}"


# -------------------------------------------------------------------------------------------- stamps


def stamps_of(english: str, chinese: str) -> dict[str, Stamp]:
    """Return the stamp of each section that both languages have."""
    there = sections(english)
    twin = sections(chinese)
    return {
        number: [_digest(there[number]), _digest(twin[number])]
        for number in there
        if number in twin
    }


def _digest(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:8]


def old(english: str, chinese: str, kept: dict[str, Stamp]) -> Iterator[str]:
    """Yield each section of a pair that somebody must read again, and why."""
    for number, now in stamps_of(english, chinese).items():
        before = kept.get(number, ["", ""])
        changed = [
            language
            for language, then, today in zip(("English", "Chinese"), before, now, strict=True)
            if then != today
        ]
        if changed:
            yield f"section {number}: {' and '.join(changed)} changed since both were read"


def read_stamps() -> dict[str, dict[str, Stamp]]:
    """Return the kept stamps: {document: {section: stamp}}."""
    return json.loads(STAMPS.read_text(encoding="utf-8")) if STAMPS.is_file() else {}


def label(document: Path) -> str:
    """Return a document's path from the root of the repository."""
    return document.relative_to(ROOT).as_posix()


def chosen(names: list[str]) -> list[Path]:
    """Return the documents whose path is one of the names, or has one that is no document's path
    in it."""
    whole_paths = {label(document) for document in pairs()}
    return [
        document
        for document in pairs()
        if any(
            name == label(document) or (name not in whole_paths and name in label(document))
            for name in names
        )
    ]


def main() -> int:
    """Print what differs in every pair, or stamp pairs; return 1 if anything differs."""
    parser = argparse.ArgumentParser(prog="python -m minidist.lessons.twins", description=__doc__)
    parser.add_argument(
        "--same",
        nargs="+",
        default=[],
        metavar="NAME",
        help="stamp each pair whose path is NAME, or has NAME in it where none is NAME",
    )
    arguments = parser.parse_args()
    kept = read_stamps()
    stamped = chosen(arguments.same)
    faults = 0
    for document in pairs():
        english = document.read_text(encoding="utf-8")
        chinese = twin_of(document).read_text(encoding="utf-8")
        if document in stamped:
            kept[label(document)] = stamps_of(english, chinese)
        stamps = kept.get(label(document), {})
        for fault in [*differences(english, chinese), *old(english, chinese, stamps)]:
            print(f"{label(document)}: {fault}")
            faults += 1
    if arguments.same:
        with whole(STAMPS) as draft:
            draft.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
