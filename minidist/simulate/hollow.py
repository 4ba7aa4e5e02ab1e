"""Chapter 24 · Arrays, places and reductions without values: all that an algorithm needs to send
its messages."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from minidist.comm.transport import Reduce

BYTE = np.dtype(np.uint8)


def hollow(length: int, dtype: np.dtype = BYTE) -> np.ndarray:
    """Return an array whose elements all lie in one place: its slices know their lengths, and it
    takes no memory."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, dtype), (length,), (0,), writeable=True)


class Known:
    """A Place whose array is there before the message comes."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return self.array


class HollowRows:
    """calls/buffers.Rows for blocks whose lengths are known."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self._edges = [0, *accumulate(blocks)]
        self._whole = hollow(self._edges[-1])

    def place(self, rank: int, count: int = 1) -> Known:
        """Return the place of the blocks of `count` ranks from `rank` on."""
        return Known(self._whole[self._edges[rank] : self._edges[rank + count]])

    def merge(self, rank: int, blocks: list[np.ndarray]) -> np.ndarray:
        """Return the part of the result that has the length of `blocks`."""
        return self._whole[: sum(map(len, blocks))]

    def place_whole(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the place of all blocks."""
        return self._whole

    def join(self, blocks: list[np.ndarray]) -> np.ndarray:
        """Return all blocks."""
        return self._whole

    def complete(self, joined: np.ndarray) -> np.ndarray:
        """Return all blocks."""
        return self._whole


class HollowReduction:
    """calls/reduction.Reduction without values; it adds in the arrays' own dtype."""

    op = "sum"

    def __init__(self, dtype: np.dtype, added: Callable[[int], None]) -> None:
        """`added(nbytes)` is called with the bytes that the rank itself adds."""
        self.dtype = dtype
        self.total = dtype
        self._note_added = added

    def into(self, source: np.ndarray, *, behind: bool = False) -> Reduce:
        """Return a mark: what arrives is added."""
        return _added

    def combine_all(self, values: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Note that the rank adds each value but the first."""
        self._note_added((len(values) - 1) * out.nbytes)

    def finish(self, total: np.ndarray, out: np.ndarray) -> None:
        """Do nothing: rounding costs no more than the storing that is counted."""


def _added(target: np.ndarray, start: int, piece: np.ndarray) -> None:
    raise AssertionError("no values arrive")
