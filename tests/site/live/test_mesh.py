"""The numbers of the live figure `mesh`, computed another way."""

from typing import Any

import numpy as np
import pytest
from live_figures import figure

from minidist.console import size_text
from minidist.launch import run
from minidist.site.live import mesh


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
