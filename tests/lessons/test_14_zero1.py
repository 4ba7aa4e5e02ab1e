"""Exercise 14: filled rightly it passes, each wrong filling fails under its name; what the figure
is said to show."""

from pathlib import Path
from typing import Any

import matplotlib
import pytest
from filling import assert_named, graded, right
from matplotlib.image import imread

import minidist as md
from minidist.grading import load_module
from minidist.lessons import find, zero_figures, zero_lab
from minidist.parallel.zero.memory_formula import MIXED, state_bytes

DRAWN_BY = "3.11.2"  # matplotlib that drew the shipped picture
RIGHT = right("14")
WRONG = {
    "weights without an owner": {1: "slice(rank * (n // size), (rank + 1) * (n // size))"},
    "wrong slices": {1: "slice((rank * n + 1) // size, ((rank + 1) * n + 1) // size)"},
    "the optimizer is not divided": {2: "list(model.parameters())"},
    "the optimizer changes a copy": {2: "flat.pieces(weights[flat.chunk].copy(), mine)"},
    "another rank's chunk": {
        2: "flat.pieces(weights[flat.chunk.start // 2 :][: flat.chunk_size], mine)"
    },
    "the whole vector was given": {2: "flat.pieces(weights, mine)"},
    "or rank 0's chunk": {2: "flat.pieces(weights[: flat.chunk_size], mine)"},
    "number 0 has no owner": {
        1: "slice(rank * (n // size) + min(rank, n % size) + 1, (rank + 1) * (n // size) + 1)"
    },
    "number 4 has 2 owners": {1: "slice(rank * (n // size), (rank + 1) * (n // size) + 1)"},
    "the optimizer uses the old array": {3: "mine = group.reduce_scatter(gradient)"},
    "the model uses the old array": {4: "weights = group.all_gather(weights[flat.chunk].copy())"},
    "the optimizer reads other gradients": {2: "flat.pieces(weights[flat.chunk], mine.copy())"},
    "gradients are gathered": {4: "group.all_gather(mine, out=weights)"},
    "old weights are added to new ones": {
        4: "weights[...] = group.all_reduce(weights) / group.size"
    },
    "averaged twice": {3: RIGHT[3] + "\nmine /= group.size"},
    "an all-reduce where a reduce-scatter is enough": {
        3: "mine[...] = group.all_reduce(gradient)[flat.chunk]"
    },
    "wrong gradients": {3: "mine[...] = gradient[flat.chunk]"},
    "the all-gather is missing": {4: "pass"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("14", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("14", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("14", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_14.py line" in result.results[-1].line()
    )


@pytest.mark.soak
def test_the_mountain_of_activations_is_the_same_in_both_pictures() -> None:
    """Array for array, as README.md says; what lies below it differs by the optimizer's share
    alone."""

    def mountain(world: Any, stage: int) -> tuple[list[int], list[int]]:
        ranks = zero_lab.recorded(world, stage, steps=2)
        found = zero_figures.changes(ranks[0], ("activations",)) if ranks else []
        below = [now for _, now in ranks[0]["samples"]][-1] if ranks else {}
        return [held[0] for _, held in found], [below.get(name, 0) for name in zero_figures.STATE]

    (ddp, below), (zero1, less) = (md.run(mountain, stage, size=2)[0] for stage in (0, 1))
    assert len(ddp) > 100 and ddp == zero1
    assert below[:2] == less[:2] and less[2] == pytest.approx(below[2] / 2, rel=0.01)


def test_the_papers_chart_has_the_papers_numbers(tmp_path: Path) -> None:
    """N0:299: 120, 31.4, 16.6 and 1.9 GB; drawn by the formula alone."""
    figure = load_module(find("14").part("figure.py"), "14")
    held = [
        state_bytes(figure.PAPER["parameters"], MIXED, zero=zero, ranks=64)["total"] / 1e9
        for zero in range(4)
    ]
    assert [f"{each:.1f}" for each in held] == ["120.0", "31.4", "16.6", "1.9"]
    figure._paper(tmp_path)
    drawn = tmp_path / "paper.png"
    shipped = find("14").part("paper.png")
    if matplotlib.__version__ == DRAWN_BY:
        assert drawn.read_bytes() == shipped.read_bytes()
    else:  # another matplotlib sets letters a little differently: by 0.012
        assert abs(imread(drawn) - imread(shipped)).mean() < 0.02
