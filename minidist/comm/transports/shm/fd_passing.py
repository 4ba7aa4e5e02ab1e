"""The memory that ranks of one host give each other when they have connected, as open files.

    every two ranks   the lower one makes the memory of their two rings
    every rank        its arena, in which it alone places boards; and the address of a trial (process_vm_read.py)
    then              each says whether it could read the trials of all others

The memory has no name: it is a file without a directory entry, passed through the connected socket. So nothing of it
can be left behind, and no other user can open it.
"""

import mmap
import os
import socket
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

from minidist.comm.transports.shm import process_vm_read
from minidist.comm.transports.shm.process_vm_read import EXHIBIT_BYTES
from minidist.errors import CommError

_YES, _NO = b"y", b"n"


class SharedFiles(NamedTuple):
    """The memory that one rank has then.

    Attributes: rings      the memory shared with each other rank, by world rank
                arenas     every rank's, this one's included
                processes  of every rank; None unless each of them may read the memory of all others
    """

    rings: dict[int, memoryview]
    arenas: dict[int, memoryview]
    processes: dict[int, int] | None


def hand_over(world_rank: int, connections: Mapping[int, socket.socket], ring_bytes: int, arena_bytes: int,
              limit: float) -> SharedFiles:
    """Give and take with every rank connected; the sockets are in blocking mode then.

    Raises: CommError naming a rank that ended meanwhile.
    """
    exhibit, rings, opened = process_vm_read.Exhibit(), {}, [nameless_file(arena_bytes)]
    arenas, readable = {world_rank: _map(opened[0], arena_bytes)}, {world_rank: os.getpid()}
    try:
        for rank, sock in connections.items():
            files = opened[:1]
            if rank > world_rank:
                opened.append(nameless_file(ring_bytes))
                files.append(opened[-1])
                rings[rank] = _map(opened[-1], ring_bytes)
            sock.setblocking(True)
            sock.settimeout(limit)
            socket.send_fds(sock, [exhibit.told], files)
        for rank, sock in connections.items():
            expected = 1 if rank > world_rank else 2
            told, received, _flags, _address = socket.recv_fds(sock, EXHIBIT_BYTES, expected)
            opened += received
            if len(received) != expected or len(told) != EXHIBIT_BYTES:
                raise _ended(world_rank, rank)
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
    return SharedFiles(rings, arenas, readable if every else None)


def _all_agree(world_rank: int, connections: Mapping[int, socket.socket], agrees: bool) -> bool:
    """Whether all ranks do."""
    for sock in connections.values():
        sock.sendall(_YES if agrees else _NO)
    answers = {rank: sock.recv(1) for rank, sock in connections.items()}
    for rank, answer in answers.items():
        if not answer:
            raise _ended(world_rank, rank)
    return agrees and set(answers.values()) <= {_YES}


def nameless_file(nbytes: int) -> int:
    """A file of zeros in memory (a temporary one on systems without), which no directory lists."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("minidist")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, nbytes)
    return file


def _map(file: int, nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(file, nbytes))


def _ended(world_rank: int, rank: int) -> CommError:
    return CommError(f"rank {world_rank} got no shared memory from rank {rank}: it ended while starting")
