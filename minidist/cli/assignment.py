"""`minidist assignment 1 --student ID --copy DIR`: write an assignment whose numbers are drawn for
one student; with a filled FILE: grade it.

    minidist assignment                                   # the assignments
    minidist assignment 1 --student anna --copy .         # writes assignment_1.py
    minidist assignment 1 assignment_1.py --student anna  # grades it; 0 passed, 1 not yet

What is drawn is a function of the assignment, --course and --student only. Two courses with other
texts for --course have other numbers.
"""

import argparse
import ast
import shlex
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

from minidist import holes
from minidist.cli.check import show, show_printed
from minidist.cli.gradescope import add_grading_arguments, graded_and_written
from minidist.cli.language import add_language_argument, language
from minidist.cli.lesson import write_new
from minidist.console import fail, shown, whole_number, write_json
from minidist.files import check_writable, scratch
from minidist.lessons.phrases import Say, translated
from minidist.reading import visible

if TYPE_CHECKING:  # it loads the planner, which only an assignment needs
    from minidist.lessons.assignments import Assignment

MOST_LETTERS = 200  # of a student's and of a course's name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist assignment` to the parser."""
    parser.add_argument(
        "number", nargs="?", type=whole_number(1, 99), help="1, 2 or 3; left out: list them"
    )
    parser.add_argument("file", nargs="?", help="your filled assignment: grade it")
    parser.add_argument("--student", metavar="ID", help="whose: the name or number in the course")
    parser.add_argument(
        "--course",
        default="",
        metavar="TEXT",
        help="the course's text, as the teacher gives it (default: none)",
    )
    parser.add_argument("--copy", metavar="DIR", help="write the file with holes to DIR")
    parser.add_argument("--json", metavar="FILE", help="write the grade as JSON")
    add_grading_arguments(parser)
    add_language_argument(parser)


def run(args: argparse.Namespace) -> int:
    """List, write or grade. Returns: 0, or 1 for a file that does not pass. Raises: ConfigError."""
    from minidist.lessons import assignments

    chosen = language(args)
    if args.number is None:
        for number, title in assignments.titles(chosen):
            print(f"{number}  {title}")
        print("minidist assignment 1 --student ID --copy DIR writes yours")
        return 0
    if args.student is None:
        fail("whose assignment? give --student ID, the name or number that the course has for you")
    student = _name("--student", args.student)
    course = _name("--course", args.course) if args.course else ""
    if bool(args.file) == bool(args.copy):
        fail("give a FILE to grade, or --copy DIR to write the file with holes: one of the two")
    found = assignments.assignment(args.number, student=student, course=course, language=chosen)
    if args.copy:
        target = Path(args.copy) / f"assignment_{args.number}.py"
        name = write_new(target, found.task_file)
        options = _options(student, course)
        print(f"{name}: fill its holes, then: minidist assignment {args.number} {name} {options}")
        return 0
    check_writable("--json", args.json)
    say = assignments.phrases().say if chosen == "zh" else str
    return _grade(args, found, student, course, say)


def _name(option: str, text: str) -> str:
    """Return the name of a student or a course without spaces around it. Raises: ConfigError.

    A letter with an accent is one character, however the system writes it.
    """
    name = unicodedata.normalize("NFC", text.strip())
    plain = name and visible(name) == name and not {*'"\\'} & {*name}
    if not plain or len(name) > MOST_LETTERS:
        fail(f"{option} {shown(text)}: give letters and digits, at most {MOST_LETTERS}")
    return name


def _options(student: str, course: str) -> str:
    """Return the options by which a student's assignment is graded."""
    return shlex.join(["--student", student, *(["--course", course] if course else [])])


def _grade(
    args: argparse.Namespace, found: "Assignment", student: str, course: str, say: Say
) -> int:
    """Grade a file as `minidist check` does, by the two files that a lesson has: the exercise with
    holes, and what grades it."""
    with scratch() as folder:
        (folder / "exercise.py").write_text(found.task_file, encoding="utf-8")
        (folder / "check.py").write_text(
            "from minidist.lessons.assignments import assignment\n\n"
            f"TASKS = assignment({args.number}, student={student!r}, course={course!r}).tasks\n",
            encoding="utf-8",
        )
        grade, printed = graded_and_written(
            args,
            f"assignment_{args.number}",
            folder / "check.py",
            Path(args.file),
            part=f"assignment {args.number}",
            tasks=holes.tasks(ast.parse(found.task_file)),
            start=f"minidist assignment {args.number} {_options(student, course)} --copy DIR",
            say=say,
        )
    show_printed(printed)
    show(translated(grade, say), say(f"Assignment {args.number}") + f" · {found.title}", say)
    if args.json:
        write_json(args.json, grade.as_json())
    return 0 if grade.passed else 1
