"""Holes, grades, and how a student's error becomes a result."""

import os
from collections.abc import Iterator
from math import isclose
from pathlib import Path
from typing import Any

import pytest

from minidist.comm.ledger import Ledger
from minidist.errors import ConfigError, KernelError
from minidist.grading import (
    HoleError,
    Mistake,
    Result,
    expect,
    grade,
    hole,
    judge,
    load_module,
    sent_since,
    totals,
    variant,
)
from minidist.lessons.running import draw_figure, insert_mermaid

CHECK = """
from minidist.grading import expect
def grade(exercise):
    yield expect("one", 1, exercise.one(), "not one", "read section 1")
    yield expect("two", 2, exercise.two(), "not two", "read section 2")
    yield expect("three", 3, exercise.two() + 1)
"""


def graded(folder: Path, exercise: str) -> Iterator[Result]:
    (folder / "check.py").write_text(CHECK)
    (folder / "mine.py").write_text(exercise)
    return grade("99", folder / "check.py", folder / "mine.py").results


def test_a_hole_says_its_number_and_its_task() -> None:
    with pytest.raises(HoleError, match="fill hole 2: the sum"):
        hole(2, "the sum", 1, 2)


def test_a_result_is_one_line() -> None:
    good = expect("bytes", 3, 3)
    bad = Result("bytes", False, "3.0 MiB", "3.5 MiB", "whole tensors", "read section 3.2 again")
    assert good.line() == "bytes: 3 ok"
    assert bad.line() == "bytes: 3.5 MiB, target 3.0 MiB: whole tensors: read section 3.2 again"


KNOWN = {
    "half": 5,
    "double": Mistake(lambda: 20, "section 3"),
    "double too": 20,
}


@pytest.mark.parametrize(
    ("measured", "mistake", "advice"),
    [
        (5, "half", "section 1"),
        (20, "double", "section 3"),
        (-10, "negative", "section 1"),
        (7, "another", "section 1"),
    ],
)
def test_the_first_known_mistake_names_a_wrong_answer(
    measured: int, mistake: str, advice: str
) -> None:
    signs = {"negative": measured < 0, "negative too": measured < 0}
    found = expect("count", 10, measured, "another", "section 1", known=KNOWN, signs=signs)
    assert (found.passed, found.mistake, found.advice) == (False, mistake, advice)


def test_a_known_mistake_comes_before_a_sign() -> None:
    found = expect("count", 10, 5, "another", "", known={"half": 5}, signs={"small": True})
    assert found.mistake == "half"


def test_a_right_answer_looks_no_mistake_up() -> None:
    known = {"never asked": lambda: pytest.fail("it was computed")}
    assert expect("count", 10, 10, known=known, signs=known).passed
    assert judge("count", True, "10", "10", signs=known).passed


def test_values_are_compared_and_shown_as_the_check_says() -> None:
    def found(measured: float) -> Result:
        return expect(
            "idle", 0.5, measured, known={"half": 0.25}, same=isclose, show="{:.1%}".format
        )

    assert found(0.5 + 1e-12).line() == "idle: 50.0% ok"
    wrong = found(0.25 + 1e-12)
    assert (wrong.target, wrong.measured, wrong.mistake) == ("50.0%", "25.0%", "half")


def test_a_sign_names_what_the_check_has_judged() -> None:
    def found(signs: dict[str, Any]) -> Result:
        return judge("rows", False, "7 rows", "6 rows", "another", "section 1", signs=signs)

    assert found({"lost": lambda: True, "twice": True}).mistake == "lost"
    assert found({"lost": False, "twice": Mistake(True, "section 2")}).advice == "section 2"
    assert (found({"lost": 0}).mistake, found({}).advice) == ("another", "section 1")


def test_grading_stops_at_the_first_mistake(tmp_path: Path) -> None:
    results = graded(tmp_path, "one = lambda: 1\ntwo = lambda: 5\n")
    assert [result.passed for result in results] == [True, False]
    assert results[-1].mistake == "not two"


def test_a_hole_inside_another_error_is_found(tmp_path: Path) -> None:
    exercise = (
        "from minidist.grading import hole\ndef one():\n    try:\n        hole(1, 'a task')\n"
        "    except Exception as error:\n        raise ValueError('outer') from error\n"
    )
    result = graded(tmp_path, exercise)[-1]
    assert "fill hole 1: a task (mine.py line 4)" in result.line()


