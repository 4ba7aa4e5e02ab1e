"""The shapes of several arrays that travel as one, packed before their bytes: a header has no room for so many.

    [ number of dims, dim, dim, ... | number of dims, ... ][ bytes of part 0 | bytes of part 1 | ... ]
      8 bytes each, the label of each part
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

WORD = np.dtype("<i8")


class PackedShapes(NamedTuple):
    """What labels say of the parts behind them.

    Attributes: shapes, lengths   of each, in elements and in bytes
                starts            where each begins, and the last one ends, in bytes from where the labels begin
    """

    shapes: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]


def labels_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The labels of arrays, as uint8; only to be read."""
    labels = np.array([number for part in parts for number in (part.ndim, *part.shape)], WORD).view(np.uint8)
    labels.setflags(write=False)
    return labels


def shapes_in(packed: np.ndarray, count: int, itemsize: int) -> PackedShapes:
    """What the labels of `count` parts say, at the beginning of `packed` (uint8)."""
    words, read, shapes = packed[:len(packed) & -WORD.itemsize].view(WORD), 0, []
    for _ in range(count):
        behind = read + 1 + int(words[read])
        shapes.append(tuple(words[read + 1:behind].tolist()))
        read = behind
    lengths = tuple(math.prod(shape) * itemsize for shape in shapes)
    return PackedShapes(tuple(shapes), lengths, tuple(accumulate(lengths, initial=read * WORD.itemsize)))
