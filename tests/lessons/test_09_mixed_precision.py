"""Exercise 09: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("09")
WRONG = {
    "divided in float16, where it becomes zero": {1: "(gradient / np.float16(1024) / np.float16(1024)).astype('f4')"},
    "not float32": {1: "gradient / np.float16(1024)"},
    "still scaled": {1: "gradient.astype(np.float32)"},
    "it was not seen": {2: "any(np.isinf(gradient).any() for gradient in gradients)"},
    "an overflow where there is none": {2: "all(np.isfinite(gradient).all() for gradient in gradients)"},
    "only the rank that overflowed knows": {3: "mine"},
    "good steps before the overflow still count": {4: RIGHT[4].replace("/ 2, 0", "/ 2, self.good")},
    "it doubles again at once": {4: RIGHT[4].replace("self.scale * 2, 0", "self.scale * 2, self.good - 1")},
    "no halving at an overflow": {4: RIGHT[4].replace("self.scale / 2, 0", "self.scale, 0")},
    "updated by an infinite gradient": {5: "False"},
    "clipped while still scaled": {6: "gradients"},
    "up the hill": {7: "master += lr * factor * gradient\nweight[...] = master"},
    "not clipped": {7: "master -= lr * gradient\nweight[...] = master"},
    "not the rounding of the masters": {7: "master -= lr * factor * gradient"},
    "the masters did not move": {7: "weight -= (lr * factor * gradient).astype(np.float16)"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("09", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("09", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("09", {}, tmp_path)
    assert "fill hole 1" in result.results[-1].line() and "exercise_09.py line" in result.results[-1].line()
