"""Ranks as processes that talk over TCP: on one host or several, nothing to install.

One connection between every two ranks, made at the start (mesh.py), each proved to belong to the job. A message is one
`sendmsg` of header and payload; on the other side

    small messages    one recv brings header and payload into the stage, the payload is copied out of it
    copies            the payload is received straight into the array it is for
    reductions        the payload is received into the stage, in pieces of up to 256 KiB, and added from there while it
                      is still in the cache; nothing of the size of the message is allocated

Cost of a message: at most 3 system calls for each 256 KiB, one copy into the kernel and one out of it.
"""

import select
import socket
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from minidist.comm.transports import mesh
from minidist.comm.transports.link import ByteLink
from minidist.comm.transports.stream import StreamTransport

BUFFER_BYTES = 256 << 10        # of each socket: larger ones leave the cache and are slower (README of benchmarks)
STAGE_BYTES = 256 << 10         # most that is received at once for a reduction
READ_AHEAD = 16 << 10           # most that is received beside a header
LOW = 128 << 10
CC = b''
SPINS = 20                      # looks at the socket before sleeping


class Meeting(Protocol):
    """The part of control.ControlLink that a transport needs."""

    world_rank: int

    def meet(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's info, in world rank order."""


class SocketsTransport(StreamTransport):
    """One rank's connections to all others. `host` is the address to listen at: this host's own, as others see it."""

    def __init__(self, world_rank: int, link: Meeting, token: bytes, limit: float, *, host: str = "127.0.0.1") -> None:
        listener = mesh.listen_tcp(host, BUFFER_BYTES)
        infos = link.meet({"transport": "sockets", "host": host, "port": listener.getsockname()[1]})

        def dial(rank: int) -> socket.socket:
            return mesh.dial_tcp(infos[rank]["host"], infos[rank]["port"], BUFFER_BYTES, limit)

        connections = mesh.join(world_rank, len(infos), token, listener, dial, limit)
        super().__init__("sockets", world_rank, limit, {rank: SocketLink(sock) for rank, sock in connections.items()}, SPINS)


class SocketLink(ByteLink):
    """One connected stream socket. `stage[start:stop]` has been received and not consumed."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if CC: sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CC)
        self._sock = sock
        self._stage: np.ndarray | None = None       # made when first needed: a ring uses two links of its many
        self._start = self._stop = 0
        self._low = self._expected = 1
        
    def write(self, prefix: bytes, payload: np.ndarray) -> int:
        try:
            return self._sock.sendmsg((prefix, payload) if prefix else (payload,))
        except BlockingIOError:
            return 0

    def peek(self, count: int) -> bytes | None:
        self._expected = 1
        if self._stop - self._start < count:
            self._stage_more(READ_AHEAD)
        if self._stop - self._start < count or self._stage is None:
            return None
        return self._stage[self._start:self._start + count].tobytes()

    def piece(self, most: int, itemsize: int) -> np.ndarray:
        if self._start:
            self._to_front()  # where items are aligned
        if self._stop < min(most, STAGE_BYTES):
            self._stage_more(most - self._stop)
        assert self._stage is not None
        whole = min(most, self._stop)
        self._expected = min(most - whole, LOW)
        return self._stage[:whole - whole % itemsize]

    def skip(self, count: int) -> None:
        self._start += count

    def read_into(self, target: np.ndarray) -> int:
        staged = min(self._stop - self._start, len(target))
        if staged == 0:
            self._expected = min(len(target), LOW)
            return self._receive(target)
        assert self._stage is not None
        target[:staged] = self._stage[self._start:self._start + staged]
        self._start += staged
        return staged

    def _to_front(self) -> None:
        left = self._stop - self._start
        if left and self._stage is not None:
            self._stage[:left] = self._stage[self._start:self._stop]
        self._start, self._stop = 0, left

    def _stage_more(self, most: int) -> None:
        """Receive up to `most` bytes behind those that are staged."""
        if self._stage is None:
            self._stage = np.empty(STAGE_BYTES, np.uint8)
        if self._start == self._stop or self._stop + most > STAGE_BYTES:
            self._to_front()
        self._stop += self._receive(self._stage[self._stop:self._stop + most])

    def _receive(self, into: np.ndarray) -> int:
        try:
            received = self._sock.recv_into(into)
        except BlockingIOError:
            return 0
        if received == 0:
            raise EOFError
        return received

    def fileno(self) -> int:
        return self._sock.fileno()

    def arm(self, reading: bool, writing: bool) -> int:
        if reading and self._low != self._expected and (self._expected > 8192 or self._low > 1):
            self._low = max(self._expected, 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._low)
        return (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0)

    def disarm(self, events: int) -> None:
        pass

    def close(self) -> None:
        """Unread bytes would make the kernel reset the connection, and with it lose what we sent last: read them."""
        scrap = np.empty(STAGE_BYTES, np.uint8)
        with suppress(OSError, EOFError):
            while self._receive(scrap):
                pass
        self._sock.close()
