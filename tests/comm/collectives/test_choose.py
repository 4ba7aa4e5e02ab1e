"""What auto means: the same on every rank, and one of the algorithms that the verb takes."""

import pytest

from minidist.comm.collectives.choose import ALGORITHMS, choose
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
    assert choose("all_reduce", "auto", 1 << 16, 2) == "direct"  # the ring's bytes in half its messages
    assert choose("all_reduce", "auto", 1 << 16, 8) == "tree"
    assert choose("all_reduce", "auto", 1 << 18, 4) == "pairwise"


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_another_name_is_an_error_that_lists_the_names(verb):
    with pytest.raises(ConfigError, match=f"{verb} has no algorithm 'x'; choose auto, {', '.join(ALGORITHMS[verb])}"):
        choose(verb, "x", 0, 2)
