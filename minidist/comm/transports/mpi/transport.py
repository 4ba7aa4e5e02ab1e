"""Ranks that mpirun started: messages as MPI's own point-to-point messages, and waits that yield
the core.

    frame on the wire                     MPI messages, in this order, all under one tag
    header and up to 16 KiB of payload    one:   header + payload
    header and more payload               many:  header | 1 MiB of payload | 1 MiB | ... | the rest

MPI keeps the order of messages between two ranks, so the receiver knows the kind of each. Payload
goes from the sender's array straight into the receiver's, two pieces at a time; for a reduction
into two buffers, from which it is added. Pieces also keep every message under MPI's limit of 2^31 -
1 bytes.

A blocking MPI call uses its core fully (MPICH and Open MPI poll), which ranks that share cores
cannot afford. So everything is started without blocking and tested; between tests we yield the
core, then sleep, 1 µs at first and at most 500 µs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from minidist.comm.limits import META_LIMIT
from minidist.comm.native import Native
from minidist.comm.transports.mpi import native as mpi_native
from minidist.comm.transports.progress.frames import HEADER_BYTES
from minidist.comm.transports.progress.message import ByteLink
from minidist.comm.transports.progress.stream import StreamTransport
from minidist.device import account
from minidist.errors import CommError, ConfigError

SPINS = 50  # tests with a yielded core before sleeping
# seconds of a sleep
_SHORTEST = 1e-6
_LONGEST = 500e-6
SMALL_BYTES = 16 << 10  # maximum payload that is sent with its header
PIECE_BYTES = 1 << 20
_DEPTH = 2  # pieces in flight


class MpiTransport(StreamTransport):
    """A rank of MPI_COMM_WORLD."""

    def __init__(self, limit: float) -> None:
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise CommError(
                "MPI was initialised for one thread only, and a rank here has several: do not "
                "change mpi4py.rc's thread_level, or use an MPI library that grants "
                "MPI_THREAD_SERIALIZED"
            )
        self.comm = comm = MPI.COMM_WORLD.Dup()  # separate from the messages of other code
        self.one_at_a_time = threading.Lock()  # held around MPI's calls
        self.calls: list[mpi_native.MpiCall] = []  # collectives to test
        self._natives: dict[int, Native] = {}  # by the group's id
        links = {
            rank: MpiLink(comm, rank, self.one_at_a_time)
            for rank in range(comm.size)
            if rank != comm.rank
        }
        super().__init__("mpi", comm.rank, limit, links, SPINS)
        self._nap = _SHORTEST

    def check_native(self, op: str | None, dtype: np.dtype | None) -> None:
        if op is None or dtype is None:
            return
        known = dtype.isnative and dtype.isbuiltin == 1 and dtype.str[1:] in mpi_native.KINDS
        if not known or (dtype.kind == "c" and op in ("max", "min")):
            raise ConfigError(f"MPI has no {op} of {dtype}; choose another algorithm than native")

    def native(self, group: int, world_ranks: Sequence[int]) -> Native:
        if group not in self._natives:
            self._natives[group] = mpi_native.MpiNative(self, group, world_ranks)
        return self._natives[group]

    def _pass(self) -> bool:
        moved = super()._pass()
        for call in list(self.calls):
            error = None
            try:
                with self.one_at_a_time:
                    complete = call.request.Test()
            except MPI.Exception as failure:
                complete = True
                error = CommError(f"rank {self.world_rank}: MPI: {failure}")
            if complete:
                moved = True
                self.calls.remove(call)
                with self.lock:
                    self.finish(call, error)
        if moved:
            self._nap = _SHORTEST
        return moved

    def _sleep(self, seconds: float) -> None:
        time.sleep(min(self._nap, seconds))
        self._nap = min(2 * self._nap, _LONGEST)

    def _wake(self) -> None:
        """Do nothing: MPI has nothing to poll, and a sleep lasts at most half a millisecond."""


def _buffer(nbytes: int) -> np.ndarray:
    """Return bytes to receive into, counted in the memory account."""
    return account.current().hold(np.empty(nbytes, np.uint8), "communication")


class MpiLink(ByteLink):
    """A peer's messages, as two streams of bytes. `_buffer[_start:]` is received but not
    consumed."""

    short = SMALL_BYTES
    # mpirun and the monitor report an end, and no message may be left without a receive
    parting = False

    def __init__(self, comm: MPI.Comm, peer: int, one_at_a_time: threading.Lock) -> None:
        self._out = _UnderWay(
            lambda buffer: comm.Isend([buffer, len(buffer), MPI.BYTE], peer), one_at_a_time, True
        )
        self._in = _UnderWay(
            lambda buffer: comm.Irecv([buffer, len(buffer), MPI.BYTE], peer), one_at_a_time, False
        )
        self._header = _buffer(HEADER_BYTES + META_LIMIT + SMALL_BYTES)
        self._buffer = self._header[:0]
        self._start = 0
        # buffers for payload to be reduced, made when needed
        self._spare = [np.empty(0, np.uint8)] * _DEPTH

    def write(self, prefix: bytes, payload: np.ndarray) -> int:
        if prefix and not self._out:
            self._out.post(prefix + payload.tobytes() if len(payload) <= SMALL_BYTES else prefix)
        while len(self._out) <= _DEPTH and (start := self._out.nbytes - len(prefix)) < len(payload):
            self._out.post(payload[start : start + PIECE_BYTES])
        return len(self._out.oldest())

    def peek(self, count: int) -> bytes | None:
        if self._start == len(self._buffer):
            if not self._in:
                self._in.post(self._header)
            self._take()
        if len(self._buffer) - self._start < count:
            return None
        return self._buffer[self._start : self._start + count].tobytes()

    def piece(self, most: int, itemsize: int) -> np.ndarray:
        if self._start == len(self._buffer):
            while self._spare and self._in.nbytes < most:
                spare = self._spare.pop()
                spare = spare if len(spare) else _buffer(PIECE_BYTES)
                self._in.post(spare[: most - self._in.nbytes])
            self._take()
        received = self._buffer[self._start : self._start + most]
        # where items are aligned
        return received.copy() if self._buffer.base is self._header else received

    def skip(self, count: int) -> None:
        self._start += count
        base = self._buffer.base
        if (
            count
            and self._start == len(self._buffer)
            and base is not None
            and base is not self._header
        ):
            self._spare.append(base)

    def read_into(self, target: np.ndarray) -> int:
        if self._start < len(self._buffer):
            buffered = self._buffer[self._start : self._start + len(target)]
            target[: len(buffered)] = buffered
            self._start += len(buffered)
            return len(buffered)
        while len(self._in) < _DEPTH and self._in.nbytes < len(target):
            self._in.post(target[self._in.nbytes : self._in.nbytes + PIECE_BYTES])
        return len(self._in.oldest())

    def _take(self) -> None:
        """Make the oldest message that has arrived, if any, the buffer."""
        received = self._in.oldest()
        if len(received):
            self._buffer = received
            self._start = 0

    def close(self) -> None:
        self._in.cancel()


class _UnderWay:
    """MPI messages in one direction that were started and not taken yet, oldest first."""

    def __init__(
        self, start: Callable[[Any], MPI.Request], one_at_a_time: threading.Lock, sends: bool
    ) -> None:
        self._start = start
        self._mpi = one_at_a_time
        self._sends = sends
        self._posted: deque[tuple[MPI.Request, Any]] = deque()
        self._status = MPI.Status()
        self.nbytes = 0  # of all their buffers

    def __len__(self) -> int:
        return len(self._posted)

    def post(self, buffer: Any) -> None:
        with self._mpi:
            self._posted.append((self._start(buffer), buffer))
        self.nbytes += len(buffer)

    def oldest(self) -> Any:
        """Return the bytes of the oldest message if it is complete, and remove it; else no bytes.
        No message is empty."""
        if not self._posted:
            return b""
        request, buffer = self._posted[0]
        try:
            with self._mpi:
                if not request.Test(self._status):
                    return b""
                count = len(buffer) if self._sends else self._status.Get_count(MPI.BYTE)
        except MPI.Exception as error:
            raise ConnectionError(f"MPI: {error}") from error
        self._posted.popleft()
        self.nbytes -= len(buffer)
        return buffer[:count]

    def cancel(self) -> None:
        with self._mpi:
            while self._posted:
                request, _ = self._posted.popleft()
                request.Cancel()
                request.Free()
