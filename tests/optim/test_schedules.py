"""Learning-rate schedules."""

import pytest

from minidist.errors import ConfigError
from minidist.optim import constant, warmup_cosine


def test_constant() -> None:
    assert [constant(step, peak=0.5) for step in (0, 1, 10**9)] == [0.5] * 3
    assert [constant(step, peak=0.5, warmup=4) for step in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]


def test_warmup_cosine() -> None:
    rates = [warmup_cosine(step, peak=1.0, warmup=4, total=12, floor=0.1) for step in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.55)                   # half way down
    assert rates[4:12] == sorted(rates[4:12], reverse=True) and rates[12:] == [0.1] * 3
    assert warmup_cosine(0, peak=1.0, warmup=0, total=10) == 1.0
    assert warmup_cosine(3, peak=1.0, warmup=3, total=3, floor=0.2) == 0.2


def test_warmup_longer_than_the_run() -> None:
    with pytest.raises(ConfigError, match="warm-up of 11 steps does not fit a run of 10"):
        warmup_cosine(0, peak=1.0, warmup=11, total=10)
