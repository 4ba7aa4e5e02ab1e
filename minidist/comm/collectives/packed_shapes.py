"""Labels: the shapes of several arrays that travel as one, before their bytes. A header has no room for so many.

    [ number of dims, dim, dim, ... | number of dims, ... ][ bytes of part 0 | bytes of part 1 | ... ]
      8 bytes each, a label for each part
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

WORD = np.dtype("<i8")


class Parts(NamedTuple):
    """What labels say of the parts behind them.

    Attributes: shapes, lengths   of each, in elements and in bytes
                starts            where each begins, and the last one ends, in bytes from where the labels begin
    """

    shapes: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]


def labels_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The labels of arrays, as uint8; only to be read."""
    return _labels(tuple([part.shape for part in parts]))


@lru_cache(maxsize=256)
def _labels(shapes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    labels = np.array([number for shape in shapes for number in (len(shape), *shape)], WORD).view(np.uint8)
    labels.setflags(write=False)    # they are remembered
    return labels


def labels_in(octets: np.ndarray, count: int) -> bytes:
    """The labels of `count` parts, from what begins with them (uint8)."""
    words, length = octets[:len(octets) & -WORD.itemsize].view(WORD), 0
    for _ in range(count):
        length += 1 + int(words[length])
    return words[:length].tobytes()


@lru_cache(maxsize=256)
def parts_of(labels: bytes, itemsize: int) -> Parts:
    """What labels say. Remembered, as the same parts come again."""
    numbers, shapes = np.frombuffer(labels, WORD).tolist(), []
    while numbers:
        dims, numbers = numbers[1:1 + numbers[0]], numbers[1 + numbers[0]:]
        shapes.append(tuple(dims))
    lengths = tuple(math.prod(shape) * itemsize for shape in shapes)
    return Parts(tuple(shapes), lengths, tuple(accumulate(lengths, initial=len(labels))))