def test_an_open_hole_is_one_line_with_how_many_are_left(tmp_path: Path) -> None:
    """Calls count, and neither comments nor texts that mention one."""
    exercise = (
        "'''Fill each hole(...).'''\nfrom minidist.grading import hole\none = "
        "lambda: 1  # hole(1, 'done')\n"
    )
    holes = "def two():\n    return hole(2, 'a sum')\n"
    assert (
        graded(tmp_path, exercise + holes)[-1].line()
        == "fill hole 2: a sum (mine.py line 5); 1 hole left"
    )
    more = holes + "def three():\n    return hole(\n        3, 'more')\n"
    assert (
        graded(tmp_path, exercise + more)[-1].line()
        == "fill hole 2: a sum (mine.py line 5); 2 holes left"
    )


TEMPLATE = """
from minidist.grading import hole
def one():
    return hole(1, "the first number")
def two():
    return hole(2, "the second number")
"""


def by_hole(folder: Path, exercise: str):
    (folder / "exercise.py").write_text(TEMPLATE)
    (folder / "check.py").write_text(CHECK + "\nANSWERS = {1: '1', 2: '2'}\n")
    (folder / "mine.py").write_text(exercise)
    return grade("99", folder / "check.py", folder / "mine.py")


def test_the_wrong_hole_is_named_though_another_is_open(tmp_path: Path) -> None:
    found = by_hole(tmp_path, TEMPLATE.replace('hole(2, "the second number")', "5"))
    assert [hole.state for hole in found.holes] == ["open", "wrong"]
    assert found.results[-1].line() == "hole 2: two: 5, target 2: not two: read section 2"
    assert found.summary() == "2 of 2 holes left: 1, 2 (wrong)"


def test_an_error_has_its_hole(tmp_path: Path) -> None:
    found = by_hole(
        tmp_path,
        TEMPLATE.replace('hole(1, "the first number")', "1").replace(
            'hole(2, "the second number")', "[][0]"
        ),
    )
    assert found.results[-1].line().startswith("hole 2: your code: IndexError")
    assert "(mine.py line 6)" in found.results[-1].line()


def test_advice_for_another_hole_is_not_given(tmp_path: Path) -> None:
    check = CHECK.replace('"not two", "read section 2"', '"not two", "see one: section 1 (hole 1)"')
    (tmp_path / "exercise.py").write_text(TEMPLATE)
    (tmp_path / "check.py").write_text(check + "\nANSWERS = {1: '1', 2: '2'}\n")
    (tmp_path / "mine.py").write_text(
        TEMPLATE.replace('hole(1, "the first number")', "1").replace(
            'hole(2, "the second number")', "3"
        )
    )
    found = grade("99", tmp_path / "check.py", tmp_path / "mine.py")
    assert found.results[-1].line() == "hole 2: two: 3, target 2: the second number"


TOGETHER = """
from minidist.grading import expect
def grade(exercise):
    yield expect("product", 4, exercise.one() * exercise.two(), "not four", "section 1 (holes 1, 2)")
    yield expect("three", 3, exercise.three(), "not three", "section 2 (hole 3)")
ANSWERS = {1: '2', 2: '2', 3: '3'}
"""


def of_three(folder: Path, one: str, two: str, three: str):
    template = TEMPLATE + 'def three():\n    return hole(3, "the third number")\n'
    (folder / "exercise.py").write_text(template)
    (folder / "check.py").write_text(TOGETHER)
    student = template
    for word, answer in (("first", one), ("second", two), ("third", three)):
        number = ["first", "second", "third"].index(word) + 1
        student = student.replace(f'hole({number}, "the {word} number")', answer)
    (folder / "mine.py").write_text(student)
    return grade("99", folder / "check.py", folder / "mine.py")


def test_a_mistake_of_two_holes_together_is_told_once(tmp_path: Path) -> None:
    found = of_three(tmp_path, "3", "5", "4")
    assert found.results[-1].line() == ("holes 1, 2: product: 15, target 4: not four: section 1")
    # each alone gives 6 or 10, which nobody has seen
    assert [other.line() for other in found.other_mistakes()] == [
        "hole 3: three: 4, target 3: not three: section 2"
    ]
    assert [hole.state for hole in found.holes] == ["wrong"] * 3


