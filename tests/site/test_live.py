"""Live figures: every position of every slider has a picture that fits, in both languages."""

import gzip
import json
import re
import shlex
from typing import Any

import pytest

from minidist import lessons
from minidist.grading import load_module
from minidist.simulate.simulate import simulate
from minidist.site.live import (
    NAMES,
    Live,
    checkpoint,
    compression,
    data_of,
    every,
    roofline,
    sick_job,
    thousand,
)
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


def test_the_roofline_has_the_table_of_the_lesson() -> None:
    """The lesson counts the bytes of 64 tokens; a product's are counted by hand."""
    live = figure("roofline", "en")
    table = re.findall(
        r"^\| v(\d), .*? \| ([\d.]+) \| ([\d.]+) \| (\d+) \| ([\d.]+) \| (\d+)% \|$",
        lessons.find("22").part("README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert [row[0] for row in table] == ["1", "2", "3"]
    for version, intensity, long, ridge, rate, part in table:
        facts = live.picture(int(version) - 1, 0, 2).facts
        assert f"the ridge is at {ridge}." in facts[0]
        (found,) = re.findall(r"= ([\d.]+) operations", facts[0])
        assert float(found) == pytest.approx(float(intensity), abs=0.006)
        (found,) = re.findall(r"At most ([\d.]+) TFLOP", facts[1])
        assert float(found) == pytest.approx(float(rate), abs=0.06)
        assert f"{part}% of the peak: memory decides" in facts[1]
        endless = roofline.attention_rung(int(version), 65536).intensity
        assert endless == pytest.approx(float(long), abs=0.006)
    one_tile = roofline.product_rung(5, 128)
    assert one_tile.operations == 2 * 128**3 and one_tile.nbytes == 3 * 128 * 128 * 2


def test_the_times_of_compression_are_those_of_the_page_of_the_machine() -> None:
    """docs/measured has the bench's own table, at its own target."""
    page = (lessons.FOLDER.parent / "docs" / "measured" / "intel-xeon.md").read_text("utf-8")
    (target,) = re.findall(r"the validation loss is ([\d.]+) .* 3\.24 million", page)
    for text, name in compression.SHOWN.items():
        (row,) = re.findall(rf"^│ {re.escape(text)} +│(.*(?:never|\)) │)$", page, re.MULTILINE)
        cells = [cell.split()[0] for cell in row.split("│")[3:7]]
        found = [compression.reached(float(target), link)[name].seconds for link in range(4)]
        assert cells == ["never" if each is None else f"{each:,.1f}" for each in found]


def test_the_rules_of_the_sick_jobs_name_what_was_planted() -> None:
    rules = ("hang", "slow rank", "slow link", "leak", "not finite")
    live = figure("sick_job", "en")
    for number, kind in enumerate(sick_job.JOBS, start=1):
        for turn in (1, 2):
            job = sick_job.job_of(number, turn)
            planted = [job.culprit] if kind == "leak" else job.culprit
            assert sick_job.answers(number, turn) == tuple(
                planted if rule == kind else None for rule in rules
            )
            for record, rule in enumerate(rules):
                shapes = live.picture(number - 1, record, 1, turn - 1).shapes
                marked = [shape for shape in shapes if shape[0] == "r" and shape[5] == "wrong"]
                assert bool(marked) == (rule == kind), (kind, rule)
                hidden = live.picture(number - 1, record, 0, turn - 1)
                assert not any(shape[5:6] == ["wrong"] for shape in hidden.shapes)
                assert len(hidden.facts) == 1 and kind not in hidden.command


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
