"""Ranks as processes that talk over TCP: on one host or several, nothing to install.

One connection between every two ranks, made at the start (full_mesh.py), each proved to belong to the job. A message
leaves in one `sendmsg` of header and payload. On the other side

    small messages    come with their header in one recv, into the stage, and are copied out of it
    copies            are received straight into the array they are for
    reductions        are received into the stage, at most 256 KiB at once, and added from there while it is in the
                      cache; nothing of the size of the message is allocated

Cost of a message: one copy into the kernel and one out of it, about 3 system calls for each 128 KiB.
"""

import select
import socket
from contextlib import suppress
from typing import Any

import numpy as np

from minidist.comm.transports.progress import full_mesh
from minidist.comm.transports.progress.link import PolledLink
from minidist.comm.transports.progress.poll_loop import PolledTransport
from minidist.device import account

BUFFER_BYTES = 2 << 20      # of a socket, each way, where the system grants so much: with less the sides wait more
STAGE_BYTES = 256 << 10     # most that is received at once for a reduction
READ_AHEAD = 16 << 10       # most that is received beside a header
LOW_WATER = 256 << 10       # of a long message, wake us for no less: each wake-up costs as much as copying 100 KiB
SPINS = 20                  # looks at the sockets before sleeping


class SocketsTransport(PolledTransport):
    """One rank's connections to all others.

    Args:    host: the address to listen at: this host's own, as the other ranks see it.
    Raises:  HandshakeError, TimeoutError: see mesh.join.
    """

    def __init__(self, world_rank: int, link: full_mesh.Meeting, token: bytes, limit: float, *,
                 host: str = "127.0.0.1") -> None:
        def dial(info: dict[str, Any]) -> socket.socket:
            return full_mesh.dial_tcp(info["host"], info["port"], BUFFER_BYTES, limit)

        listener = full_mesh.listen_tcp(host, BUFFER_BYTES)
        info = {"transport": "sockets", "host": host, "port": listener.getsockname()[1]}
        connections = full_mesh.join(link, info, listener, dial, token, limit)
        links = {rank: SocketLink(sock) for rank, sock in connections.items()}
        super().__init__("sockets", world_rank, limit, links, SPINS)


class SocketLink(PolledLink):
    """One connected stream socket. `_stage[_start:_stop]` has been received and not consumed."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        _hurry(sock)
        self._sock = sock
        self._stage: np.ndarray[Any, Any] | None = None     # made when first needed: in a ring, few links are
        self._start = self._stop = 0
        self._low_water = self._expected = 1                # what the socket was told; bytes known to come

    def write(self, prefix: bytes, payload: np.ndarray) -> int:
        try:
            return self._sock.sendmsg([prefix, payload.data] if prefix else [payload.data])
        except BlockingIOError:
            return 0

    def peek(self, count: int) -> bytes | None:
        if self._stop - self._start < count:
            self._stage_more(READ_AHEAD, expected=1)
        if self._stop - self._start < count or self._stage is None:
            return None
        return self._stage[self._start:self._start + count].tobytes()

    def piece(self, most: int, itemsize: int) -> np.ndarray:
        if self._start:
            self._to_front()  # where items are aligned
        if self._stop < min(most, STAGE_BYTES):
            self._stage_more(most - self._stop, expected=most - self._stop)
        assert self._stage is not None
        whole = min(most, self._stop)
        return self._stage[:whole - whole % itemsize]

    def skip(self, count: int) -> None:
        self._start += count

    def read_into(self, target: np.ndarray) -> int:
        staged = min(self._stop - self._start, len(target))
        if staged == 0 or self._stage is None:
            return self._receive(target, expected=len(target))
        target[:staged] = self._stage[self._start:self._start + staged]
        self._start += staged
        return staged

    def _to_front(self) -> None:
        left = self._stop - self._start
        if left and self._stage is not None:
            self._stage[:left] = self._stage[self._start:self._stop]
        self._start, self._stop = 0, left

    def _stage_more(self, most: int, expected: int) -> None:
        """Receive up to `most` bytes behind those that are staged."""
        if self._stage is None:
            self._stage = account.current().hold(np.empty(STAGE_BYTES, np.uint8), "communication")
        if self._start == self._stop or self._stop + most > STAGE_BYTES:
            self._to_front()
        self._stop += self._receive(self._stage[self._stop:self._stop + most], expected)

    def _receive(self, into: np.ndarray, expected: int) -> int:
        """Bytes received, 0 if there are none now; then `expected` are known to come."""
        try:
            received = self._sock.recv_into(into.data)
        except BlockingIOError:
            self._expected = expected
            return 0
        self._expected = 1
        if received == 0:
            raise EOFError
        return received

    def fileno(self) -> int:
        return self._sock.fileno()

    def arm(self, reading: bool, writing: bool) -> int:
        low_water = max(1, min(self._expected, LOW_WATER))
        if reading and low_water != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water
        return (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0)

    def disarm(self, events: int) -> None:
        pass

    def close(self) -> None:
        """Read what nobody has read: else the kernel resets the connection, and may drop what we sent last."""
        scrap = np.empty(STAGE_BYTES, np.uint8)
        with suppress(OSError, EOFError):
            while self._receive(scrap, expected=1):
                pass
        self._sock.close()


def _hurry(sock: socket.socket) -> None:
    """Send small messages at once; and on loopback, where nothing is ever congested, take the plainest control.

    BBR, the default of some systems, measures and paces; over loopback that costs a quarter of the bandwidth.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION") and sock.getpeername()[0] in ("127.0.0.1", "::1"):
        with suppress(OSError):  # not among those this user may choose
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
