"""What a term of the glossary means, shown where a page first uses it."""

import re
from functools import cache
from html import escape

from minidist.lessons.glossary import terms

UNTOUCHED = re.compile(r"`[^`\n]*`|<[^>\n]*>|!?\[[^\]\n]*\]\([^)\n]*\)|\*\*[^*\n]+\*\*")
"""Parts of a line that keep their words: code, HTML, links, and terms that the story explains."""


def with_tips(text: str, language: str) -> str:
    """Return Markdown in which the first use of each term shows its meaning. Headings keep their
    words, which are anchors."""
    seen = set[str]()
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        block if block.startswith("```") else _block(block, language, seen) for block in blocks
    )


def _block(text: str, language: str, seen: set[str]) -> str:
    lines = text.split("\n")
    return "\n".join(
        line if line.startswith(("#", "<", ">", "|")) else _line(line, language, seen)
        for line in lines
    )


def _line(line: str, language: str, seen: set[str]) -> str:
    """Return a line with tips, except in its untouched parts."""
    told = list[str]()
    begin = 0
    for part in UNTOUCHED.finditer(line):
        told += [_words(line[begin : part.start()], language, seen), part[0]]
        begin = part.end()
    return "".join([*told, _words(line[begin:], language, seen)])


def _words(text: str, language: str, seen: set[str]) -> str:
    pattern, meanings = _terms(language)

    def tip(found: re.Match[str]) -> str:
        key = found[0].lower()
        if key in seen:
            return found[0]
        seen.add(key)
        return f'<abbr title="{escape(meanings[key])}">{found[0]}</abbr>'

    return pattern.sub(tip, text)


@cache
def _terms(language: str) -> tuple[re.Pattern[str], dict[str, str]]:
    """Return what finds the terms of a language, the longest first, and {term: its meaning}."""
    meanings = dict[str, str]()
    for term in terms():
        chinese = re.sub(r" ?[(（].*[)）]", "", term.zh)
        if language == "zh":
            meanings[chinese.split("，")[0].lower()] = f"{term.en}：{_plain(term.means_zh)}"
        else:
            meanings[term.en.split(", ")[0].lower()] = f"{chinese}: {_plain(term.means)}"
    names = "|".join(map(re.escape, sorted(meanings, key=len, reverse=True)))
    edges = names if language == "zh" else rf"(?<![\w-])(?:{names})(?![\w-])"
    return re.compile(edges, re.IGNORECASE), meanings


def _plain(meaning: str) -> str:
    return meaning.replace("`", "")
