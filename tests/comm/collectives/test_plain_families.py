"""The plain version that each family's module opens with: right over links without buffers, and at
the real cost."""

import math
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.comm.collectives import (
    bruck,
    direct,
    halving_doubling,
    hierarchical,
    naive,
    pairwise,
    ring,
    select,
    shared_memory,
    torus,
    torus_both,
    tree,
)
from minidist.comm.cost.volume import FORMULAS, Case
from minidist.grading import sent_since, totals

SIZES = (1, 2, 3, 5, 8)
LENGTHS = (0, 3, 16)
TRANSPORT = "threads-unbuffered"


def brought(rank: int, length: int) -> np.ndarray:
    """Numbers that tell rank and place, and add up without rounding."""
    return np.arange(1.0, length + 1) * 10.0**rank


def summed(size: int, length: int) -> np.ndarray:
    """Return what an all-reduce of these gives."""
    return np.sum([brought(rank, length) for rank in range(size)], axis=0)


def check_all_reduce(world: Any, plain: Any, *groups: Any) -> tuple[int, int]:
    """Run it on the groups (none: the world), check the result, and return what this rank sent:
    messages, bytes."""
    before = totals(world.ledger)
    for length in LENGTHS:
        x = brought(world.rank, length)
        total = plain(*(groups or (world,)), x)
        assert np.array_equal(total, summed(world.size, length))
        assert np.array_equal(x, brought(world.rank, length)), "the argument is left alone"
    return sent_since(world.ledger, before)


@pytest.mark.sampled
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("naive", naive),
        ("ring", ring),
        ("direct", direct),
        ("pairwise", pairwise),
        ("halving-doubling", halving_doubling),
    ],
)
def test_all_reduce(name: str, family: Any, size: int) -> None:
    if family is halving_doubling and size & (size - 1):
        size = 4
    sent = md.run(check_all_reduce, family.plain_all_reduce, size=size, transport=TRANSPORT)
    formula = FORMULAS["all_reduce", name]
    cases = [Case(size, nbytes=8 * length) for length in LENGTHS]
    assert tuple(map(sum, zip(*sent, strict=True))) == (
        sum(map(formula.messages_of, cases)),
        sum(map(formula.bytes_of, cases)),
    )


@pytest.mark.parametrize("size", SIZES)
def test_tree(size: int) -> None:
    def job(world: Any, root: int) -> int:
        x = brought(world.rank, 5)
        told = tree.plain_broadcast(world, x if world.rank == root else None, root)
        assert np.array_equal(told, brought(root, 5))
        total = tree.plain_reduce(world, x, root)
        assert world.rank != root or np.array_equal(total, summed(size, 5))
        return totals(world.ledger)[0]

    for root in {0, size - 1}:
        assert sum(md.run(job, root, size=size, transport=TRANSPORT)) == 2 * (size - 1)


@pytest.mark.parametrize("family", [pairwise, bruck])
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(family: Any, size: int) -> None:
    def job(world: Any) -> int:
        received = family.plain_all_to_all(
            world, [np.array([world.rank, dst]) for dst in range(size)]
        )
        assert [part.tolist() for part in received] == [[src, world.rank] for src in range(size)]
        return totals(world.ledger)[0]

    case = Case(size, parts=[[16] * size] * size)
    assert sum(md.run(job, size=size, transport=TRANSPORT)) == FORMULAS[
        "all_to_all", "bruck" if family is bruck else "pairwise"
    ].messages_of(case)


@pytest.mark.parametrize("nodes", [(0,), (0, 0, 1), (0, 1, 0, 1, 2), (1, 1, 1)])
def test_hierarchical(nodes: tuple[int, ...]) -> None:
    def job(world: Any) -> None:
        node = world.split(nodes[world.rank])
        leaders = world.split(0 if node.rank == 0 else None)
        check_all_reduce(world, hierarchical.plain_all_reduce, node, leaders)

    md.run(job, size=len(nodes), transport=TRANSPORT)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 3), (2, 2), (2, 3)])
def test_torus(rows: int, columns: int) -> None:
    def job(world: Any) -> None:
        row = world.split(world.rank // columns)
        column = world.split(world.rank % columns)
        check_all_reduce(world, torus.plain_all_reduce, row, column)

    md.run(job, size=rows * columns, transport=TRANSPORT)


@pytest.mark.parametrize("sides", [(1,), (3,), (3, 2), (2, 2, 2)])
def test_torus_both(sides: tuple[int, ...]) -> None:
    def job(world: Any) -> None:
        rings = [
            world.split(min(ranks), axis="ring") for ranks in torus_both.rings_of(world.rank, sides)
        ]
        check_all_reduce(world, torus_both.plain_all_reduce, rings)

    md.run(job, size=math.prod(sides), transport=TRANSPORT)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3])
def test_shared_memory(size: int) -> None:
    """In place of the real one, in ranks that share memory."""

    def job(world: Any) -> np.ndarray:
        def plain(call: Any, x: np.ndarray, out: np.ndarray, op: Any) -> None:
            out[...] = shared_memory.plain_all_reduce(call, x)

        select.ALGORITHMS["all_reduce"]["shared"] = plain  # of this process
        return world.all_reduce(brought(world.rank, 7), algorithm="shared")

    for total in md.run(job, size=size, transport="shm"):
        assert np.array_equal(total, summed(size, 7))
