"""Signs: a bit a number, a scale a block, and votes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from summing import gradients, sum_by

from minidist.comm.chunks import bounds
from minidist.parallel.compress.sign import Sign
from minidist.parallel.compress.two_phase import RandomStream

DRAW = RandomStream("", 0, 0)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 300),
    block=st.sampled_from([0, 8, 16, 64, 4096]),
    kind=st.sampled_from(["float32", "float64"]),
)
def test_there_and_back(count: int, block: int, kind: str) -> None:
    codec = Sign(block)
    values = np.random.default_rng(count).normal(size=count).astype(kind)
    payload = codec.encode(values, DRAW)
    assert (payload.dtype, payload.size) == (np.uint8, codec.nbytes(count, np.dtype(kind)))
    found = codec.decode(payload, count, np.dtype(kind))
    assert found.dtype == kind
    for start in range(0, count, block or max(count, 1)):
        part = slice(start, start + (block or count))
        mean = np.abs(values[part]).mean()
        np.testing.assert_allclose(found[part], np.where(values[part] >= 0, mean, -mean), rtol=1e-6)


def two_phases(given: list[np.ndarray], size: int) -> np.ndarray:
    """Scaled signs with worker and server errors (Tang et al. 2021, figure 3): (steps, n)."""
    n = given[0].shape[1]
    worker = np.zeros((size, n))
    server = np.zeros(n)
    edges = bounds(n, size)
    sums = []
    for step in range(len(given[0])):
        total = np.zeros(n)
        for chunk in map(slice, edges, edges[1:]):
            for rank in range(size):
                worker[rank, chunk] += given[rank][step, chunk]
                sent = np.sign(worker[rank, chunk]) * np.float32(np.abs(worker[rank, chunk]).mean())
                worker[rank, chunk] -= sent
                server[chunk] += sent
            total[chunk] = np.sign(server[chunk]) * np.float32(np.abs(server[chunk]).mean())
            server[chunk] -= total[chunk]
        sums.append(total)
    return np.array(sums)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5])
def test_equals_the_paper(size: int) -> None:
    numbers = [gradients(rank, 20, 257) for rank in range(size)]
    sums = sum_by("sign:block=0", size, given=numbers.__getitem__)
    np.testing.assert_allclose(sums.results[0], two_phases(numbers, size), rtol=1e-9)


def test_majority() -> None:
    """Three ranks: two weak ones outvote a strong one; the sum's size is that of all scales."""
    numbers = [np.array([[8.0, -8.0]]), np.array([[-1.0, 1.0]]), np.array([[-1.0, 1.0]])]
    voted = sum_by("sign:majority=yes", 3, given=numbers.__getitem__, shapes=((2,),)).results[0]
    np.testing.assert_array_equal(voted, [[-10.0, 10.0]])
    added = sum_by("sign", 3, given=numbers.__getitem__, shapes=((2,),)).results[0]
    np.testing.assert_array_equal(added, [[6.0, -6.0]])
