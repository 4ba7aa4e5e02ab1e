"""Exercise 15: filled rightly it passes, and each wrong filling fails under its name."""

import json
from pathlib import Path

import pytest
from filling import assert_named, graded, right

from minidist import lessons
from minidist.cli import main

RIGHT = right("15")
WRONG = {
    "the gradients stay": {1: 'group.reduce_scatter(p.grad, out=mine, algorithm="ring")'},
    "the all-gather is missing": {2: "pass"},
    "wrong sums": {1: "mine[...] = p.grad.ravel()[Flat([p], group).chunk]\np.zero_grad()"},
    "wrong traffic": {
        1: "mine[...] = group.all_reduce(p.grad.ravel())[Flat([p], group).chunk]\np.zero_grad()"
    },
    "plain_zero2 on 2 ranks, 3 steps: weights": {1: RIGHT[1] + "\nmine /= group.size"},
    "the update comes before the reduce has ended": {7: "pass"},
    "forgot to free": {6: "self.kept = self.flying.pop(0)"},
    "too many in flight": {4: "pass"},
    "backward stands still": {4: "self.land()"},
    "old weights are added to new ones": {
        2: "weights[...] = group.all_reduce(weights) / group.size"
    },
    "summed into the shard": {3: "self.group.start_reduce_scatter(gradient, out=run.shard)"},
    "reduce_scatter waits for the sum": {3: "self.group.reduce_scatter(gradient, out=chunk)"},
    "read before it arrived": {5: "run.shard += chunk\nhandle.wait()"},
    "land every sum in flight": {7: "pass"},
    "another sum was taken out of the list": {6: "self.flying.pop()"},
    "take the first out, and only this one": {6: "self.flying.clear()"},
    "land() waits for the first": {7: "self.flying.clear()"},
    "no rank needs the other ranks' sums": {7: "self.group.all_gather(self.flying[0][2])"},
    "handle.wait() is missing": {5: "run.shard += chunk"},
    "run.shard is a new array": {5: "handle.wait()\nrun.shard = run.shard + chunk"},
    "gradients are gathered": {2: "group.all_gather(_, out=weights)"},
    "the optimizer uses the old array": {1: "mine = group.reduce_scatter(p.grad)\np.zero_grad()"},
    "the model uses the old array": {2: "weights = group.all_gather(weights[flat.chunk].copy())"},
    "averaged twice": {5: "handle.wait()\nrun.shard += chunk / self.group.size"},
    "replaced instead of added": {5: "handle.wait()\nrun.shard[...] = chunk"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("15", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.soak  # other lessons' wrong fillings are graded in the default run
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("15", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("15", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_15.py line" in result.results[-1].line()
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("option", "row"),
    [
        ("--zero=0", "`--zero 0` (DDP)"),
        ("--zero=2", "`--zero 2`"),
        ("--zero=2 --bucket-bytes=256KiB", "`--zero 2 --bucket-bytes 256KiB`"),
    ],
)
def test_the_peak_of_train_s_gradients(option: str, row: str, tmp_path: Path) -> None:
    """A model of two buckets has its whole gradient for a moment."""
    words = ["train", "-n", "2", "--steps", "2", "--quiet", "--transport", "threads"]
    assert main([*words, *option.split(), "--out", str(tmp_path / "run")]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    held = metrics["ranks"][0]["memory"]["gradients"]
    shown = f"| {row} | {held['now'] / 1e6:.1f} MB | {held['peak'] / 1e6:.1f} MB |"
    assert shown in lessons.find("15").part("README.md").read_text(encoding="utf-8"), shown
