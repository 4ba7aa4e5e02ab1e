"""Grade an exercise in a process of its own. The process that shows and keeps the grade never runs
the student's code: code that exits, prints "passed" or changes the grader gets no points by it.

    grade_apart("03", check_file, exercise_file)    # as grading.grade; also what the code printed
"""

import io
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

import msgspec

from minidist.files import read_regular
from minidist.grading import MOST_SOURCE, Grade, Result, grade, require_own_file
from minidist.launch.own_python import module_command

LIMIT = 600.0  # seconds of a whole check; each wait inside has a shorter one
MOST_PRINTED = 1 << 16  # characters of what a student's code printed


class GradedApart(NamedTuple):
    """A grade, and the first MOST_PRINTED characters that the code printed while it was graded."""

    grade: Grade
    printed: str


class FirstPrints(io.TextIOBase):
    """A stdout that keeps the first MOST_PRINTED characters and drops the others."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text[: MOST_PRINTED - len(self.text)]
        return len(text)


def grade_apart(
    number: str, check_file: Path, exercise_file: Path, *, limit: float = LIMIT
) -> GradedApart:
    """Return the grade of `exercise_file`, as grading.grade does, made by another process.

    Args:    limit: seconds until that process is ended.
    Raises:  ConfigError if the exercise is missing or no Python file.
    """
    require_own_file(number, exercise_file)
    with tempfile.TemporaryDirectory(prefix="minidist-check-") as folder:
        report = Path(folder) / "grade.json"
        words = (number, str(check_file), str(exercise_file), str(report))
        try:
            done = subprocess.run(
                module_command("minidist.graded_apart", *words),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            met = f"no end within {limit:g} s"
            return _no_grade(
                number, exercise_file, met, "it never ends", "look for an endless loop"
            )
        try:
            return msgspec.json.decode(read_regular(report, most=MOST_SOURCE), type=GradedApart)
        except (OSError, msgspec.MsgspecError):
            met = _end_of(done.returncode)
            advice = "let your functions return"
            return _no_grade(number, exercise_file, met, "it ended the process", advice)


def _no_grade(number: str, exercise_file: Path, met: str, mistake: str, advice: str) -> GradedApart:
    result = Result("your code", False, "an end of every task", met, mistake, advice)
    return GradedApart(Grade(number, str(exercise_file), (result,)), "")


def _end_of(status: int) -> str:
    """Return how a process ended, in words."""
    if status >= 0:
        return f"an exit with status {status} before the end of the check"
    return f"an end by {signal.Signals(-status).name}"


def _main(number: str, check_file: str, exercise_file: str, report: str) -> None:
    with redirect_stdout(FirstPrints()) as kept:
        found = grade(number, Path(check_file), Path(exercise_file))
    Path(report).write_bytes(msgspec.json.encode(GradedApart(found, kept.text)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
