"""A ring of bytes in shared memory: one process writes, another reads, without a lock and mostly
without the kernel.

    words, each on its own cache line      data, CAPACITY bytes
    head    total bytes written            +-------------------------------------------------------+
    tail    total bytes read               | free | unread: tail % CAPACITY to head % CAPACITY | free
    reader  the reader sleeps: wake it     +-------------------------------------------------------+
    writer  the writer sleeps: wake it

The writer copies bytes in, then moves `head`; the reader copies them out, or adds them to an array
in place, then moves `tail`. Each side uses only the bytes that the other side's word allows.

The ring is larger than a core's second-level cache. If the reader's core still holds a cache line,
the writer must wait until that cache gives the line up: 512 KiB take 55 µs in a ring of half a
megabyte, and 15 in one of two or more (AMD EPYC). In a larger ring the reader's cache has dropped a
line before the writer reaches it again.

The link of two processes has a ring in each direction, and a socket. A side that sleeps says so in
the ring; a byte in the socket wakes it. However a process ends, the kernel closes its socket.

Order matters in two places, and a processor keeps it only at a fence (ARM reorders stores; x86
reads before its own earlier stores):

    bytes before head     else the reader takes bytes that are not there yet
    head before reader    the writer moves `head`, then checks whether the reader sleeps; the reader
                          says that it sleeps, then checks `head` again. The later of the two sees
                          the other's write: no wake-up is lost.

Python has no fence, but releasing a lock and acquiring it again is one: nothing before the release
may move after it, nothing after the acquire may move before it, and the two keep their order
(ARMv8; on x86 each one is a fence).
"""

import select
import socket
import threading
from contextlib import suppress

import numpy as np

from minidist.comm.calls.buffers import address_of
from minidist.comm.transports.progress.poll_loop import PolledLink

CAPACITY = 4 << 20  # bytes of a ring: more than a core's second-level cache
# maximum bytes copied before the other side sees them, so that both work at the same time
PIECE_BYTES = 512 << 10
LINE = 64  # bytes of a cache line; each write begins at a multiple
_PAGE = 4096
RING_BYTES = _PAGE + CAPACITY

