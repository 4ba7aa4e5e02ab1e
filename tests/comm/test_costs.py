"""The formulas' numbers, worked out by hand (that the algorithms send them is tests/comm/collectives/)."""

from minidist.comm.costs import FORMULAS, Case, chunk_bytes


def test_numbers_worked_out_by_hand():
    case = Case(4, nbytes=40, blocks=[12, 12, 8, 8])
    numbers = {pair: (formula.messages_of(case), formula.bytes_of(case)) for pair, formula in FORMULAS.items()}
    assert numbers["all_reduce", "ring"] == (24, 240)
    assert numbers["all_reduce", "direct"] == (12, 480)
    assert numbers["all_reduce", "tree"] == numbers["all_reduce", "naive"] == (6, 240)
    assert numbers["reduce_scatter", "ring"] == (12, 120)
    assert numbers["reduce_scatter", "naive"] == (6, 148)
    assert numbers["all_gather", "ring"] == (12, 120)
    assert numbers["all_gather", "naive"] == (6, 148)
    assert numbers["gather", "naive"] == numbers["scatter", "naive"] == (3, 28)
    assert numbers["broadcast", "tree"] == numbers["reduce", "naive"] == (3, 120)
    assert numbers["barrier", "dissemination"] == (8, 0)
    parts = Case(3, parts=[[9, 1, 2], [3, 9, 4], [5, 6, 9]])
    assert FORMULAS["all_to_all", "pairwise"].bytes_of(parts) == 21
    assert FORMULAS["all_to_all", "naive"].bytes_of(parts) == 1 + 2 + 3 + 2 * 4 + 5 + 2 * 6


def test_one_rank_sends_nothing():
    for formula in FORMULAS.values():
        alone = Case(1, nbytes=40, blocks=[40], parts=[[40]])
        assert (formula.messages_of(alone), formula.bytes_of(alone)) == (0, 0)


def test_chunk_bytes():
    assert chunk_bytes(10, 4, 4) == [12, 12, 8, 8]
