"""Selection: exactly the largest, those of at least a threshold, and one of every stratum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm.chunks import bounds
from minidist.parallel.compress import selection
from minidist.parallel.compress.selection import at_least, drawn, largest


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 3000), seed=st.integers(0, 99), spread=st.floats(0, 3), data=st.data())
def test_the_largest(n: int, seed: int, spread: float, data: st.DataObject) -> None:
    """The guess of a sample of 64 is often wrong, and the answer never."""
    k = data.draw(st.integers(0, n))
    random = np.random.default_rng(seed)
    values = random.normal(size=n) * 10 ** random.uniform(-spread, spread, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "SAMPLE", 64)
        found = largest(values, k)
    np.testing.assert_array_equal(found, np.sort(np.argsort(-np.abs(values), kind="stable")[:k]))


@pytest.mark.parametrize(
    "values", [np.zeros(5000), np.ones(5000), np.repeat([0.0, 7.0], 2500), np.full(5000, np.nan)]
)
def test_equal_numbers(values: np.ndarray) -> None:
    found = largest(values, 100)
    assert len(np.unique(found)) == 100
    assert np.array_equal(found, np.sort(found))
    np.testing.assert_array_equal(np.abs(values[found]), np.full(100, np.abs(values).max()))


def test_what_is_not_finite_comes_first() -> None:
    values = np.arange(10_000.0)
    values[[5, 77, 4000]] = np.nan, -np.inf, np.inf
    np.testing.assert_array_equal(largest(values, 3), [5, 77, 4000])
    np.testing.assert_array_equal(at_least(values, 9999.0, 10), [5, 77, 4000, 9999])


def test_a_sample_that_misses_what_is_large() -> None:
    """The large numbers lie between the places that the sample looks at, or at just these
    places."""
    for first in (0, 1):
        values = np.full(1 << 16, 0.5)
        values[first::4] = 1.0 + np.arange(1 << 14)
        np.testing.assert_array_equal(largest(values, 100), (np.arange(1 << 14) * 4 + first)[-100:])


def test_at_least_of_too_many_the_largest() -> None:
    values = np.array([3.0, -5.0, 1.0, 4.0, -2.0])
    np.testing.assert_array_equal(at_least(values, 2.0, 5), [0, 1, 3, 4])
    np.testing.assert_array_equal(at_least(values, 2.0, 2), [1, 3])


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 500), chunks=st.integers(1, 9), data=st.data())
def test_one_of_every_stratum(size: int, chunks: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(min(size, chunks), size))
    positions, lengths = drawn(size, k, chunks, "a stream", 1)
    assert lengths.sum() == size
    assert lengths.min() >= 1
    edges = np.concatenate([[0], np.cumsum(lengths)])
    assert ((positions >= edges[:-1]) & (positions < edges[1:])).all()
    # a reduce-scatter of the values leaves each rank those of its chunk
    for chunk in range(chunks):
        start, stop = bounds(k, chunks)[chunk : chunk + 2]
        low, high = bounds(size, chunks)[chunk : chunk + 2]
        assert ((positions[start:stop] >= low) & (positions[start:stop] < high)).all()
        assert lengths[start:stop].sum() == high - low


def test_every_position_of_a_stratum_is_drawn_equally_often() -> None:
    counts = np.zeros(100)
    lengths = drawn(100, 10, 3, "", 0)[1]
    expected = np.repeat(2000 / lengths, lengths)
    for step in range(2000):
        counts[drawn(100, 10, 3, f"step {step}", 0)[0]] += 1
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())
