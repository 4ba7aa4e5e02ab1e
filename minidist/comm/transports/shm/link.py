"""The link of shared memory: two rings of bytes, and a socket to wake the other side.

    writes      copy into the ring, then, if the reader sleeps, one byte through the socket
    sleeps      says so in the ring, looks once more, and polls the socket
    has died    the kernel closes its socket, however the process ended
"""

import select
import socket
from contextlib import suppress

import numpy as np

from minidist.comm.transports.progress.poll_loop import PolledLink
from minidist.comm.transports.shm.ring_buffer import LINE, RING_BYTES, RingReader, RingWriter, copy


class ShmLink(PolledLink):
    """One peer's two rings, and the socket that wakes it and us."""

    align = LINE

    def __init__(self, sock: socket.socket, memory: memoryview, lower: bool) -> None:
        first, second = memory[:RING_BYTES], memory[RING_BYTES:2 * RING_BYTES]
        self._out, self._in = RingWriter(first if lower else second), RingReader(second if lower else first)
        sock.setblocking(False)
        self._sock = sock
        self.ended = False                          # the peer's socket is closed: it writes and reads no more

    def write(self, prefix: bytes, payload: np.ndarray) -> int:
        if self.ended:
            raise BrokenPipeError("its process has ended")
        taken = self._out.write(prefix, payload)
        if taken and self._out.reader_sleeps():
            self.ring()
        return taken

    def peek(self, count: int) -> bytes | None:
        data = self._in.peek(count)
        if data is None and self.ended:
            raise EOFError
        return data

    def piece(self, most: int, itemsize: int) -> np.ndarray:
        piece = self._in.piece(most)
        if not len(piece) and self.ended:
            raise EOFError
        return piece

    def skip(self, count: int) -> None:
        if self._in.skip(count):
            self.ring()

    def read_into(self, target: np.ndarray) -> int:
        piece = self.piece(len(target), 1)
        if len(piece):
            copy(target[:len(piece)], piece)
            self.skip(len(piece))
        return len(piece)

    def ring(self) -> None:
        """Wake the peer."""
        with suppress(OSError):  # full: it is ringing already; broken: the peer is gone, and arm() will see it
            self._sock.send(b"!")

    def fileno(self) -> int:
        return self._sock.fileno()

    def arm(self, reading: bool, writing: bool) -> int:
        self._in.sleeps(reading)
        self._out.sleeps(writing)
        if self._in.show():  # fences: our words before the look at the peer's
            self.ring()
        ready = self.ended or (reading and self._in.unread() > 0) or (writing and self._out.roomy())
        return 0 if ready else select.POLLIN

    def disarm(self, events: int) -> None:
        self._in.sleeps(False)
        self._out.sleeps(False)
        if events:
            try:
                self.ended = not self._sock.recv(4096)
            except BlockingIOError:
                pass
            except ConnectionError:
                self.ended = True

    def close(self) -> None:
        self._sock.close()
        del self._in, self._out  # the memory goes when nothing points into it
