"""Exercises are cut from the plain versions of their chapters: the same names and lines, with holes
in them."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from filling import graded, right

from minidist import holes, lessons
from minidist.grading import answer_key, grade, load_module

NUMBERS = [lesson.number for lesson in lessons.every_lesson()]
NOT_CUT = {
    "01": "launching has no plain version: the exercise reads what launchers leave in the "
    "environment",
    "22": "its plain version is NumPy; the exercise has holes in kernels, which are written in C",
}
"""Exercises that are not cut from a plain version, and why."""

BEYOND = {
    "00": "the numbers of the memory account, and an evaluation that keeps nothing",
    "02": "the barrier, and what tree and ring take",
    "04": "hops, cuts, which ranks a machine has and which lead, and what both rings take",
    "05": "the two formulas of what goes through device 0",
    "06": "several servers: keys, a bound on how far a worker is ahead, and what a link carries",
    "07": "buckets that travel while backward runs, which is DDP's point",
    "08": "how rows are cut, and the traffic of each stage",
    "09": "a scale that finds itself, and overflows and norms of several ranks",
    "10": "which layers a rank has, bytes and idle time",
    "11": "1F1B is a list of instructions; GPipe's loop is the plain version",
    "12": "columns of whole heads, a bias, and the loss of a cut vocabulary",
    "13": "the zigzag, positions, and bytes",
    "14": "where the chunks of a vector lie",
    "15": "sums that travel while backward runs",
    "17": "places and groups of a mesh, one norm, the layout of axes",
    "18": "the gate, capacity, and both ways to balance",
    "19": "how large a segment is best",
    "20": "bytes in each memory, and moves that overlap with work",
    "21": "the density at which top-k gains nothing",
    "23": "the lower bound, the causes of a wait, and a link with priorities",
    "24": "where ranks lie, what a ring's busiest link carries, and MFU",
    "25": "the energy of a step under a power cap",
    "26": "the interval between saves",
}
"""What exercises ask beyond the plain version, in functions of their own."""


def template(number: str) -> ast.Module:
    return ast.parse(lessons.find(number).part("exercise.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_blank_exercise_has_heads_tasks_and_only_open_holes(number: str, tmp_path: Path) -> None:
    file = tmp_path / f"exercise_{number}.py"
    text = holes.blank(lessons.find(number).part("exercise.py").read_text(encoding="utf-8"))
    file.write_text(text, encoding="utf-8")
    given = holes.definitions(template(number))
    left = holes.definitions(ast.parse(text))
    for name, part in left.items():
        assert ast.get_docstring(part) == ast.get_docstring(given[name])
        assert getattr(part, "args", None) is None or ast.dump(part.args) == ast.dump(
            given[name].args
        )
    asked = re.sub(r"[\s#]+", "", text)
    for hole, task in holes.tasks(template(number)).items():
        assert re.sub(r"[\s#]+", "", f"{hole} {task}") in asked
    result = grade(number, lessons.find(number).part("check.py"), file)
    assert "fill hole" in result.results[-1].line(), result.results[-1].line()
    assert {hole.state for hole in result.holes} == {"open"}


def check_of(number: str):
    return load_module(lessons.find(number).part("check.py"), number)


@pytest.mark.parametrize("number", [number for number in NUMBERS if number not in NOT_CUT])
def test_an_exercise_is_the_plain_version_with_holes(number: str) -> None:
    """Names, arguments and every line outside the holes; annotations, docstrings and comments may
    differ."""
    check = check_of(number)
    parts = holes.definitions(template(number))
    inside = set[int]()
    assert check.CUT_FROM
    for plain in check.CUT_FROM:
        assert plain.__name__.lower().startswith("plain") and plain.__module__.startswith(
            "minidist."
        )
        found = holes.match(parts[plain.__name__], ast.parse(inspect.getsource(plain)).body[0])
        assert found is not None, (
            f"exercise {number} has other lines than {plain.__module__}.{plain.__name__}"
        )
        inside |= set(found)
    assert len(inside) >= 2
    asked = set(holes.tasks(template(number)))
    assert (number in BEYOND) == bool(asked - inside)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_function_of_a_plain_versions_name_is_cut_from_it(number: str) -> None:
    defined = holes.definitions(template(number))
    named = {name for name in defined if name.lower().startswith("plain") and "." not in name}
    assert named == {plain.__name__ for plain in getattr(check_of(number), "CUT_FROM", ())}
    assert bool(named) == (number not in NOT_CUT)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_hole_has_its_right_code_and_a_task(number: str) -> None:
    tree = template(number)
    asked = holes.tasks(tree)
    assert list(asked) == list(range(1, len(asked) + 1)) and all(
        len(task) > 10 for task in asked.values()
    )
    assert set(answer_key(check_of(number), tree)) == set(asked)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_story_says_how_many_holes_there_are(number: str) -> None:
    words = ["Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven"]
    story = lessons.find(number).part("README.md").read_text(encoding="utf-8")
    last = story.rpartition("Your turn")[2]
    assert f"\n{words[len(holes.tasks(template(number))) - 3]} holes" in last


@pytest.mark.parametrize("number", NUMBERS)
def test_two_holes_never_follow_each_other_as_statements(number: str) -> None:
    """It could not be told where the code of the first ends."""
    for node in ast.walk(template(number)):
        for block in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            lines = (
                [holes.number_of(line) if isinstance(line, ast.Expr) else 0 for line in block or ()]
                if isinstance(block, list)
                else []
            )
            assert not any(
                first and second for first, second in zip(lines, lines[1:], strict=False)
            ), lines


def test_other_lines_are_seen() -> None:
    cut = ast.parse(
        "def plain_sum(x, y):\n    '''Docs.'''\n    return hole(1, 'a task', x)\n"
    ).body[0]
    for text, same in (
        ("def plain_sum(x: int, y) -> int:\n    return x + y", True),
        ("def plain_sum(x, z):\n    return x + z", False),
        ("def plain_sum(x, y):\n    x += 1\n    return x", False),
    ):
        assert (holes.match(cut, ast.parse(text).body[0]) is not None) == same


@pytest.mark.parametrize("number", ["03", "08"])
def test_the_plain_versions_own_lines_pass(number: str, tmp_path: Path) -> None:
    """In full: each test of an exercise does it for its own."""
    assert graded(number, right(number), tmp_path).passed
