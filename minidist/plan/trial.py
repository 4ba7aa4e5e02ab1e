"""Chapter 24 · The best plans trained on this machine, in turn, compared with their predictions.

Each round starts every plan once, with `minidist train`; a plan's time is the median of its rounds.
The last plan is a random one; it shows whether the predictions differ between plans.
"""

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from minidist.errors import ConfigError
from minidist.launch.own_python import module_command
from minidist.plan.ranking import Choice, Ranking, model_words, plan_words, replayed
from minidist.progress import SILENT, Progress
from minidist.simulate.rates import Rates

ROUNDS = 4
STEPS = 12
TIMEOUT = 600.0  # seconds of one run


@dataclass(frozen=True)
class Trial:
    """The measured and predicted step of one plan.

    Attributes: predicted: seconds of a step by the replay; measured: by the runs; spread: relative
                difference between two halves of the rounds.
    """

    choice: Choice
    random: bool
    predicted: float
    measured: float
    spread: float

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {
            "plan": self.choice.plan.as_dict(),
            "random": self.random,
            "predicted": self.predicted,
            "measured": self.measured,
            "spread": self.spread,
        }


def try_plans(
    ranking: Ranking,
    count: int,
    *,
    optimizer: str = "adamw",
    rounds: int = ROUNDS,
    steps: int = STEPS,
    rates: Rates | None = None,
    show: Progress = SILENT,
) -> list[Trial]:
    """Train with the best `count` plans and a random one, in turn.

    Args:    rates: seconds of kernels, for plans that the ranking did not confirm (default: of the
             cluster's device).
    Raises:  ConfigError if a run fails, with the run's message.
    """
    best = ranking.top(count)
    choices = [*best, _random(ranking, len(best))] if len(ranking) > len(best) else best
    seen: list[list[float]] = [[] for _ in choices]
    for number in range(rounds):
        for place, (choice, found) in enumerate(zip(choices, seen, strict=True)):
            show.at(
                number * len(choices) + place,
                rounds * len(choices),
                f"round {number + 1}: training under {' '.join(plan_words(choice.plan))}",
            )
            found.append(run_once(ranking, choice, optimizer, steps))
    return [
        Trial(
            choice,
            place >= len(best),
            _replayed(ranking, choice, optimizer, rates),
            median(found),
            abs(median(found[::2]) / median(found[1::2] or found) - 1),
        )
        for place, (choice, found) in enumerate(zip(choices, seen, strict=True))
    ]


def _replayed(ranking: Ranking, choice: Choice, optimizer: str, rates: Rates | None) -> float:
    """Return the seconds of a step by the replay; the fast path is too short if ranks share
    cores."""
    if choice.confirmed is None:
        choice = replayed(choice, ranking, rates=rates, optimizer=optimizer)
    assert choice.confirmed is not None
    return choice.confirmed.step_seconds


def _random(ranking: Ranking, first: int) -> Choice:
    """Return a random plan from place `first` on; the same one at each call."""
    return ranking.choice(int(np.random.default_rng(0).integers(first, len(ranking))))


def run_once(ranking: Ranking, choice: Choice, optimizer: str, steps: int) -> float:
    """Train once; return the seconds of a step in the run's metrics."""
    with tempfile.TemporaryDirectory(prefix="minidist-plan-") as folder:
        found = Path(folder, "metrics.json")
        words = [
            "train",
            "-n",
            str(choice.plan.size),
            *model_words(ranking),
            *plan_words(choice.plan),
            "--optimizer",
            optimizer,
            "--steps",
            str(steps),
            "--quiet",
            "--out",
            str(Path(folder, "run")),
            "--json",
            str(found),
        ]
        told = f"minidist {' '.join(words)}"
        try:
            done = subprocess.run(
                module_command("minidist", *words),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{told}: not done after {TIMEOUT:g} s; use fewer layers") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise ConfigError(f"{told}: {last}")
        return float(json.loads(found.read_text(encoding="utf-8"))["step_seconds"])
