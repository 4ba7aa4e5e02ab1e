"""The workspace that docstrings state is what the memory account sees: the worst rank's peak of
communication."""

import gc
import sys
import tracemalloc

import numpy as np
import pytest
from collective_checker import Drawn, bring, call
from helpers import run

from minidist.device import account

N = 48 * 8  # bytes of the array, or of all blocks together; 4 ranks, so a chunk, or a block, is N/4
WORKSPACE = {
    ("broadcast", "naive"): 0,
    ("broadcast", "tree"): 0,
    ("broadcast", "ring"): 0,
    ("broadcast", "hierarchical"): 0,
    ("reduce", "naive"): 0,
    ("reduce", "tree"): N,
    ("reduce", "hierarchical"): N,
    ("all_reduce", "naive"): 0,
    ("all_reduce", "tree"): 0,
    ("all_reduce", "ring"): 0,
    ("all_reduce", "pairwise"): 0,
    ("all_reduce", "direct"): 3 * N,
    ("all_reduce", "doubling"): N,
    ("all_reduce", "halving-doubling"): 0,
    ("all_reduce", "hierarchical"): N,
    ("all_reduce", "torus"): 0,
    ("all_reduce", "torus-both"): 0,
    ("gather", "naive"): 0,
    ("gather", "tree"): 3 * N // 4,
    ("scatter", "naive"): 0,
    ("scatter", "tree"): N // 2,
    ("all_gather", "naive"): 0,
    ("all_gather", "ring"): 0,
    ("all_gather", "halving-doubling"): 0,
    ("all_gather", "torus"): 0,
    ("all_gather", "hierarchical"): 0,
    ("reduce_scatter", "naive"): N,
    ("reduce_scatter", "ring"): N // 2,
    ("reduce_scatter", "pairwise"): 0,
    ("reduce_scatter", "halving-doubling"): N,
    ("reduce_scatter", "torus"): N // 2,
    ("reduce_scatter", "hierarchical"): N,
    ("all_to_all", "naive"): 6 * N // 4,
    ("all_to_all", "pairwise"): 0,
    ("all_to_all", "bruck"): 3 * (N // 2 + 2 * 16),
}


@pytest.mark.sampled
@pytest.mark.parametrize(("verb", "algorithm"), WORKSPACE)
def test_workspace_is_as_stated(verb, algorithm):
    blocks = {
        "gather": [6] * 4,
        "all_gather": [6] * 4,
        "scatter": [24] * 4,
        "all_to_all": [[12] * 4] * 4,
    }
    lengths = blocks.get(verb, [48] * 4)
    case = Drawn(verb, algorithm, 4, lengths, "float64")

    def ranks(world):
        x = bring(case, world.rank)
        with account.use(account.MemoryAccount()) as told:
            call(world, case, x, None)
            return told.peak["communication"]

    assert max(run(ranks, size=4)) == WORKSPACE[verb, algorithm]


def allocated(world, length, calls):
    """Return what calls of several kinds leave allocated, in blocks, and the most that they hold,
    in bytes.

    The least of some rounds each: a wait that lasts is told, which takes memory of its own.
    """
    x = np.ones(length)
    part = np.ones(length // world.size)
    whole = np.empty(len(part) * world.size)

    def several(count):
        for _ in range(count):
            world.all_reduce(x, out=x, op="max", algorithm="ring")
            world.all_gather(part, out=whole)
            world.broadcast(x, out=x)
            world.start_all_reduce(x, out=x, op="max").wait()

    several(100)  # tables and buffers that grow to their bounds, and stay
    world.barrier()
    gc.collect()
    gc.disable()  # nothing may wait for the collector either
    left = []
    held = []
    for _ in range(3):
        before = sys.getallocatedblocks()
        several(calls)
        left.append(sys.getallocatedblocks() - before)
    tracemalloc.start()
    for _ in range(5):
        tracemalloc.reset_peak()
        several(3)
        held.append(tracemalloc.get_traced_memory()[1])
    return min(left), min(held)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.soak)])
def test_what_a_call_allocates_is_constant(transport):
    """Call after call nothing is left, and a call on an array forty times as long allocates no
    more."""
    short, long = (
        run(allocated, length, calls, size=2, transport=transport)
        for length, calls in ((1000, 100), (40_000, 25))
    )
    for rank in range(2):
        assert short[rank][0] < 200  # of 400 calls: not one block in two
        assert long[rank][0] < 50  # of 100
        assert abs(long[rank][1] - short[rank][1]) < 200_000  # a copy of the array were 320,000
