"""Exercise 08: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("08")
SUM = "for p in model.parameters():\n    group.all_reduce(p.grad, out=p.grad)"
WRONG = {
    "rows are lost": {1: "begin + each"},
    "uneven passes": {1: "begin + each + (more if number + 1 == passes else 0)"},
    "mean of means": {2: "micro.targets.size"},
    "averaged twice": {2: "targets.size * passes"},
    # and drops the sum
    "the ranks' weights differ": {
        4: "for p in model.parameters():\n    group.all_reduce(p.grad)\n"
        "optimizer.step()\noptimizer.zero_grad()"
    },
    "this rank's tokens": {2: "mine.targets.size"},
    "reduced after every pass": {
        3: "loss.backward()\n" + SUM,
        4: "optimizer.step()\noptimizer.zero_grad()",
    },
    "not reduced once": {4: "optimizer.step()\noptimizer.zero_grad()"},
    "forgot to zero": {4: SUM + "\noptimizer.step()"},
    "steps after every pass": {
        3: "loss.backward()\noptimizer.step()",
        4: SUM + "\noptimizer.zero_grad()",
    },
    "divided by rows, not tokens": {2: "len(targets)"},
    "this rank's tokens times the ranks": {2: "mine.targets.size * group.size"},
    "mean of the passes' means": {2: "micro.targets.size", 3: "(loss / passes).backward()"},
    "wrong weights": {2: "targets.size + 1"},
    "there is no gradient to sum": {3: "loss.backward()\noptimizer.zero_grad()"},
    "the gradient is 2 times too small": {3: "(loss / passes).backward()"},
    "averaged over the ranks too": {
        4: SUM + "\n    p.grad /= group.size\noptimizer.step()\noptimizer.zero_grad()"
    },
    "only the last pass counts": {3: "optimizer.zero_grad()\nloss.backward()"},
    "nothing was learned": {4: SUM + "\noptimizer.zero_grad()\noptimizer.step()"},
    "the sum of a stage cannot wait": {5: "[2 * psi, 2 * psi, 2 * psi, 3 * psi][stage]"},
    "a whole gradient can wait": {5: "[2 * a * psi, 2 * psi, (a + 1) * psi, 3 * a * psi][stage]"},
    "once a step, not in every pass": {5: "[2 * psi, 2 * psi, 2 * a * psi, 3 * a * psi][stage]"},
    "move in every pass": {5: "[2 * psi, 2 * psi, (a + 1) * psi, (2 * a + 1) * psi][stage]"},
    "in one pass the sum is": {5: "[psi, psi, a * psi, 2 * a * psi][stage]"},
    "wrong traffic": {5: "[2 * psi, 2 * psi, (a + 1) * psi, 4 * a * psi][stage]"},
    "not a number": {2: "targets.size - mine.targets.size"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("08", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("08", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("08", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_08.py line" in result.results[-1].line()
    )
