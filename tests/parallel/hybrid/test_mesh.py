"""Placement: neighbours on the mesh share a node, however a launcher dealt the ranks; the numbers
stay the same."""

import argparse
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import finish, start
from leftovers import nothing_left
from plans import MOST, train

import minidist as md
from minidist.cli.train.arguments import add_arguments
from minidist.cli.train.settings import as_arguments, check
from minidist.errors import PlanError
from minidist.launch.forked import run_forked
from minidist.launch.mpirun import find_mpirun
from minidist.parallel.hybrid.mesh import placed
from minidist.parallel.hybrid.plan_checks import AXES

IN_TURN = (0, 1, 0, 1, 0, 1, 0, 1)
"""Eight ranks that a launcher dealt to two nodes in turn."""


def members(world: Any, nodes: tuple[int, ...], plan: md.Plan) -> dict[str, tuple[int, ...]]:
    """This rank's groups along the axes of a plan, by world ranks."""
    world.nodes = nodes
    mesh = md.Mesh(world, plan.order, plan.placement, **plan.axes)
    assert (mesh.world is world) == (mesh.world.world_ranks == world.world_ranks)
    found = {axis: mesh[axis].world_ranks for axis in AXES if mesh.shape[axis] > 1}
    found["all"] = mesh.world.world_ranks
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("options", "nodes", "tp"),
    [
        ({}, IN_TURN, {0: (0, 2), 5: (5, 7)}),
        ({"placement": "rank"}, IN_TURN, {0: (0, 1), 5: (4, 5)}),
        ({}, (), {0: (0, 1), 5: (4, 5)}),
        ({"order": "tp,pp"}, (), {0: (0, 2), 5: (5, 7)}),
        ({"order": "tp,dp,pp", "placement": "rank"}, IN_TURN, {0: (0, 4), 5: (1, 5)}),
    ],
)
def test_which_ranks_are_neighbours(
    options: Any, nodes: Any, tp: dict[int, tuple[int, ...]]
) -> None:
    found = md.run(members, nodes or (0,) * 8, md.Plan(dp=2, pp=2, tp=2, **options), size=8)
    assert {rank: found[rank]["tp"] for rank in tp} == tp


