"""`minidist lesson`: list the lessons, print one, run it, break it, draw its figure, or copy its
exercise."""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from minidist import lessons
from minidist.cli import passed
from minidist.cli.language import add_language_argument, language
from minidist.cli.story import Story, fit_words, for_terminal
from minidist.console import fail, folder_to_write, rank_count, require_memory, shown, write_json
from minidist.files import DISK_FAILED, check_writable, whole
from minidist.grading import load_module
from minidist.holes import blank
from minidist.lessons import Lesson
from minidist.lessons.finding import find_places
from minidist.lessons.notebook import notebook_text
from minidist.lessons.page import page_console
from minidist.lessons.phrases import phrases_of, with_tasks
from minidist.progress import progress
from minidist.reading import visible

LEVELS = ("holes", "blank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist lesson` to the parser."""
    parser.add_argument(
        "lesson",
        nargs="?",
        help="the lesson's number, e.g. 03; or a line of the notes (N2:398) or a word, to find its "
        "lesson; left out: the table of lessons",
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "-n",
        "--ranks",
        type=rank_count,
        metavar="N",
        help="run the lesson on N ranks of this machine",
    )
    one.add_argument("--answers", action="store_true", help="print the quiz's answers too")
    one.add_argument(
        "--figure", action="store_true", help="record a run and draw the lesson's figure from it"
    )
    one.add_argument(
        "--break", dest="broken", metavar="NAME", help="run one of the story's 'Break it'"
    )
    one.add_argument("--copy", metavar="DIR", help="copy the exercise to DIR, to work on it there")
    one.add_argument(
        "--notebook",
        metavar="DIR",
        nargs="?",
        const=".",
        help="write the lesson as a Jupyter notebook to DIR (default: the current folder)",
    )
    parser.add_argument(
        "--level",
        choices=LEVELS,
        help="with --copy: holes leaves the code around each hole (the default), blank only the head "
        "of each function",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where --figure writes, a folder that is made if need be (default: figures/NN_name)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the table of lessons, or the run's tables, as JSON"
    )
    add_language_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Do what the options request. Returns: the exit status of the run, or 0.

    Raises: ConfigError for an unknown lesson, a rank count below 1, or a place that cannot be
            written.
    """
    _check_fit(args)
    check_writable("--json", args.json)
    if args.lesson is None:
        return _list(args.json, language(args))
    if not re.fullmatch(r"[0-9]+(_.*)?", args.lesson) and not _options_given(args):
        return _find(args.lesson)
    lesson = lessons.find(args.lesson)
    if args.copy:
        return _copy(lesson, Path(args.copy), language(args), is_blank=args.level == "blank")
    if args.notebook:
        return _notebook(lesson, Path(args.notebook), language(args))
    if args.figure:
        return _figure(lesson, args.out)
    if args.broken:
        return _break(lesson, args.broken)
    if args.ranks is not None or args.json:
        return _run(lesson, args.ranks or 1, args.json)
    told = for_terminal(lesson, answers=args.answers, language=language(args))
    page_console().print(Story(told))
    return 0


def _check_fit(args: argparse.Namespace) -> None:
    """Raise ConfigError for an option that does not fit.

    The parser refuses two actions, e.g. --figure --copy.
    """
    given = _options_given(args)
    if args.lesson is None and given:
        fail(f"{given[0]} needs the number of a lesson, e.g. minidist lesson 03 {given[0]}")
    if args.out is not None and not args.figure:
        fail("--out goes with --figure: it says where the figure is written")
    if args.level is not None and not args.copy:
        fail("--level goes with --copy: it says how much of the exercise is copied")
    if args.json is not None and given and given != ["-n"]:
        fail(
            f"--json does not go with {given[0]}: it writes the table of lessons, or the tables "
            "of a run"
        )


def _options_given(args: argparse.Namespace) -> list[str]:
    """Return the options that only one lesson takes."""
    named = {
        "-n": args.ranks,
        "--answers": args.answers,
        "--figure": args.figure,
        "--break": args.broken,
        "--copy": args.copy,
        "--notebook": args.notebook,
        "--level": args.level,
        "--out": args.out,
    }
    return [option for option, value in named.items() if value not in (None, False)]


def _find(question: str) -> int:
    """Print where a line of the notes or a word is worked through; return 0."""
    found = find_places(question)
    if not found:
        fail(
            f"there is no lesson with {shown(question[:60])}; minidist lesson lists them, "
            "minidist lesson N2:398 finds that of a line of the notes"
        )
    table = Table("where", "section", "lessons", header_style="bold cyan")
    for place in found:
        table.add_row(place.where, escape(place.title), ", ".join(place.lessons) or "none")
    console = page_console()
    console.print(table)
    first = next((place.lessons[0] for place in found if place.lessons), None)
    if first is not None:
        console.print(f"read it:  minidist lesson {first}", markup=False)
    return 0


def _list(file: str | None, chosen: str) -> int:
    """Print the table of lessons, with their modules if the terminal is wide enough; return 0."""
    there = lessons.in_order()
    graded = passed.when()
    begun = passed.begun()
    console = page_console()
    rows = [
        [
            lesson.number,
            f"{lesson.title_in(chosen)}\n{lesson.notes}",
            str(lesson.minutes),
            " ".join(lesson.after),
            graded.get(lesson.number) or _left(begun.get(lesson.number)),
            "\n".join(lesson.modules),
        ]
        for lesson in there
    ]
    if (table := _table(rows, console.width)) is None:
        _print_blocks(console, rows)
    else:
        console.print(table)
    console.print(_progress(there, graded), markup=False)
    console.print(
        "min: about how many minutes, by length; after: the lessons it builds on; passed: when its "
        "check did, or how many holes are left\n"
        "minidist lesson 03 reads one, minidist lesson 03 -n 4 runs it, minidist check 03 "
        "grades it",
        style="dim",
    )
    if file:
        write_json(
            file,
            {
                "lessons": [
                    {
                        "lesson": lesson.number,
                        "title": lesson.title,
                        "notes": lesson.notes,
                        "module": lesson.module,
                        "folder": str(lesson.folder),
                        "minutes": lesson.minutes,
                        "after": lesson.after,
                        "passed": graded.get(lesson.number),
                        "left": begun.get(lesson.number, [None])[0],
                    }
                    for lesson in there
                ]
            },
        )
    return 0


def _left(state: tuple[int, int] | None) -> str:
    """Return how much of a half-done exercise is left, as a cell of the table."""
    return "" if state is None else f"{state[0]} of {state[1]} left"


def _progress(there: list[Lesson], graded: Collection[str]) -> str:
    """Return one line: how many checks are passed, and which lesson is next: the first that builds
    only on passed ones."""
    left = [lesson for lesson in there if lesson.number not in graded]
    if not left:
        return f"passed: all {len(there)}"
    ready = [lesson for lesson in left if set(lesson.after) <= set(graded)] or left
    following = f"next: {ready[0].number}, {ready[0].title}"
    return f"passed: {len(there) - len(left)} of {len(there)}; {following}"


def _table(rows: list[list[str]], width: int) -> Table | None:
    """Return the table of lessons, without modules if their paths do not fit.

    None if even single words do not fit.
    """
    names = ["lesson", "title and notes", "min", "after", "passed", "module"]
    for count in (len(names), len(names) - 1):
        table = Table(
            *(Column(name, overflow="fold", no_wrap=name == "passed") for name in names[:count]),
            title="Lessons",
            title_justify="left",
            header_style="bold cyan",
        )
        if not fit_words(table, [row[:count] for row in [names, *rows]], width):
            continue
        for row in rows:
            title, notes = map(escape, row[1].split("\n"))
            told = f"{title}\n[dim]{notes}[/dim]"
            table.add_row(row[0], told, *row[2:count])
        return table
    return None


def _print_blocks(console: Console, rows: list[list[str]]) -> None:
    """Print the lessons one below the other, for a terminal too narrow for the words of the
    table."""
    for number, told, minutes, after, graded, _ in rows:
        title, notes = told.split("\n")
        facts = [f"{minutes} min"]
        facts += [f"after {after}"] if after else []
        facts += [f"passed {graded}"] if graded else []
        console.print(f"[bold]{number}[/bold]")
        told = f"[bold]{escape(title)}[/bold]\n{escape(notes)}\n[dim]{', '.join(facts)}[/dim]"
        console.print(Padding(told, (0, 0, 0, 4)))


def _run(lesson: Lesson, ranks: int, file: str | None) -> int:
    """Run the lesson's script on `ranks` ranks started here; return its exit status."""
    argv = [
        sys.executable,
        str(lesson.part("lesson.py")),
        *(["--json", os.path.realpath(file)] if file else []),
    ]
    if ranks == 1:
        return subprocess.call(argv)
    require_memory(f"a lesson on {ranks} ranks", 0, processes=ranks)
    from minidist.launch import spawn

    return spawn(argv, ranks)


def _figure(lesson: Lesson, out: str | None) -> int:
    """Draw the lesson's figure from a new run; the figure shipped with the lesson is kept."""
    try:
        folder = ["--out", str(folder_to_write(out))] if out is not None else []
    except argparse.ArgumentTypeError as error:
        fail(f"--out: {error}")
    argv = [sys.executable, str(lesson.part("figure.py")), *folder]
    with progress(f"drawing the figure of lesson {lesson.number} from a run of its own"):
        drawing = subprocess.run(
            argv, stdout=subprocess.PIPE, text=True, errors="replace", check=False
        )
    print(drawing.stdout, end="")
    return drawing.returncode


def _break(lesson: Lesson, name: str) -> int:
    """Run one of the lesson's experiments, as `lesson.py --break NAME` does."""
    known = load_module(lesson.part("lesson.py"), lesson.number).BREAKS
    if name not in known:
        fail(
            f"lesson {lesson.number} has no --break {shown(name)}; choose one of {', '.join(known)}"
        )
    return subprocess.call([sys.executable, str(lesson.part("lesson.py")), "--break", name])


def _copy(lesson: Lesson, folder: Path, chosen: str, *, is_blank: bool) -> int:
    """Copy the exercise to `folder`, with its tasks in the `chosen` language, or only the heads of
    its functions; an existing file is never overwritten."""
    exercise = lesson.part("exercise.py").read_text(encoding="utf-8")
    if chosen == "zh":
        exercise = with_tasks(exercise, phrases_of(lesson).say)
    target = folder / f"exercise_{lesson.number}.py"
    name = write_new(target, blank(exercise) if is_blank else exercise)
    print(f"{name}: fill its holes, then: minidist check {lesson.number} {name}")
    return 0


def _notebook(lesson: Lesson, folder: Path, chosen: str) -> int:
    """Write the lesson as a notebook to `folder`; an existing file is never overwritten."""
    target = folder / f"{lesson.folder.name}.ipynb"
    name = write_new(target, notebook_text(lesson, chosen))
    print(f'{name}: open it, e.g. with jupyter lab (pip install "minidist[notebook]")')
    return 0


def write_new(target: Path, text: str) -> str:
    """Write a student's file, into a folder that is made if need be; return its name as it is
    shown. Raises: ConfigError if it is there, or cannot be written; OSError if the disk is full."""
    if os.path.exists(target):
        fail(f"{target} is already there; choose another folder or move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole(target) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in DISK_FAILED:
            raise
        fail(f"cannot write {shown(str(target))[1:-1]}: {error.strerror}")
    return visible(str(target))
