"""What the stories quote is what the modules say: each quoted plain version, docstring and all,
equals its source."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from minidist import lessons

ROOT = lessons.FOLDER.parent
NUMBERS = [lesson.number for lesson in lessons.every_lesson()]
WITHOUT = {"01"}
"""Stories that quote no plain version: what they are about has none."""


def story(number: str) -> str:
    """A lesson's README."""
    return lessons.find(number).part("README.md").read_text(encoding="utf-8")


@cache
def functions(path: Path) -> dict[str, str]:
    """Source of the functions and classes at the top of a file, by name."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    return {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def quotes(text: str) -> list[tuple[str, str]]:
    """(name, text) of each plain version in the Python blocks of a story."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    parts = [part for block in blocks for part in re.split(r"(?m)^(?=def |class )", block)]
    named = re.compile(r"(?:def|class) (plain_\w+|Plain\w+)")
    return [(name[1], part.strip()) for part in parts if (name := named.match(part))]


def named_files(number: str) -> list[Path]:
    """The modules that a story names, and the lesson's own."""
    paths = sorted(set(re.findall(r"`((?:minidist|lessons)/[\w/]+\.py)`", story(number))))
    return [
        *(ROOT / path for path in paths if (ROOT / path).is_file()),
        lessons.find(number).part("lesson.py"),
    ]


def plain_versions() -> dict[tuple[str, str], str]:
    """{(module's path, name): source} of every plain version in the package that is a chapter or a
    family."""
    paths = [
        *(ROOT / "minidist/parallel").rglob("*.py"),
        *(ROOT / "minidist/comm/collectives").glob("*.py"),
    ]
    return {
        (str(path.relative_to(ROOT)), name): source
        for path in paths
        for name, source in functions(path).items()
        if name.startswith("plain_")
    }


@pytest.mark.parametrize("number", [number for number in NUMBERS if number not in WITHOUT])
def test_a_quoted_plain_version_is_its_source(number: str) -> None:
    found = quotes(story(number))
    assert found, f"lesson {number} quotes no plain version"
    for name, quoted in found:
        sources = {
            str(path.relative_to(ROOT)): functions(path)[name]
            for path in named_files(number)
            if name in functions(path)
        }
        assert sources, f"lesson {number} quotes {name}, but names no module that has it"
        assert quoted in sources.values(), (
            f"lesson {number}: {name} is written otherwise in {', '.join(sources)}"
        )


def test_every_plain_version_is_quoted() -> None:
    """By some story that names its module."""
    quoted = {
        (str(path.relative_to(ROOT)), name)
        for number in NUMBERS
        for name, text in quotes(story(number))
        for path in named_files(number)
        if functions(path).get(name) == text
    }
    assert len(plain_versions()) > 30
    assert not set(plain_versions()) - quoted


def test_a_block_is_taken_apart_by_function() -> None:
    text = "```python\ndef plain_a(x):\n    return x\n\n\ndef plain_b(x):\n    return 2 * x\n```\n"
    assert quotes(text) == [
        ("plain_a", "def plain_a(x):\n    return x"),
        ("plain_b", "def plain_b(x):\n    return 2 * x"),
    ]
