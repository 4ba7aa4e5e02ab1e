"""The age of what a document shows: digests of its code, from the time when it was made.

Figures (drawn.py) and printed blocks (printed.py) are *shown things*. A JSON file keeps a stamp of
each: the digest of each file of code that it shows, and of what was made. Comments, docstrings and
blank lines do not count.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from minidist import lessons
from minidist.files import whole

ROOT = lessons.FOLDER.parent
LOOK = {"figures", "page", "running", "drawn", "printed", "stamps"}
"""Modules of the lessons that change how a thing looks, not what it shows."""
ASIDE = {
    "cli",
    "comm.group",
    "console",
    "device.backend",
    "errors",
    "files",
    "grading",
    "lessons",
    "progress",
}
"""Rooms and modules of the library that every script imports, and no figure shows."""

Stamp = dict[str, Any]
"""{"code": {file: digest}, what was made: {name: digest}, "older": True where it is known to be
older}"""


class ShownThing(Protocol):
    """A figure's script, or a command and the blocks of one document that it prints."""

    name: str
    folder: Path
    """The lesson's, by which the command line calls it."""

    def stamp(self) -> Stamp:
        """Return the stamp of what was made, or looked at, just now."""

    def renew(self) -> bool:
        """Make it again, in place. Returns: whether it could be made."""


def label(file: Path) -> str:
    """Return a file's path from the root of the repository."""
    return file.relative_to(ROOT).as_posix()


def modules_of(number: str) -> set[Path]:
    """Return the modules in the head of a lesson's story."""
    found = set[Path]()
    for module in lessons.find(number).modules:
        path = ROOT / module
        found |= {*path.rglob("*.py")} if path.is_dir() else {path} if path.is_file() else set()
    return found


def imported(text: str) -> set[Path]:
    """Return the library's modules that a script imports by name, without those that change nothing
    that is shown."""
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    rooms = [name.split(".")[1:] for name in names if name.startswith("minidist.")]
    paths = [
        Path("minidist", *room) if room[0] != "kernels" else Path(*room)
        for room in rooms
        if not {room[0], ".".join(room)} & ASIDE
    ]
    return {file for path in paths if (file := ROOT / f"{path}.py").is_file()}


def shown_code(script: Path) -> list[Path]:
    """Return the files whose code a script of a lesson shows.

    They are the script, the files that it loads from the lessons, what these import of the library,
    and the lesson's modules.
    """
    found = set[Path]()
    library = set[Path]()
    left = [script]
    while left:
        file = left.pop()
        if file in found or not file.is_file():
            continue
        found.add(file)
        text = file.read_text(encoding="utf-8")
        library |= imported(text)
        left += [script.with_name(name) for name in re.findall(r'"(\w+\.py)"', text)]
        left += [
            lessons.FOLDER / f"{name}.py"
            for name in re.findall(r"\bminidist\.lessons(?:\.| import )(\w+)", text)
            if name not in LOOK
        ]
    return sorted(found | library | modules_of(script.parent.name))


STRING_OR_COMMENT = re.compile(
    r'''
    (""" (?:\\.|[^\\])*? """ | '{3} (?:\\.|[^\\])*? '{3} | " (?:\\.|[^"\\\n])* " | ' (?:\\.|[^'\\\n])* ') | \#[^\n]*
    ''',
    re.DOTALL | re.VERBOSE,
)


def significant(text: str) -> str:
    """Return a module's lines without comments, docstrings, blank lines and the spaces at their
    ends."""
    lines = STRING_OR_COMMENT.sub(lambda found: found[1] or "", text).split("\n")
    for node in _documented(ast.parse(text)):
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0].lineno - 1
            last = node.body[0].end_lineno or 0
            lines[first:last] = [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _documented(
    node: ast.AST,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the nodes of a module that may have a docstring, without searching expressions."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, name, ()) if not isinstance(node, ast.expr) else ():
            yield from _documented(child)


def digest_of(content: bytes) -> str:
    """Return eight hexadecimal digits of a digest."""
    return hashlib.sha256(content).hexdigest()[:8]


@cache
def digest(file: Path) -> str:
    """Return the digest of what counts in a file."""
    content = file.read_bytes()
    return digest_of(significant(content.decode()).encode() if file.suffix == ".py" else content)


def digests(files: list[Path]) -> dict[str, str]:
    """Return {path from the root: digest}."""
    return {label(file): digest(file) for file in files}


def read_stamps(file: Path) -> dict[str, Stamp]:
    """Return the file's {name: its stamp}."""
    found: dict[str, Stamp] = json.loads(file.read_text(encoding="utf-8"))
    return found


def write_stamps(file: Path, kept: dict[str, Stamp]) -> None:
    """Write the file: one line a thing."""
    lines = [
        f" {json.dumps(name)}: {json.dumps(kept[name], ensure_ascii=False)}"
        for name in sorted(kept)
    ]
    with whole(file) as draft:
        draft.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def changed(thing: ShownThing, kept: Stamp) -> list[str]:
    """Return what differs from the stamp: files of code that changed, were added or removed, and
    the same of what was made."""
    now = thing.stamp()
    return [
        name
        for part in now
        for name in sorted({*now[part], *kept.get(part, {})})
        if now[part].get(name) != kept.get(part, {}).get(name)
    ]


def older(things: list[ShownThing], kept: dict[str, Stamp]) -> dict[str, list[str]]:
    """Return {name: what changed since the stamp}, without the things that are known to be
    older."""
    found = {thing.name: changed(thing, kept.get(thing.name, {})) for thing in things}
    return {
        name: files
        for name, files in found.items()
        if files and not kept.get(name, {}).get("older")
    }
