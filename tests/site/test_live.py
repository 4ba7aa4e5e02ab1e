"""Live figures: every position of every slider has a picture that fits, in both languages."""

import gzip
import json
import shlex
from typing import Any

import pytest
from live_figures import figure

from minidist.site.live import NAMES, Live, data_of, every
from minidist.site.pages import LANGUAGES, say

MOST_PICTURES = 700
MOST_BYTES = 50_000  # of a figure, compressed
MOST_TOGETHER = 320_000
QUICK = 6  # positions of a figure that the default run draws


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
