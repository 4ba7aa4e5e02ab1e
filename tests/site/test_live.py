"""Live figures: every position of every slider has a picture that fits, in both languages."""

import gzip
import json
import shlex
from typing import Any

import numpy as np
import pytest

from minidist.console import size_text
from minidist.launch import run
from minidist.site.live import NAMES, Live, cuts, data_of, every, mesh, routing
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


@pytest.mark.parametrize(
    ("place", "held"),
    [
        # columns of q, k, v with biases, rows of out; a quarter of the MLP; whole biases and norms
        ((3, 1, 0), [n * 8 * (3 * 49 + 48) + 48 * (49 + 48) + 6 * 48 for n in (2, 2, 1, 1)]),
        ((3, 2, 2), [12 * (2 * 49 + 48) + 48 * (49 + 48) + 6 * 48] * 4),
    ],
)
def test_cuts_hold_and_send_what_real_steps_do(place: tuple[int, ...], held: list[int]) -> None:
    ranks, heads, key_heads = (int(word) for word in cut_picture(place).command.split()[-3:])
    numbers, sent = cuts.measured(ranks, heads, key_heads)
    assert numbers == held == cuts.cut_block(ranks, heads, key_heads).weights
    assert sum(cuts.bytes_of_layer(ranks, heads, key_heads)) == sent
    told = " ".join(cut_picture(place).facts)
    assert f"at most {max(held):,}" in told
    assert all(size_text(n) in told for n in cuts.bytes_of_layer(ranks, heads, key_heads) if n)


def cut_picture(place: tuple[int, ...]) -> Any:
    return figure("cuts", "en").picture(*place)


def test_one_key_head_lies_whole_on_each_rank() -> None:
    """The prediction's answer, of numbers that the cut names: 12 columns of queries, 12 shared."""
    columns = cuts.cut_block(4, 8, 1).parts["attention.qkv.weight"]
    shared = [*range(48, 60)]
    assert [own.tolist() for own in columns] == [
        [*range(12 * rank, 12 * rank + 12), *shared] for rank in range(4)
    ]
    live = figure("cuts", "en")
    assert live.predict.choices[live.predict.right] == str(len(columns[0])) == "24"
    frames = [shape for shape in cut_picture((3, 2, 2)).shapes if shape[5:6] == ["edge"]]
    assert len(frames) == 2
    assert any("5 ranks" in fact or "tp=5" in fact for fact in cut_picture((4, 0, 0)).facts)


@pytest.mark.parametrize("order", mesh.ORDERS)
def test_the_groups_of_the_mesh_follow_from_the_order(order: str) -> None:
    """Ranks are counted along the last axis first."""
    axes = order.split(",")
    shape = {"dp": 2, "pp": 2, "tp": 4}
    grid = np.arange(16).reshape([shape[axis] for axis in axes])
    for rank, (coordinates, groups) in enumerate(mesh.meshed(**shape)[order]):
        place = [coordinates[axis] for axis in axes]
        assert grid[tuple(place)] == rank
        for at, axis in enumerate(axes):
            line: list[Any] = [*place]
            line[at] = slice(None)
            assert groups[axis] == grid[tuple(line)].tolist()


def test_a_click_on_the_mesh_shows_the_groups_of_the_story() -> None:
    """Rank 5 as in lesson 17's table; the bytes as a training's ledger counts them."""
    live = figure("mesh", "en")
    picture = live.picture(1, 1, 1, 0, 5)
    told = " ".join(picture.facts)
    assert "dp=1, pp=0, tp=1" in told
    assert all(group in told for group in ("dp: ranks 1 5", "pp: ranks 5 7", "tp: ranks 4 5"))
    boxes = {shape[6]: (shape[5], shape[7]) for shape in picture.shapes if len(shape) == 8}
    assert {rank: color for rank, (color, _) in boxes.items() if color != "free"} == {
        "5": "c2",
        "1": mesh.COLORS["dp"],
        "7": mesh.COLORS["pp"],
        "4": mesh.COLORS["tp"],
    }
    assert all(sets == [mesh.RANK, int(rank)] for rank, (_, sets) in boxes.items())
    assert live.controls[mesh.RANK].values == tuple(map(str, range(16)))
    shape = {"dp": 2, "pp": 2, "tp": 2}
    plan = mesh.lab.plan_of(shape)
    trained = run(lambda world: mesh.lab.train(world, plan, steps=1, config=mesh.CONFIG), size=8)
    assert {axis: trained[0]["sent"][axis] for axis in shape} == {
        axis: mesh.sent(**shape)[axis] for axis in shape
    }
    assert all(size_text(trained[0]["sent"][axis]) in told for axis in shape)


def test_the_outermost_axis_leaves_its_machine() -> None:
    live = figure("mesh", "en")
    told = live.picture(1, 1, 2, mesh.ORDERS.index("tp,dp,pp"), 0).facts
    assert live.predict.choices[live.predict.right] == "1"
    assert any("ranks 0 4 8 12, on 4 machines" in fact for fact in told)


@pytest.mark.parametrize(
    "place",
    # the start without and with a limit; biases with a limit, on 4 and on 8 ranks
    [(0, 4, 1, 1), (0, 0, 1, 1), (3, 0, 1, 1), (3, 1, 0, 2)],
)
def test_routing_counts_what_real_ranks_exchange(place: tuple[int, ...]) -> None:
    state = routing.STATES[place[0]]
    capacity = routing.CAPACITIES[place[1]]
    k = routing.TOP_K[place[2]]
    ranks = routing.RANKS[place[3]]
    counted = routing.cost(routing.routed(state, k)[capacity], ranks)
    assert counted == routing.measured(ranks, k, capacity, state)
    picture = figure("routing", "en").picture(*place)
    told = " ".join(picture.facts)
    assert f"{counted.away} rows travel" in told and size_text(counted.nbytes) in told
    assert f"e{np.argmax(counted.chosen)}," in told and f"{max(counted.rows)} rows" in told
    labels = [shape[3] for shape in picture.shapes if shape[0] == "t" and " · r" in shape[3]]
    assert labels == [f"e{expert} · r{expert * ranks // 8}" for expert in range(8)]
    crosses = [shape for shape in picture.shapes if shape[5:] == ["wrong", "×"]]
    missing = routing.routed(state, k)[capacity].kept[0]
    assert len(crosses) == (~missing).sum() + 1  # and that of the legend


def test_a_hot_expert_drops_three_quarters() -> None:
    """The prediction by hand: 8 sequences of 32 choices, of which two experts take 4 each."""
    live = figure("routing", "en")
    assert "Dropped: 192 of 256, 75%" in " ".join(live.picture(0, 0, 1, 1).facts)
    assert live.predict.choices[live.predict.right] == "75%"
    busiest = [max(routing.cost(routing.routed(s, 2)[None], 4).chosen) for s in routing.STATES]
    assert busiest[0] == 128 and busiest[1] > max(busiest[2:])  # both remedies help
