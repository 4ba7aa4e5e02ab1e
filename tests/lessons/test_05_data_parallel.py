"""Exercise 05: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("05")
WRONG = {
    "rows are left out": {1: "[inputs[r * (len(inputs) // len(replicas)):][:len(inputs) // len(replicas)] "
                             "for r in range(len(replicas))]"},
    "the model did not travel": {2: "copied.data = original.data"},
    "others in step 0": {2: "pass"},
    "the model does not travel in every step": {2: "if not copied.name.endswith('.'):\n    copied.name += '.'\n"
                                                   "    copied.data[...] = original.data"},
    "the wrong gradients": {3: "[np.full_like(y.data, loss.item()) for y in outputs]"},
    "averaged": {4: "sum(p.grad for p in same) / len(replicas)"},
    "the others' gradients are missing": {4: "same[0].grad"},
    "one model for all the others": {
        5: "(model_bytes + others * (row_bytes + output_bytes), model_bytes + others * output_bytes)"},
    "the outputs' gradients are missing": {
        5: "((replicas - 1) * model_bytes + others * row_bytes, (replicas - 1) * model_bytes + others * output_bytes)"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("05", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("05", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("05", {}, tmp_path)
    assert not result.passed
    assert "fill hole 1" in result.results[-1].line() and "exercise_05.py line" in result.results[-1].line()
