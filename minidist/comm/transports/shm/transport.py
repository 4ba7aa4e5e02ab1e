"""Ranks of one host as processes that share memory: two copies per message; the kernel is needed
only to sleep.

    rank 0                        shared by the two                          rank 1
    array --copy-->  [ ring 0 -> 1: head, tail, 4 MiB of bytes ]  --add-->   array
    array <--copy--  [ ring 1 -> 0                              ]  <--copy-- array
    doorbell <=====  a connected socket: "wake up", or the end of the process  =====> doorbell

A reduction adds straight from the ring: nothing of the size of a message is allocated on either
side. In addition to the rings, groups have boards (exchange_board.py). Each rank's part of a board
lies in an arena in which only this rank places boards. Where the system lets each rank read the
memory of all others (process_vm_read.py), long arrays are not copied to a board: only their address
is shown.

When two ranks have connected, they pass each other open files through the socket (hand_over): the
lower rank the memory of their rings, each its arena; and try to read each other's memory. A file
has no name and no directory entry. So no file can be left behind, no other user can open it, and
/dev/shm does not limit its size. Pages that are never written cost nothing.
"""

import errno
import mmap
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from minidist.comm.transport import Board
from minidist.comm.transports.progress.poll_loop import PolledLink, PolledTransport
from minidist.comm.transports.shm import process_vm_read
from minidist.comm.transports.shm.exchange_board import (
    CLOSED,
    PART_BYTES,
    BoardPart,
    BoardWait,
    SharedBoard,
)
from minidist.comm.transports.shm.process_vm_read import EXHIBIT_BYTES, Exhibit
from minidist.comm.transports.shm.ring_buffer import RING_BYTES, ShmLink
from minidist.device.cores import of_all_ranks
from minidist.errors import CommError, PeerLostError

# looks at the rings before sleeping: if each rank has a core, and if not
SPINS = 200
SPINS_CROWDED = 20
BOARDS = 64  # maximum number of open boards of a rank
ARENA_BYTES = BOARDS * PART_BYTES
# maximum bytes read from another rank's memory between checks for an abort
STRETCH_BYTES = 32 << 20


def share(
    world_rank: int,
    connections: Mapping[int, socket.socket],
    limit: float,
    far: Mapping[int, PolledLink] | None = None,
    *,
    name: str = "shm",
) -> "ShmTransport":
    """Return the transport of a rank that is connected to the others of its host; `far`: its links
    to other hosts."""
    rings, arenas, processes = hand_over(
        world_rank, connections, 2 * RING_BYTES, ARENA_BYTES, limit
    )
    links = {
        rank: ShmLink(connections[rank], memory, lower=rank > world_rank)
        for rank, memory in rings.items()
    }
    return ShmTransport(world_rank, limit, links, arenas, far, processes=processes, name=name)


def hand_over(
    world_rank: int,
    connections: Mapping[int, socket.socket],
    ring_bytes: int,
    arena_bytes: int,
    limit: float,
) -> tuple[dict[int, memoryview], dict[int, memoryview], dict[int, int] | None]:
    """Exchange files with every connected rank; afterwards the sockets are in blocking mode.

    Returns: the memory shared with each other rank for rings; every rank's arena, including this
             one's; and every rank's process, or None unless each rank may read the memory of all
             others; all by world rank.
    Raises:  PeerLostError naming a rank that ended meanwhile.
    """
    exhibit = Exhibit()
    rings = {}
    opened = [nameless_file(arena_bytes)]
    arenas = {world_rank: _map(opened[0], arena_bytes)}
    readable = {world_rank: os.getpid()}
    try:
        for rank, sock in connections.items():
            files = opened[:1]
            if rank > world_rank:
                opened.append(nameless_file(ring_bytes))
                files.append(opened[-1])
                rings[rank] = _map(opened[-1], ring_bytes)
            sock.setblocking(True)
            sock.settimeout(limit)
            with _while_starting(world_rank, rank):
                socket.send_fds(sock, [exhibit.told], files)
        for rank, sock in connections.items():
            expected = 1 if rank > world_rank else 2
            with _while_starting(world_rank, rank):
                told, received, flags, _address = socket.recv_fds(sock, EXHIBIT_BYTES, expected)
                opened += received
                cut = flags & socket.MSG_CTRUNC
                if not cut and (len(received) != expected or len(told) != EXHIBIT_BYTES):
                    raise EOFError("it ended")
            if cut:  # by the kernel
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            process = process_vm_read.process_of(told)
            if process is not None:
                readable[rank] = process
            arenas[rank] = _map(received[0], arena_bytes)
            if rank < world_rank:
                rings[rank] = _map(received[1], ring_bytes)
    finally:
        for file in opened:
            os.close(file)  # its mapping stays
    every = _all_agree(world_rank, connections, len(readable) == len(arenas))
    return rings, arenas, readable if every else None


def _all_agree(world_rank: int, connections: Mapping[int, socket.socket], agrees: bool) -> bool:
    """Return whether `agrees` is true on all ranks."""
    answers = {b"y" if agrees else b"n"}
    for rank, sock in connections.items():
        with _while_starting(world_rank, rank):
            sock.sendall(b"y" if agrees else b"n")
    for rank, sock in connections.items():
        with _while_starting(world_rank, rank):
            answers.add(sock.recv(1))
            if b"" in answers:
                raise EOFError("it ended")
    return answers == {b"y"}


@contextmanager
def _while_starting(world_rank: int, rank: int) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise PeerLostError(
            f"rank {world_rank} got no shared memory from rank {rank} while starting: {error}", rank
        ) from error


