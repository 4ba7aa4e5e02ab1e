"""shm between many processes of one host: rings to every other rank, and boards for the world and
for parts of it."""

import numpy as np
import pytest
from leftovers import nothing_left

import minidist as md


def calls(world):
    """Messages and boards: what each rank got, to be checked by values and order."""
    rank = world.rank
    size = world.size
    near = world.split(rank // 8)
    swapped = world.all_to_all(
        [np.array([100 * rank + other]) for other in range(size)], algorithm="pairwise"
    )
    gathered = world.all_gather(np.full(1 + rank % 3, rank), algorithm="ring")
    sums = [
        float(world.all_reduce(float(rank), algorithm=algorithm))
        for algorithm in ("shared", "doubling")
    ]
    return (
        world.transport.name,
        near.board is not None,
        near.world_ranks,
        np.concatenate(swapped).tolist(),
        gathered.tolist(),
        sums,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "size", [10, *(pytest.param(size, marks=pytest.mark.soak) for size in (96, 128, 200))]
)
def test_many_ranks(size):
    with nothing_left():
        found = md.run(calls, size=size, transport="shm", limit=300)
    gathered = [rank for rank in range(size) for _ in range(1 + rank % 3)]
    for rank, result in enumerate(found):
        near = tuple(range(rank // 8 * 8, min(rank // 8 * 8 + 8, size)))
        assert result == (
            "shm",
            True,
            near,
            [100 * other + rank for other in range(size)],
            gathered,
            [size * (size - 1) / 2] * 2,
        )
