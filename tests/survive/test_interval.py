"""The interval between saves, beside a simulation that knows no formula."""

import math
import random

import pytest

from minidist.errors import ConfigError
from minidist.survive.interval import best_interval, goodput, steps_between


def simulated(
    interval: float, *, save: float, between: float, restart: float, segments: int
) -> float:
    """The part of the time that is kept work, of many segments with interruptions at random
    moments."""
    chance = random.Random(1)
    clock = 0.0
    for _ in range(segments):
        while (moment := chance.expovariate(1 / between)) < interval + save:
            clock += moment
            while (moment := chance.expovariate(1 / between)) < restart:  # also while it restarts
                clock += moment
            clock += restart
        clock += interval + save
    return segments * interval / clock


@pytest.mark.parametrize(
    ("interval", "save", "between", "restart"),
    [
        (60.0, 2.0, 900.0, 5.0),
        (200.0, 10.0, 300.0, 20.0),
        (30.0, 1.0, 50.0, 0.0),
        (5.0, 2.0, 10.0, 3.0),
    ],
)
def test_goodput_is_what_a_simulation_finds(
    interval: float, save: float, between: float, restart: float
) -> None:
    found = simulated(interval, save=save, between=between, restart=restart, segments=40_000)
    assert goodput(interval, save=save, between=between, restart=restart) == pytest.approx(
        found, rel=0.02
    )


@pytest.mark.parametrize(("save", "between"), [(1.0, 3600.0), (10.0, 86_400.0), (0.2, 600.0)])
def test_no_other_interval_is_much_better(save: float, between: float) -> None:
    best = best_interval(save, between)
    assert best == pytest.approx(math.sqrt(2 * save * between))
    kept = goodput(best, save=save, between=between)
    others = [
        goodput(best * factor, save=save, between=between)
        for factor in (0.5, 0.8, 0.9, 1.1, 1.25, 2.0)
    ]
    assert max(others) < kept * 1.001 and kept == pytest.approx(
        1 - math.sqrt(2 * save / between), abs=0.005
    )
    assert max(others[0], others[-1]) < kept


def test_the_interval_in_steps() -> None:
    assert steps_between(2.0, 100.0, 0.5) == 40 and steps_between(2.0, 100.0, 90.0) == 1
    with pytest.raises(ConfigError, match="step is 0"):
        steps_between(2.0, 100.0, 0)


def test_refuses() -> None:
    with pytest.raises(ConfigError, match="save is 0.0; it must be a number of seconds above 0"):
        best_interval(0.0, 10.0)
    with pytest.raises(ConfigError, match="between is nan"):
        goodput(1.0, save=1.0, between=math.nan)
    with pytest.raises(ConfigError, match="restart is -1"):
        goodput(1.0, save=1.0, between=10.0, restart=-1)
    assert goodput(1e6, save=1.0, between=10.0) == 0.0
