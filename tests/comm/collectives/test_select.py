"""Test what auto means: the same on every rank, and one of the algorithms that the verb takes."""

import pytest

from minidist.comm.collectives.select import ALGORITHMS, choose
from minidist.comm.cost.critical_path import Tiers, tiers
from minidist.comm.cost.link_model import LinkCost, Profile
from minidist.errors import ConfigError


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_auto_is_an_algorithm_of_the_verb(verb):
    for size in range(1, 10):
        for nbytes in (0, 1 << 10, 1 << 16, 1 << 20, 1 << 26):
            assert choose(verb, "auto", nbytes, size) in ALGORITHMS[verb]


def test_few_bytes_go_directly_and_many_round_the_ring():
    assert choose("all_reduce", "auto", 1 << 10, 4) == "direct"
    assert choose("all_reduce", "auto", 1 << 24, 4) == "ring"
    assert choose("all_reduce", "auto", 1 << 24, 2) == "ring"
    # the ring's bytes in half its messages
    assert choose("all_reduce", "auto", 1 << 16, 2) == "direct"
    assert choose("all_reduce", "auto", 1 << 16, 8) == "tree"
    assert choose("all_reduce", "auto", 1 << 18, 4) == "pairwise"


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_another_name_is_an_error_that_lists_the_names(verb):
    with pytest.raises(
        ConfigError,
        match=f"{verb} has no algorithm 'x'; choose auto, {', '.join(ALGORITHMS[verb])}",
    ):
        choose(verb, "x", 0, 2)


# ---------------------------------------------------------------- several nodes

FAST = LinkCost("shm", 4, 1e-6, 0, 1e-10, 0, 0.0)
SLOW = LinkCost("network", 8, 5e-5, 0, 1e-8, 0, 0.0)


def test_tiers_are_those_of_several_nodes_with_several_ranks_each():
    assert tiers([5, 5, 2, 2, 2], None, "shm") == Tiers(2, 3, None, None)
    assert tiers([0, 1, 0, 1], Profile([FAST, SLOW], {}), "shm") == Tiers(2, 2, FAST, SLOW)
    assert tiers([0] * 4, None, "shm") is None
    assert tiers([0, 1, 2, 2, 2], None, "shm") is None  # three nodes, two of them of one rank


def test_leaders_alone_use_the_network_by_default_but_for_few_bytes():
    here = Tiers(2, 4, None, None)
    for verb, algorithm in (
        ("all_reduce", "hierarchical"),
        ("broadcast", "hierarchical"),
        ("reduce", "hierarchical"),
        ("reduce_scatter", "ring"),
        ("all_gather", "ring"),
        ("barrier", "dissemination"),
    ):
        assert choose(verb, "auto", 1 << 20, 8, tiers=here) == algorithm
        assert choose(verb, "auto", 1 << 20, 8, SLOW, tiers=here) in (
            algorithm,
            "pairwise",
            "halving-doubling",
        )
    assert choose("all_reduce", "auto", 1 << 10, 8, tiers=here) == "direct"
    # nobody measured the inside
    assert choose("all_reduce", "auto", 1 << 20, 8, SLOW, tiers=here) == "hierarchical"


def test_a_profile_weighs_the_time_inside_a_node_against_that_between_nodes():
    """8 ranks on 2 nodes, 64 MiB: 0.75 n less between them, for 2 log2(4) n more inside."""
    slow_inside = LinkCost("shm", 4, 1e-6, 0, 2e-9, 0, 0.0)
    assert (
        choose("all_reduce", "auto", 1 << 26, 8, SLOW, tiers=Tiers(2, 4, FAST, SLOW))
        == "hierarchical"
    )
    assert choose("all_reduce", "auto", 1 << 26, 8, SLOW, tiers=Tiers(2, 4, slow_inside, SLOW)) in (
        "ring",
        "pairwise",
    )
    assert choose("all_reduce", "auto", 64, 8, SLOW, tiers=Tiers(2, 4, FAST, SLOW)) == "direct"
