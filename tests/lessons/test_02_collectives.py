"""Exercise 02: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import graded

RIGHT = {
    1: "(link.rank - root) % link.size",
    2: "place + distance < link.size",
    3: "(place + distance + root) % link.size",
    4: "(place - distance + root) % link.size",
    5: "(link.rank + step) % link.size",
    6: "(link.rank - step) % link.size",
    7: "distance < link.size",
    8: "2 * distance",
    9: "2 * levels * (alpha + nbytes * beta)",
    10: "2 * (size - 1) * (alpha + nbytes / size * beta)",
}
WRONG = {
    "root ignored": {1: "link.rank", 3: "place + distance", 4: "place - distance"},
    "the root is told": {2: "True"},
    "waits for a rank that never sends": {4: "root"},
    "a partner is left out": {5: "(link.rank + 1) % link.size", 6: "(link.rank - 1) % link.size"},
    "sends to the rank it hears from": {6: "(link.rank + step) % link.size"},
    "partners do not match": {6: "(link.rank - 1) % link.size"},
    "left too early": {7: "distance < link.size // 2"},
    "more steps than needed": {8: "distance + 1"},
    "ranks take different numbers of steps": {7: "distance < link.size - link.rank"},
    "as many steps as ranks": {9: "2 * (size - 1) * (alpha + nbytes * beta)"},
    "half of the way": {9: "levels * (alpha + nbytes * beta)"},
    "whole tensors round the ring": {10: "2 * (size - 1) * (alpha + nbytes * beta)"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("02", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    result = graded("02", {**RIGHT, **WRONG[mistake]}, tmp_path)
    assert not result.passed
    assert mistake in result.results[-1].line()


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("02", {}, tmp_path)
    assert not result.passed
    assert "fill hole 1" in result.results[-1].line() and "exercise_02.py line" in result.results[-1].line()
