"""Floors of `minidist bench all-reduce|...`: the work that no algorithm avoids, without meaningful
values.

    copies   no communication: each rank copies and adds its least bytes in its own memory, all
             ranks at once
    bare-tcp no reduction and no headers: each rank sends and receives its least bytes, to and from
             all others at once, over bare sockets
    bare-shm no header, and no call: each rank shows its least bytes on the ranks' board, and copies
             or adds what the others show; the values are right

No floor is the fastest possible: NumPy's copies are not; an all-reduce in pieces that fit the
caches can be faster than bare-tcp, which streams all bytes at once; and bare-shm also copies arrays
that could be lent: beyond 2 MiB our calls are faster.
"""

import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.comm.chunks import split
from minidist.comm.collectives.shared_memory import piece_bytes
from minidist.comm.group import Group
from minidist.comm.limits import SHOWN_BYTES
from minidist.comm.transport import Board
from minidist.errors import TimeoutError

if TYPE_CHECKING:
    from minidist.bench.collectives import Verb

COPIES, TCP, SHM = FLOORS = ("copies", "bare-tcp", "bare-shm")
CACHED = 32 << 10  # elements of a partial sum, which stays in the processor's cache
LIMIT = 60.0  # seconds without a byte that end an exchange

Run = Callable[[np.ndarray, np.ndarray], Any]
"""`run(send, recv)`: the timed call; in place, `send is recv`."""


def blocks(array: np.ndarray, count: int) -> list[np.ndarray]:
    """Return `count` equal blocks as views (np.split takes as long as sending some KiB)."""
    block = len(array) // count
    return [array[number * block : (number + 1) * block] for number in range(count)]


