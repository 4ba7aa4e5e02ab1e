"""Two ranks in one process, joined by real links: for tests that look inside a transport, or break a link."""

import mmap
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from minidist.comm.transport import Tag
from minidist.comm.transports.link import ByteLink
from minidist.comm.transports.ring import RING_BYTES
from minidist.comm.transports.shm import ShmLink
from minidist.comm.transports.sockets import SocketLink
from minidist.comm.transports.stream import StreamTransport

KINDS = ("sockets", "shm")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


def socket_links() -> tuple[ByteLink, ByteLink]:
    first, second = tcp_pair()
    return SocketLink(first), SocketLink(second)


def shm_links() -> tuple[ByteLink, ByteLink]:
    first, second = socket.socketpair()
    memory = memoryview(mmap.mmap(-1, 2 * RING_BYTES))
    return ShmLink(first, memory, lower=True), ShmLink(second, memory, lower=False)


MAKERS: dict[str, Callable[[], tuple[ByteLink, ByteLink]]] = {"sockets": socket_links, "shm": shm_links}


@contextmanager
def linked(kind: str, *, limit: float = 10.0, spins: int = 0) -> Iterator[tuple[StreamTransport, StreamTransport]]:
    """The transports of ranks 0 and 1; without spins every wait goes through sleep and wake-up."""
    first, second = MAKERS[kind]()
    zero = StreamTransport(kind, 0, limit, {1: first}, spins)
    one = StreamTransport(kind, 1, limit, {0: second}, spins)
    try:
        yield zero, one
    finally:
        zero.close()
        one.close()


def tag(sequence: int) -> Tag:
    return Tag(7, sequence)


def into(array: np.ndarray) -> Callable[[bytes, int], np.ndarray]:
    """An Accept that fills `array`."""
    return lambda meta, nbytes: array


def add(target: np.ndarray, start: int, piece: np.ndarray) -> None:
    """A Reduce: sum."""
    target[start:start + len(piece)] += piece
