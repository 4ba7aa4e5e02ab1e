"""The numbers of the live figure `checkpoint`, computed another way."""

import re

import pytest
from live_figures import figure

from minidist import lessons
from minidist.grading import load_module
from minidist.site.live import (
    checkpoint,
)


def test_the_kept_time_of_the_checkpoint_figure_is_that_of_a_replay() -> None:
    """Lesson 26's lab replays a run event by event; the figure has Daly's formula."""
    lab = load_module(lessons.find("26").part("experiments.py"), "26")
    live = figure("checkpoint", "en")
    for place in ((2, 1, 0, 5), (3, 1, 1, 2), (1, 0, 0, 4)):
        (told,) = re.findall(r"([\d.]+)% of the time", live.picture(*place).facts[0])
        save, between, restart, interval = (
            seconds[at]
            for seconds, at in zip(
                (checkpoint.SAVES, checkpoint.BETWEEN, checkpoint.RESTARTS, checkpoint.INTERVALS),
                place,
                strict=True,
            )
        )
        days = 400 * 86_400.0
        moments = lab.interruptions(between, days, seed=1)
        spans = lab.replay(interval, moments, save=save, restart=restart, seconds=days)
        assert float(told) == pytest.approx(100 * lab.kept(spans), abs=1.0)
