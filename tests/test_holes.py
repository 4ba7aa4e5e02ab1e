"""Test which code stands where a hole is."""

import ast

import pytest

from minidist import holes

TEMPLATE = """
def total(xs):
    found = hole(1, "the start")
    for x in xs:
        hole(2, "add it", x)
    return found


def mean(xs):
    return hole(3, "the mean", xs)
"""
PLAIN = """
def total(xs: list) -> float:
    '''The sum.'''
    found = 0.0     # so far
    for x in xs:
        y = x
        found += y
    return found
"""


def tree(text: str) -> ast.Module:
    return ast.parse(text)


def answers(student: str | ast.Module) -> list[holes.Answer]:
    right = holes.right_code(tree(TEMPLATE), [PLAIN], {3: "total(xs) / len(xs)"})
    return holes.answers_of(
        tree(TEMPLATE), tree(student) if isinstance(student, str) else student, right
    )


def test_the_right_code_is_read_from_the_plain_version() -> None:
    right = holes.right_code(tree(TEMPLATE), [PLAIN], {3: "total(xs) / len(xs)"})
    assert {hole: [ast.unparse(node) for node in nodes] for hole, nodes in right.items()} == {
        1: ["0.0"],
        2: ["y = x", "found += y"],
        3: ["total(xs) / len(xs)"],
    }


def test_an_exercise_with_other_lines_is_refused() -> None:
    with pytest.raises(
        ValueError, match="not cut from total: their code differs outside the holes"
    ):
        holes.right_code(tree(TEMPLATE), [PLAIN.replace("return found", "return float(found)")], {})


def test_tasks_in_order() -> None:
    assert holes.tasks(tree(TEMPLATE)) == {1: "the start", 2: "add it", 3: "the mean"}


def test_answers_one_by_one() -> None:
    student = TEMPLATE.replace('hole(1, "the start")', "0.0").replace(
        'hole(2, "add it", x)', "found -= x"
    )
    found = answers(student)
    assert [answer.holes for answer in found] == [(1,), (2,), (3,)]
    assert [answer.is_open for answer in found] == [False, False, True]
    assert [answer.is_right_code for answer in found] == [True, False, False]


def test_a_function_whose_other_lines_were_changed_is_one_answer() -> None:
    found = answers("def total(xs):\n    return sum(xs)\n\n\ndef mean(xs):\n    return 3\n")
    assert [answer.holes for answer in found] == [(1, 2), (3,)]


def test_corrected_code_runs_and_keeps_its_lines() -> None:
    student = tree(
        TEMPLATE.replace('hole(1, "the start")', "5.0").replace(
            'hole(2, "add it", x)', "found += 1 / 0"
        )
    )
    first, second, third = answers(student)
    names: dict = {}
    exec(compile(holes.corrected(student, [second, third]), "mine.py", "exec"), names)
    assert names["total"]([1.0, 2.0]) == 8.0 and names["mean"]([1.0, 3.0]) == 4.5
    module = holes.corrected(student, [first, third])
    exec(compile(module, "mine.py", "exec"), names)
    with pytest.raises(ZeroDivisionError) as caught:
        names["total"]([1.0])
    assert caught.traceback[-1].lineno + 1 == 5
    other = tree("def total(xs):\n    return None\n")
    exec(compile(holes.corrected(other, answers(other)), "mine.py", "exec"), names)
    assert names["total"]([1.0, 2.0]) == 3.0
