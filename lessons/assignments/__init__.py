"""Three assignments whose tasks differ by student, so that no answer of a lesson fits.

    ring.py       1  an all-reduce on a ring that is drawn
    pipeline.py   2  1F1B with a twist that is drawn
    planning.py   3  a plan for a cluster and a model that are drawn
    draws.py         what is drawn is a function of the assignment, the course and the student

Each module offers drawn(draw), which returns the student's numbers; task_file(them), the Python
file with holes; and tasks(them), {hole: what grades it}. An answer is measured, and compared with
what the numbers make right: no module has a filled file. `minidist assignment` writes the file and
grades it. texts.zh.toml has the Chinese of each TEXTS, zh.toml that of holes and grades.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from minidist.errors import ConfigError
from minidist.grading import Tasks
from minidist.lessons.assignments import pipeline, planning, ring
from minidist.lessons.assignments.draws import StudentDraw
from minidist.lessons.phrases import Phrases, folder_phrases, with_tasks
from minidist.reading import read_toml

MODULES = {1: ring, 2: pipeline, 3: planning}
CHINESE = Path(__file__).with_name("texts.zh.toml")


@dataclass(frozen=True)
class Assignment:
    """One student's assignment. Attributes: title; task_file: the text of the Python file with
    holes; tasks: {hole: what grades it}."""

    title: str
    task_file: str
    tasks: dict[int, Tasks]


def assignment(number: int, *, student: str, course: str = "", language: str = "en") -> Assignment:
    """Return a student's assignment.

    Args:    course: any text, so that two courses, or two years, have other numbers. language: of
             the title and of what the file says: "en" or "zh".
    Raises:  ConfigError if there is no such assignment.
    """
    module = _module(number)
    name = module.__name__.rpartition(".")[2]
    numbers = module.drawn(StudentDraw(f"assignment {number}", course, student))
    if language == "zh":
        told = with_tasks(module.task_file(numbers, read_toml(CHINESE)[name]), phrases().say)
    else:
        told = module.task_file(numbers)
    signed = told.replace("@STUDENT@", student)
    return Assignment(_title(module, language), signed, module.tasks(numbers))


def phrases() -> Phrases:
    """Return the Chinese of what the holes and the grades of all assignments say."""
    return folder_phrases(CHINESE.parent)


def titles(language: str = "en") -> Iterable[tuple[int, str]]:
    """Return number and title of each assignment."""
    return [(number, _title(module, language)) for number, module in MODULES.items()]


def _title(module: ModuleType, language: str) -> str:
    return phrases().say(module.TITLE) if language == "zh" else str(module.TITLE)


def _module(number: int) -> ModuleType:
    if number not in MODULES:
        there = ", ".join(map(str, MODULES))
        raise ConfigError(f"there is no assignment {number}; choose one of {there}")
    return MODULES[number]
