"""The number of steps of a run without --steps: as many as fit into about a minute, with bits that
an ordinary command line gives again."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from minidist.cli import main
from minidist.cli.train import fitting
from minidist.cli.train.arguments import add_arguments
from minidist.cli.train.report import lesson_of
from minidist.console import Parser
from minidist.parallel.hybrid.hybrid import Plan

TINY = "--batch 5 --context 8 --layers 1 --width 8 --heads 2 --dtype float64 --transport threads"


def parsed(words: str) -> Any:
    parser = Parser()
    add_arguments(parser)
    return parser.parse_args(shlex.split(words))


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(0.001, 500), (0.12, 500), (0.25, 240), (0.3, 200), (0.56, 110), (0.6, 100), (60.0, 100)],
)
def test_about_a_minute_but_never_fewer_than_a_hundred(seconds: float, steps: int) -> None:
    assert fitting.steps_that_fit([seconds / 2, seconds, seconds, seconds, seconds * 9]) == steps


@pytest.mark.parametrize(
    "words",
    [
        "--steps 500",
        "--resume run",
        "--save-every 10",
        "--elastic 1:2",
        "--local-steps 5",
        "--strategy parameter-server --asynchronous",
        "--warmup 3",
        "--lr-schedule wsd --lr-decay 9",
    ],
)
def test_a_run_whose_options_follow_from_its_steps_does_not_choose_them(words: str) -> None:
    assert not fitting.chooses_steps(parsed(words))


@pytest.mark.parametrize("words", ["", "--zero 2 -n 2", "--lr-schedule linear", "--verify"])
def test_others_choose(words: str) -> None:
    assert fitting.chooses_steps(parsed(words))


def test_the_measured_steps_lie_inside_the_warm_up() -> None:
    assert fitting.MEASURED < -(-fitting.MOST_STEPS // 20)
    assert parsed("").steps == fitting.MOST_STEPS


@pytest.mark.parametrize(
    ("ranks", "steps"), [(1, 100), (2, 100), pytest.param(1, 500, marks=pytest.mark.soak)]
)
def test_the_command_in_the_result_gives_the_same_bits(
    ranks: int,
    steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "SECONDS", 0.0 if steps == fitting.FEWEST_STEPS else 1e9)
    assert main(["train", "-n", str(ranks), *shlex.split(TINY), "--out", "one"]) == 0
    printed = capsys.readouterr().out
    assert ("--steps 100 --warmup 25 repeats this run" in printed) == (steps == 100)
    metrics = json.loads(Path("one/metrics.json").read_text())
    assert metrics["steps"] == len(metrics["losses"]) == steps
    again = shlex.split(metrics["machine"]["command"])
    assert again[:2] == ["minidist", "train"] and {f"--steps={steps}", "--warmup=25"} <= {*again}
    assert main([*again[1:], "--out", "two"]) == 0
    twice = json.loads(Path("two/metrics.json").read_text())
    assert twice["losses"] == metrics["losses"]
    weights = load_file("one/model.safetensors")
    for name, weight in load_file("two/model.safetensors").items():
        assert np.array_equal(weight, weights[name])


def test_every_plan_names_a_lesson_that_exists() -> None:
    plans = {
        "00": Plan(),
        "05": Plan(strategy="data-parallel", replicas=2),
        "06": Plan(dp=2, strategy="parameter-server"),
        "07": Plan(dp=2),
        "11": Plan(pp=2),
        "12": Plan(tp=2),
        "13": Plan(cp=2),
        "14": Plan(dp=2, zero=1),
        "15": Plan(dp=2, zero=2),
        "16": Plan(dp=2, zero=3),
        "17": Plan(dp=2, pp=2, tp=2, zero=1),
        "18": Plan(ep=2),
        "20": Plan(dp=2, zero=3, offload="all"),
        "21": Plan(dp=2, local_steps=5),
    }
    assert {lesson_of(plan.as_dict()) for plan in plans.values()} == plans.keys()
    assert all(lesson_of(plan.as_dict()) == lesson for lesson, plan in plans.items())
