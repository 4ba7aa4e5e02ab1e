"""The numbers of the live figure `sawtooth`, computed another way."""

import gzip
import json
import shlex
from typing import Any
import numpy as np
import pytest
import minidist as md
from minidist import lessons
from minidist.grading import load_module
from minidist.observe.events import Await, Transfer
from minidist.parallel.context.ring_attention import visible
from minidist.parallel.memory.disk import Disk
from minidist.simulate.models import model
from minidist.simulate.timelines import timelines
from minidist.simulate.trace import RankTrace
from minidist.site.live import NAMES, Live, data_of, every
from minidist.site.live.offload_lanes import phase_begins, remembered, simulated
from minidist.site.live.ring_attention import TOKENS, walked
from minidist.site.live.sawtooth import CONFIG, SIZES, step_of, turning_points
from minidist.site.live.zero_memory import MODELS
from minidist.site.pages import LANGUAGES, say
from figures_of import figure


def test_the_sawtooth_has_the_peaks_of_the_lessons_formula() -> None:
    """The inputs of all segments but one, and a whole segment, to an input; forwards counted."""
    lab = load_module(lessons.find("19").part("experiments.py"), "19")
    each = lab.inside(CONFIG, 1)
    layers = 48

    def formula(size: int) -> int:
        return (layers // size - 1) * each["all"] + size * each["none"]

    assert step_of(layers, 3).peak - step_of(layers, 6).peak == formula(3) - formula(6)
    for size in (1, 2, 3, 6):
        less = step_of(layers, 6).peak - step_of(layers, size).peak
        assert abs(less - (formula(6) - formula(size))) <= each["all"]
    assert min(SIZES, key=lambda size: step_of(layers, size).peak) == 2
    assert [step_of(layers, size).runs for size in SIZES] == [48, *[96] * 5]


def test_the_sawtooth_keeps_every_peak_of_the_curve() -> None:
    assert turning_points([1, 3, 5, 5, 2, 2, 4, 4]) == [(0, 1), (3, 5), (5, 2), (7, 4)]
    step = step_of(6, 1)
    assert max(height for _, height in turning_points(step.moments)) == max(step.moments)
    teeth = [at for at, _ in turning_points(step.moments[: step.turn])]
    assert len(teeth) >= 2 * 6  # up and down in each block


def test_the_lanes_of_the_figure_move_the_bytes_of_the_lessons_table() -> None:
    """Mixed precision, one pass: bytes a parameter of each lane; the update, whatever the tokens."""
    table = {"disk to host": 18, "host to disk": 16, "host to device": 4, "device to host": 2}
    found = simulated(4, 32)
    (trace,) = found.traces
    for lane, each in table.items():
        moves = [
            event.nbytes
            for event in trace.events[trace.steps[-1] :]
            if isinstance(event, Transfer) and event.lane == lane
        ]
        assert sum(moves) == pytest.approx(each * trace.parameters, rel=1e-3), lane
    updates = [
        simulated(4, sequences).step_seconds
        - phase_begins(timelines(simulated(4, sequences), [0])[0])[2]
        for sequences in (32, 128)
    ]
    assert updates[0] == pytest.approx(updates[1], rel=1e-6)


def test_a_read_when_needed_is_what_a_store_without_a_spare_buffer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (late,) = simulated(4, 32, False).traces
    monkeypatch.setattr(Disk, "has_spare", lambda disk: False)
    remembered.cache_clear()
    (trace,) = simulated.__wrapped__(4, 32, True).traces
    remembered.cache_clear()
    assert _order(trace) == _order(late)


def _order(trace: RankTrace) -> list[Any]:
    """Return a step's events without the numbers of moves, which count in the order of starts."""
    return [
        event._replace(id=0) if isinstance(event, (Transfer, Await)) else event
        for event in trace.events[trace.steps[-1] :]
    ]
