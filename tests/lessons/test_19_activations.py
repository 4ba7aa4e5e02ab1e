"""Exercise 19: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

RIGHT = right("19")
RUN = '''

def run(blocks, x):
    with no_grad():
        for block in blocks:
            x = block(x)
    return x
'''
TAPED = RUN.replace("with no_grad():", "if True:")
WRONG = {
    "counted twice": {1: "segments * x + size * a"},
    "nothing is made again": {1: "segments * x"},
    "that keeps every block's input": {1: "layers * x + a"},
    "one block is made again": {1: "(segments - 1) * x + a"},
    "another size has a lower peak": {2: "sizes[0]"},
    "best size for 10 blocks": {2: "round((layers * x / a) ** 0.5)"},
    "one a segment": {3: "kept.extend([x, x])"},
    "a segment starts from another's input": {5: "tensor(kept.pop(0).data, requires_grad=True)"},
    "the gradient does not reach the segment before": {6: "(y.backward(dy), dy)[1]"},
    "your code raised": {6: "(y.backward(dy), y.grad)[1]"},
}


def filled(answers: dict[int, str], folder: Path, run: str = RUN):
    """The grade; hole 4's loop is a function of its own."""
    file = folder / "exercise_19.py"
    graded("19", answers, folder)       # writes the file
    file.write_text(file.read_text(encoding="utf-8") + run, encoding="utf-8")
    from minidist import lessons
    from minidist.grading import grade

    return grade("19", lessons.find("19").part("check.py"), file)


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = filled(RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    result = filled({**RIGHT, **WRONG[mistake]}, tmp_path)
    assert not result.passed
    assert mistake in result.results[-1].line()


def test_a_tape_that_is_kept_fails_under_its_name(tmp_path: Path) -> None:
    result = filled(RIGHT, tmp_path, TAPED)
    assert "the tape was kept" in result.results[-1].line()


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("19", {}, tmp_path)
    assert "fill hole 1" in result.results[-1].line() and "exercise_19.py line" in result.results[-1].line()
