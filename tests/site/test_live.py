"""Live figures: every position of every slider has a picture that fits, in both languages."""

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

MOST_PICTURES = 700
MOST_BYTES = 40_000  # of a figure's numbers, compressed
MOST_TOGETHER = 400_000
QUICK = 12  # positions of a figure that the default run draws


def figure(name: str, language: str) -> Live:
    (found,) = [live for live in every(say(language)) if live.name == name]
    return found


def places(shape: list[Any]) -> list[tuple[float, float]]:
    if shape[0] == "r":
        x, y, width, height = shape[1:5]
        return [(x, y), (x + width, y + height)]
    if shape[0] == "l":
        return [tuple(map(float, point.split(","))) for point in shape[1].split()]
    return [(shape[1], shape[2])]


def assert_drawn(live: Live, place: tuple[int, ...]) -> None:
    picture = live.picture(*place)
    assert picture.shapes and picture.facts, place
    width, height = live.size
    for shape in picture.shapes:
        assert all(0 <= x <= width and 0 <= y <= height for x, y in places(shape)), (place, shape)
    assert shlex.split(picture.command)[0] in ("minidist", "python", "mpirun"), picture.command


each = pytest.mark.parametrize("name", NAMES)
both = pytest.mark.parametrize("language", LANGUAGES)


@each
@both
def test_a_figure_asks_before_it_moves(name: str, language: str) -> None:
    live = figure(name, language)
    assert len(live.predict.choices) >= 2 and 0 <= live.predict.right < len(live.predict.choices)
    assert live.predict.question.strip()[-1] in "?？" and live.predict.why
    count = len([*live.positions()])
    assert 1 < count <= MOST_PICTURES
    assert len(live.start or live.controls) == len(live.controls)
    told = json.dumps([live.title, live.predict.question, live.predict.why], ensure_ascii=False)
    assert any("\u4e00" <= letter <= "\u9fff" for letter in told) == (language == "zh")
    positions = [*live.positions()]
    for place in positions[:: max(1, count // QUICK)]:
        assert_drawn(live, place)


@each
def test_each_control_changes_the_picture(name: str) -> None:
    """From somewhere: a slider that never changes anything is none."""
    live = figure(name, "en")
    for at, control in enumerate(live.controls):
        for place in [*live.positions()][:: max(1, len([*live.positions()]) // (4 * QUICK))]:
            ends = [(*place[:at], end, *place[at + 1 :]) for end in (0, len(control.values) - 1)]
            first, last = (live.picture(*end) for end in ends)
            if first.shapes != last.shapes:
                break
        else:
            raise AssertionError(f"{name}: {control.label} changes nothing")


@pytest.mark.soak
@both
def test_every_picture_fits_and_all_are_small(language: str) -> None:
    total = 0
    for live in every(say(language)):
        for place in live.positions():
            assert_drawn(live, place)
        told = json.dumps(data_of(live), ensure_ascii=False, separators=(",", ":"))
        size = len(gzip.compress(told.encode()))
        assert size <= MOST_BYTES, (live.name, size)
        total += size
    assert total <= MOST_TOGETHER


def test_the_ring_of_the_figure_sums() -> None:
    live = figure("ring", "en")
    ends = live.picture(2, 14, 0)  # four ranks, at the end
    cells = [shape[6] for shape in ends.shapes if shape[0] == "r" and len(shape) > 6]
    assert cells == ["10"] * 16
    lost = live.picture(2, 14, 1)
    assert any("wrong" in fact for fact in lost.facts)
    assert any(shape[0] == "r" and shape[5] == "wrong" for shape in lost.shapes)


def test_the_ring_attention_of_the_figure_multiplies_what_the_real_one_does() -> None:
    """Scores of each rank as in the lesson's table; at each hop as the real ring's blocks say."""
    assert walked(4, False).scores.sum(axis=1).tolist() == [78, 222, 366, 510]
    assert walked(4, True).scores.sum(axis=1).tolist() == [294] * 4
    for size in (2, 5, 8):
        length = TOKENS * size
        for (rank, hop), scores in np.ndenumerate(walked(size, True).scores):
            pairs = visible(length, rank, (rank - hop) % size, size)
            sides = [(queries.stop - queries.start, causal) for queries, _, causal in pairs]
            assert scores == sum(n * (n + 1) // 2 if causal else n * n for n, causal in sides)


def test_the_memory_of_zero_is_what_the_simulator_holds() -> None:
    """Totals by hand, and what a simulated rank holds between steps."""
    live = figure("zero_memory", "en")

    def totals(name: str, power: int) -> list[str]:
        shapes = live.picture(MODELS.index(name), power, 0).shapes
        return [shape[3] for shape in shapes if shape[-1] == "bold"]

    # 70.552 billion parameters: (2 + 14 / 64) and 16 / 64 bytes each
    assert totals("llama3-70b", 6)[2:] == ["156.5 GB ✗", "17.6 GB ✓"]
    plan = md.Plan(dp=8, zero=2, precision="bf16")
    (trace,) = md.simulate(plan, model("llama3-8b"), "h100:1x8", batch=8).traces
    state = sum(trace.now[category] for category in ("parameters", "gradients", "optimizer"))
    assert totals("llama3-8b", 3)[2] == f"{state / 1e9:.1f} GB ✓"


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
