"""The formulas' numbers, worked out by hand (that the algorithms send them is
tests/comm/collectives/)."""

import pytest

from minidist.comm.cost.critical_path import PATHS
from minidist.comm.cost.volume import FORMULAS, Case, box, chunk_bytes
from minidist.comm.limits import STRETCH_BYTES


def test_numbers_worked_out_by_hand():
    case = Case(4, nbytes=40, blocks=[12, 12, 8, 8])
    numbers = {
        pair: (formula.messages_of(case), formula.bytes_of(case))
        for pair, formula in FORMULAS.items()
    }
    assert numbers["all_reduce", "ring"] == (24, 240)
    assert numbers["all_reduce", "direct"] == (12, 480)
    assert numbers["all_reduce", "tree"] == numbers["all_reduce", "naive"] == (6, 240)
    assert numbers["reduce_scatter", "ring"] == (12, 120)
    assert numbers["reduce_scatter", "naive"] == (6, 148)
    assert numbers["all_gather", "ring"] == (12, 120)
    assert numbers["all_gather", "naive"] == (6, 148)
    assert numbers["all_reduce", "doubling"] == (8, 320)
    assert numbers["all_reduce", "halving-doubling"] == (16, 240)
    assert numbers["all_reduce", "torus"] == (16, 240)
    # one ring of 4, 6 steps, both ways round
    assert numbers["all_reduce", "torus-both"] == (48, 240)
    assert numbers["all_reduce", "hierarchical"] == (6, 240)
    assert (
        numbers["reduce_scatter", "halving-doubling"]
        == numbers["reduce_scatter", "torus"]
        == (8, 120)
    )
    assert numbers["all_gather", "halving-doubling"] == numbers["all_gather", "torus"] == (8, 120)
    assert numbers["gather", "tree"] == numbers["scatter", "tree"] == (3, 12 + 8 + 2 * 8)
    assert numbers["broadcast", "ring"] == (15, 2 * 40 + 12 + 36)
    assert numbers["all_reduce", "native"] == (8 + 4, 160)
    assert numbers["gather", "naive"] == numbers["scatter", "naive"] == (3, 28)
    assert numbers["broadcast", "tree"] == numbers["reduce", "naive"] == (3, 120)
    assert numbers["barrier", "dissemination"] == (8, 0)
    parts = Case(3, parts=[[9, 1, 2], [3, 9, 4], [5, 6, 9]])
    assert FORMULAS["all_to_all", "pairwise"].bytes_of(parts) == 21
    assert FORMULAS["all_to_all", "naive"].bytes_of(parts) == 1 + 2 + 3 + 2 * 4 + 5 + 2 * 6


def test_surplus_ranks_and_nodes():
    case = Case(6, nbytes=48, blocks=[8] * 6, nodes=[0, 0, 1, 1, 1, 0])
    numbers = {
        pair: (formula.messages_of(case), formula.bytes_of(case))
        for pair, formula in FORMULAS.items()
        if pair[0] != "all_to_all"
    }
    assert numbers["all_reduce", "doubling"] == (12, 12 * 48)  # 4 ranks x 2 steps, and 2 surplus
    assert numbers["all_reduce", "halving-doubling"] == (20, 480)
    assert numbers["reduce_scatter", "halving-doubling"] == (12, 5 * 48 + 16)
    assert numbers["all_reduce", "hierarchical"] == (8 + 4, 480)
    assert numbers["reduce_scatter", "hierarchical"] == (8 + 6, 5 * 48 + 32)
    assert numbers["all_gather", "hierarchical"] == (8 + 6, 5 * 48 + 32)
    assert numbers["all_reduce", "torus"] == (36, 480)  # 2 x 3: each rank 2 (1 + 2)
    # the same steps, of 4 messages each
    assert numbers["all_reduce", "torus-both"] == (4 * 36, 480)


def test_an_array_of_several_stretches():
    """4 MiB and a byte go round a ring twice; so do the leaders' ring, and the columns of a torus
    for their chunk."""
    case = Case(6, nbytes=2 * STRETCH_BYTES + 1, nodes=[0, 0, 0, 1, 1, 1])
    numbers = {
        algorithm: FORMULAS["all_reduce", algorithm].messages_of(case)
        for algorithm in ("ring", "hierarchical", "torus")
    }
    assert numbers == {"ring": 3 * 60, "hierarchical": 8 + 3 * 4, "torus": 24 + 12}
    # only the first column's chunk is beyond 4 MiB
    long = Case(6, nbytes=3 * STRETCH_BYTES + 1, nodes=[0] * 6)
    assert FORMULAS["all_reduce", "torus"].messages_of(long) == 24 + 4 * 2 + 4 + 4
    path = PATHS["all_reduce", "ring"](6)
    assert (path.work(STRETCH_BYTES).waits, path.work(STRETCH_BYTES + 1).waits) == (10, 20)


@pytest.mark.parametrize(
    ("size", "sides"),
    [
        (1, ()),
        (2, (2,)),
        (4, (4,)),
        (7, (7,)),
        (8, (2, 4)),
        (12, (3, 4)),
        (27, (3, 3, 3)),
        (64, (4, 4, 4)),
        (360, (2, 3, 3, 4, 5)),
    ],
)
def test_the_box_has_a_ring_of_four_for_two_of_two(size, sides):
    assert box(size) == sides


def test_bruck_counts_jumps_and_labels():
    case = Case(4, parts=[[9, 1, 2, 3], [0, 9, 0, 0], [0, 0, 9, 0], [0, 0, 0, 9]], dims=2)
    assert FORMULAS["all_to_all", "bruck"].messages_of(case) == 8
    assert FORMULAS["all_to_all", "bruck"].bytes_of(case) == 1 + 2 + 2 * 3 + 4 * 24 * (1 + 1 + 2)


def test_one_rank_sends_nothing():
    for formula in FORMULAS.values():
        alone = Case(1, nbytes=40, blocks=[40], parts=[[40]])
        assert (formula.messages_of(alone), formula.bytes_of(alone)) == (0, 0)


def test_chunk_bytes():
    assert chunk_bytes(10, 4, 4) == [12, 12, 8, 8]
