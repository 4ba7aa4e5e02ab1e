"""Whatever the algorithm: a rank that means something else is met with MismatchError, soon, and
does not return."""

import numpy as np
import pytest
from collective_checker import PAIRS, Drawn, bring, call, mutated
from helpers import THREADS, run

from minidist.errors import MismatchError

SIZED = [pair for pair in PAIRS if pair[0] != "barrier"]


@pytest.mark.sampled
@pytest.mark.parametrize("transport", THREADS)
@pytest.mark.parametrize(("verb", "algorithm"), SIZED)
def test_another_dtype_of_the_same_size(verb, algorithm, transport):
    """Rank 3 brings integers; where only the root brings something, rank 3 is the root and the
    others expect floats."""
    size = 5
    lengths = [[4] * size] * size if verb == "all_to_all" else [10] * size
    case = Drawn(verb, algorithm, size, lengths, root=3, nodes=(0, 0, 1, 1, 0))
    returned = []

    def ranks(world):
        world.nodes = case.nodes
        mine = mutated(case, dtype="int32" if world.rank == 3 else "float32")
        x = bring(mine, world.rank)
        call(world, mine, np.zeros((2, 5), np.float32) if x is None else x, None)
        returned.append(world.rank)

    with pytest.raises(MismatchError, match="disagree in dtype"):
        run(ranks, size=size, transport=transport)
    assert 3 not in returned


@pytest.mark.sampled
@pytest.mark.parametrize("transport", THREADS)
@pytest.mark.parametrize(("verb", "algorithm"), PAIRS)
def test_another_algorithm(verb, algorithm, transport):
    """Rank 2 takes another algorithm of the verb."""
    other = next(name for kind, name in PAIRS if kind == verb and name != algorithm)
    lengths = [[4] * 5] * 5 if verb == "all_to_all" else [10] * 5
    case = Drawn(verb, algorithm, 5, lengths, nodes=(0, 0, 1, 1, 0))
    returned = []

    def ranks(world):
        world.nodes = case.nodes
        mine = mutated(case, algorithm=other if world.rank == 2 else algorithm)
        call(world, mine, bring(mine, world.rank), None)
        returned.append(world.rank)

    with pytest.raises(MismatchError, match="disagree in algorithm"):
        run(ranks, size=5, transport=transport)
    assert 2 not in returned
