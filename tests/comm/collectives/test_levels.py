"""Algorithms of several levels: what goes between machines, which grid, and parts of calls."""

from functools import partial

import numpy as np
import pytest
from collective_checker import Drawn, bring, call
from helpers import run

from minidist.comm.collectives import torus_both
from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.collectives.subset_call import SubsetCall
from minidist.comm.collectives.torus import grid

NODES = (0, 1, 0, 2, 1, 0)


def between_nodes(verb, nodes):
    """Bytes that messages carry from one machine to another."""
    case = Drawn(
        verb, "hierarchical", len(nodes), [12] * len(nodes), "float64", root=4, nodes=nodes
    )

    def ranks(world):
        events = []
        world.nodes = nodes
        world.ledger.subscribe(events.append)
        call(world, case, bring(case, world.rank), None)
        return sum(
            event.details["nbytes"]
            for event in events
            if event.kind == "message"
            and nodes[event.details["src"]] != nodes[event.details["dst"]]
        )

    return sum(run(ranks, size=len(nodes)))


@pytest.mark.parametrize(
    ("verb", "times"), [("all_reduce", 4), ("reduce", 2), ("broadcast", 2), ("reduce_scatter", 2)]
)
def test_only_leaders_talk_between_machines(verb, times):
    """M = 3 machines: M-1 times the array (twice that for an all-reduce), however many ranks there
    are."""
    assert between_nodes(verb, NODES) == times * 12 * 8


def test_an_all_gather_crosses_each_link_once():
    assert between_nodes("all_gather", NODES) == 2 * (6 * 24 * 8)


def test_one_machine_sends_nothing_out():
    assert between_nodes("all_reduce", (5, 5, 5, 5, 5)) == 0


def test_a_group_knows_the_machines_of_its_ranks():
    def ranks(world):
        world.nodes = NODES
        return world.split(world.rank % 2, key=-world.rank).nodes

    assert run(ranks, size=6) == [(1, 0, 0), (0, 2, 1)] * 3


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (1, (1, 1)),
        (2, (1, 2)),
        (4, (2, 2)),
        (6, (2, 3)),
        (7, (1, 7)),
        (12, (3, 4)),
        (16, (4, 4)),
        (24, (4, 6)),
    ],
)
def test_the_grid_is_the_most_square(size, shape):
    form = grid(size)
    assert form == shape
    for rank in range(size):
        assert set(form.row_of(rank)) & set(form.column_of(rank)) == {rank}
    assert sorted(rank for first in range(form.columns) for rank in form.column_of(first)) == list(
        range(size)
    )


def sent_by_step(sides, length):
    """For each rank and step, the ranks that it sends to, and the bytes of each message."""
    size = int(np.prod(sides))
    algorithm = partial(torus_both.all_reduce, sides=sides)

    def ranks(world):
        sent = [[] for _ in range(2 * (sum(sides) - len(sides)))]
        world.ledger.subscribe(
            lambda event: (
                sent[event.details["step"]].append((event.details["dst"], event.details["nbytes"]))
                if event.kind == "message"
                else None
            )
        )
        got = world.all_reduce(np.arange(length) + float(world.rank), algorithm="torus-both")
        np.testing.assert_array_equal(got, size * np.arange(length) + size * (size - 1) / 2)
        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALGORITHMS["all_reduce"], "torus-both", algorithm)
        return run(ranks, size=size)


@pytest.mark.parametrize("sides", [(5,), (3, 3), (3, 4), (3, 3, 3)])
def test_both_ways_round_every_dim_use_all_links_at_once(sides):
    """A part for each link: in every step a rank sends one message to each of its neighbours."""
    for rank, steps in enumerate(sent_by_step(sides, 5 * int(np.prod(sides)) * 2 * len(sides))):
        near = {
            ranks[(ranks.index(rank) + way) % len(ranks)]
            for ranks in torus_both.rings_of(rank, sides)
            for way in (1, -1)
        }
        assert len(near) == 2 * len(sides)
        if len(set(sides)) == 1:
            assert all(sorted(dst for dst, _ in step) == sorted(near) for step in steps)
            assert all(len({nbytes for _, nbytes in step}) == 1 for step in steps)
        assert {dst for step in steps for dst, _ in step} == near


@pytest.mark.parametrize("sides", [(2,), (1, 3), (2, 1, 2), (4, 2)])
def test_boxes_of_any_sides_and_lengths(sides):
    for length in (0, 1, 7):
        sent_by_step(sides, length)


def test_a_part_counts_among_its_ranks_and_tells_later_steps(monkeypatch):
    def work(whole, x, out, op):
        part = SubsetCall(whole, [2, 0, 1], first_step=5)
        # what a lasting wait tells
        assert (part.signature, part.world_ranks) == (whole.signature, (0, 1, 2))
        seen[whole.rank] = [part.rank, part.size, part.next_rank, part.prev_rank]
        part.exchange(part.next_rank, x, part.prev_rank, out, step=1)

    def ranks(world):
        sent = []
        world.ledger.subscribe(
            lambda event: sent.append(event.details) if event.kind == "message" else None
        )
        got = world.all_reduce(np.full(2, world.rank), algorithm="ring")
        return (
            seen[world.rank],
            got.tolist(),
            [(message["dst"], message["step"]) for message in sent],
        )

    seen = {}
    # once, not by each rank: all share the table
    monkeypatch.setitem(ALGORITHMS["all_reduce"], "ring", work)
    assert run(ranks, size=3) == [
        ([1, 3, 2, 0], [2, 2], [(1, 6)]),
        ([2, 3, 0, 1], [0, 0], [(2, 6)]),
        ([0, 3, 1, 2], [1, 1], [(0, 6)]),
    ]
