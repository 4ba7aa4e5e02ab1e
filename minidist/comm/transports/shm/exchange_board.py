"""A board: memory in which every rank of a group shows arrays to all the others.

    rank 0's part    posted | asleep | closed | headers of turns 0, 1 | bytes      only rank 0 writes here
    rank 1's part    posted | asleep | closed | headers of turns 0, 1 | bytes      only rank 1 writes here
    ...

`show` is the only operation: a rank copies its arrays into its part, increments `posted`, waits
until the others have posted as often, and reads their bytes in place. So bytes for P-1 ranks are
written once, and all ranks wait for each other at the same time instead of one after the other.

Parts have two turns, used alternately: a rank overwrites a turn only at its second `show` after,
and before that all others have posted the first. Where the ranks may read each other's memory, long
arrays need not be copied: a rank shows their address, the others read() them there, and all
synchronize once more before it may change them.

A rank closes its board while others may still read its last bytes. So its part is used for another
board only after they have closed theirs too: `closed` counts the closed boards.

The fences have the same reasons as in ring_buffer.py: bytes before `posted`; `posted` before
`asleep`, and `asleep` before the look at `posted`, so that the later of two ranks sees the other's
write, and no wake-up is lost.
"""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minidist.comm.limits import META_LIMIT, SHOWN_BYTES
from minidist.comm.transport import Board, Tag
from minidist.comm.transports.progress.engine import Engine, Operation, yield_core
from minidist.comm.transports.shm import process_vm_read
from minidist.comm.transports.shm.ring_buffer import LINE, Fence

if TYPE_CHECKING:
    from minidist.comm.transports.shm.transport import ShmTransport

_PAGE = 4096
TURNS = 2
_HEADER = struct.Struct("2Q")  # the numbers of bytes of meta, and of arrays
_HEADER_BYTES = 2 * _PAGE  # these words, and meta
_BYTES = _PAGE + TURNS * _HEADER_BYTES  # offset in a part of the bytes of all turns
PART_BYTES = _BYTES + TURNS * SHOWN_BYTES

_POSTED = 0
_ASLEEP = LINE // 8
CLOSED = 2 * LINE // 8


class BoardPart:
    """A rank's part of a board, as used by that rank or another."""

    def __init__(self, memory: memoryview) -> None:
        self.words = memory[:_PAGE].cast("Q")
        starts = [_PAGE + turn * _HEADER_BYTES for turn in range(TURNS)]
        self._headers = [memory[start : start + LINE] for start in starts]
        self._metas = [memory[start + LINE : start + LINE + META_LIMIT] for start in starts]
        self._shown = np.frombuffer(memory[_BYTES:PART_BYTES], np.uint8).reshape(TURNS, SHOWN_BYTES)

    def clear(self) -> int:
        """Reset the part; return the number of boards that its rank has closed here."""
        self.words[_POSTED] = self.words[_ASLEEP] = 0
        return self.words[CLOSED]

    def write(self, turn: int, meta: bytes, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Copy arrays here, one after the other; return their bytes in place."""
        if meta:
            self._metas[turn][: len(meta)] = meta
        stop = 0
        for array in arrays:
            start = stop
            stop = stop + array.nbytes
            # a copy: see ring_buffer.copy
            np.positive(array.view(np.uint8), out=self._shown[turn, start:stop])
        _HEADER.pack_into(self._headers[turn], 0, len(meta), stop)
        return self._shown[turn, :stop]

    def read(self, turn: int) -> tuple[bytes, np.ndarray]:
        """Return meta, and the bytes in place."""
        meta_length, length = _HEADER.unpack_from(self._headers[turn])
        return self._metas[turn][:meta_length].tobytes(), self._shown[turn, :length]


class SharedBoard(Board):
    """A group's board on one of its ranks; `closed`: for each part, the number of boards closed
    there before."""

    def __init__(
        self,
        transport: "ShmTransport",
        world_ranks: Sequence[int],
        parts: Sequence[BoardPart],
        *,
        closed: Sequence[int],
        lends: bool = False,
    ) -> None:
        self._transport = transport
        self._world_ranks = tuple(world_ranks)
        self._parts = list(parts)
        self._closed = closed
        self.lends = lends
        self._own = parts[world_ranks.index(transport.world_rank)]
        self._others = [
            (rank, part.words)
            for rank, part in zip(world_ranks, parts, strict=True)
            if rank != transport.world_rank
        ]
        self._fence = Fence()
        self._shown = 0

    def show(self, meta: bytes, arrays: Sequence[np.ndarray]) -> list[tuple[bytes, np.ndarray]]:
        self._shown += 1
        turn = self._shown % TURNS
        fence = self._fence
        own = self._own.write(turn, meta, arrays)
        fence()  # the bytes before `posted`
        self._own.words[_POSTED] = self._shown
        fence()  # our `posted` before reading theirs and `asleep`
        for _, words in self._others:
            if words[_POSTED] < self._shown:
                self._wait()
                break
        else:  # the last rank to arrive wakes the sleepers
            for rank, words in self._others:
                if words[_ASLEEP]:
                    words[_ASLEEP] = 0
                    self._transport.links[rank].ring()
        fence()  # their `posted` before the bytes
        return [(meta, own) if part is self._own else part.read(turn) for part in self._parts]

    def lendable(self, array: np.ndarray) -> bool:
        return self.lends and process_vm_read.readable(array)

    def read(self, rank: int, address: int, target: np.ndarray) -> None:
        self._transport.read(self._world_ranks[rank], address, target.reshape(-1).view(np.uint8))

    def close(self) -> None:
        if self._parts:
            self._fence()  # our reads before `closed`
            self._own.words[CLOSED] += 1
            self._transport.close_board(
                self,
                [
                    (part.words, closed)
                    for part, closed in zip(self._parts, self._closed, strict=True)
                ],
            )
            del self._own
            # the memory is released when nothing refers to it
            self._parts = []
            self._others = []

    def missing(self) -> list[int]:
        """Return the world ranks that have not posted as often as this rank."""
        return [rank for rank, words in self._others if words[_POSTED] < self._shown]

    def sleeps(self, asleep: bool) -> None:
        """Ask to be woken when the last rank has posted, or cancel that. Then look at missing()
        again."""
        self._own.words[_ASLEEP] = int(asleep)
        self._fence()  # our `asleep` before the look at their `posted`

    def _wait(self) -> None:
        """Spin as a leader of the engine does, then wait in the engine."""
        for _ in range(self._transport.spins):
            yield_core()
            if not self.missing():
                return
        self._transport.await_board(self)


class BoardWait(Operation):
    def __init__(self, transport: Engine, board: SharedBoard) -> None:
        self.engine = transport
        self.peer = (board.missing() or [transport.world_rank])[0]
        self.tag = Tag(0, 0)
        self.board = board

    def peers(self) -> tuple[int, ...]:
        return () if self.finished else tuple(self.board.missing())

    def __str__(self) -> str:
        return f"ranks {self.board.missing()} to enter a collective in shared memory"
