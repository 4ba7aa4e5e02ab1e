"""Cutting an array into one chunk a rank, as numpy.array_split does: the first n mod P chunks have
one element more."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

Owner = TypeVar("Owner")


@lru_cache(maxsize=256)
def bounds(length: int, size: int) -> tuple[int, ...]:
    """Where the `size` chunks begin and the last one ends: size + 1 numbers. Remembered, as calls
    come again."""
    short, longer = divmod(length, size)
    return tuple(rank * short + min(rank, longer) for rank in range(size + 1))


def split(array: np.ndarray, size: int) -> list[np.ndarray]:
    """Views of the `size` chunks along the first dim."""
    return [array[start:stop] for start, stop in pairwise(bounds(len(array), size))]


def longest(length: int, size: int) -> int:
    """Elements of the longest chunk: ceil(length / size)."""
    return -(-length // size)


def spans_within(
    spans: Iterable[tuple[Owner, range]], chunk: slice
) -> Iterator[tuple[Owner, slice, range]]:
    """What a chunk has of parts of several owners that lie one after another.

    Args:    spans: (owner, which elements of it).
    Returns: of each, also where nothing is in the chunk: (owner, its place in the chunk, which
    elements of it).
    """
    start = 0
    for owner, part in spans:
        first = min(max(start, chunk.start), chunk.stop)
        last = max(first, min(start + len(part), chunk.stop))
        yield (
            owner,
            slice(first - chunk.start, last - chunk.start),
            part[first - start : last - start],
        )
        start += len(part)
