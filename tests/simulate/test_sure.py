"""How sure answers are: intervals and ties from the errors of runs that were left out."""

import math
import random

import pytest

from minidist.nn import GPTConfig
from minidist.plan.ranking import plan_for
from minidist.simulate.rates import CostProfile, Rates
from minidist.simulate.simulate import simulate
from minidist.simulate.sure import PUBLISHED, Sureness, of_fit, sureness

TINY = GPTConfig(vocabulary=512, context=64, layers=2, width=128, heads=4)


def test_nine_of_ten_lie_inside() -> None:
    dice = random.Random(3)
    errors = [dice.gauss(0.0, 0.1) for _ in range(4000)]
    found = sureness(errors)
    inside = sum(abs(error) <= math.log(found["spread"]) for error in errors)
    assert inside / len(errors) == pytest.approx(0.9, abs=0.01)
    assert found["spread"] == pytest.approx(math.exp(0.1645), rel=0.02)


def test_what_both_plans_of_a_job_are_wrong_by_does_not_count() -> None:
    """Each job is 30 % off, its plans 2 % more or less."""
    errors = [0.3, 0.32, -0.3, -0.28]
    apart = sureness(errors, ["a", "a", "b", "b"])["apart"]
    assert apart == pytest.approx(math.exp(0.02))
    assert sureness(errors)["apart"] > math.exp(0.5)
    assert sureness(errors, list("abcd")) == sureness(errors)


def test_an_interval_and_a_tie() -> None:
    sure = Sureness(spread=1.25, apart=1.1, memory=1.02)
    assert sure.interval(2.0) == (1.6, 2.5)
    assert sure.memory_interval(100.0) == pytest.approx((98.04, 102.0), abs=0.01)
    assert not sure.tells(1.0, 1.05) and not sure.tells(1.05, 1.0) and sure.tells(1.0, 1.2)


def test_a_profile_has_its_own() -> None:
    assert of_fit({"spread": 1.07}) == PUBLISHED._replace(spread=1.07)


def test_an_answer_says_how_sure_it_is() -> None:
    profile = CostProfile("h100", fit={"spread": 1.07, "apart": 1.05})
    found = simulate("dp=2", TINY, "h100:2", batch=4)
    assert found.sure == PUBLISHED
    low, high = found.as_json()["known_to"]["step_seconds"]
    assert low * PUBLISHED.spread == pytest.approx(found.step_seconds)
    assert high / PUBLISHED.spread == pytest.approx(found.step_seconds)
    rates = Rates.of(found.cluster.device, profile)
    surer = simulate("dp=2", TINY, "h100:2", batch=4, rates=rates)
    assert surer.sure == PUBLISHED._replace(spread=1.07, apart=1.05)
    assert surer.step_seconds == found.step_seconds


def test_a_ranking_says_which_plans_it_cannot_tell_from_the_best() -> None:
    ranking = plan_for(TINY, "h100:4", batch=8)
    for choice in ranking.top(20):
        near = choice.known_seconds <= PUBLISHED.apart * ranking.best.known_seconds
        assert ranking.tied(choice) == near
