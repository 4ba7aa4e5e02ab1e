"""Cutting an array into one chunk a rank, as numpy.array_split does: the first n mod P chunks have one element more."""

from functools import lru_cache
from itertools import pairwise

import numpy as np


@lru_cache(maxsize=256)
def bounds(length: int, size: int) -> tuple[int, ...]:
    """Where the `size` chunks begin and the last one ends: size + 1 numbers. Remembered, as calls come again."""
    short, longer = divmod(length, size)
    return tuple(rank * short + min(rank, longer) for rank in range(size + 1))


def split(array: np.ndarray, size: int) -> list[np.ndarray]:
    """Views of the `size` chunks along the first dim."""
    return [array[start:stop] for start, stop in pairwise(bounds(len(array), size))]


def longest(length: int, size: int) -> int:
    """Elements of the longest chunk: ceil(length / size)."""
    return -(-length // size)