def copies_call(verb: "Verb", size: int) -> Run:
    """Return a function with the least copies and sums of a rank, by NumPy.

    all-gather and all-to-all: n bytes copied. reduce-scatter: P blocks of n/P added. all-reduce:
    that, and the sum copied P-1 times.
    """

    def gather(send: np.ndarray, recv: np.ndarray) -> None:
        for block in blocks(recv, len(recv) // len(send)):
            block[...] = send

    def add(send: np.ndarray, recv: np.ndarray) -> None:
        first, second, *others = blocks(send, size)
        for start in range(0, len(first), CACHED):
            piece = slice(start, start + CACHED)
            total = np.add(first[piece], second[piece], out=recv[: len(first)][piece])
            for other in others:
                np.add(total, other[piece], out=total)

    def add_and_gather(send: np.ndarray, recv: np.ndarray) -> None:
        add(send, recv)
        own, *others = blocks(recv, size)
        for block in others:
            block[...] = own

    return {"all_reduce": add_and_gather, "reduce_scatter": add}.get(verb.name, gather)


def tcp_call(verb: "Verb", sockets: Sequence[socket.socket]) -> Run:
    """Return a function with the least exchange of a rank: with each other rank n/P bytes sent and
    received, for an all-reduce twice.

    The bytes for different ranks do not overlap, as far as the array is large enough: those of an
    all-reduce do.

    Args:    sockets: one to each other rank.
    """
    size = len(sockets) + 1

    def exchange(send: np.ndarray, recv: np.ndarray) -> None:
        count = -(-max(len(send), len(recv)) * (2 if verb.in_place else 1) // size)
        outgoing, incoming = (
            dict(zip(sockets, _spread(array, count, size - 1), strict=True))
            for array in (send, recv)
        )
        # bytes done by each socket
        unsent = dict.fromkeys(sockets, 0)
        awaited = dict.fromkeys(sockets, 0)
        while unsent or awaited:
            moved = sum(
                [
                    _step(
                        unsent,
                        sock,
                        lambda sock, at: sock.send(outgoing[sock][at:]),
                        outgoing[sock].nbytes,
                    )
                    for sock in list(unsent)
                ]
            )
            moved += sum(
                [
                    _step(
                        awaited,
                        sock,
                        lambda sock, at: sock.recv_into(incoming[sock][at:]),
                        incoming[sock].nbytes,
                    )
                    for sock in list(awaited)
                ]
            )
            if not moved and not any(select.select(list(awaited), list(unsent), [], LIMIT)):
                raise TimeoutError(f"bench: no byte of contender {TCP} came or went in {LIMIT:g} s")

    return exchange


class BoardCalls:
    """The least work of ranks over a board, in pieces: each rank shows what others need, and copies
    or adds what they show.

    all_gather, all_to_all: n bytes copied out. reduce_scatter: P blocks of n/P added. all_reduce:
    that, and the sums as all_gather's. Nothing is lent: beyond 2 MiB, where our calls lend, this is
    not a floor.
    """

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.board = board
        self.rank = rank
        self.size = size

    def all_gather(self, send: np.ndarray, recv: np.ndarray) -> None:
        places = split(recv, self.size)
        places[self.rank][...] = send
        self._tell(send, places)

    def all_to_all(self, send: np.ndarray, recv: np.ndarray) -> None:
        parts = split(send, self.size)
        places = split(recv, self.size)
        places[self.rank][...] = parts[self.rank]
        for src, start, piece in self._for_me(parts):
            places[src][start : start + len(piece)] = piece

    def reduce_scatter(self, send: np.ndarray, recv: np.ndarray) -> None:
        parts = split(send, self.size)
        first = int(self.rank == 0)
        for src, start, piece in self._for_me(parts):
            stretch = slice(start, start + len(piece))
            np.add((parts[self.rank] if src == first else recv)[stretch], piece, out=recv[stretch])

    def all_reduce(self, send: np.ndarray, recv: np.ndarray) -> None:
        sums = split(recv, self.size)
        self.reduce_scatter(send, sums[self.rank])
        self._tell(sums[self.rank], sums)

    def _tell(self, own: np.ndarray, places: Sequence[np.ndarray]) -> None:
        """Show this rank's array to all ranks; each copies it to that rank's place."""
        step = SHOWN_BYTES // own.itemsize
        for start in range(0, len(places[0]), step):  # no place is longer than the first
            for src, piece in self._shown([own[start : start + step]]):
                places[src][start : start + len(piece)] = piece

    def _for_me(self, parts: Sequence[np.ndarray]) -> Iterator[tuple[int, int, np.ndarray]]:
        """Show a part for each other rank; yield (sender, begin, piece for this rank)."""
        rank = self.rank
        step = piece_bytes(self.size) // parts[0].itemsize
        for start in range(0, len(parts[0]), step):
            pieces = [part[start : start + step] for part in parts]
            counts = list(map(len, pieces))
            for src, theirs in self._shown(pieces[:rank] + pieces[rank + 1 :]):
                # a rank does not show its own part
                at = sum(counts[:rank]) - (counts[src] if src < rank else 0)
                yield src, start, theirs[at : at + counts[rank]]

    def _shown(self, pieces: Sequence[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        for src, (_, theirs) in enumerate(self.board.show(b"", pieces)):
            if src != self.rank:
                yield src, theirs.view(np.float32)


def _spread(array: np.ndarray, count: int, pieces: int) -> list[memoryview]:
    """Return `pieces` views of `count` elements as bytes, at the largest distance that the array
    allows."""
    gap = (len(array) - count) // max(1, pieces - 1)
    return [
        array[number * gap : number * gap + count].view(np.uint8).data for number in range(pieces)
    ]


def _step(
    reached: dict[socket.socket, int],
    sock: socket.socket,
    move: Callable[[socket.socket, int], int],
    count: int,
) -> int:
    """Move the bytes that can move now, and return their number. Remove a socket that has moved
    `count` bytes."""
    moved = 0
    with suppress(BlockingIOError):
        moved = move(sock, reached[sock])
        if moved == 0:
            raise ConnectionError(f"bench: a rank of the contender {TCP} has ended")
    reached[sock] += moved
    if reached[sock] == count:
        del reached[sock]
    return moved


def connected(world: Group) -> list[socket.socket]:
    """Return a non-blocking connection over loopback to each other rank."""
    with socket.create_server(("127.0.0.1", 0), backlog=world.size) as listener:
        listener.settimeout(LIMIT)
        ports = world.all_gather(np.array([listener.getsockname()[1]]))
        sockets = [
            socket.create_connection(("127.0.0.1", int(port)), LIMIT)
            for port in ports[: world.rank]
        ]
        sockets += [listener.accept()[0] for _ in range(world.rank + 1, world.size)]
    for sock in sockets:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    return sockets
