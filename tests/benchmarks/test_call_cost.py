"""Test what training takes beside messages and kernels: numbers that were planted in steps are
found again."""

import itertools
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minidist.bench.calibrate import _training_steps
from minidist.bench.call_cost import (
    ALONE,
    KINDS,
    LEAST,
    alone_seconds,
    kinds,
    small_step,
    step_seconds,
    with_steps,
)
from minidist.comm.cost.link_model import ComputationCost, LinkCost, Profile
from minidist.comm.group import Group
from minidist.launch import run
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.here import here
from minidist.simulate.simulate import require, simulate

COMPUTATION = (
    ComputationCost(1, {"float32": 8e10, "float64": 4e10}, 20.0, 3e-6, 8e9, 1 << 20, 2.0, 0.1),
)
LINK = LinkCost("shm", 2, 2e-5, 5e-6, 2e-10, 1e-10, 0.1)
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("ranks", "call", "pair", "slowdown"),
    [
        (2, 1e-4, 1e-4, 1.3),
        pytest.param(2, 2e-4, 2e-4, 1.0, marks=SOAK),
        pytest.param(2, 0.0, 0.0, 1.2, marks=SOAK),
        pytest.param(3, 1e-4, 1e-4, 1.1, marks=SOAK),
        pytest.param(4, 3e-4, 1e-4, 1.3, marks=SOAK),
        pytest.param(4, 0.0, 0.0, 1.0, marks=SOAK),
        pytest.param(2, 1e-4, 1e-4, 0.9, marks=SOAK),
    ],
)
def test_what_was_planted_is_found(ranks: int, call: float, pair: float, slowdown: float) -> None:
    link = LinkCost("shm", ranks, 2e-5, 5e-6, 2e-10, 1e-10, 0.1)
    profile = Profile([link], {"processor": "any"}, COMPUTATION)
    true = here(
        ranks,
        "shm",
        replace(profile, links=[replace(link, call=call, pair=pair, slowdown=slowdown)]),
    )
    steps = {kind: small_step(kind, ranks) for kind in kinds(ranks)}
    alone = alone_seconds(ranks, profile)
    measured = {
        kind: [simulate(plan, config, true, batch=sequences).step_seconds / alone]
        for kind, (plan, config, sequences) in steps.items()
    }
    found = with_steps(link, measured, profile)
    assert (found.call, found.pair) == pytest.approx((call, pair), rel=1e-6, abs=1e-9)
    assert found.slowdown == pytest.approx(slowdown, rel=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("kind", kinds(2))
def test_a_step_that_is_shorter_than_predicted_makes_nothing_negative(kind: str) -> None:
    steps = {each: [1e-6 if each == kind else 1.0] for each in kinds(2)}
    found = with_steps(LINK, steps, Profile([LINK], {"processor": "any"}, COMPUTATION))
    assert found.call >= 0 and found.slowdown >= LEAST


def test_without_computation_a_link_stays_as_it_is() -> None:
    assert with_steps(LINK, {kind: [1.0] for kind in KINDS}, Profile([LINK], {}, ())) == LINK


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_that_is_timed_is_the_one_that_is_predicted(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer takes the global batch, on every rank."""
    seen = []

    class Watched:
        def __init__(self, plan: Plan, config: GPTConfig, world: Group) -> None:
            self.model = plan, config

        def step(self, batch: tuple[np.ndarray, np.ndarray]) -> None:
            seen.append((*self.model, *batch[0].shape))

    monkeypatch.setattr("minidist.bench.call_cost.Trainer", Watched)
    run(lambda world: len(step_seconds(kind, world)), size=4, transport="threads")
    plan, config, sequences = small_step(kind, 4)
    assert set(seen) == {(plan, config, sequences, config.context)}
    plan.require(4, config)
    require(plan, config, here(4, "shm", Profile([LINK], {}, COMPUTATION)), sequences)


def test_a_slow_minute_of_the_machine_does_not_show() -> None:
    """Every step is in units of those that ranks train alone before and after it."""
    slow = itertools.cycle([1.0] * 7 + [1.5] * 8)

    def ask(**question: Any) -> list[float]:
        return [0.2 * next(slow)] * 3

    def alone(**question: Any) -> list[float]:
        assert question["size"] == ALONE
        return [0.1 * next(slow)]

    steps = _training_steps({"shm": ask}, alone, 2, 20, lambda text: None)["shm"]
    assert set(steps) == set(kinds(2)) and all(len(each) == 20 for each in steps.values())
    assert all(statistics.median(each) == pytest.approx(2.0) for each in steps.values())
