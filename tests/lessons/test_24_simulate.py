"""Exercise 24: filled rightly it passes, each wrong filling fails under its name; what the lesson's
tables say."""

import argparse
from pathlib import Path

import pytest
from filling import assert_named, graded, right

import minidist as md
from minidist import lessons
from minidist.grading import load_module
from minidist.simulate.models import model

RIGHT = right("24")
LESSON = load_module(lessons.find("24").part("lesson.py"), "24")
WRONG = {
    "a message that waits for the wrong rank": {1: "group[1:]"},
    "a call that does not wait for the last rank": {
        2: "max(ended.get((way, count[way] - 1), 0.0), min(came[way, count[way]].values()))"
    },
    "calls of one group at the same time": {2: "max(came[way, count[way]].values())"},
    "as long on every rank as on rank 0": {3: "event.work"},
    "adds the clock once more": {3: "now + busy_seconds(rank, event.work)"},
    "exchanges rank and work": {3: "busy_seconds(event.work, rank)"},
    "work of another length": {3: "2 * busy_seconds(rank, event.work)"},
    "does not wait for the call just before": {
        2: "max(ended.get((way, 1), 0.0), *came[way, count[way]].values())"
    },
    "before to the arrival": {
        2: "ended.get((way, count[way] - 1), 0.0) + max(came[way, count[way]].values())"
    },
    "a message that waits for the wrong": {1: "(rank,)"},
    "a call that waits for another group's": {
        2: "max([*ended.values(), 0.0, *came[way, count[way]].values()])"
    },
    "turns the clock of a late rank back": {4: "ended[started[event.id]]"},
    "adds the call's end to the rank's clock": {4: "now + ended[started[event.id]]"},
    "your receiver does not wait": {4: "now"},
    "multiplies this axis": {5: "place + shape[axis] * coordinates[axis]"},
    "does not multiply the place": {5: "place + coordinates[axis]"},
    "counts ranks from 1": {5: "place * shape[axis] + coordinates[axis] + 1"},
    "exchanges place and coordinate": {5: "place * coordinates[axis] + shape[axis]"},
    "ranks on other devices": {5: "coordinates[axis]"},
    "makes a shared link faster": {6: "2 * (size - 1) / size * nbytes / (sharing * bandwidth)"},
    "as if no other message shared the link": {6: "2 * (size - 1) / size * nbytes / bandwidth"},
    "sends whole arrays": {6: "2 * (size - 1) * nbytes * sharing / bandwidth"},
    "goes round once": {6: "(size - 1) / size * nbytes * sharing / bandwidth"},
    "counts P steps": {6: "2 * nbytes * sharing / bandwidth"},
    "not what the link carries": {6: "nbytes / bandwidth"},
    "the peak of one device": {7: "tokens * flops_a_token / (seconds * peak)"},
    "not yet a share of the peak": {7: "tokens * flops_a_token / seconds"},
    "counts one token": {7: "flops_a_token / (seconds * devices * peak)"},
    "does not divide by the seconds": {7: "tokens * flops_a_token / (devices * peak)"},
    "the 6 FLOPs a weight twice": {7: "6 * tokens * flops_a_token / (seconds * devices * peak)"},
    "upside down": {7: "seconds * devices * peak / (tokens * flops_a_token)"},
    "not the share of all devices' peak": {7: "tokens * flops_a_token / devices"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("24", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("24", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("24", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_24.py line" in result.results[-1].line()
    )


def test_a_guess_is_five_numbers_of_seconds() -> None:
    assert LESSON.seconds_of("0.1,.2,3,4,5e-1") == [0.1, 0.2, 3.0, 4.0, 0.5]
    for text in ("0.1", "1,2,3,4,x", "1,2,3,4,0", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="write 5 numbers of seconds"):
            LESSON.seconds_of(text)


def test_the_break_its_lose_what_the_story_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The virtual clock is exact: the story's figures are these."""
    told = lessons.find("24").part("README.md").read_text(encoding="utf-8")
    for name, figures in (
        ("slow-ring", ("48.95 ms", "92.72 ms")),
        ("tensor-across-nodes", ("0.321 s", "0.357 s")),
        ("straggler", ("0.185 s", "0.367 s")),
    ):
        LESSON.BREAKS[name]()
        out = capsys.readouterr().out
        assert all(figure in out and figure in told for figure in figures), name


def story(chapter: str = "24") -> str:
    return " ".join(lessons.find(chapter).part("README.md").read_text(encoding="utf-8").split())


def test_the_story_says_what_four_times_the_devices_give() -> None:
    first = LESSON.simulated("dp=16", "h100:2x8", 64, zero=3)
    strong, weak = (
        LESSON.simulated("dp=64", "h100:8x8", batch, zero=3).tokens_per_second
        for batch in (64, 256)
    )
    told = [f"{speed / first.tokens_per_second:.2f} times" for speed in (strong, weak)]
    assert f"third table: {' and '.join(told)}." in story()


def test_the_story_says_what_bandwidth_and_size_give() -> None:
    """At 1 and at 8 GB/s the large model is the worse one, at 64 it is the better one."""
    lab = LESSON.lab
    small, large = (lab.efficiencies(lab.sized(*lab.SIZES[at]), (1.0, 8.0, 64.0)) for at in (0, -1))
    assert f"weights keeps {small[0]:.1%} and that of 6.7 billion {large[0]:.1%}" in (
        story().replace(" %", "%")
    )
    assert f"keep {100 * large[1]:.0f} to {100 * small[1]:.0f} % of one node's" in story()
    fast = f"small one keeps {100 * small[2]:.0f} % and the large one {100 * large[2]:.0f} %."
    assert fast in story()


def test_the_story_says_what_bytes_cost() -> None:
    """Training widens fp8 before each product: a step takes longer than with bf16."""
    plans = [md.Plan(dp=8, precision=precision) for precision in ("fp8", "bf16")]
    fp8, bf16 = (md.simulate(plan, model("gpt2"), "h100:1x8", batch=64) for plan in plans)
    said = (
        f"A step takes {fp8.step_seconds:.4f} s and ${fp8.dollars:.3g}; with `--precision bf16` "
        f"{bf16.step_seconds:.4f} s and ${bf16.dollars:.3g}."
    )
    assert said in story()
    by_docs = (
        f"{fp8.step_seconds:.4f} s per step of GPT-2 on eight H100 with fp8 and "
        f"{bf16.step_seconds:.4f} s"
    )
    page = Path(__file__).parents[2] / "docs" / "concepts" / "precision.md"
    assert by_docs in " ".join(page.read_text(encoding="utf-8").split())
    assert fp8.peak(fp8.fullest)["total"] < bf16.peak(bf16.fullest)["total"]


@pytest.mark.soak
def test_data_parallel_efficiency_depends_on_bandwidth_and_passes_rather_than_on_size() -> None:
    """N1:100 says that large models are limited; their gradients grow, and so does the computing
    beside them."""
    lab = LESSON.lab
    (small, wide), (large,) = (
        lab.efficiencies(lab.sized(layers, 1024, 16), gbps)
        for layers, gbps in ((4, (8.0, 64.0)), (12, (8.0,)))
    )
    assert 0.1 < small < 0.9 and large == pytest.approx(small, rel=0.25)
    assert wide > 1.5 * small
    assert lab.efficiencies(lab.sized(4, 1024, 16), (8.0,), passes=4)[0] > 1.2 * small


@pytest.mark.soak
def test_the_table_by_size_row_by_row() -> None:
    """No plan is faster than the row's ZeRO-2 at 7 billion; 3D is slower by a fifth at 70 billion,
    by little at 175; offloading by a tenth at a trillion."""
    rows = list(LESSON.lab.advised())
    assert all(row.advised is not None for row in rows)
    losses = [row.advised.known_seconds / row.best.known_seconds - 1 for row in rows]
    assert (
        all(loss >= 0 for loss in losses)
        and losses[0] < 0.01 < 0.1 < losses[1] < 0.3
        and losses[2] < 0.03
        and 0.03 < losses[3] < 0.12
    )
