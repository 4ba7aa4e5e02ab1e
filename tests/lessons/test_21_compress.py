"""Exercise 21: filled rightly it passes, each wrong filling fails under its name; what the lesson
measures."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filling import assert_named, graded, right

import minidist as md
from minidist import lessons
from minidist.autograd.tensor import Parameter
from minidist.grading import load_module
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.step.scheme import GradientRun

RIGHT = right("21")
WRONG = {
    "no error feedback": {1: "residual[...] = gradient.reshape(-1)"},
    "zeros: nothing was added up": {1: "pass"},
    "not in rising order": {2: "np.argsort(-np.abs(residual))[:k]"},
    "not the largest": {2: "np.sort(np.argpartition(residual, -k)[-k:])"},
    "not the largest: the positions": {2: "np.sort(np.argpartition(np.abs(residual), k)[-k:])"},
    "Add in place, by +=": {1: "residual = residual + gradient.reshape(-1)"},
    "numbers where positions are wanted": {2: "np.sort(np.abs(residual))[-k:]"},
    "places are cleared that only other ranks": {4: "residual[places] = 0"},
    "what was not sent is cleared": {
        4: "residual[np.setdiff1d(np.arange(residual.size), chosen)] = 0"
    },
    "the first k numbers are cleared": {4: "residual[: len(chosen)] = 0"},
    "only this rank's own values": {5: "np.add.at(gradient.reshape(-1), chosen, values[:k])"},
    "places where k is": {2: "np.flatnonzero(residual)"},
    "sizes without their signs": {3: "np.abs(residual[chosen])"},
    "values of shape": {3: "residual"},
    "sent twice": {4: "pass"},
    "next gradient is added to it": {4: "residual[...] = 0"},
    "one rank's value at each place": {5: "gradient.reshape(-1)[places] += values"},
    "a mean": {5: "np.add.at(gradient.reshape(-1), places, values / group.size)"},
    "nothing of what was gathered is applied": {5: "pass"},
    "other weights": {4: "residual *= 0.5"},
    "losses are divided by targets.size": {1: "residual += gradient.reshape(-1) / group.size"},
    "the other sign": {1: "residual -= gradient.reshape(-1)"},
    "without what the residual had kept": {3: "gradient.reshape(-1)[chosen]"},
    "only this step's gradient is taken out": {
        4: "residual[chosen] -= gradient.reshape(-1)[chosen]"
    },
    "the sum is subtracted": {5: "np.subtract.at(gradient.reshape(-1), places, values)"},
    "so it never moved from them": {6: "p.data"},
    "the common weights begin at 0": {6: "np.zeros_like(p.data)"},
    "early or late": {7: "(step - 1) % every"},
    "the ranks meet at other steps": {7: "step % (every + 1)"},
    "the weights themselves are sent": {8: "share * p.data"},
    "the outer rate is missing": {9: "gradient + momentum * speed"},
    "the speed counts in full": {9: "lr * (gradient + speed)"},
    "gradient and speed are exchanged": {9: "lr * (speed + momentum * gradient)"},
    "points back, from this rank's": {9: "-lr * (gradient + momentum * speed)"},
    "are one array": {10: "p.data = weights"},
    "meets one step early": {7: "step % every == 0"},
    "the ranks meet after every step": {7: "False"},
    "the ranks never meet": {7: "True"},
    "one step early or late": {7: "(step + 1) % every"},
    "the ranks meet at other steps: they": {7: "step < every"},
    "no share": {8: "weights - p.data"},
    "equal shares": {8: "(weights - p.data) / group.size"},
    "the sign": {8: "share * (p.data - weights)"},
    "momentum without the look ahead": {9: "lr * speed"},
    "no momentum": {9: "lr * gradient"},
    "continues from its own weights": {10: "pass"},
    "the ring sends each number twice": {11: "itemsize / (ranks * (4 + itemsize))"},
    "the positions travel too": {11: "2 / ranks"},
    "an all-gather grows with the ranks": {11: "itemsize / (4 + itemsize)"},
    "a position has 4 bytes": {11: "1 / ranks"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("21", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.soak  # other lessons' wrong fillings are graded in the default run
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("21", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("21", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_21.py line" in result.results[-1].line()
    )


# ------------------------------------------------------------------------------ what the tables say

lab, broken = (
    load_module(lessons.find("21").part(name), "21") for name in ("experiments.py", "broken.py")
)


def test_a_residual_that_is_lost_is_missing_in_the_sum() -> None:
    """The figure's measure: with feedback all of the gradients is applied or kept, without it is
    not."""
    found = md.run(
        lab.kept, 4, ("4bit", "top-k:density=0.01", "top-k:density=0.01,feedback=no"), size=2
    )[0]
    assert found["4bit"]["lost"] < 1e-6 and found["top-k:density=0.01"]["lost"] < 1e-6
    assert found["top-k:density=0.01,feedback=no"]["lost"] > 0.01
    assert found["top-k:density=0.01"]["sum"] > found["top-k:density=0.01,feedback=no"]["sum"]
    assert found["4bit"]["first"] > found["top-k:density=0.01"]["first"]


def test_the_share_of_a_projection_is_its_squared_length() -> None:
    given = np.array([3.0, 4.0])
    assert lab.share(np.array([3.0, 0.0]), given) == pytest.approx(9 / 25)
    assert lab.share(given, given) == 1 and lab.share(-given, given) == -3


def test_the_clock_adds_computing_messages_and_bytes() -> None:
    link = lab.Link("slow", alpha=0.5, beta=0.25)
    assert lab.clock(lab.Moment(10, 0.0, sent=8, messages=3), 2.0, link) == 20 + 1.5 + 2


def test_the_picture_of_fragments_is_that_of_streaming() -> None:
    assert lab.fragment_rows(6, 3, 1, 9) == ["·SM····SM", "···SM····", "·····SM··"]
    assert lab.fragment_rows(2, 1, 0, 4) == ["·X·X"]


@pytest.mark.soak  # tests/parallel/compress/test_state.py has restarts
def test_a_restart_with_residuals_changes_no_bit() -> None:
    gaps = broken.gaps_after_restart("top-k:density=0.01")
    assert gaps["restored"] == 0 and gaps["lost"] > 1e-4


def test_numbers_of_the_story() -> None:
    """Bytes of top-k (quiz), of local steps in 4 bits, of 1-bit Adam; schemes of the lesson."""
    story = " ".join(lessons.find("21").part("README.md").read_text(encoding="utf-8").split())

    def times_fewer(text: str, ranks: int) -> float:
        weights = [Parameter(np.zeros(1_024_000, np.float32))]
        group = SimpleNamespace(size=ranks)
        run = GradientRun.whole(weights, group, "all_reduce")
        return 2 * (ranks - 1) * 4 * run.size / scheme_of(text).sent_bytes(run)

    top_k = [times_fewer("top-k:density=0.01", ranks) for ranks in (8, 64)]
    assert f"{top_k[0]:.1f} times on 8 ranks, {top_k[1]:.1f} on 64" in story
    even, fewer = (times_fewer("top-k:density=0.01", ranks) for ranks in (100, 101))
    assert even == pytest.approx(1, rel=1e-3) and fewer == pytest.approx(100 / 101, rel=1e-3)
    assert "On 100 ranks it sends as much as the ring, on more ranks more." in story
    assert f"a step sends 1/{4 * times_fewer('4bit', 4):.0f} of DDP's bytes" in story
    assert f"= {1 / (1 / 5 + 4 / 5 / times_fewer('sign', 4)):.1f} in all" in story
    lesson = load_module(lessons.find("21").part("lesson.py"), "21")
    assert len(lesson.SCHEMES) == 10 and "sends one gradient by ten of these schemes" in story