@given(
    sizes=st.permutations([1, 1, 1, 2, 3]),
    order=st.lists(st.sampled_from(AXES), unique=True, min_size=1),
    nodes=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_the_innermost_axis_fills_nodes_one_by_one(
    sizes: list[int], order: list[str], nodes: list[int]
) -> None:
    nodes = [nodes.index(node) for node in nodes]  # as ranks learn them: by a node's first rank
    shape = dict(zip(AXES, sizes, strict=True))

    class World:
        """What `placed` asks of a group; a split returns this rank's number."""

        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.size = 6
            self.nodes = nodes
            self.axis = "world"

        def split(self, color: int, key: int, axis: str) -> int:
            return key

    numbers = [placed(World(rank), shape, ",".join(order)) for rank in range(6)]  # type: ignore[arg-type]
    numbers = [rank if isinstance(number, World) else number for rank, number in enumerate(numbers)]
    assert sorted(numbers) == list(range(6)) and numbers[0] == 0
    innermost = [axis for axis in order if shape[axis] > 1][-1:] or [
        axis for axis in AXES if shape[axis] > 1
    ][-1:]
    at = [dict(zip(AXES, np.unravel_index(number, sizes), strict=True)) for number in numbers]
    ranks = sorted(range(6), key=lambda rank: nodes[rank])  # node by node
    along = [at[rank][innermost[0]] for rank in ranks]
    assert along == [place % shape[innermost[0]] for place in range(6)]


def test_an_order_of_no_axes() -> None:
    for order in ("tp,xp", "tp,tp", "", "tp, dp"):
        with pytest.raises(
            PlanError, match="name different axes of dp, pp, ep, cp, tp, the innermost last"
        ):
            md.Plan(order=order)
    with pytest.raises(PlanError, match="choose one of node, rank"):
        md.Plan(placement="nodes")


# -------------------------------------------------------------------------------- a training's bits


def trained(world: Any, nodes: tuple[int, ...], plan: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    """Digest and losses, and the bytes that messages along each axis carried from node to node."""
    world.nodes = nodes or world.nodes
    crossed = dict.fromkeys(AXES, 0)

    def count(event: Any) -> None:
        ends = event.details
        if (
            event.kind == "message"
            and (axis := ends["axis"].split(",")[0]) in AXES  # replicas along dp and cp count as dp
            and nodes[ends["src"]] != nodes[ends["dst"]]
        ):
            crossed[axis] += ends["nbytes"]

    if nodes:
        world.ledger.subscribe(count)
    found = train(world, MOST, {"plan": plan, "steps": 1})
    return (found["digest"], *found["losses"]), crossed


@pytest.mark.soak
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "pp": 2, "tp": 2, "zero": 1},
        pytest.param({"dp": 2, "cp": 2, "tp": 2, "zero": 3}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_tensor_parallel_stays_inside_nodes_and_no_bit_changes(plan: dict[str, Any]) -> None:
    before = md.run(trained, (), plan, size=8)[0][0]
    for options, inside in (
        ({}, "tp"),
        ({"order": "tp,pp,cp,dp"}, "dp"),
        ({"placement": "rank"}, "dp"),
    ):
        found = md.run(trained, IN_TURN, {**plan, **options}, size=8)
        assert {numbers for numbers, _ in found} == {before}
        crossed = {axis: sum(bytes_of[axis] for _, bytes_of in found) for axis in ("dp", "tp")}
        assert [axis for axis, nbytes in crossed.items() if not nbytes] == [inside]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "plan", [{"zero": 2}, {"strategy": "parameter-server", "servers": 2}], ids=str
)
def test_the_data_axis_alone(plan: dict[str, Any]) -> None:
    """Servers are the last ranks of the mesh; so are those that evaluation counts out."""
    plan = {"dp": 4, **plan}
    found = [
        {numbers for numbers, _ in md.run(trained, nodes, plan, size=4)}
        for nodes in ((), (0, 1, 1, 0))
    ]
    assert found[0] == found[1] and len(found[0]) == 1


def changed(world: Any) -> tuple[Any, ...]:
    """A plan changes between steps; the ranks are numbered anew each time."""
    from training import global_batch, tiny

    world.nodes = IN_TURN[:4]
    config = tiny()
    trainer = md.Trainer(md.Plan(dp=2, tp=2), config, world)
    losses = [trainer.step(global_batch(0, 5, config))]
    orders = [trainer.world.world_ranks]
    for plan in (
        md.Plan(dp=2, tp=2, placement="rank"),
        md.Plan(dp=4, zero=3),
        md.Plan(pp=2, dp=2, order="pp,dp"),
    ):
        trainer.change_plan(plan)
        losses.append(trainer.step(global_batch(0, 5, config)))
        orders.append(trainer.world.world_ranks)
    trainer.check_replicas()
    trainer.close()
    assert losses == sorted(losses, reverse=True)
    return tuple(orders)


@pytest.mark.soak  # tests/parallel/hybrid/test_change_plan.py changes plans
def test_a_plan_changes_the_placement() -> None:
    assert set(md.run(changed, size=4)) == {
        ((0, 2, 1, 3), (0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2, 3))
    }


# ------------------------------------------------------------------------------- ranks as processes


def boards(world: Any) -> list[bool]:
    mesh = md.Mesh(world, dp=2, tp=2)
    return [mesh[axis].board is not None for axis in ("dp", "tp")]


def test_two_nodes_with_memory_inside_and_connections_between() -> None:
    with nothing_left():
        assert (
            run_forked(boards, (), size=4, transport="auto", limit=20, nodes=IN_TURN[:4])
            == [[False, True]] * 4
        )


def test_under_mpirun_that_deals_ranks_in_turn() -> None:
    code = (
        "import minidist as md; w = md.init(transport='auto'); tp = md.Mesh(w, tp=3)['tp']\n"
        "if w.rank == 0: print(w.nodes, tp.world_ranks, w.transport.name)"
    )
    hosts = ["-launcher", "fork", "-hosts", "one,two", "-ppn", "1"]
    with nothing_left() as environment:
        done = finish(
            start([*find_mpirun().command(3), *hosts, sys.executable, "-c", code], environment)
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "(0, 1, 0) (0, 2, 1) shm+tcp\n"


def test_train_takes_the_placement() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = ["--plan", "dp=2,tp=2", "--order", "tp,dp", "--placement", "rank"]
    plan = check(parser.parse_args([*given, "--data", __file__])).plan(4)
    assert plan == md.Plan(dp=2, tp=2, order="tp,dp", placement="rank", replicas=1)
    assert set(given[2::2]) <= {
        word.partition("=")[0] for word in as_arguments(parser.parse_args(given))
    }
