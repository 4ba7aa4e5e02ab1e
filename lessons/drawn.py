"""Every figure of the lessons, drawn by one command; and the figures that are older than the code they show.

    python -m minidist.lessons.drawn                  # which are older, and what has changed since
    python -m minidist.lessons.drawn --redraw 03 07   # record runs and draw in place, Mermaid blocks too; or: all
    python -m minidist.lessons.drawn --same 03        # looked at: the change does not show in the picture
    python -m minidist.lessons.drawn --later 07       # known to be older: to be redrawn on a quiet machine

A figure shows the code of its script, of the files that the script loads from its lesson, and of the modules in the
head of the story. Comments, docstrings and blank lines do not count. `drawn.json` keeps a digest of each of these files
from the time of the drawing, and of each picture; a test compares them.
"""

import argparse
import ast
import hashlib
import io
import json
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

from minidist import lessons
from minidist.console import Parser, fail
from minidist.files import whole

ROOT = lessons.FOLDER.parent
STAMPS = lessons.FOLDER / "drawn.json"
SCRIPTS = ("figure.py", "hosts.py")
LOOK = {"figures", "page", "running", "drawn"}      # they change how a figure looks, not what it shows

Stamp = dict[str, Any]
"""{"code": {file: digest}, "pictures": {name: digest}, "older": True where it is known to be older}"""


def scripts() -> list[Path]:
    """Every script that draws pictures of a lesson."""
    return [lesson.part(name) for lesson in lessons.every_lesson() for name in SCRIPTS if lesson.part(name).is_file()]


def label(file: Path) -> str:
    """A file's path from the root of the repository."""
    return file.relative_to(ROOT).as_posix()


def shown_code(script: Path) -> list[Path]:
    """The files whose code the script's figure shows."""
    found, left = set[Path](), [script]
    while left:
        file = left.pop()
        if file in found or not file.is_file():
            continue
        found.add(file)
        text = file.read_text(encoding="utf-8")
        left += [script.with_name(name) for name in re.findall(r'"(\w+\.py)"', text)]
        left += [lessons.FOLDER / f"{name}.py" for name in re.findall(r"\bminidist\.lessons(?:\.| import )(\w+)", text)
                 if name not in LOOK]
    for module in lessons.find(script.parent.name).module.split(", "):
        path = ROOT / module
        found |= {*path.rglob("*.py")} if path.is_dir() else {path} if path.is_file() else set()
    return sorted(found)


def pictures(script: Path) -> list[Path]:
    """The files that the script draws: those of its own name, and with figure.py those of no other script."""
    others = {name.removesuffix(".py") for name in SCRIPTS} - {"figure"}
    there = sorted(path for path in script.parent.iterdir() if path.suffix in (".png", ".mmd"))
    return [path for path in there if (path.stem == script.stem if script.stem in others else path.stem not in others)]


def significant(text: str) -> str:
    """A module's lines without comments, docstrings, blank lines and the spaces at their ends."""
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][:token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) \
                and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
            lines[first:last] = [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())


@cache
def digest(file: Path) -> str:
    """Eight hexadecimal digits of what counts in a file."""
    content = file.read_bytes()
    if file.suffix == ".py":
        content = significant(content.decode()).encode()
    return hashlib.sha256(content).hexdigest()[:8]


def stamps() -> dict[str, Stamp]:
    """{script: its stamp}, as drawn.json has them."""
    found: dict[str, Stamp] = json.loads(STAMPS.read_text(encoding="utf-8"))
    return found


def write_stamps(kept: dict[str, Stamp]) -> None:
    """Write drawn.json: one line a script."""
    lines = [f" {json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
    with whole(STAMPS) as draft:
        draft.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def stamp(script: Path) -> Stamp:
    """The stamp of a figure that was drawn, or looked at, just now."""
    return {"code": {label(file): digest(file) for file in shown_code(script)},
            "pictures": {file.name: digest(file) for file in pictures(script)}}


def changed(script: Path, kept: Stamp) -> list[str]:
    """What differs from the figure's stamp: files of code that changed, came or went, and pictures likewise."""
    now = stamp(script)
    return [name for part in ("code", "pictures") for name in sorted({*now[part], *kept.get(part, {})})
            if now[part].get(name) != kept.get(part, {}).get(name)]


def older(kept: dict[str, Stamp]) -> dict[str, list[str]]:
    """{script: what changed since its figure was drawn}, without the figures that are older and known to be."""
    found = {label(script): changed(script, kept.get(label(script), {})) for script in scripts()}
    return {name: files for name, files in found.items() if files and not kept.get(name, {}).get("older")}


def redraw(script: Path) -> bool:
    """Record a run and draw in place. Returns: whether it could be drawn."""
    print(f"{label(script)} …", flush=True)
    before = {picture: picture.stat().st_mtime_ns for picture in pictures(script)}
    ended = subprocess.call([sys.executable, str(script), "--out", str(script.parent)])
    return ended == 0 and all(picture.stat().st_mtime_ns > moment for picture, moment in before.items())


def chosen(numbers: list[str]) -> list[Path]:
    """The scripts of these lessons; of all for "all"."""
    folders = {lesson.folder for lesson in lessons.every_lesson()} if numbers == ["all"] else \
        {lessons.find(number).folder for number in numbers}
    return [script for script in scripts() if script.parent in folders]


def mark(arguments: argparse.Namespace) -> int:
    """Redraw, or stamp without drawing. Returns: 1 if a script failed; its stamp stays as it was."""
    kept, failed = stamps(), []
    for script in chosen(arguments.redraw or arguments.same or arguments.later):
        if arguments.later:
            kept[label(script)] = {**kept.get(label(script), {}), "older": True}
        elif arguments.redraw and not redraw(script):
            failed.append(label(script))
        else:
            digest.cache_clear()
            kept[label(script)] = stamp(script)
        write_stamps(kept)
    print("".join(f"{name} failed: its pictures may be half old, half new\n" for name in failed), end="")
    return int(bool(failed))


def main() -> int:
    """Say which figures are older; with an option, draw or stamp."""
    parser = Parser(prog="python -m minidist.lessons.drawn", description="The lessons' figures and their age.")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--redraw", nargs="+", metavar="NN", help="record runs of these lessons and draw; or: all")
    choice.add_argument("--same", nargs="+", metavar="NN", help="looked at: the change does not show in the picture")
    choice.add_argument("--later", nargs="+", metavar="NN", help="known to be older: to be redrawn later")
    arguments = parser.parse_args()
    if not STAMPS.is_file():
        fail(f"there is no {STAMPS}; run in a checkout of the repository")
    if arguments.redraw or arguments.same or arguments.later:
        return mark(arguments)
    kept = stamps()
    for script in scripts():
        told = kept.get(label(script), {})
        files = changed(script, told)
        state = "as its code is" if not files else "older, known" if told.get("older") else "OLDER"
        print(f"{label(script)}: {state}{': ' * bool(files)}{', '.join(files[:4])}{' …' * (len(files) > 4)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
