"""Exercise 09: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from filling import assert_named, graded, right

from minidist.grading import load_module
from minidist.lessons import find

RIGHT = right("09")
WRONG = {
    "not this step's masters, rounded": {1: "pass"},
    "the model computes with float32": {1: "p.data = master.data"},
    "every step was skipped, or every gradient was 0": {1: "p.data[...] = master.data * scale"},
    "divided by a scale that was not there": {2: "1.0"},
    "backward began with 1: no loss scale": {2: "1.0", 4: "gradient"},
    "in which order are they widened": {
        3: "p.grad / scale",
        4: "np.asarray(gradient, 'float32')",
    },
    "the masters moved the wrong way": {2: "-scale"},
    "divided while it has two bytes": {3: "p.grad"},
    "gradients of the masters: float64, target float32": {3: "np.asarray(p.grad, 'float64')"},
    "small numbers are lost": {4: "np.float32(gradient.astype('float16') / np.float16(scale))"},
    "divided twice": {4: "gradient / np.float32(scale) ** 2"},
    "another update": {2: "2 * scale"},
    "nearly right": {3: "np.asarray(p.grad, 'float16').round(0)"},
    "still scaled": {4: "gradient"},
    "updated by an infinite gradient": {5: "True"},
    "the masters did not move": {
        5: "not all(np.isfinite(gradient).all() for gradient in gradients)"
    },
    "it was not seen": {6: "any(np.isinf(gradient).any() for gradient in gradients)"},
    "an overflow where there is none": {
        6: "all(np.isfinite(gradient).all() for gradient in gradients)"
    },
    "Here the second has one": {6: "not np.isfinite(gradients[0]).all()"},
    "only the rank that overflowed knows": {7: "mine"},
    "no rank says so": {7: "group.all_gather(np.array([float(mine)])).all()"},
    "the skipped step counts as a good one": {
        8: "if overflow:\n    self.scale, self.good = self.scale / 2, 0\nself.good += 1\n"
        "if self.good == self.patience:\n    self.scale, self.good = self.scale * 2, 0"
    },
    "more than halved": {8: RIGHT[8].replace("self.scale / 2", "self.scale / 4")},
    "more than doubled": {8: RIGHT[8].replace("self.scale * 2", "self.scale * 4")},
    "no doubling after 3": {8: "if overflow:\n    self.scale, self.good = self.scale / 2, 0"},
    "doubled only after more than 3": {8: RIGHT[8].replace("==", ">")},
    "good steps before the overflow still count": {8: RIGHT[8].replace("/ 2, 0", "/ 2, self.good")},
    "good steps are not counted anew after a doubling": {
        8: RIGHT[8].replace("self.scale * 2, 0", "self.scale * 2, self.good - 1")
    },
    "no halving at an overflow": {8: RIGHT[8].replace("self.scale / 2, 0", "self.scale, 0")},
    "clipped while still scaled": {9: "length(gradients, group)"},
    "not clipped": {9: "0.0"},
    "scaled once more": {9: "length(gradients, group) * scale"},
    "the square of the norm": {9: "(length(gradients, group) / scale) ** 2"},
    "this rank's gradients only": {
        9: "np.sqrt(sum(float(np.sum(np.square(gradient, dtype=np.float64)))"
        " for gradient in gradients)) / scale"
    },
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("09", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("09", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("09", {}, tmp_path)
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_09.py line" in result.results[-1].line()
    )


def test_the_story_says_how_far_a_weight_without_a_master_stays_behind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    story = find("09").part("README.md").read_text(encoding="utf-8")
    load_module(find("09").part("lesson.py"), "09").BREAKS["no-masters"]()
    assert "after 100 updates of 0.001: bf16 alone 1.0, master 0.900" in capsys.readouterr().out
    story = " ".join(story.split())
    assert "in every one of a hundred steps" in story
    assert "the master has moved by 0.1 in the meantime" in story


def test_how_much_of_a_weight_bf16_rounds_away() -> None:
    """At most 2^-8, and nearly as much just above a power of two: the story and the page of precision say so."""
    story = find("09").part("README.md").read_text(encoding="utf-8")
    page = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "precision.md"
    weights = np.linspace(1, 2, 100_001)
    error = (np.abs(weights.astype(ml_dtypes.bfloat16).astype(float) - weights) / weights).max()
    assert 0.99 * 2.0**-8 < error < 2.0**-8
    assert "is off by up to 2^-8 of the number" in " ".join(story.split())
    assert "a disturbance of up to 2^-8 of each weight" in " ".join(
        page.read_text(encoding="utf-8").split()
    )


@pytest.mark.parametrize(
    "other",
    [
        {3: "p.grad.astype('float32')"},
        {3: "p.grad", 4: "gradient.astype('float32') / scale"},
        {4: "gradient * np.float32(1 / scale)"},
    ],
)
def test_gradients_may_be_widened_in_another_way(other: dict[int, str], tmp_path: Path) -> None:
    """What is divided has four bytes, wherever it was widened."""
    result = graded("09", {**RIGHT, **other}, tmp_path)
    assert result.passed, result.results[-1].line()
