"""`minidist check 03 [FILE]`: grade the exercise of a lesson; exit status 0 passed, 1 not yet, 2
bad input."""

import argparse
import ast
from pathlib import Path

from rich.markup import escape
from rich.table import Column, Table

from minidist import holes, lessons
from minidist.cli import passed
from minidist.cli.gradescope import add_grading_arguments, graded_and_written
from minidist.cli.language import add_language_argument, language
from minidist.console import write_json
from minidist.files import check_writable
from minidist.grading import Grade
from minidist.lessons.page import page_console
from minidist.lessons.phrases import Say, phrases_of, translated
from minidist.reading import visible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist check` to the parser."""
    parser.add_argument("lesson", help="the lesson's number, e.g. 03")
    parser.add_argument(
        "file",
        nargs="?",
        help="your filled exercise (default: the exercise in the lesson's folder)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the grade as JSON")
    add_grading_arguments(parser)
    add_language_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Grade and print; return 0 if every task passed, else 1.

    Raises: ConfigError for an unknown lesson, or for a file that is no Python file.
    """
    lesson = lessons.find(args.lesson)
    check_writable("--json", args.json)
    file = Path(args.file) if args.file else lesson.part("exercise.py")
    chosen = language(args)
    say = phrases_of(lesson).say if chosen == "zh" else str
    template = ast.parse(lesson.part("exercise.py").read_text(encoding="utf-8"))
    result, printed = graded_and_written(
        args,
        lesson.number,
        lesson.part("check.py"),
        file,
        part=f"lesson {lesson.number}",
        tasks=holes.tasks(template),
        start=f"minidist lesson {lesson.number} --copy DIR",
        say=say,
    )
    show_printed(printed)
    show(
        translated(result, say),
        say(f"Lesson {lesson.number}") + f" · {lesson.title_in(chosen)}",
        say,
    )
    if result.passed:
        passed.keep(lesson.number)
    elif result.holes:
        left = sum(hole.state != "right" for hole in result.holes)
        if left < len(result.holes):
            passed.keep_begun(lesson.number, left, len(result.holes))
    if args.json:
        write_json(args.json, result.as_json())
    return 0 if result.passed else 1


def show_printed(printed: str) -> None:
    """Print what the student's code printed while it was graded."""
    if printed:
        print(f"your code printed:\n{visible(printed, keep=chr(10)).rstrip()}\n")


def show(result: Grade, title: str, say: Say = str) -> None:
    """Print the grade as a table with this title.

    Below it "passed", or the first mistake, the results of other holes, and what remains. `say`
    tells the words around the results in the reader's language.
    """
    console = page_console()
    table = Table(
        "",
        *(Column(say(name), overflow="fold") for name in ("task", "target", "measured")),
        title=title,
        title_justify="left",
        header_style="bold cyan",
    )
    for item in result.results:
        table.add_row(
            "[green]ok[/green]" if item.passed else "[bold red]no[/bold red]",
            item.task,
            escape(item.target),
            escape(item.measured),
        )
    console.print(table)
    if result.passed:
        console.print(say(f"passed: all {len(result.results)} tasks"), style="bold green")
        return
    first = result.results[-1] if result.results else None
    console.print(say("not yet"), style="bold yellow", end=say(": "))
    console.print(first.line(say) if first else say("nothing was graded"), markup=False)
    if first and first.picture:
        console.print(f"\n{first.picture}\n", markup=False, no_wrap=True, overflow="crop")
    for other in result.other_mistakes():
        console.print(other.line(say), markup=False)
    if any(hole.state != "open" for hole in result.holes):
        console.print(result.summary(say), markup=False)