_HEAD, _TAIL, _READER, _WRITER = (index * LINE // 8 for index in range(4))
# the reader moves `tail` after reading this many bytes, or before it sleeps
_SHOW_BYTES = CAPACITY // 16


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy source to target[:], both uint8.

    On AMD's Zen 3 and 4 the memmove of glibc 2.33 to 2.38 is twelve times slower when the target
    begins 1 to 15 bytes after the source, modulo a page; a loop of NumPy's is not, but otherwise it
    is a little slower than memmove.
    """
    if len(source) > _PAGE and 0 < (address_of(target) - address_of(source)) % _PAGE < 16:
        np.positive(source, out=target)
    else:
        target[:] = source


class Fence:
    """A memory fence: reads and writes before the call are ordered before those after it, for every
    process."""

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release = lock.release
        self._acquire = lock.acquire

    def __call__(self) -> None:
        self._release()
        self._acquire()


class _End:
    """The common part of both ends of a ring."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_PAGE].cast("Q")
        self._bytes = memory[_PAGE:RING_BYTES]
        self._data = np.frombuffer(self._bytes, np.uint8)
        self.fence = Fence()


class RingWriter(_End):
    """The writing end. One thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._head = 0  # this side's
        self._tail = 0  # the reader's, as last seen

    def free(self) -> int:
        """Return the number of bytes that can be written now, a multiple of 64."""
        self._tail = self._words[_TAIL]
        return (CAPACITY - (self._head - self._tail)) & -LINE

    def write(self, prefix: bytes, payload: np.ndarray) -> int:
        """Take the whole prefix (or nothing) and bytes of the payload. Return the number of bytes
        taken from both.

        The end of the payload is padded, so that the next prefix begins on a cache line.
        """
        wanted = len(payload)
        free = CAPACITY - (self._head - self._tail)
        if free < len(prefix) + wanted + LINE:
            free = self.free()
            if free < max(len(prefix), 1):
                return 0
        if prefix:
            self._put(prefix)
        begin = self._head % CAPACITY
        count = min(wanted, free - len(prefix), CAPACITY - begin, PIECE_BYTES)
        if count < wanted:
            count &= -LINE
        if count:
            copy(self._data[begin : begin + count], payload if count == wanted else payload[:count])
            self._head += count
        if count == wanted:
            self._head += -count % LINE
        self.fence()  # the bytes before `head`
        self._words[_HEAD] = self._head
        return len(prefix) + count

    def _put(self, prefix: bytes) -> None:
        begin = self._head % CAPACITY
        first = min(len(prefix), CAPACITY - begin)
        self._bytes[begin : begin + first] = prefix[:first]
        if first < len(prefix):
            self._bytes[: len(prefix) - first] = prefix[first:]
        self._head += len(prefix)

    def reader_sleeps(self) -> bool:
        """Return whether the reader asks to be woken after a write; True once per request."""
        self.fence()  # `head` before the reader's word
        sleeps = self._words[_READER] != 0
        if sleeps:
            self._words[_READER] = 0
        return sleeps

    def sleeps(self, asleep: bool) -> None:
        """Ask to be woken when half of the ring is free, or cancel that. A fence must follow, then
        a check of roomy()."""
        self._words[_WRITER] = int(asleep)

    def roomy(self) -> bool:
        return self.free() >= CAPACITY // 2


class RingReader(_End):
    """The reading end. One thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        # this side's; its value known to the writer; the writer's, as last seen
        self._tail = self._shown = self._head = 0

    def unread(self) -> int:
        """Return the number of bytes that can be read now."""
        head = self._words[_HEAD]
        if head != self._head:
            self._head = head
            self.fence()  # `head` before the bytes
        return head - self._tail

    def peek(self, count: int) -> bytes | None:
        """Return the next `count` bytes, not consumed; None if fewer are there."""
        if self._head - self._tail < count and self.unread() < count:
            return None
        begin = self._tail % CAPACITY
        data = self._bytes[begin : begin + count].tobytes()
        return data if len(data) == count else data + self._bytes[: count - len(data)].tobytes()

    def piece(self, most: int) -> np.ndarray:
        """Return the available bytes up to a boundary, in place; not consumed.

        The boundary is the end of the ring, of a payload, or a multiple of 64 bytes: items of 1, 2,
        4, ... 64 bytes are whole.
        """
        unread = self.unread()
        begin = self._tail % CAPACITY
        return self._data[begin : begin + min(most, unread, CAPACITY - begin, PIECE_BYTES)]

    def skip(self, count: int) -> bool:
        """Consume `count` bytes. Return whether to wake the writer: it asked for it, and enough was
        read."""
        self._tail += count
        return self._tail - self._shown >= _SHOW_BYTES and self.show()

    def show(self) -> bool:
        """Publish this side's `tail`. Return whether to wake the writer; True once per request."""
        self.fence()  # our reading before `tail`
        self._words[_TAIL] = self._shown = self._tail
        self.fence()  # `tail` before the writer's word
        wakes = self._words[_WRITER] != 0 and self.unread() <= CAPACITY // 2
        if wakes:
            self._words[_WRITER] = 0
        return wakes

    def sleeps(self, asleep: bool) -> None:
        """Ask to be woken after a write, or cancel that. A fence must follow, then a check of
        unread()."""
        self._words[_READER] = int(asleep)


class ShmLink(PolledLink):
    """A peer's two rings, and the socket by which each side wakes the other."""

    align = LINE

    def __init__(self, sock: socket.socket, memory: memoryview, lower: bool) -> None:
        first = memory[:RING_BYTES]
        second = memory[RING_BYTES : 2 * RING_BYTES]
        self._out = RingWriter(first if lower else second)
        self._in = RingReader(second if lower else first)
        sock.setblocking(False)
        self._sock = sock
        self.ended = False  # the peer's socket is closed: it writes and reads no more

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
            copy(target[: len(piece)], piece)
            self.skip(len(piece))
        return len(piece)

    def ring(self) -> None:
        """Wake the peer."""
        # full: a byte is there already; broken: the peer is gone, and arm() will see it
        with suppress(OSError):
            self._sock.send(b"!")

    def fileno(self) -> int:
        return self._sock.fileno()

    def arm(self, reading: bool, writing: bool) -> int:
        self._in.sleeps(reading)
        self._out.sleeps(writing)
        if self._in.show():  # contains fences: our words before the check of the peer's
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
        del self._in, self._out  # the memory is released when nothing refers to it
