"""Trials: plans run in turn, and what is told of them; the runs themselves are replaced."""

import argparse
import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidist.cli import main
from minidist.cli.train.arguments import add_arguments
from minidist.cli.train.settings import mixture_of
from minidist.comm.cost.link_model import (
    ComputationCost,
    LinkCost,
    Profile,
    profile_path,
    save_profile,
)
from minidist.errors import ConfigError
from minidist.nn import GPTConfig, MixtureConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.plan import trial
from minidist.plan.ranking import Choice, Ranking, plan_for, plan_words
from minidist.plan.trial import try_plans
from minidist.simulate.simulate import simulate

CONFIG = GPTConfig(vocabulary=512, context=64, layers=2, width=32, heads=2, positions="rotary")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started; each writes its number as the seconds of a step."""
    found: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        found.append(command)
        if "--broken" in command:
            return subprocess.CompletedProcess(command, 2, "", "minidist train: no such option")
        Path(command[command.index("--json") + 1]).write_text(f'{{"step_seconds": {len(found)}}}')
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", run)
    return found


def test_each_round_runs_the_best_and_a_random_plan(started: list[list[str]]) -> None:
    ranking = plan_for(CONFIG, "h100:1x2", batch=4)
    trials = try_plans(ranking, 2, rounds=4, steps=3)
    plans = [command[command.index("--plan") : command.index("--out")] for command in started]
    assert len(started) == 12 and plans[0] == plans[3] != plans[2] and len(trials) == 3
    assert [trial.random for trial in trials] == [False, False, True]
    # of 1, 4, 7, 10; of 2, 5, 8, 11; …
    assert [trial.measured for trial in trials] == [5.5, 6.5, 7.5]
    assert trials[0].spread == pytest.approx(1 - 4 / 7)
    replayed = [
        simulate(trial.choice.plan, CONFIG, "h100:1x2", batch=4).step_seconds for trial in trials
    ]
    assert (
        [trial.predicted for trial in trials]
        == replayed
        != [trial.choice.step_seconds for trial in trials]
    )


def test_a_run_has_the_model_that_was_ranked(started: list[list[str]]) -> None:
    """With its attention pattern and its mixture; the options are those that train reads into the
    same fields."""
    mixture = MixtureConfig(4, top_k=3, balance="bias", shared=1, noise=0.5)
    config = replace(CONFIG, attention_pattern="local:64", mixture=mixture)
    try_plans(plan_for(config, "h100:1x1", batch=4), 1, rounds=1)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(started[0][started[0].index("train") + 1 :])
    assert (args.attention_pattern, mixture_of(args)) == ("local:64", mixture)


def test_a_run_that_fails_is_told_in_its_own_words(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minidist.plan.trial.plan_words", lambda plan: ["--broken"])
    with pytest.raises(ConfigError, match="no such option"):
        try_plans(plan_for(CONFIG, "h100:1x2", batch=4), 1)


def test_the_command_simulates_what_it_runs(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ranks that share this machine: --run K confirms the best K, and holds the replay against
    the runs."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    rates = [
        ComputationCost(
            ranks, {"float32": 1e11 / ranks, "float64": 5e10}, 10.0, 1e-6, 1e10, 1e6, 3.0, 0.2
        )
        for ranks in (1, 2)
    ]
    link = LinkCost("shm", 2, 2e-5, 5e-6, 2e-10, 0.0, 0.1, call=3e-4)
    save_profile(Profile([link], {}, tuple(rates)), profile_path())
    words = [
        "--layers",
        "2",
        "--width",
        "32",
        "--heads",
        "2",
        "--sequence",
        "64",
        "--vocab",
        "512",
        "--batch",
        "4",
    ]
    words += ["--run", "14", "--top", "14", "--json", str(tmp_path / "plan.json")]
    assert main(["plan", "--here", "-n", "2", *words]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    config = GPTConfig(vocabulary=512, context=64, layers=2, width=32, heads=2, positions="rotary")
    for made, plan in zip(found["trials"][:14], found["plans"], strict=True):
        assert made["plan"] == plan["plan"] and made["predicted"] == plan["confirmed_seconds"]
    # whose ranks wait for each other
    pipelines = [made for made in found["trials"] if made["plan"]["pp"] == 2]
    for made in (found["trials"][0], pipelines[0], pipelines[-1]):
        replayed = simulate(Plan(**made["plan"]), config, "here:2", batch=4)
        assert made["predicted"] == pytest.approx(replayed.step_seconds)


def draw_plans(seed: int, ranks: int) -> list[tuple[Ranking, Choice]]:
    """Ten plans of one model and batch, and ten of others."""
    draw = random.Random(seed)
    drawn = []
    models = [(4, 256, 128, 16)] + [
        (
            draw.choice((2, 4, 6)),
            draw.choice((128, 256, 384)),
            draw.choice((64, 128)),
            draw.choice((8, 16)),
        )
        for _ in range(5)
    ]
    for layers, width, context, batch in models:
        config = GPTConfig(
            vocabulary=512, context=context, layers=layers, width=width, heads=4, positions="rotary"
        )
        ranking = plan_for(config, f"here:{ranks}", batch=batch, precision="fp32")
        drawn += [
            (ranking, ranking.choice(place))
            for place in draw.sample(range(len(ranking)), 2 if drawn else 10)
        ]
    return drawn


def predicted_and_measured(
    ranks: int, rounds: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of twenty plans, on a machine that does nothing else, and is measured first: seconds
    predicted; the median of alternating runs; by how much two halves of the runs differ. All of it
    is printed, and the order of both.

    A virtual machine has another speed a minute later. So the first plan runs again after each one,
    and each time is that of the machine as fast as it was when it was measured.
    """
    subprocess.run(
        [
            sys.executable,
            "-m",
            "minidist",
            "bench",
            "calibrate",
            "-n",
            str(ranks),
            "--only",
            "shm,computation",
        ],
        check=True,
        timeout=900,
    )
    drawn = draw_plans(0, ranks)
    assert len(drawn) == 20

    def run(place: int) -> float:
        return trial.run_once(*drawn[place], "adamw", trial.STEPS)

    begun = control = float(np.median([run(0) for _ in range(3)]))
    seen = [[] for _ in drawn]
    slowness = list[float]()
    for place in (*range(20),) * rounds:
        before = control
        seconds = run(place)
        control = run(0)
        slowness.append((before + control) / 2 / begun)
        seen[place].append(seconds / slowness[-1])
    measured = np.array([np.median(found) for found in seen])
    spread = np.array([abs(np.median(found[::2]) / np.median(found[1::2]) - 1) for found in seen])
    predicted = np.array(
        [
            simulate(choice.plan, ranking.config, ranking.cluster, batch=ranking.batch).step_seconds
            for ranking, choice in drawn
        ]
    )
    errors = predicted / measured - 1
    for (_, choice), *figures in zip(drawn, predicted, measured, errors, spread, strict=True):
        words = " ".join(plan_words(choice.plan))
        print(
            "predicted {:.4f} s, measured {:.4f} s, {:+.1%}, halves differ by {:.1%}:".format(
                *figures
            ),
            words,
        )
    whole, ten = (agreement(predicted[part], measured[part]) for part in (slice(None), slice(10)))
    print(
        f"{ranks} ranks: mean error {abs(errors).mean():.1%}, worst {abs(errors).max():.1%}; "
        f"order {whole:.2f}, {ten:.2f} in the ten of one model; the machine was "
        f"{min(slowness):.2f} to {max(slowness):.2f} times as slow as at first"
    )
    return predicted, measured, spread


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_plans_of_this_machine(request: pytest.FixtureRequest) -> None:
    """Two ranks: no more than this machine has cores."""
    if "twenty" not in request.config.option.keyword:
        pytest.skip("forty minutes on a machine that does nothing else; only by name: -k twenty")
    predicted, measured, spread = predicted_and_measured(2)
    errors = abs(predicted / measured - 1)
    assert errors.mean() <= 0.08 and errors.max() <= 0.2
    assert min(agreement(predicted, measured), agreement(predicted[:10], measured[:10])) >= 0.85
    assert measured[predicted[:10].argmin()] <= measured[:10].min() * (1.03 + spread[:10].max())


def agreement(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Kendall's tau: pairs in the same order, less those in the other, over all."""
    pairs = list(itertools.combinations(range(len(predicted)), 2))
    return float(
        sum(
            np.sign(predicted[i] - predicted[j]) * np.sign(measured[i] - measured[j])
            for i, j in pairs
        )
    ) / len(pairs)
