"""Collectives over a board in shared memory: ranks as threads, each with a real end of it."""

import numpy as np
import pytest
from collective_checker import ALL_PAIRS, Drawn, examine
from helpers import run
from hypothesis import given, settings
from hypothesis import strategies as st
from linked import run_shm
from strategies import calls

from minidist.comm.transport import SHOWN_BYTES
from minidist.errors import ConfigError, MismatchError

SHARED = [verb for verb, algorithm in ALL_PAIRS if algorithm == "shared"]


@pytest.mark.parametrize("verb", SHARED)
@settings(max_examples=30)
@given(data=st.data())
def test_sample(verb, data):
    examine(data.draw(calls(verb, "shared", "shm")), run_shm)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", SHARED)
@settings(max_examples=1000, derandomize=False)
@given(data=st.data())
def test_full_count(verb, data):
    examine(data.draw(calls(verb, "shared", "shm")), run_shm)


@pytest.mark.parametrize(("size", "length"), [(2, SHOWN_BYTES + 1), *(
    pytest.param(size, length, marks=pytest.mark.soak) for size in (2, 3, 5)
    for length in (SHOWN_BYTES - 1, SHOWN_BYTES, 2 * SHOWN_BYTES + 7))])
def test_pieces(size, length):
    """Arrays of several pieces, cut anywhere."""
    for verb in ("all_reduce", "reduce_scatter"):
        for how in ("new", "in place") if verb == "all_reduce" else ("new",):
            examine(Drawn(verb, "shared", size, [length] * size, "int8", how=how), run_shm)
    examine(Drawn("broadcast", "shared", size, [length] * size, "int8", root=1), run_shm)
    examine(Drawn("all_gather", "shared", size, [length // 2 + 3 * rank for rank in range(size)], "int8"), run_shm)
    table = [[length * (1 + src * dst) // size for dst in range(size)] for src in range(size)]
    examine(Drawn("all_to_all", "shared", size, table, "int8"), run_shm)


def many_calls(world):
    """Calls of all lengths one after the other, in two groups that overlap: a turn must not be overwritten too soon."""
    half = world.split(world.rank % 2)
    for number in range(60):
        x = np.full(1 + 977 * (number % 9), world.rank + number)
        assert (world.all_reduce(x) == sum(range(world.size)) + world.size * number).all()
        assert (half.all_reduce(x) == sum(range(world.rank % 2, world.size, 2)) + half.size * number).all()
    return world.ledger.rows()


def test_many_calls():
    for rows in run_shm(many_calls, size=4):
        assert {row["algorithm"] for row in rows if row["verb"] == "all_reduce"} == {"shared"}, "what auto means here"


def odd_one(world):
    with pytest.raises(MismatchError, match=r"op.*\n.*max.*\n.*sum|op.*\n.*sum.*\n.*max"):
        world.all_reduce(np.ones(3), op="max" if world.rank == 1 else "sum", algorithm="shared")


def test_ranks_that_disagree_learn_it_from_the_board():
    run_shm(odd_one, size=3)


def test_ranks_that_share_no_memory_are_told():
    def job(world):
        with pytest.raises(ConfigError, match="shared is for ranks that share memory"):
            world.all_reduce(np.ones(3), algorithm="shared")

    run(job, size=2)
