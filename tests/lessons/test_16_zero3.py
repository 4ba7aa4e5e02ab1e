"""Exercise 16: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("16")
NOTHING = "lambda *_: None"
WRONG = {
    "not gathered for forward": {1: NOTHING},
    "give the method, without ()": {1: "self.gather()"},
    "the method was called at once": {2: "self.free()"},
    "only this rank's chunk": {4: "self.shard"},
    "the result went into a new array": {
        5: "self.mine = self.group.reduce_scatter(gradient)\nself.free()"
    },
    "the last step's sums are still in it": {
        5: "self.mine += self.group.reduce_scatter(gradient)\nself.free()"
    },
    "other weights are gathered": {4: "np.resize(self.shard, self.flat.size)"},
    "reduced after forward": {2: "self.reduce"},
    "an all-reduce where a reduce-scatter is enough": {
        5: "self.mine[...] = self.group.all_reduce(gradient)[self.flat.chunk]\nself.free()"
    },
    "the gradients were cleared": {6: "optimizer.step()\noptimizer.zero_grad()"},
    "forgot to free after forward": {2: NOTHING},
    "not gathered again for backward": {3: NOTHING},
    "forgot to free after backward": {
        5: 'self.group.reduce_scatter(gradient, out=self.mine, algorithm="ring")'
    },
    "averaged twice": {5: RIGHT[5] + "\nself.mine /= self.group.size"},
    "wrong gradients": {5: "self.mine[...] = gradient[self.flat.chunk]\nself.free()"},
    "an all-gather too many at the end": {
        6: "optimizer.step()\nfor unit in units:\n    group.all_gather(unit.shard)"
    },
    "not needed before the next forward": {
        6: "optimizer.step()\nfor unit in units:\n    unit.gather()"
    },
    "not one update a step": {6: "pass"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("16", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.soak  # other lessons' wrong fillings are graded in the default run
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("16", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("16", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_16.py line" in result.results[-1].line()
    )
