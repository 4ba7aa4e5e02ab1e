"""Live figures: every position of every slider has a picture that fits, in both languages."""

import gzip
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from minidist.comm.cost.critical_path import PATHS
from minidist.comm.cost.link_model import LinkCost
from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.errors import CommError
from minidist.grading import load_module
from minidist.launch import run
from minidist.lessons import FOLDER
from minidist.parallel.pipeline.executor import Executor
from minidist.parallel.pipeline.instructions import Schedule
from minidist.parallel.pipeline.schedule_checker import Times
from minidist.site.live import NAMES, Live, buckets, data_of, edit_schedule, every
from minidist.site.live.edit_schedule import SWAPS
from minidist.site.live.families import CALLS, LENGTHS, messages_of, seconds_of
from minidist.site.live.schedules import RANKS, SCHEDULES, clock
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


@pytest.mark.parametrize("size", [2, 4, 8])  # other numbers of ranks overlap in a tree
def test_the_families_take_what_the_critical_path_says(size: int) -> None:
    cost = LinkCost("link", size, 2e-3, 0.0, 2e-3 / 65536, 0.0, 0.0)
    for verb, algorithm in CALLS:
        if (verb, algorithm) in PATHS:
            for nbytes in LENGTHS:
                told = cost.seconds(PATHS[verb, algorithm](size).work(nbytes))
                assert seconds_of(verb, algorithm, size, nbytes) == pytest.approx(told), algorithm


@pytest.mark.parametrize("size", [4, 7])
def test_the_families_send_what_the_formulas_say(size: int) -> None:
    nbytes = 8 * 1001 * size
    for verb, algorithm in CALLS:
        brings = verb in ("gather", "all_gather")
        case = Case(
            size,
            nbytes=0 if verb == "barrier" else nbytes,
            blocks=[nbytes if brings else nbytes // size] * size,
            parts=[[nbytes // size] * size] * size,
            itemsize=8,
        )
        messages = messages_of(verb, algorithm, size, nbytes)
        formula = FORMULAS[verb, algorithm]
        sent = sum(message.nbytes for message in messages)
        assert (len(messages), sent) == (formula.messages_of(case), formula.bytes_of(case)), verb
    eight, seven = (seconds_of("all_reduce", "doubling", count, 512) for count in (8, 7))
    assert round(1e3 * eight) == 6 and round(1e3 * seven) == 8


def test_the_schedules_have_the_bubbles_of_the_lesson() -> None:
    lab = load_module(FOLDER / "11_pipeline" / "experiments.py", "11")
    live = figure("schedules", "en")
    for which, (_, name, chunks) in enumerate(SCHEDULES):
        if chunks in (None, lab.CHUNKS):
            _, ideal = lab.ideal_bubble(name, 4, 8)
            facts = live.picture(which, RANKS.index(4), 2, 0).facts
            assert f"the bubble is {ideal:.1%}" in facts[0], name
    # the lesson's table of slow messages, and what a rank holds by the formula of schedules.py
    assert [clock(which, 4, 8, 0.5).length for which in (0, 1, 3)] == [36, 41, 45]
    held = [min(2 * (3 - rank) + 3 * 4 + 1, 4 * 8) / 4 for rank in range(4)]
    picture = live.picture(3, RANKS.index(4), 2, 0)
    assert ", ".join(f"{count:g}" for count in held) in picture.facts[1]
    boxes = [shape for shape in picture.shapes if shape[0] == "r" and shape[5] in ("c0", "c7")]
    assert len(boxes) == 4 * 4 * 8 + 2  # a forward a stage and microbatch, and the legend


def executed(group: Group, schedule: Schedule) -> bool:
    """Return whether the executor comes to the end of a schedule that nobody has checked."""
    lab = load_module(FOLDER / "11_pipeline" / "experiments.py", "11")
    executor = Executor(replace(schedule, checked=True), group)
    try:
        executor.run(lab.Sleeper(schedule, Times(0.0, 0.0, 0.0, 0.0)))
    except CommError:  # a deadlock; or the others, which wait for a rank that has ended
        return False
    return True


@pytest.mark.parametrize("name", edit_schedule.NAMES)
def test_ranks_run_a_swapped_schedule_if_the_figure_says_so(name: str) -> None:
    """All swaps that the checker passes, in one run; and each deadlock of rank 0 in its own."""
    kinds = {swap: edit_schedule.verdict(edit_schedule.swapped(name, *swap), 0.0) for swap in SWAPS}
    for (rank, at), (timed, said, deadlock) in kinds.items():
        schedule = edit_schedule.swapped(name, rank, at)
        assert deadlock == ("deadlock" in said)
        if timed or (deadlock and rank == 0):
            came = run(executed, schedule, size=3)
            assert all(came) == (timed is not None), (rank, at)


def test_the_swap_that_is_asked_about_takes_the_time_that_is_told() -> None:
    """In 1F1B with messages of half a forward rank 0 gets gradient 0 at 9, so activation 2 is on
    rank 1 at 9.5, which began to wait for it at 8.5: one forward is lost."""
    live = figure("edit_schedule", "en")
    swap = 1 + SWAPS.index((0, 5))
    lengths = [live.picture(2, at, message).facts[0] for at in (0, swap) for message in (0, 1)]
    for told, length in zip(lengths, (15, 18, 15, 19), strict=True):
        assert f"lasts {length} forwards" in told
    assert "wait for each other" in live.picture(1, swap, 0).facts[0]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [buckets.BUCKETS[0], buckets.BUCKETS[-1]])
def test_the_exposed_time_is_that_of_the_gaps_in_the_picture(
    bucket_bytes: int, overlap: bool
) -> None:
    step = buckets.step_of(bucket_bytes, 1, overlap)
    computes, reduces = buckets.lanes_of(bucket_bytes, 1, overlap)
    busy = sum(span.stop - span.start for span in computes)
    assert step.axes["dp"].exposed == pytest.approx(step.step_seconds - busy)
    sent = sum(span.details["nbytes"] for span in reduces)
    vectors = 12 * 13 * 768 + 2 * 768  # biases and norms of the blocks, and the last norm
    assert sent == 2 * (buckets.CONFIG.numbers + vectors)  # bfloat16


def test_one_bucket_takes_what_a_ring_takes_and_hides_nothing() -> None:
    """2 (P-1)/P of the gradients' bytes over 0.92 of 50 GB/s, and little for latency."""
    everything = buckets.BUCKETS[-1]
    for overlap in (True, False):
        ring = 2 * 7 / 8 * 2 * buckets.CONFIG.numbers / (0.92 * 50e9)
        exposed = buckets.step_of(everything, 1, overlap).axes["dp"].exposed
        assert ring < exposed < 1.05 * ring
    told = [buckets.step_of(16 << 20, link, True).axes["dp"].exposed for link in (1, 2)]
    assert [round(1e3 * seconds, 1) for seconds in told] == [1.4, 9.1]  # the prediction's numbers
