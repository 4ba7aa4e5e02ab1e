"""Test what each rank gets of a dim, and of attention's heads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.nn.shares import even_slices, head_shares


@given(length=st.integers(0, 20), size=st.integers(1, 9))
def test_slices_are_those_of_array_split(length: int, size: int) -> None:
    whole = np.arange(length)
    for own, expected in zip(even_slices(length, size), np.array_split(whole, size), strict=True):
        np.testing.assert_array_equal(whole[own], expected)


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "expected"),
    [
        (4, 4, 2, [(0, 2, 0, 2), (2, 4, 2, 4)]),
        (6, 6, 4, [(0, 2, 0, 2), (2, 4, 2, 4), (4, 5, 4, 5), (5, 6, 5, 6)]),
        (6, 3, 2, [(0, 4, 0, 2), (4, 6, 2, 3)]),
        (8, 2, 5, [(0, 2, 0, 1), (2, 3, 0, 1), (3, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]),
    ],
)
def test_heads_of_each_rank(
    heads: int, key_heads: int, size: int, expected: list[tuple[int, ...]]
) -> None:
    shares = head_shares(heads, key_heads, size)
    assert [(q.start, q.stop, k.start, k.stop) for q, k in shares] == expected


@given(size=st.integers(1, 12), key_heads=st.integers(1, 6), each=st.integers(1, 6))
def test_heads_are_all_given_and_look_at_whole_key_heads(
    size: int, key_heads: int, each: int
) -> None:
    heads = key_heads * each
    if heads < size:
        return
    shares = head_shares(heads, key_heads, size)
    assert [head for queries, _ in shares for head in queries] == list(range(heads))
    for queries, keys in shares:
        assert len(queries) and len(queries) % len(keys) == 0
        assert {head // each for head in queries} == set(keys)
