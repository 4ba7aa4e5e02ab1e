"""Trials: plans run in turn, and what is told of them; the runs themselves are replaced."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.plan.ranking import plan_for
from minidist.plan.trial import try_plans

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
    plans = [command[command.index("--plan"):command.index("--out")] for command in started]
    assert len(started) == 12 and plans[0] == plans[3] != plans[2] and len(trials) == 3
    assert [trial.random for trial in trials] == [False, False, True]
    assert [trial.measured for trial in trials] == [5.5, 6.5, 7.5]          # of 1, 4, 7, 10; of 2, 5, 8, 11; …
    assert trials[0].spread == pytest.approx(1 - 4 / 7)
    assert trials[0].predicted == ranking.best.step_seconds


def test_a_run_that_fails_is_told_in_its_own_words(started: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minidist.plan.trial.plan_words", lambda plan: ["--broken"])
    with pytest.raises(ConfigError, match="no such option"):
        try_plans(plan_for(CONFIG, "h100:1x2", batch=4), 1)