def nameless_file(nbytes: int) -> int:
    """Return a zero-filled file in memory (elsewhere a temporary file) without a directory
    entry."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("minidist")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, nbytes)
    return file


def _map(file: int, nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(file, nbytes))


class ShmTransport(PolledTransport):
    """A rank's rings to the others of its host, and the memory for the boards of their groups.

    Args: links              to every other rank of this host
          arenas, processes  as hand_over() returned them
          far                links to the ranks of other hosts (auto.py)
          name               the links in use: "shm", or "shm+tcp" with far links
    """

    def __init__(
        self,
        world_rank: int,
        limit: float,
        links: Mapping[int, "ShmLink"],
        arenas: dict[int, memoryview],
        far: Mapping[int, PolledLink] | None = None,
        *,
        processes: Mapping[int, int] | None = None,
        name: str = "shm",
    ) -> None:
        spins = SPINS if len(links) < of_all_ranks() else SPINS_CROWDED
        super().__init__(name, world_rank, limit, {**links, **(far or {})}, spins)
        self.links = links
        self._arenas = arenas
        self._processes = processes
        self._free = list(range(BOARDS - 1, -1, -1))
        self._boards: dict[SharedBoard, int] = {}  # with their places
        # places with boards that others may still read
        self._left: list[tuple[int, list[tuple[memoryview, int]]]] = []
        self._waits: list[BoardWait] = []

    @property
    def inside(self) -> str:
        return "shm"

    @property
    def shared_bytes(self) -> int:
        """Bytes of a ring to each rank and of the parts of the open boards. Pages that are never
        written take no memory."""
        return RING_BYTES * len(self.links) + PART_BYTES * len(self._boards)

    def reserve_board(self) -> int:
        """Return a free place, plus BOARDS times the number of boards closed there before; by this
        number others detect that the new board is closed."""
        for left in list(self._left):
            place, others = left
            if all(words[CLOSED] > before for words, before in others):
                self._left.remove(left)
                self._free.append(place)
        if not self._free:
            return -1
        place = self._free.pop()
        return place + BOARDS * self._part(self.world_rank, place).clear()

    def open_board(self, world_ranks: Sequence[int], places: Sequence[int]) -> Board | None:
        own = places[world_ranks.index(self.world_rank)]
        if -1 in places or not self._arenas.keys() >= set(world_ranks):
            self._free += [own % BOARDS] if own >= 0 else []
            return None
        parts = [
            self._part(rank, place % BOARDS)
            for rank, place in zip(world_ranks, places, strict=True)
        ]
        board = SharedBoard(
            self,
            world_ranks,
            parts,
            closed=[place // BOARDS for place in places],
            lends=self._processes is not None,
        )
        self._boards[board] = own % BOARDS
        return board

    def close_board(self, board: SharedBoard, others: list[tuple[memoryview, int]]) -> None:
        """Free the board's place when all ranks have closed theirs: until then they may read
        it."""
        self._left.append((self._boards.pop(board), others))

    def read(self, rank: int, address: int, target: np.ndarray) -> None:
        """Fill `target` (uint8) with the bytes at `address` of another rank of this host.

        Raises: PeerLostError if that rank is gone, the error given to abort(); CommError if the
        system now forbids it.
        """
        assert self._processes is not None, "the board lends"
        what = f"{len(target)} bytes in the memory of rank {rank}"
        for start in range(0, len(target), STRETCH_BYTES):
            if self.waits.error is not None:
                raise self.explained(self.waits.error, what)
            try:
                process_vm_read.read(
                    self._processes[rank], address + start, target[start : start + STRETCH_BYTES]
                )
            except PermissionError as error:
                raise CommError(
                    f"rank {self.world_rank} can no longer read {what}, but could when the job "
                    f"started ({error}); did that rank change its user, or forbid debugging?"
                ) from error
            except OSError as error:
                lost = self._lost(
                    self._peers[rank],
                    f"its memory cannot be read any more ({error})",
                    PeerLostError,
                )
                raise self.explained(lost, what) from error

    def close(self) -> None:
        super().close()
        for board in list(self._boards):
            board.close()
        self._left.clear()
        self._arenas.clear()

    def _part(self, rank: int, place: int) -> BoardPart:
        return BoardPart(self._arenas[rank][place * PART_BYTES : (place + 1) * PART_BYTES])

    def await_board(self, board: SharedBoard) -> None:
        """Wait in the engine until all ranks have posted their part."""
        wait = BoardWait(self, board)
        peers = [self._peers[rank] for rank in board.missing()]
        with self.lock:
            self.unfinished += 1
            self._waits.append(wait)
            for peer in peers:
                peer.awaited += 1
                self._active[peer.rank] = peer
            if self._asleep:
                self._wake()
        try:
            wait.wait()
        finally:
            with self.lock:
                self._waits.remove(wait)
                for peer in peers:
                    peer.awaited -= 1
                if not wait.finished:
                    self.finish(wait)

    def _pass(self) -> bool:
        moved = super()._pass()
        for wait in list(self._waits):
            gone = [rank for rank in wait.board.missing() if self.links[rank].ended]
            missing = wait.board.missing()  # once more: a rank may have posted before it ended
            lost = [rank for rank in gone if rank in missing]
            with self.lock:
                if not wait.finished and (lost or not missing):
                    self.finish(
                        wait,
                        self._lost(self._peers[lost[0]], "its process ended", PeerLostError)
                        if lost
                        else None,
                    )
                    moved = True
        return moved

    def _sleep(self, seconds: float) -> None:
        boards = [wait.board for wait in list(self._waits) if not wait.finished]
        for board in boards:
            board.sleeps(True)
        if all(board.missing() for board in boards):
            super()._sleep(seconds)
        for board in boards:
            board.sleeps(False)
