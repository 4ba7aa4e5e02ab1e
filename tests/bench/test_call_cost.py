"""What training takes beside messages and kernels: numbers that were planted in steps are found again."""

from dataclasses import replace

import pytest

from minidist.bench.call_cost import KINDS, kinds, small_step, with_steps
from minidist.comm.cost.link_model import ComputationCost, LinkCost, Profile
from minidist.simulate.here import here
from minidist.simulate.simulate import simulate

COMPUTATION = (ComputationCost(1, {"float32": 8e10, "float64": 4e10}, 20.0, 3e-6, 8e9, 1 << 20, 2.0, 0.1),)
SOAK = pytest.mark.soak


@pytest.mark.parametrize(("ranks", "call", "pair", "slowdown"), [
    (2, 1e-4, 1e-4, 1.3), pytest.param(2, 2e-4, 2e-4, 1.0, marks=SOAK), pytest.param(2, 0.0, 0.0, 1.2, marks=SOAK),
    pytest.param(3, 1e-4, 1e-4, 1.1, marks=SOAK),
    pytest.param(4, 3e-4, 1e-4, 1.3, marks=SOAK), pytest.param(4, 0.0, 0.0, 1.0, marks=SOAK)])
def test_what_was_planted_is_found(ranks: int, call: float, pair: float, slowdown: float) -> None:
    link = LinkCost("shm", ranks, 2e-5, 5e-6, 2e-10, 1e-10, 0.1)
    profile = Profile([link], {"processor": "any"}, COMPUTATION)
    true = here(ranks, "shm", replace(profile, links=[replace(link, call=call, pair=pair, slowdown=slowdown)]))
    steps = {kind: small_step(kind, ranks) for kind in kinds(ranks)}
    seconds = {kind: [simulate(plan, config, true, batch=sequences).step_seconds]
               for kind, (plan, config, sequences) in steps.items()}
    found = with_steps(link, seconds, profile)
    assert (found.call, found.pair) == pytest.approx((call, pair), rel=1e-6, abs=1e-9)
    assert found.slowdown == pytest.approx(slowdown, rel=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("kind", kinds(2))
def test_a_step_that_is_shorter_than_predicted_makes_nothing_negative(kind: str) -> None:
    link = LinkCost("shm", 2, 2e-5, 5e-6, 2e-10, 1e-10, 0.1)
    seconds = {each: [1e-6 if each == kind else 1.0] for each in kinds(2)}
    found = with_steps(link, seconds, Profile([link], {"processor": "any"}, COMPUTATION))
    assert found.call >= 0 and found.slowdown >= 1


def test_without_computation_a_link_stays_as_it_is() -> None:
    link = LinkCost("shm", 2, 2e-5, 5e-6, 2e-10, 1e-10, 0.1)
    assert with_steps(link, {kind: [1.0] for kind in KINDS}, Profile([link], {}, ())) == link
