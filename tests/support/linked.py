"""Two ranks in one process, joined by real links: for tests that look inside a transport, or break
a link."""

import ctypes
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from minidist.comm.group import Group
from minidist.comm.ledger import Ledger
from minidist.comm.transport import Tag
from minidist.comm.transports.progress.poll_loop import PolledLink, PolledTransport
from minidist.comm.transports.shm.ring_buffer import RING_BYTES, ShmLink
from minidist.comm.transports.shm.transport import ARENA_BYTES, ShmTransport
from minidist.comm.transports.tcp import TcpLink

KINDS = ("tcp", "shm")


def nobody_tells(patch: pytest.MonkeyPatch) -> None:
    """There is no monitor here that will say more about a lost peer: nobody waits for that."""
    patch.setattr("minidist.comm.transports.progress.engine._HEARSAY", 0.0)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection. Whoever else calls the port, which another job may have had
    before, is turned away."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        while True:
            second, caller = listener.accept()
            if caller == first.getsockname():
                return first, second
            second.close()


def swallow(sock: socket.socket) -> None:
    """From now on the kernel drops every packet that comes for this socket, as a firewall's DROP
    does."""
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0))  # BPF: return 0 bytes
    program = struct.pack("@HP", 1, ctypes.addressof(drop))
    sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def tcp_links() -> tuple[PolledLink, PolledLink]:
    first, second = tcp_pair()
    return TcpLink(first), TcpLink(second)


def shm_links() -> tuple[ShmLink, ShmLink]:
    first, second = socket.socketpair()
    memory = memoryview(mmap.mmap(-1, 2 * RING_BYTES))
    return ShmLink(first, memory, lower=True), ShmLink(second, memory, lower=False)


MAKERS: dict[str, Callable[[], tuple[PolledLink, PolledLink]]] = {
    "tcp": tcp_links,
    "shm": shm_links,
}


@contextmanager
def linked(
    kind: str, *, limit: float = 10.0, spins: int = 0
) -> Iterator[tuple[PolledTransport, PolledTransport]]:
    """The transports of ranks 0 and 1; without spins every wait goes through sleep and wake-up."""
    first, second = MAKERS[kind]()
    zero = PolledTransport(kind, 0, limit, {1: first}, spins)
    one = PolledTransport(kind, 1, limit, {0: second}, spins)
    try:
        yield zero, one
    finally:
        zero.close()
        one.close()


def shm_transports(size: int, limit: float = 10.0, lends: bool = True) -> list[ShmTransport]:
    """The transports of all ranks of a job over shared memory, in this process; `lends`: they read
    its memory."""
    links: list[dict[int, ShmLink]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            links[low][high], links[high][low] = shm_links()
    arenas = {rank: memoryview(mmap.mmap(-1, ARENA_BYTES)) for rank in range(size)}
    processes = dict.fromkeys(range(size), os.getpid()) if lends else None
    return [
        ShmTransport(rank, limit, links[rank], dict(arenas), processes=processes)
        for rank in range(size)
    ]


def run_shm(
    fn: Callable[..., Any], *args: Any, size: int, limit: float = 10.0, lends: bool = True, **_: Any
) -> list[Any]:
    """helpers.run over these transports, a thread a rank; raises what the first of the ranks
    raised."""
    transports = shm_transports(size, limit, lends)
    groups = [
        Group(transport, Ledger(transport.world_rank), range(size)) for transport in transports
    ]
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda group: fn(group, *args), groups))
    finally:
        for group in groups:
            group.close()
            group.transport.close()


def tag(sequence: int) -> Tag:
    return Tag(7, sequence)


def into(array: np.ndarray) -> Callable[[bytes, int], np.ndarray]:
    """An Accept that fills `array`."""
    return lambda meta, nbytes: array


def add(target: np.ndarray, start: int, piece: np.ndarray) -> None:
    """A Reduce: sum."""
    target[start : start + len(piece)] += piece
