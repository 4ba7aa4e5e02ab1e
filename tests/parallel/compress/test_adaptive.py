"""The density that ranks agree on: from the link, the computing and the gradients' spread, the same
on all."""

from typing import Any

import numpy as np
import pytest
from summing import gradients, sum_by

from minidist.parallel.compress.adaptive import Adaptive, agreed_density, spread_of
from minidist.parallel.step.scheme import Scheme

N = 257
LINK = {
    "ranks": 4,
    "size": 1_000_000,
    "itemsize": 4,
    "bandwidth": 1e8,
    "seconds": 0.1,
    "spread": 1.0,
    "least": 0.001,
}


@pytest.mark.parametrize(
    ("changes", "density"),
    [
        ({}, 1.0),  # room for 10 MB, and all numbers are 6 MB a rank
        ({"bandwidth": 2e7}, 2e6 / (3 * 8e6)),  # 2 MB: of 24 MB for pairs of all numbers
        ({"bandwidth": 2e7, "spread": 0.02}, 0.02),  # the gradients need less than the link moves
        ({"bandwidth": 1e4}, 0.001),  # the link moves next to nothing
        ({"bandwidth": 5.9e7}, 5.9e6 / 24e6),  # pairs of a quarter are as many bytes as all numbers
        ({"bandwidth": 1e7, "least": 0.3}, 1.0),  # more than a quarter: all are fewer bytes
        ({"ranks": 2, "bandwidth": 2e7}, 2e6 / 8e6),
    ],
)
def test_density(changes: dict[str, Any], density: float) -> None:
    assert agreed_density(**{**LINK, **changes}) == pytest.approx(density)


def test_spread() -> None:
    assert spread_of(np.array([10.0, 0.1, -0.1, 0.1]), 0.9) == 0.25
    assert spread_of(np.ones(100), 0.9) == 0.9
    assert (
        spread_of(np.zeros(5), 0.9)
        == spread_of(np.array([np.nan, 1]), 0.9)
        == spread_of(np.empty(0), 0.9)
        == 1.0
    )


class Clock:
    """Seconds that a test decides: each look takes `tick`."""

    def __init__(self, tick: float) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def adapt(text: str, ticks: tuple[float, ...], steps: int = 8) -> tuple[list[Any], np.ndarray]:
    """(each rank's counters, the sums) where rank r's clock ticks by ticks[r]."""
    schemes: list[Any] = []

    def prepare(scheme: Scheme) -> None:
        schemes.append(scheme)
        scheme.clock = Clock(ticks[len(schemes) - 1])  # type: ignore[attr-defined]

    sums = sum_by(text, len(ticks), steps=steps, prepare=prepare)
    return [scheme.counters for scheme in schemes], sums.results[0]


def test_all_ranks_agree_though_they_measure_different_times() -> None:
    """A probe takes one tick, so the slowest clock finds 2 × 128 KiB in 8 s; a step computes 1 to 8
    s."""
    counters, _ = adapt("adaptive:hide=0.01,period=4", (1.0, 2.0, 8.0))
    assert counters[0] == counters[1] == counters[2]
    rate = 2 * 131072 / 8
    room = 0.01 * 8
    assert rate * room < 2 * 12 * N  # so the link decides, or the spread
    assert 0.01 != counters[0]["density.0"] < 1


def test_a_fast_link_sends_everything_and_a_slow_one_the_least() -> None:
    fast, sums = adapt("adaptive:hide=1000,period=4", (1.0, 1.0))
    assert fast[0]["density.0"] == 1.0
    given = [gradients(rank, 8, N) for rank in range(2)]
    # from step 3 on nothing waits
    np.testing.assert_allclose(sums[2:], (given[0] + given[1])[2:], rtol=1e-12)
    slow, _ = adapt("adaptive:hide=1e-9,period=4,least=0.02", (1.0, 1.0))
    assert slow[0]["density.0"] == 0.02


def test_runs_alike_where_times_are_alike() -> None:
    first, second = (adapt("adaptive:hide=0.01,period=3", (1.0, 3.0))[1] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_one_agreement_a_period() -> None:
    sums = [
        sum_by("adaptive:period=5", 2, steps=steps).bytes_on("control")
        for steps in (1, 2, 6, 7, 11)
    ]
    assert sums == [0, sums[1], sums[1], 2 * sums[1], 2 * sums[1]]
    assert isinstance(Adaptive.clock(), float)
