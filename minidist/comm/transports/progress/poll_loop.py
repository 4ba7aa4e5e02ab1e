"""The sleep of a leader on links that the kernel can watch: until poll() reports one of them, or
the bell.

leader   arms every link it waits for, looks once more, poll(links, bell) .......... disarms them,
         takes a pass
others   start or finish a transfer, or abort: one byte into the bell ........^
"""

import math
import select
import socket
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress

from minidist.comm.health.acceptor import SILENCE
from minidist.comm.health.deadlock import LONG_PACKETS
from minidist.comm.transports.progress.message import ByteLink
from minidist.comm.transports.progress.stream import StreamTransport

ASK = 1.0  # seconds between two checks for silent links


class PolledLink(ByteLink):
    """A link that the kernel can watch."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the file descriptor to poll."""

    @abstractmethod
    def arm(self, reading: bool, writing: bool) -> int:
        """Return the poll events that end a sleep in which we wait to read or to write; 0 if the
        link is ready already."""

    def disarm(self, events: int) -> None:
        """End a sleep; poll reported `events` of this link."""

    def resends(self) -> bool:
        """Return whether packets are sent again and again without an acknowledgement."""
        return False

    def silent(self) -> bool:
        """Return whether resends() has lasted SILENCE s (acceptor.py): then the link is lost,
        without an error."""
        return False


class PolledTransport(StreamTransport):
    """A StreamTransport over PolledLinks: tcp and shm."""

    def __init__(
        self, name: str, world_rank: int, limit: float, links: Mapping[int, PolledLink], spins: int
    ) -> None:
        super().__init__(name, world_rank, limit, links, spins)
        self._polled = dict(links)
        self._asks = 0.0  # time of the next check for silent links
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)

    def resent(self) -> list[int]:
        return [rank for rank, link in self._polled.items() if link.resends()]

    def close(self) -> None:
        super().close()
        self._bell.close()
        self._ringer.close()

    def _sleep(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        with self.lock:
            self._active = {
                rank: peer
                for rank, peer in self._active.items()
                if peer.reading or peer.outgoing or peer.awaited
            }
            watched = {self._polled[rank].fileno(): self._polled[rank] for rank in self._active}
            ready = self.waits.error is not None
            for rank, peer in self._active.items():
                events = self._polled[rank].arm(peer.reading, bool(peer.outgoing))
                poller.register(self._polled[rank].fileno(), events)
                ready = ready or not events
        if time.monotonic() >= self._asks:
            ready |= self._drop_silent()
        reported = {} if ready else dict(poller.poll(math.ceil(seconds * 1000)))
        if self._bell.fileno() in reported:
            with suppress(BlockingIOError):
                self._bell.recv(4096)
        for fileno, link in watched.items():
            link.disarm(reported.get(fileno, 0))

    def _drop_silent(self) -> bool:
        """Lose the peers whose links lose packets; return whether this rank waits for one of them.

        A link on which this rank does not wait is reported to the monitor: the peer may wait for a
        message of this rank.
        """
        self._asks = time.monotonic() + ASK
        silent = {rank for rank, link in self._polled.items() if link.silent()}
        for rank in silent.difference(self._active, self.lost):
            self.waits.cut(rank)
        waited_for = silent.intersection(self._active)
        for rank in waited_for:
            self._lose(
                self._active[rank],
                f"nothing that was sent to it was acknowledged for {SILENCE:g} s; {LONG_PACKETS}",
            )
        return bool(waited_for)

    def _wake(self) -> None:
        with suppress(OSError):  # full: it rings already; closed: no thread is left to wake
            self._ringer.send(b"!")
