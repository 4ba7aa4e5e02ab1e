"""The numbers of the live figure `thousand`, computed another way."""

import re

import pytest
from live_figures import figure

from minidist.simulate.simulate import simulate
from minidist.site.live import (
    thousand,
)


def test_the_estimate_of_the_thousand_gpus_is_that_of_a_replay() -> None:
    """md.simulate uses none of the planner's formulas. One plan: it takes a second."""
    found = thousand.table_of("llama2-70b")
    choice = found.choice(thousand.ModelCut(pp=1, tp=1, zero=3, recompute=1))
    replayed = simulate(choice.plan, found.ranking.config, found.ranking.cluster, batch=1024)
    (told,) = re.findall(
        r"([\d.]+) s a step", figure("thousand", "en").picture(0, 0, 0, 2, 1).facts[0]
    )
    assert float(told) == pytest.approx(replayed.step_seconds, rel=0.01)
    peak = replayed.peak(replayed.fullest)["total"]
    assert choice.total == pytest.approx(peak, rel=0.04) and replayed.fits
