"""Test what checks of lessons share: ranks that do not fit together, weights beside the answer
key's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidist.comm.group import Group
from minidist.grading import HoleError, Mistake, Result, TaskFailed, grade, hole
from minidist.lessons.checking import on_ranks, parity, replicas, timelines

RIGHT = np.array([1.0, -2.0, 4.0])
MISTAKES = {"averaged twice": RIGHT / 2, "the sign": Mistake(lambda: -RIGHT, "section 2")}


def test_the_ranks_results_come_in_rank_order() -> None:
    assert on_ranks(lambda group, x: x + group.rank, 5, size=3, task="t", advice="a") == [5, 6, 7]


def waiting(group: Group) -> None:
    if group.rank == 0:
        group.recv(src=1)


def test_ranks_that_do_not_fit_together_fail_the_task() -> None:
    with pytest.raises(TaskFailed) as raised:
        on_ranks(waiting, size=2, task="3 steps", advice="see section 1", mistake="they wait")
    result = raised.value.result
    assert not result.passed
    assert (result.task, result.target, result.measured) == ("3 steps", "an end", "DeadlockError")
    assert result.mistake == "they wait"
    assert result.advice.startswith("see section 1; rank 0: no rank can continue")


def test_an_error_of_the_students_code_stays_that_error() -> None:
    def unfilled(group: Group) -> None:
        hole(1, "a task")

    with pytest.raises(HoleError, match="fill hole 1"):
        on_ranks(unfilled, size=2, task="3 steps", advice="see section 1")


def test_a_check_ends_with_the_task_that_failed(tmp_path: Path) -> None:
    """Its Result is the last one, as of a check that yields it."""
    (tmp_path / "check.py").write_text(
        "from minidist.grading import expect\n"
        "from minidist.lessons.checking import on_ranks\n"
        "def grade(exercise):\n"
        "    yield expect('one', 1, 1)\n"
        "    on_ranks(exercise.work, size=2, task='two', advice='section 1')\n"
        "    yield expect('three', 3, 3)\n"
    )
    (tmp_path / "mine.py").write_text(
        "def work(group):\n    if group.rank == 0:\n        group.recv(src=1)\n"
    )
    results = grade("99", tmp_path / "check.py", tmp_path / "mine.py").results
    assert [(result.task, result.passed) for result in results] == [("one", True), ("two", False)]


def told(*ranks: np.ndarray, **options: Any) -> Result:
    return parity("weights", RIGHT, ranks, "wrong sums", "section 1", known=MISTAKES, **options)


def test_right_weights_pass_with_the_limit_in_the_text() -> None:
    assert told(RIGHT, RIGHT * (1 + 1e-12)).line() == "weights: those of one process, to 1e-10 ok"


@pytest.mark.parametrize(
    ("mine", "mistake", "advice"),
    [
        (RIGHT / 2, "averaged twice", "section 1"),
        (-RIGHT, "the sign", "section 2"),
        (RIGHT + 1, "wrong sums", "section 1"),
        (RIGHT[:2], "wrong sums", "section 1"),
        (RIGHT * np.nan, "wrong sums", "section 1"),
    ],
)
def test_wrong_weights_have_the_name_of_the_mistake(
    mine: np.ndarray, mistake: str, advice: str
) -> None:
    found = told(mine, mine)
    assert not found.passed
    assert (found.mistake, found.advice) == (mistake, advice)
    assert "off by" in found.measured


def test_one_wrong_rank_is_enough() -> None:
    found = told(RIGHT, RIGHT + 1e-9, signs={"the ranks differ": True}, wanted="the plain ones")
    assert (found.passed, found.mistake, found.target) == (
        False,
        "the ranks differ",
        "the plain ones",
    )


def test_a_nan_on_a_later_rank_is_seen() -> None:
    assert not told(RIGHT, RIGHT * np.nan, RIGHT).passed
    assert not replicas("copies", [RIGHT, RIGHT * np.nan, RIGHT], "apart", "section 3").passed


def test_replicas_are_equal_to_1e_12() -> None:
    assert replicas("copies", [RIGHT, RIGHT], "apart", "section 3").passed
    found = replicas("copies", [RIGHT, RIGHT + 1e-11], "apart", "section 3")
    assert (found.passed, found.mistake, found.advice) == (False, "apart", "section 3")


def test_a_timeline_has_each_thing_at_its_time() -> None:
    right = [("rank 0", [("F0", 0, 1), ("B0", 3, 5)]), ("rank 10", [("F0", 1, 2)])]
    yours = [("rank 0", [("F0", 0, 1), ("B0", 4, 6)]), ("rank 10", [("a long name", 1, 2)])]
    assert timelines(right, yours).splitlines() == [
        "right:",
        "  rank 0  |F0 |........B0     |",
        "  rank 10 |....F0 |",
        "yours:",
        "  rank 0  |F0 |............B0     |",
        "  rank 10 |....a l|",
    ]


def test_a_long_timeline_is_drawn_narrower() -> None:
    assert len(timelines([("a", [("x", 0, 40)])], [("a", [("y", 0, 50)])]).splitlines()[-1]) == 105
