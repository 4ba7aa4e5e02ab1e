"""Write and read results.json, the file in which a Gradescope autograder leaves its marks: one test
per hole.

    results = results_of(grade, tasks, part="lesson 03", points=1, seconds=4.2)
    write_results("results.json", results)
    read_results("results.json")       # also those of another autograder

The keys are those of Gradescope's "Autograder Specifications". A file without "score" gets the sum
of its tests. `extra_data` keeps the part, "lesson 03" or "assignment 1", for `minidist cohort`.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from minidist.console import positive_number, written
from minidist.errors import ConfigError
from minidist.files import as_utf8, check_writable
from minidist.graded_apart import LIMIT, GradedApart, grade_apart
from minidist.grading import Grade, Result, require_python
from minidist.lessons.phrases import Say, translated
from minidist.progress import progress
from minidist.reading import Finite, NotNegative, converted, read_json, visible

MOST_BYTES = 1 << 24  # of a results file
MOST_OUTPUT = 2000  # characters of a test's output that we write
Text = Annotated[str, msgspec.Meta(max_length=1 << 20)]


class HoleTest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One test of a results file: one hole of ours. Attributes: as Gradescope names them."""

    score: Finite | None = None
    max_score: NotNegative | None = None
    status: Text | None = None
    name: Text = ""
    number: Text | int | float | None = None
    output: Text = ""
    visibility: Text = ""


class Results(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A results file. Attributes: as Gradescope names them; `score`, if there, stands for the sum
    of the tests."""

    score: Finite | None = None
    execution_time: NotNegative | None = None
    output: Text = ""
    visibility: Text = ""
    extra_data: dict[str, Any] = {}
    tests: Annotated[list[HoleTest], msgspec.Meta(max_length=10_000)] = []

    @property
    def part(self) -> str:
        """Return the part of the course: "lesson 03", "assignment 1"; "" if the file does not
        say."""
        part = self.extra_data.get("part", "")
        return part if isinstance(part, str) else ""

    @property
    def points(self) -> float:
        """Return the points reached."""
        if self.score is not None:
            return self.score
        return sum(test.score or 0.0 for test in self.tests)


def add_grading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check` and `assignment` share."""
    parser.add_argument(
        "--gradescope",
        metavar="FILE",
        help="write the marks, one test per hole, as the results.json of a Gradescope autograder",
    )
    parser.add_argument(
        "--points",
        type=positive_number,
        metavar="N",
        help="with --gradescope: points per hole (default: 1)",
    )
    parser.add_argument(
        "--limit",
        type=positive_number,
        default=LIMIT,
        metavar="SECONDS",
        help=f"the most that the whole check may take (default: {LIMIT:g})",
    )


def graded_and_written(
    args: argparse.Namespace,
    number: str,
    check_file: Path,
    exercise_file: Path,
    *,
    part: str,
    tasks: Mapping[int, str],
    start: str,
    say: Say = str,
) -> GradedApart:
    """Grade a file in its own process, within --limit; write the marks if --gradescope asks.

    Args:    part: what is graded, "lesson 03". tasks: the task of each hole. start: the command
             that writes the file with holes. say: tells the marks in the reader's language.
    Raises:  ConfigError for bad options. A file that is missing or no Python text: with
             --gradescope it gets no points, else ConfigError.
    """
    if args.points is not None and args.gradescope is None:
        raise ConfigError(
            "--points goes with --gradescope: it says what a hole of results.json counts"
        )
    check_writable("--gradescope", args.gradescope)
    began = time.monotonic()
    try:
        require_python(exercise_file, f"start with: {start}")
        with progress(f"grading {part}"):
            found = grade_apart(number, check_file, exercise_file, limit=args.limit)
    except ConfigError as error:
        if args.gradescope is None:
            raise
        unread = Result("your file", False, "a Python file", "none", str(error))
        found = GradedApart(Grade(number, str(exercise_file), (unread,)), "")
    if args.gradescope:
        seconds = time.monotonic() - began
        points = 1.0 if args.points is None else args.points
        results = results_of(found.grade, tasks, part=part, points=points, seconds=seconds, say=say)
        write_results(args.gradescope, results)
    return found


def results_of(
    grade: Grade,
    tasks: Mapping[int, str],
    *,
    part: str,
    points: float,
    seconds: float,
    say: Say = str,
) -> Results:
    """Return the marks of a grade: `points` per right hole; `say` tells them.

    A passed grade has every hole right. A grade that names no holes has none right: the mistake
    lies outside of them, the file is not the student's work, or it ended before its check did.
    """
    grade = translated(grade, say)
    states = {hole.number: hole for hole in grade.holes}
    first = grade.results[-1].line(say) if grade.results else say("nothing was graded")
    tests = []
    for number, task in tasks.items():
        hole = states.get(number)
        right = grade.passed or (hole is not None and hole.state == "right")
        if right:
            told = say("right")
        elif hole is None:
            told = first
        else:
            told = hole.result.line(say) if hole.result else say("not filled yet")
        tests.append(
            HoleTest(
                score=points if right else 0.0,
                max_score=points,
                status="passed" if right else "failed",
                name=f"{say(f'hole {number}')}{say(': ')}{say(task)}",
                number=str(number),
                output=_one_line(told),
                visibility="visible",
            )
        )
    passed = say(f"passed: all {len(tasks)} holes")
    return Results(
        execution_time=round(seconds, 3),
        output=_one_line(passed if grade.passed else first),
        visibility="visible",
        extra_data={"part": part},
        tests=tests,
    )


def _one_line(text: str) -> str:
    """Return a text as one line of visible letters, which may be an exception's text."""
    return visible(" ".join(text.split()))[:MOST_OUTPUT]


def write_results(file: str, results: Results) -> None:
    """Write a results file, whole or not at all. Raises: as console.written."""
    text = json.dumps(msgspec.to_builtins(results), indent=1, ensure_ascii=False)
    with written("--gradescope", file) as draft:
        draft.write_bytes(as_utf8(text + "\n"))


def read_results(file: Path) -> Results:
    """Return the content of a results file. Raises: OSError, ConfigError as reading.read_json."""
    found = converted(read_json(file, most=MOST_BYTES), Results)
    assert isinstance(found, Results)
    if found.score is None and not found.tests:
        raise ConfigError("it has neither tests nor a score, as a results file has")
    return found
