"""Exercise 16: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import graded

GATHER = "unit.put(self.group.all_gather(unit.shard))"
REDUCE = "self.group.reduce_scatter(unit.gradient(), out=unit.mine)"
RIGHT = {1: GATHER, 2: "unit.forget()", 3: GATHER, 4: REDUCE + "\nunit.forget()", 5: "pass"}
WRONG = {
    "not gathered for forward": {1: "pass"},
    "not gathered again for backward": {3: "pass"},
    "forgot to free after forward": {2: "pass"},
    "forgot to free after backward": {4: REDUCE},
    "averaged twice": {4: RIGHT[4] + "\nunit.mine /= self.group.size"},
    "an all-gather too many at the end": {5: "self.group.all_gather(unit.shard)"},
    "not needed before the next forward": {5: GATHER},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("16", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("16", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("16", {}, tmp_path)
    assert not result.passed
    assert "fill hole 1" in result.results[-1].line() and "exercise_16.py line" in result.results[-1].line()
