"""Where to write in shared memory that other processors' caches hold: to lines just used, or to lines long forgotten.

    near   [ turn 0 | turn 1 ]                       the same lines again and again: the caches hold them
    far    [ ........ 16 MiB ........ ] round and round: when the writer comes again, no cache holds its lines

A processor may write to a cache line only when no other has it, and takes it away from those that do. Between cores
that share a last-level cache that costs little, and near is two to three times as quick as far: the writer finds its
lines, and the readers theirs, in the cache. Between cores that share none it costs five times as much as the copy
itself, and far is quicker by half: an all-reduce of 8 MiB in 2.0 ms where near takes 4.7, and 1.3 where cores share
(2 ranks, AMD EPYC, measured).

A rank cannot know which it is, and on a virtual machine it changes within seconds. So it finds out, again and again: a
few of many writes are made in both ways, and the way that took less time is that of the rest: near, unless far is
clearly quicker. Each rank decides for itself, since a reader is told where to look. Who goes far has the system find
room for all of it at once: that takes 14 to 58 ms, and else would make hundreds of writes slow, each of 64 KiB by 0.06
to 0.6 ms.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from minidist.comm.transport import SHOWN_BYTES

TURNS = 2
NEAR_BYTES = TURNS * SHOWN_BYTES
FAR_BYTES = 16 << 20
LONG_BYTES = 64 << 10       # shorter writes are near
TRIAL = (False,) * 8 + (True,) * 4
"""Whether the first writes of a round are far. The near lines come to the readers' caches in the first four."""
COUNTED = TRIAL.index(True) // 2    # the first write of a trial that is timed
ROUND = 128                 # long writes from one trial to the next
CLEARLY = 0.8               # of the time of near writes: what far ones may take to be preferred

_LINE, _PAGE = 64, 4096


class Writer:
    """Writes to one rank's part of a board. One thread at a time.

    Attributes: far      whether long writes go far, until the next trial
                reached  bytes of the far memory that were ever touched, so that the system has found room for them
    Args:       octets: NEAR_BYTES + FAR_BYTES of shared memory, uint8.
                clock: seconds that this thread has worked, so that being interrupted does not count.
    """

    def __init__(self, octets: np.ndarray, clock: Callable[[], float] = time.thread_time) -> None:
        self._octets, self._clock, self.far, self.reached = octets, clock, False, 0
        self._next = 0                  # where the next far write begins, behind the near memory
        self._number = 0                # of the next long write, within its round
        self._seconds, self._written = [0.0, 0.0], [0, 0]   # of both ways, in this round's trial

    def write(self, turn: int, sources: Sequence[np.ndarray]) -> tuple[int, int]:
        """Put the bytes of contiguous arrays, together at most SHOWN_BYTES, one after the other.

        Returns: where they begin in the memory, and how many they are. What was written last is not overwritten, if
                 turns alternate.
        """
        total = sum([source.nbytes for source in sources])
        start = turn * SHOWN_BYTES
        if total < LONG_BYTES:
            _copy(self._octets[start:], sources)
            return start, total
        number, self._number = self._number, (self._number + 1) % ROUND
        tried = number < len(TRIAL)
        if TRIAL[number] if tried else self.far:
            start = self._far_start(total)
        if tried and number >= COUNTED:
            self._try(TRIAL[number], self._octets[start:start + total], sources)
        else:
            _copy(self._octets[start:], sources)
        if number == len(TRIAL) - 1:
            self._decide()
        return start, total

    def _far_start(self, total: int) -> int:
        start = self._next if self._next + total <= FAR_BYTES else 0
        self._next = -(-(start + total) // _LINE) * _LINE
        self.reached = max(self.reached, start + total)
        return NEAR_BYTES + start

    def _try(self, far: bool, target: np.ndarray, sources: Sequence[np.ndarray]) -> None:
        target[::_PAGE] = 0     # the system finds room for pages never written to, which is not to count
        begun = self._clock()
        _copy(target, sources)
        self._seconds[far] += self._clock() - begun
        self._written[far] += len(target)

    def _decide(self) -> None:
        near, far = (seconds / written for seconds, written in zip(self._seconds, self._written, strict=True))
        self.far = far < CLEARLY * near
        if self.far and self.reached < FAR_BYTES:
            self._octets[NEAR_BYTES + self.reached::_PAGE] = 0
            self.reached = FAR_BYTES
        self._seconds, self._written = [0.0, 0.0], [0, 0]


def _copy(target: np.ndarray, sources: Sequence[np.ndarray]) -> None:
    """One after the other. Long ones by a loop of NumPy's, which is never as slow as memmove can be: see ring.copy."""
    stop = 0
    for source in sources:
        start, stop = stop, stop + source.nbytes
        if source.nbytes > _PAGE:
            np.positive(source.view(np.uint8), out=target[start:stop])
        else:
            target[start:stop] = source.view(np.uint8)
