"""Cut an array into one chunk per rank, as numpy.array_split does: the first n mod P chunks have
one element more."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

Owner = TypeVar("Owner")


@lru_cache(maxsize=256)
def bounds(length: int, size: int) -> tuple[int, ...]:
    """Return the starts of the `size` chunks and the end of the last: size + 1 numbers. Cached,
    because calls repeat."""
    short, longer = divmod(length, size)
    return tuple(rank * short + min(rank, longer) for rank in range(size + 1))


@lru_cache(maxsize=256)
def slices(length: int, size: int) -> tuple[slice, ...]:
    """Return the slices of the `size` chunks. Cached, as bounds."""
    return tuple(slice(start, stop) for start, stop in pairwise(bounds(length, size)))


def split(array: np.ndarray, size: int) -> list[np.ndarray]:
    """Return views of the `size` chunks along the first dim."""
    return list(map(array.__getitem__, slices(len(array), size)))


def longest(length: int, size: int) -> int:
    """Return the number of elements of the longest chunk: ceil(length / size)."""
    return -(-length // size)


def spans_within(
    spans: Iterable[tuple[Owner, range]], chunk: slice
) -> Iterator[tuple[Owner, slice, range]]:
    """Yield the overlap of a chunk with each of several consecutive parts.

    Args:    spans: (owner, range of the owner's elements) of each part, in the order of the array.
    Returns: for each part, also without overlap: (owner, the overlap's slice of the chunk, the
    owner's elements in it).
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