def test_a_mistake_of_one_hole_blames_no_other(tmp_path: Path) -> None:
    found = of_three(tmp_path, "3", "2", "4")
    assert found.results[-1].line() == "hole 1: product: 6, target 4: not four: section 1"
    assert [other.holes for other in found.other_mistakes()] == [(3,)]


def test_a_mistake_outside_the_holes_blames_none(tmp_path: Path) -> None:
    student = TEMPLATE.replace('hole(1, "the first number")', "1 + 0") + "x = 1 / 0\n"
    assert by_hole(tmp_path, student).holes == ()


def test_a_variant_of_a_plain_version_is_what_a_mistake_leads_to() -> None:
    assert variant(expect, "same(measured, target)", "not same(measured, target)")("a", 1, 2).passed


def test_an_error_names_the_students_line(tmp_path: Path) -> None:
    result = graded(tmp_path, "def one():\n    return [][3]\n")[-1]
    assert "list index out of range (mine.py line 2)" in result.line()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "np.split(np.arange(5), 2)",
            "ValueError, target no error: your code raised: array split does not result",
        ),
        ("int('x')", "ValueError, target no error: your code raised: invalid literal for int"),
        (
            "raised_while_handling()",
            "RuntimeError, target no error: your code raised: the second (mine.py line 7)",
        ),
        ("{}['a']", "KeyError, target no error: your code raised: 'a' (mine.py line 9)"),
    ],
)
def test_of_a_chain_of_errors_the_one_that_was_raised_is_shown(
    tmp_path: Path, code: str, said: str
) -> None:
    lines = [
        "import numpy as np",
        "def raised_while_handling():",
        "    try:",
        "        [][0]",
        "    except IndexError:",
        "        # what is raised here is what the student sees",
        "        raise RuntimeError('the second')",
        "def one():",
        f"    return {code}",
    ]
    assert said in graded(tmp_path, "\n".join(lines))[-1].line()


def test_of_a_rank_that_fails_its_own_error_is_shown(tmp_path: Path) -> None:
    lines = [
        "from minidist.launch import run",
        "def one():",
        "    run(lambda group: {}['a'], size=2, transport='threads')",
    ]
    line = graded(tmp_path, "\n".join(lines))[-1].line()
    assert "KeyError" in line
    assert "'a' (mine.py line 3)" in line


def test_a_file_named_from_here_has_lines_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = graded(Path(), "def one():\n    return [][3]\n")[-1]
    assert "list index out of range (mine.py line 2)" in result.line()


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text(CHECK)
    with pytest.raises(ConfigError, match="no file .*mine.py"):
        grade("99", tmp_path / "check.py", tmp_path / "mine.py")
    with pytest.raises(ConfigError, match="no file"):
        load_module(tmp_path / "nowhere.py", "99")


def test_totals_leave_control_out() -> None:
    ledger = Ledger()
    ledger.record("dp", "all_reduce", "ring", 100, 2)
    ledger.record("control", "gather", "naive", 7, 1)
    before = totals(ledger)
    ledger.record("dp", "all_reduce", "ring", 50, 1)
    assert before == (2, 100) and sent_since(ledger, before) == (1, 50)


def test_the_mermaid_block_is_replaced(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n```mermaid\nold\n```\nafter\n```\nx\n```\n")
    insert_mermaid(readme, "pie\n    a\\n : 1\n")
    assert readme.read_text() == "before\n```mermaid\npie\n    a\\n : 1\n```\nafter\n```\nx\n```\n"


def test_a_figure_whose_run_fails_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(group: Any) -> None:
        raise KernelError("no g++ here; install it")

    monkeypatch.setattr("sys.argv", ["figure.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^figure: rank 0: no g\+\+ here; install it$"):
        draw_figure(record, lambda recorded, folder: None, tmp_path, size=1)


def test_a_file_that_changes_within_a_second_is_read_again(tmp_path: Path) -> None:
    """Python's cache of compiled files knows a file by its second and its size."""
    file = tmp_path / "answer.py"
    for text in ("value = 1", "value = 2"):
        file.write_text(text, encoding="utf-8")
        os.utime(file, (1e9, 1e9))
        assert f"value = {load_module(file, '03').value}" == text
