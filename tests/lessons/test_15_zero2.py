"""Exercise 15: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("15")
WRONG = {
    "the update comes before the reduce has ended": {5: "pass"},
    "forgot to free": {4: "self.kept = [*getattr(self, 'kept', []), self.flying.pop(0)]"},
    "too many in flight": {2: "pass"},
    "backward stands still": {2: "self.land()"},
    "averaged twice": {3: "handle.wait()\nrun.shard += chunk / self.group.size"},
    "replaced instead of added": {3: "handle.wait()\nrun.shard[...] = chunk"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("15", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("15", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("15", {}, tmp_path)
    assert not result.passed
    assert "fill hole 1" in result.results[-1].line() and "exercise_15.py line" in result.results[-1].line()
