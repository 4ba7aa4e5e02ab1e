"""Honest grades: an answer that takes the library's own, reaches around its exercise, ends the process
or changes the grader gets no points; a student's own code in any style does."""

import ast
import json
from pathlib import Path

import pytest
from filling import fill, right

from minidist import lessons
from minidist.cli import main
from minidist.graded_apart import MOST_PRINTED, grade_apart
from minidist.grading import grade, load_module
from minidist.own_work import borrowed

NUMBERS = [lesson.number for lesson in lessons.every_lesson()]
RING = lessons.find("03")
TEMPLATE = RING.part("exercise.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", NUMBERS)
def test_an_import_of_the_librarys_answer_is_refused_by_name(number: str, tmp_path: Path) -> None:
    check = load_module(lessons.find(number).part("check.py"), number)
    answers = getattr(check, "CUT_FROM", ()) or (check.grade,)
    file = tmp_path / "mine.py"
    file.write_text(f"from {answers[0].__module__} import {answers[0].__name__}\n")
    result = grade(number, lessons.find(number).part("check.py"), file)
    assert not result.passed
    assert f"import of {answers[0].__module__}.{answers[0].__name__}" in result.results[0].line()


@pytest.mark.parametrize("number", NUMBERS)
def test_the_right_answers_of_every_lesson_are_own_work(number: str) -> None:
    template = lessons.find(number).part("exercise.py").read_text(encoding="utf-8")
    assert borrowed(ast.parse(fill(template, right(number))), ast.parse(template)) is None


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import minidist.comm.collectives.ring as r", "import of minidist.comm.collectives.ring"),
        ("from minidist.grading import Result", "import of minidist.grading.Result"),
        ("import importlib", "import of importlib"),
        ("import os.path", "import of os.path"),
        ("from sys import modules", "import of sys.modules"),
        ("from . import ring", "import of ..ring"),
        ("x = __import__('minidist')", "call of __import__"),
        ("x = eval('1')", "call of eval"),
        ("x = open('/dev/null')", "call of open"),
        ("x = getattr(hole, '__glo' + 'bals__')", "call of getattr"),
        ("x = hole.__globals__", "private name .__globals__"),
        ("x = group._group.all_reduce", "private name ._group"),
        ("x = __builtins__", "name __builtins__"),
        ("f = exec", "call of exec"),
        ("np.allclose = lambda *arrays, **options: True", "change of np.allclose"),
        ("del np.linalg.norm", "change of np.linalg.norm"),
    ],
)
def test_a_way_around_the_exercise_is_named(code: str, named: str) -> None:
    source = f"import numpy as np\n{code}\n"
    assert borrowed(ast.parse(source), ast.parse(TEMPLATE)) == (2, named)


@pytest.mark.parametrize(
    "code",
    [
        "import math, itertools\nfrom collections import deque",
        "import numpy\nx = numpy.zeros(3)\nx[:] = numpy.roll(x, 1)",
        "from minidist.grading import hole",
        "import numpy as np\nclass Kept:\n    pass\nkept = Kept()\nkept.x = np.pi",
        "def _helper(index, size):\n    return index % size\nx = _helper(4, 3)",
        "if __name__ == '__main__':\n    print(plain_all_reduce)",
    ],
)
def test_own_code_in_any_style_is_allowed(code: str) -> None:
    assert borrowed(ast.parse(code), ast.parse(TEMPLATE)) is None


# ------------------------------------------------------------------- in a process of its own


def filled_ring(first: str) -> str:
    """Return the right answer of lesson 03, with other code in front."""
    return f"{first}\n{fill(TEMPLATE, right('03'))}"


def checked(source: str, folder: Path) -> tuple[int, dict]:
    """Return the status and the JSON of `minidist check 03`."""
    file = folder / "mine.py"
    file.write_text(source)
    status = main(["check", "03", str(file), "--json", str(folder / "grade.json")])
    return status, json.loads((folder / "grade.json").read_text())


def test_a_right_answer_passes_and_what_it_prints_stands_above(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = checked(filled_ring("print('passed: all 99 tasks')"), tmp_path)
    assert status == 0 and found["passed"]
    assert {result["mistake"] for result in found["results"]} == {""}
    assert capsys.readouterr().out.startswith("your code printed:\npassed: all 99 tasks\n\n")


def test_of_endless_prints_the_first_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(filled_ring("for _ in range(3_000): print('x' * 99)"))
    found, printed = grade_apart("03", RING.part("check.py"), file)
    assert found.passed and len(printed) == MOST_PRINTED


@pytest.mark.parametrize(
    ("code", "met"),
    [
        ("print('passed: all 15 tasks'); raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "import of os"),
        ("import minidist.grading as g; g.expect = None", "import of minidist.grading"),
        ("np = __builtins__", "name __builtins__"),
    ],
)
def test_code_that_exits_or_changes_the_grader_gets_no_points(
    code: str, met: str, tmp_path: Path
) -> None:
    status, found = checked(code + "\n", tmp_path)
    assert status == 1 and not found["passed"]
    assert met in found["results"][0]["measured"] and len(found["results"]) == 1


ENDS = """
import os, signal, time
def grade(exercise):
    {code}
    yield
"""


@pytest.mark.parametrize(
    ("code", "met"),
    [
        ("os._exit(0)", "an exit with status 0 before the end of the check"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "an end by SIGKILL"),
        ("time.sleep(60)", "no end within 2 s"),
    ],
)
def test_a_check_whose_process_ends_is_not_passed(code: str, met: str, tmp_path: Path) -> None:
    """As code does that reaches the process in a way that own_work.py does not know."""
    (tmp_path / "check.py").write_text(ENDS.format(code=code))
    (tmp_path / "mine.py").write_text("x = 1\n")
    found, printed = grade_apart("03", tmp_path / "check.py", tmp_path / "mine.py", limit=2.0)
    assert not found.passed and found.results[0].measured == met and printed == ""
