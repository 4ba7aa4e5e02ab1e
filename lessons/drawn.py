"""Make every figure and printed block of the documents again, and list those older than their code.

    python -m minidist.lessons.drawn                  # which are older, and what has changed since
    python -m minidist.lessons.drawn --redraw 03 07   # record runs, draw and print in place,
                                                      Mermaid too; or: all
    python -m minidist.lessons.drawn --same 03        # looked at: the change does not show
    python -m minidist.lessons.drawn --later 07       # known to be older: to be made again on a
                                                      quiet machine

Each command takes `--only figures`, `printed` or `measured`. Printed blocks take seconds, and are
the same on every machine. Measured blocks need a quiet machine: --redraw makes them only where
--only asks for them.

A figure shows the code of its script, of the files that the script loads from its lesson, and of
the modules in the head of the story; a printed block (printed.py) that of its command's script.
Comments, docstrings and blank lines do not count. `drawn.json` and `printed.json` keep a digest of
each file, and of what was made, from the time when it was made; tests compare them.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from minidist import lessons
from minidist.console import Parser, fail
from minidist.lessons import printed
from minidist.lessons.stamps import (
    ShownThing,
    Stamp,
    changed,
    digest,
    digests,
    label,
    read_stamps,
    shown_code,
    write_stamps,
)

STAMPS = lessons.FOLDER / "drawn.json"
SCRIPTS = ("figure.py", "hosts.py")


class FigureScript:
    """A script of a lesson that draws pictures: a shown thing."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.name = label(script)
        self.folder = script.parent

    def stamp(self) -> Stamp:
        """Return the stamp of a figure that was drawn, or looked at, just now."""
        return {
            "code": digests(shown_code(self.script)),
            "pictures": {file.name: digest(file) for file in pictures(self.script)},
        }

    def renew(self) -> bool:
        """Record a run and draw in place. Returns: whether it could be drawn."""
        print(f"{self.name} …", flush=True)
        before = {picture: picture.stat().st_mtime_ns for picture in pictures(self.script)}
        ended = subprocess.call([sys.executable, str(self.script), "--out", str(self.folder)])
        return ended == 0 and all(
            picture.stat().st_mtime_ns > moment for picture, moment in before.items()
        )


def figures() -> list[FigureScript]:
    """Return every script that draws pictures of a lesson."""
    return [
        FigureScript(lesson.part(name))
        for lesson in lessons.every_lesson()
        for name in SCRIPTS
        if lesson.part(name).is_file()
    ]


def pictures(script: Path) -> list[Path]:
    """Return the files that the script draws: those of its own name; for figure.py those of no
    other script."""
    others = {name.removesuffix(".py") for name in SCRIPTS} - {"figure"}
    there = sorted(path for path in script.parent.iterdir() if path.suffix in (".png", ".mmd"))
    drawn_by = {path: path.name.split(".")[0] for path in there}  # hosts.zh.png: hosts
    return [
        path
        for path, stem in drawn_by.items()
        if (stem == script.stem if script.stem in others else stem not in others)
    ]


def mark(file: Path, things: list[ShownThing], arguments: argparse.Namespace) -> list[str]:
    """Make these things again, or only stamp them. Return the names of those that failed; their
    stamps stay.

    Stamps of things that no longer exist are removed.
    """
    numbers = arguments.redraw or arguments.same or arguments.later
    folders = (
        {lesson.folder for lesson in lessons.every_lesson()}
        if numbers == ["all"]
        else {lessons.find(number).folder for number in numbers}
    )
    there = {thing.name for _, other, every in every_thing() if other == file for thing in every}
    kept = {name: stamp for name, stamp in read_stamps(file).items() if name in there}
    failed = []
    for thing in things:
        if thing.folder not in folders:
            continue
        if arguments.later:
            kept[thing.name] = {**kept.get(thing.name, {}), "older": True}
        elif arguments.redraw and not thing.renew():
            failed.append(thing.name)
        else:
            kept[thing.name] = stamped(thing)
        write_stamps(file, kept)
    return failed


def stamped(thing: ShownThing) -> Stamp:
    """Return a thing's stamp now, computed without cached digests."""
    digest.cache_clear()
    return thing.stamp()


def every_thing() -> list[tuple[str, Path, list[ShownThing]]]:
    """Return (kind, the file of its stamps, its things) of all that the documents show."""
    blocks = printed.every_printout()
    return [
        ("figures", STAMPS, [*figures()]),
        ("printed", printed.STAMPS, [found for found in blocks if not found.measured]),
        ("measured", printed.STAMPS, [found for found in blocks if found.measured]),
    ]


def tell(file: Path, things: list[ShownThing]) -> None:
    """Print one line per thing: whether it is as its code is."""
    kept = read_stamps(file)
    for thing in things:
        told = kept.get(thing.name, {})
        files = changed(thing, told)
        state = "as its code is" if not files else "older, known" if told.get("older") else "OLDER"
        print(
            f"{thing.name}: "
            f"{state}{': ' * bool(files)}{', '.join(files[:4])}{' …' * (len(files) > 4)}"
        )


def main() -> int:
    """List the figures and printed blocks that are older; with an option, make them again or stamp
    them."""
    parser = Parser(
        prog="python -m minidist.lessons.drawn",
        description="Figures, printed blocks, and their age.",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--redraw", nargs="+", metavar="NN", help="draw and print those of these lessons; or: all"
    )
    choice.add_argument(
        "--same", nargs="+", metavar="NN", help="looked at: the change does not show"
    )
    choice.add_argument(
        "--later", nargs="+", metavar="NN", help="known to be older: to be made again later"
    )
    parser.add_argument(
        "--only",
        choices=("figures", "printed", "measured"),
        help="of these alone (default: all, but --redraw leaves measured blocks as they are)",
    )
    arguments = parser.parse_args()
    if not STAMPS.is_file():
        fail(f"there is no {STAMPS}; run in a checkout of the repository")
    failed = []
    for kind, file, things in every_thing():
        if not (arguments.redraw or arguments.same or arguments.later):
            tell(file, things)
        elif kind == (arguments.only or kind) and (
            kind != "measured" or arguments.only or not arguments.redraw
        ):
            failed += mark(file, things, arguments)
    print(
        "".join(f"{name} failed: what it makes may be half old, half new\n" for name in failed),
        end="",
    )
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
