"""Exercise 07: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("07")
WRONG = {
    "divided by local tokens": {2: "batch.targets.size"},
    "buckets in forward order": {1: "range(len(sizes))"},
    "reduced before the gradient is final": {3: "if len(self.pending) == number:\n    self.start(number)"},
    "a bucket was not started once": {3: "self.missing[number] -= 1"},
    "averaged twice": {4: RIGHT[4] + "\n        for flat in self.flat:\n            flat /= self.group.size"},
    "not waited for": {4: "self.missing = [len(bucket) for bucket in self.buckets]"},
    "not ready for the next backward": {4: "for handle in self.pending:\n    handle.wait()\nself.pending = []"},
    "synchronised once an epoch": {5: """
        for batch in batches:
            local_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronizer.finish()
       """},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("07", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("07", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("07", {}, tmp_path)
    assert not result.passed
    assert "fill hole 1" in result.results[-1].line() and "exercise_07.py line" in result.results[-1].line()
