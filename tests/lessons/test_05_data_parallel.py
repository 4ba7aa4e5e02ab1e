"""Exercise 05: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

from minidist.grading import load_module
from minidist.lessons import find

RIGHT = right("05")
WRONG = {
    "rows are left out": {
        1: "[inputs[r * (len(inputs) // len(replicas)):][:len(inputs) // len(replicas)] "
        "for r in range(len(replicas))]"
    },
    "each device has the whole batch": {1: "[inputs] * len(replicas)"},
    "each part is one row": {1: "inputs"},
    "the tokens of each row are cut": {1: "np.array_split(inputs, len(replicas), axis=1)"},
    "a row is on two devices": {
        1: "[inputs[r * len(inputs) // len(replicas):][:-(-len(inputs) // len(replicas))] "
        "for r in range(len(replicas))]"
    },
    "the smaller part comes before a larger one": {
        1: "[inputs[r * len(inputs) // len(replicas):(r + 1) * len(inputs) // len(replicas)] "
        "for r in range(len(replicas))]"
    },
    "not as even as it goes": {
        1: "[inputs[r * -(-len(inputs) // len(replicas)):][:-(-len(inputs) // len(replicas))] "
        "for r in range(len(replicas))]"
    },
    "the rows are in another order": {
        1: "[inputs[r::len(replicas)] for r in range(len(replicas))]"
    },
    "one array for both": {2: "copied.data = original.data"},
    "device 0 was overwritten": {2: "original.data[...] = copied.data"},
    "the model did not travel": {2: "pass"},
    "device 1 computes step 0 with other weights": {2: "copied.data[...] = -original.data"},
    "other numbers than device 0's were copied": {2: "copied.data[...] = 0"},
    "only the first step's model travelled": {
        2: "if not copied.name.endswith('.'):\n    copied.name += '.'\n"
        "    copied.data[...] = original.data"
    },
    "the loss went out": {3: "[np.full_like(y.data, loss.item()) for y in outputs]"},
    "another device's gradients": {
        3: "np.array_split(np.asarray(gathered.grad), len(replicas))[::-1]"
    },
    "divided by the number of devices": {
        3: "np.array_split(np.asarray(gathered.grad) / len(replicas), len(replicas))"
    },
    "the outputs went out": {3: "np.array_split(np.asarray(gathered.data), len(replicas))"},
    "divided by the number of devices: the loss is the mean": {
        4: "sum(p.grad for p in same) / len(replicas)"
    },
    "multiplied by the number of devices": {4: "sum(p.grad for p in same) * len(replicas)"},
    "the opposite sign": {4: "-sum(p.grad for p in same)"},
    "the others' gradients are missing": {4: "same[0].grad"},
    "device 0's own gradients are missing": {4: "sum(p.grad for p in same[1:])"},
    "the wrong gradients": {4: "max((p.grad for p in same), key=lambda g: abs(g).sum())"},
    "one model for all the others": {
        5: "(model_bytes + others * (row_bytes + output_bytes), model_bytes + others * "
        "output_bytes)"
    },
    "the outputs' gradients are missing": {
        5: "((replicas - 1) * model_bytes + others * row_bytes, (replicas - 1) * model_bytes + "
        "others * output_bytes)"
    },
    "receives: 10176, target 9472: device 0's own rows are counted": {
        5: "((replicas - 1) * model_bytes + others * (row_bytes + output_bytes), "
        "(replicas - 1) * model_bytes + rows * output_bytes)"
    },
    "not a pair": {5: "(replicas - 1) * model_bytes"},
}


def test_the_story_has_the_times_of_the_clock() -> None:
    """DP's step and DDP's, by counted calls and bytes: the same on every machine."""
    lab = load_module(find("05").part("experiments.py"), "05")
    story = find("05").part("README.md")
    for ranks in (1, 2, 4, 8):
        found = lab.step_on_a_clock(lab.BLAS, ranks, sequences=8)
        times = " | ".join(f"{1e3 * found[name]:.1f} ms" for name in lab.PARTS)
        ratio = (found["dp passes"] + found["dp link"]) / (found["ddp passes"] + found["ddp link"])
        assert f"| {ranks} | {times} | {ratio:.2f} |" in story.read_text(encoding="utf-8")
    calls = lab.calls_of(lab.BLAS, 1)
    computes = sum(max(flops / lab.FLOPS, nbytes / lab.BYTES) for flops, nbytes in calls)
    told = f"a replica makes {len(calls)} calls and computes for {1e3 * computes:.1f} ms"
    assert told in story.read_text(encoding="utf-8")


def test_the_lock_on_a_clock_of_its_own() -> None:
    """The same on every machine: small products take turns, large ones do not. (README, section 5,
    has the numbers.)"""
    lab = load_module(find("05").part("experiments.py"), "05")
    told = find("05").part("README.md").read_text()
    for config, busy in ((lab.PYTHON, "1.01"), (lab.BLAS, "3.77")):
        alone, four = (lab.turns_on_a_clock(config, replicas, sequences=4) for replicas in (1, 4))
        assert f"{four[1]:.2f}" == busy and f" {busy} " in told.replace("\n", " ")
        assert alone[1] == pytest.approx(1, rel=1e-12)
        assert f"| {busy} | {1e3 * alone[0]:.1f} ms | {1e3 * four[0]:.1f} ms |" in told
        assert four[0] > 3.8 * alone[0] if config is lab.PYTHON else four[0] < alone[0] / 3.5
    assert (
        abs(
            sum(flops for flops, _ in lab.calls_of(lab.BLAS, 2))
            / sum(flops for flops, _ in lab.calls_of(lab.BLAS, 1))
            - 2
        )
        < 1e-9
    )


@pytest.mark.parametrize(
    ("replicas", "threads", "processors", "ticks", "waited"),
    [
        (4, 1, 2, 24, 0),
        (4, 4, 2, 100, 152),
        (1, 4, 4, 3, 0),
        (1, 1, 2, 12, 0),
        (3, 1, 3, 12, 0),
        (3, 2, 1, 78, 42),
    ],
)
def test_threads_that_spin_on_a_clock(
    replicas: int, threads: int, processors: int, ticks: int, waited: int
) -> None:
    """A product is four ticks of work. Threads that have their processors waste none."""
    lab = load_module(find("05").part("experiments.py"), "05")
    assert lab.products_on_a_clock(replicas, threads, processors=processors) == (ticks, waited)


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("05", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("05", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("05", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_05.py line" in result.results[-1].line()
    )
