"""Exercise 00: filled rightly it passes, and each wrong filling fails under its name."""

from dataclasses import replace
from pathlib import Path

import pytest
from filling import assert_named, graded, right

from minidist.grading import load_module
from minidist.lessons import find

RIGHT = right("00")
WRONG = {
    "divided by the number of sequences": {1: "len(targets)"},
    "divided by the number of tokens of one": {1: "targets.shape[1]"},
    "the sum, not the mean": {1: "1"},
    "the opposite sign": {1: "-targets.size"},
    "another step": {1: "targets.size - 1"},
    "two updates a batch": {2: "optimizer.step(); optimizer.step(); optimizer.zero_grad()"},
    "the weights did not move": {2: "optimizer.zero_grad()"},
    "the gradients of the batches before are still there": {2: "optimizer.step()"},
    "biases and norms forgotten": {3: "12 * width * width"},
    "the norms forgotten": {3: "12 * width * width + 9 * width"},
    "the master weights are missing": {5: "8 * parameters"},
    "that is float32's": {4: "4 * parameters"},
    "one moment forgotten": {6: "4 * parameters"},
    "too much: attention's scores": {7: "16 * width + heads * context + 2"},
    "the norms' two scales, or the scores' logarithms": {7: "16 * width + heads + 1"},
    "wrong bytes: the account counted 8": {6: "8 * parameters + 1"},
    "an entry of the table is missing": {7: "8 * width + heads + 2"},
    "the loss Tensors keep their tapes alive": {
        8: """
            loss = model.loss(inputs, targets, divisor=targets.size)
            model.losses = [*(model.losses if total else []), loss]
            total += loss.item()
           """
    },
    "no no_grad()": {8: "total += model.loss(inputs, targets, divisor=targets.size).item()"},
    "the total is a Tensor with every tape": {
        8: "total = model.loss(inputs, targets, divisor=targets.size) + total"
    },
}


def test_the_bytes_a_token_that_the_story_works_out() -> None:
    lesson = load_module(find("00").part("lesson.py"), "00")
    story = find("00").part("README.md").read_text(encoding="utf-8")
    for context, sum_ in ((64, "4 · (16 · 64 + 4 + 2 + 4 · 64)"), (512, "4 · (16 · 64 + 4 + 2)")):
        config = replace(lesson.CONFIG, context=context, width=64, layers=1)
        assert f"`{sum_} = {lesson.kept_for_backward(config, 1) // context:,}`" in story
        assert eval(sum_.replace("·", "*")) * context == lesson.kept_for_backward(config, 1)


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("00", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("00", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("00", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_00.py line" in result.results[-1].line()
    )
