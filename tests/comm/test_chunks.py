"""Chunks are numpy.array_split's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm.chunks import bounds, longest, split


@given(length=st.integers(0, 200), size=st.integers(1, 20))
def test_split_is_array_split(length, size):
    array = np.arange(length)
    chunks = split(array, size)
    assert [chunk.tolist() for chunk in chunks] == [
        chunk.tolist() for chunk in np.array_split(array, size)
    ]
    assert all(np.shares_memory(chunk, array) for chunk in chunks if len(chunk))
    assert longest(length, size) == max(map(len, chunks))
    assert bounds(length, size)[-1] == length
