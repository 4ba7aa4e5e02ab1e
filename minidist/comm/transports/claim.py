"""Writing to memory that other processors' caches hold: claim every line first, where that is quicker.

    copy      line 0: fetch, write   line 1: fetch, write   line 2: ...       few fetches at a time
    claim     one byte of line 0, of line 1, of line 2, ...                   many at a time
    then copy to lines that are this processor's own

A processor may write to a cache line only when no other has it, and takes it away from those that do. It waits for that
most of the time where the others are far: behind other last-level caches, say. Copying fetches few lines ahead; stores
a line apart fetch many. Between cores whose last-level caches differ that takes a third off an all-reduce in shared
memory; between cores that share one it adds up to a sixth, for it goes over the lines twice (1 MiB, 2 ranks, AMD EPYC,
measured). A rank cannot know which it is, and on a virtual machine it changes within seconds. So it finds out, again
and again: a few of many writes are made in both ways, and the way that took less time is that of the rest.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

_LINE = 64                  # bytes of a cache line
_PAGE = 4096
LONG_BYTES = 64 << 10       # shorter writes are plain copies
TRIAL = (False, False, True, True, True, True, False, False)
"""The ways of the first writes of a round: each way twice after its like, as collectives alternate long and short."""
ROUND = 128                 # long writes from one trial to the next


class Writer:
    """Copies arrays into shared memory that others have read. One thread at a time.

    Attributes: claims  whether long writes claim their lines first, until the next trial
    Args:       clock: seconds that this thread has worked, so that being interrupted does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self.claims = clock, False
        self._number = 0                # of the next long write, within its round
        self._seconds, self._octets = [0.0, 0.0], [0, 0]    # of both ways, in this round's trial

    def write(self, target: np.ndarray, sources: Sequence[np.ndarray]) -> int:
        """Fill the front of `target` (uint8) with the bytes of contiguous arrays, one after the other; how many."""
        total = sum(source.nbytes for source in sources)
        if total < LONG_BYTES:
            _copy(target, sources)
        elif self._number < len(TRIAL):
            self._try(TRIAL[self._number], target, sources, total)
        else:
            _write(self.claims, target, sources, total)
            self._number = (self._number + 1) % ROUND
        return total

    def _try(self, claims: bool, target: np.ndarray, sources: Sequence[np.ndarray], total: int) -> None:
        start = self._clock()
        _write(claims, target, sources, total)
        self._seconds[claims] += self._clock() - start
        self._octets[claims] += total
        self._number += 1
        if self._number == len(TRIAL):
            plain, claimed = (seconds / octets for seconds, octets in zip(self._seconds, self._octets, strict=True))
            self.claims = claimed < plain
            self._seconds, self._octets = [0.0, 0.0], [0, 0]


def _write(claims: bool, target: np.ndarray, sources: Sequence[np.ndarray], total: int) -> None:
    if claims:
        target[:total:_LINE] = 0
    _copy(target, sources)


def _copy(target: np.ndarray, sources: Sequence[np.ndarray]) -> None:
    """One after the other. Long ones by a loop of NumPy's, which is never as slow as memmove can be: see ring.copy."""
    stop = 0
    for source in sources:
        start, stop = stop, stop + source.nbytes
        if source.nbytes > _PAGE:
            np.positive(source.view(np.uint8), out=target[start:stop])
        else:
            target[start:stop] = source.view(np.uint8)
