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
from contextlib import ExitStack
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
    exhibit, rings = process_vm_read.Exhibit(), {}
    processes: dict[int, int | None] = {world_rank: os.getpid()}
    with ExitStack() as opened:
        own = _opened(opened, nameless_file(arena_bytes))
        arenas = {world_rank: _map(own, arena_bytes)}
        for rank, sock in connections.items():
            files = [_opened(opened, nameless_file(ring_bytes))] if rank > world_rank else []
            sock.setblocking(True)
            sock.settimeout(limit)
            socket.send_fds(sock, [exhibit.told], [own, *files])
            if files:
                rings[rank] = _map(files[0], ring_bytes)
        for rank, sock in connections.items():
            expected = 1 if rank > world_rank else 2
            told, received, _flags, _address = socket.recv_fds(sock, EXHIBIT_BYTES, expected)
            files = [_opened(opened, file) for file in received]
            if len(files) != expected or len(told) != EXHIBIT_BYTES:
                raise _ended(world_rank, rank)
            processes[rank] = process_vm_read.process_of(told)
            arenas[rank] = _map(files[0], arena_bytes)
            if rank < world_rank:
                rings[rank] = _map(files[1], ring_bytes)
    return SharedFiles(rings, arenas, _agreed(world_rank, connections, processes))


def _agreed(world_rank: int, connections: Mapping[int, socket.socket], processes: Mapping[int, int | None],
            ) -> dict[int, int] | None:
    """The processes, if every rank can read those of all; all ranks get the same answer."""
    readable = {rank: process for rank, process in processes.items() if process is not None}
    for sock in connections.values():
        sock.sendall(_YES if len(readable) == len(processes) else _NO)
    answers = {rank: sock.recv(1) for rank, sock in connections.items()}
    for rank, answer in answers.items():
        if not answer:
            raise _ended(world_rank, rank)
    return readable if len(readable) == len(processes) and set(answers.values()) <= {_YES} else None


def nameless_file(nbytes: int) -> int:
    """A file of zeros in memory (a temporary one on systems without), which no directory lists."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("minidist")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, nbytes)
    return file


def _opened(files: ExitStack, file: int) -> int:
    """A file that is closed with `files`; its mappings stay."""
    files.callback(os.close, file)
    return file


def _map(file: int, nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(file, nbytes))


def _ended(world_rank: int, rank: int) -> CommError:
    return CommError(f"rank {world_rank} got no shared memory from rank {rank}: it ended while starting")
