"""Three assignments whose tasks differ by student, so that no answer of a lesson fits.

    ring.py       1  an all-reduce on a ring that is drawn
    pipeline.py   2  1F1B with a twist that is drawn
    planning.py   3  a plan for a cluster and a model that are drawn
    draws.py         what is drawn is a function of the assignment, the course and the student

Each module offers drawn(draw), which returns the student's numbers; task_file(them), the Python
file with holes; and tasks(them), {hole: what grades it}. An answer is measured, and compared with
what the numbers make right: no module has a filled file. `minidist assignment` writes the file and
grades it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType

from minidist.errors import ConfigError
from minidist.grading import Tasks
from minidist.lessons.assignments import pipeline, planning, ring
from minidist.lessons.assignments.draws import StudentDraw

MODULES = {1: ring, 2: pipeline, 3: planning}


@dataclass(frozen=True)
class Assignment:
    """One student's assignment. Attributes: title; task_file: the text of the Python file with
    holes; tasks: {hole: what grades it}."""

    title: str
    task_file: str
    tasks: dict[int, Tasks]


def assignment(number: int, *, student: str, course: str = "") -> Assignment:
    """Return a student's assignment.

    Args:    course: any text, so that two courses, or two years, have other numbers.
    Raises:  ConfigError if there is no such assignment.
    """
    module = _module(number)
    numbers = module.drawn(StudentDraw(f"assignment {number}", course, student))
    return Assignment(
        module.TITLE, _signed(module.task_file(numbers), student), module.tasks(numbers)
    )


def titles() -> Iterable[tuple[int, str]]:
    """Return number and title of each assignment."""
    return [(number, str(module.TITLE)) for number, module in MODULES.items()]


def _module(number: int) -> ModuleType:
    if number not in MODULES:
        there = ", ".join(map(str, MODULES))
        raise ConfigError(f"there is no assignment {number}; choose one of {there}")
    return MODULES[number]


def _signed(text: str, student: str) -> str:
    """Return a task file with the student's name in place of its mark."""
    return text.replace("@STUDENT@", student)
