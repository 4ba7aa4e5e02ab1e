"""Ranks as processes that communicate only over TCP, on one host or several: nothing to install.

One connection between every two ranks, made at the start (full_mesh.py). start_send and start_recv
are in progress/stream.py; a TcpLink only moves their bytes. plain_tcp.py does the same without an
engine. Here no operation blocks on a socket. A message is sent by one `sendmsg` of header and
payload. The receiver takes

    small messages    with their header in one recv, into the buffer, and copies or adds them from
                      there
    copies            straight into their array
    reductions        into the buffer, at most 256 KiB at once, and adds them from there while they
                      are in the cache; nothing of the size of the message is allocated

A link that loses packets is lost after acceptor.SILENCE s: the kernel finds it while everything
sent is acknowledged (keep-alive), and a waiting rank checks the other case (poll_loop.py).

Cost of a message: one copy into the kernel and one out of it, about 3 system calls for each 128
KiB.
"""

import select
import socket
from contextlib import suppress
from typing import Any

import numpy as np

from minidist.comm.health.acceptor import QUEUE, RESENT, is_silent, keep_alive, unanswered
from minidist.comm.transports.progress import full_mesh
from minidist.comm.transports.progress.frames import HEADER_BYTES
from minidist.comm.transports.progress.poll_loop import PolledLink
from minidist.device import account

# of a socket, each way, if the system allows it: with less, the sides wait more
BUFFER_BYTES = 2 << 20
BUFFERED_BYTES = 256 << 10  # maximum received at once for a reduction
READ_AHEAD = 16 << 10  # maximum received together with a header
# maximum bytes of a message that is received with its header, if both are known before
SHORT = 128 << 10
# bytes of a long message that must arrive before a wake-up, which costs as much as copying 100 KiB
LOW_WATER = 256 << 10
SPINS = 20  # looks at the connections before sleeping


def listen(host: str) -> socket.socket:
    """Return a listener at a free port of `host`."""
    listener = _tcp_socket(host)
    listener.bind((host, 0))
    listener.listen(QUEUE)
    return listener


def dial(info: dict[str, Any], limit: float) -> socket.socket:
    """Return a connection to the listener of the rank with this "host" and "port"."""
    return full_mesh.dial(_tcp_socket(info["host"]), (info["host"], info["port"]), limit)


def _tcp_socket(host: str) -> socket.socket:
    """Return a socket with buffers sized before it connects or listens (accepted sockets inherit
    them): TCP then fixes its window."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return sock


class TcpLink(PolledLink):
    """A connected stream socket. `_buffer[_start:_stop]` is received but not consumed."""

    short = SHORT

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            keep_alive(sock)
            _choose_congestion_control(sock)
        self._sock = sock
        self._buffer = np.empty(0, np.uint8)  # allocated at first use: a ring uses few links
        self._memory = self._buffer.data  # the same; a slice of it takes half the time
        self._start = self._stop = 0
        self._low_water = self._expected = 1  # as set on the socket; bytes known to arrive

    def write(self, prefix: bytes, payload: np.ndarray) -> int:
        try:
            return self._sock.sendmsg([prefix, payload.data] if prefix else [payload.data])
        except BlockingIOError:
            return 0

    def look(self, most: int = 0) -> int:
        if self._stop - self._start < HEADER_BYTES:
            self._fill(max(most, READ_AHEAD), expected=1)
        return self._stop - self._start

    def peek(self, count: int) -> bytes | None:
        if self._stop - self._start < count:
            self._fill(READ_AHEAD, expected=1)
            if self._stop - self._start < count:
                return None
        return self._memory[self._start : self._start + count].tobytes()

    def whole(self, header: bytes, nbytes: int) -> np.ndarray | None:
        count = len(header) + nbytes
        if self._stop - self._start < count:
            # another one may be the peer's last: to look for more would find the end
            if self.peek(HEADER_BYTES) != header[:HEADER_BYTES]:
                return None
            self._fill(max(count, READ_AHEAD), expected=1)
            if self._stop - self._start < count:
                return None
        start = self._start + len(header)
        if self._memory[self._start : start].tobytes() != header:
            return None
        self._start += count
        return self._buffer[start : self._start]

    def piece(self, most: int, itemsize: int) -> np.ndarray:
        if self._start:
            self._to_front()  # where items are aligned
        if self._stop < min(most, BUFFERED_BYTES):
            self._fill(most - self._stop, expected=most - self._stop)
        whole = min(most, self._stop)
        return self._buffer[: whole - whole % itemsize]

    def skip(self, count: int) -> None:
        self._start += count

    def read_into(self, target: np.ndarray) -> int:
        buffered = min(self._stop - self._start, len(target))
        if buffered == 0:
            return self._receive(target.data, expected=len(target))
        target[:buffered] = self._buffer[self._start : self._start + buffered]
        self._start += buffered
        return buffered

    def _to_front(self) -> None:
        left = self._stop - self._start
        if left:
            self._buffer[:left] = self._buffer[self._start : self._stop]
        self._start = 0
        self._stop = left

    def _fill(self, most: int, expected: int) -> None:
        """Receive up to `most` bytes, after the bytes already in the buffer."""
        if not len(self._buffer):
            self._buffer = account.current().hold(
                np.empty(BUFFERED_BYTES, np.uint8), "communication"
            )
            self._memory = self._buffer.data
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop + most > BUFFERED_BYTES:
            self._to_front()
        self._stop += self._receive(self._memory[self._stop : self._stop + most], expected)

    def _receive(self, into: memoryview, expected: int) -> int:
        """Return the bytes received; 0 if none are there now; then `expected` are known to
        arrive."""
        try:
            received = self._sock.recv_into(into)
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

    def resends(self) -> bool:
        """Return whether a packet was sent RESENT times without an answer: after 1.4 s on a fast
        link. A stopped peer still answers."""
        return unanswered(self._sock)[0] >= RESENT

    def silent(self) -> bool:
        return is_silent(self._sock)

    def close(self) -> None:
        """Read the remaining bytes, then close: else the kernel resets the connection, and may drop
        the last bytes sent."""
        scrap = memoryview(bytearray(BUFFERED_BYTES))
        with suppress(OSError, EOFError):
            while self._receive(scrap, expected=1):
                pass
        self._sock.close()


def _choose_congestion_control(sock: socket.socket) -> None:
    """Choose reno on loopback: BBR, the default of some systems, costs a quarter of the speed."""
    if hasattr(socket, "TCP_CONGESTION") and sock.getpeername()[0] in ("127.0.0.1", "::1"):
        with suppress(OSError):  # not among those this user may choose
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
