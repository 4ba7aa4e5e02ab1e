"""The seats of the ranks at the monitor: which ranks have connected, have left or are lost; and
waits for changes."""

import contextlib
import dataclasses
import select
import socket
import threading
from typing import Any

from minidist.comm import wire
from minidist.comm.health.failure import Failure
from minidist.errors import CommError


@dataclasses.dataclass
class Seat:
    """A rank's seat at the monitor. `system` names the process table of its pid (process_state.py).

    `done`: it has said goodbye; `left`: and has closed its connection, or is about to; `ended`: its
    process has ended, after the goodbye. `saves`: at a SIGTERM, it saves its work and then ends on
    its own.
    """

    world_rank: int
    pid: int
    host: str
    sock: socket.socket
    done: bool = False
    left: bool = False
    ended: bool = False
    expendable: bool = False
    saves: bool = False
    system: str = ""
    sending: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def send(self, kind: str, **content: Any) -> None:
        """Send one frame. Ignore an error: the monitor reads from every seat, and so finds a lost
        rank."""
        with self.sending, contextlib.suppress(CommError, OSError, ValueError):
            wire.send_frame(self.sock, {"kind": kind, **content}, 1.0)

    def unheard(self) -> bool:
        """Return whether it has sent a frame, or closed the connection, that was not read yet."""
        poll = select.poll()
        with contextlib.suppress(ValueError):
            poll.register(self.sock, select.POLLIN)
            return bool(poll.poll(0))
        return True  # its socket was closed meanwhile


@dataclasses.dataclass
class AgentSeat(Seat):
    """A node agent's seat at the monitor (node_agent.py); it covers `ranks`, or, if that is empty,
    its whole system.

    `unanswered`: looks sent since its last frame; `told`: how ranks ended, "" if it does not know.
    """

    ranks: tuple[int, ...] = ()
    unanswered: int = 0
    told: dict[int, str] = dataclasses.field(default_factory=dict)

    def covers(self, seat: Seat) -> bool:
        """Return whether it watches that rank."""
        return seat.world_rank in self.ranks if self.ranks else seat.system == self.system


class Seats:
    """The monitor's knowledge of each rank. A thread that changes it holds `_changed`, and notifies
    the waiting threads.

    Attributes:
        size: ranks of the job.
        loss: the first rank that did not end well, or None.
        spared: expendable ranks that did not end well, by world rank; the job continues without
        them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.loss: Failure | None = None
        self.spared: dict[int, Failure] = {}
        self._changed = threading.Condition()
        self._seats: dict[int, Seat] = {}
        # ranks that will not connect, for which no rank has waited yet
        self._never: dict[int, Failure] = {}

    def present(self) -> dict[int, Seat]:
        """Return the connected ranks that have not said goodbye, by world rank."""
        with self._changed:
            return {rank: seat for rank, seat in self._seats.items() if not seat.left}

    def staying(self) -> dict[int, Seat]:
        """Return the ranks whose process is not known to have ended well, by world rank."""
        with self._changed:
            return {rank: seat for rank, seat in self._seats.items() if not seat.ended}

    def awaited(self) -> set[int]:
        """Return the ranks that have not connected, if a connected rank waits for them."""
        with self._changed:
            return set(range(self.size)).difference(self._seats) if self.present() else set()

    def has_left(self, world_rank: int) -> bool:
        """Return whether this rank has said goodbye, or its connection is gone."""
        with self._changed:
            return world_rank in self._seats and self._seats[world_rank].left

    def has_come(self, world_rank: int) -> bool:
        """Return whether this rank has ever connected."""
        with self._changed:
            return world_rank in self._seats

    @property
    def savers(self) -> set[int]:
        """The ranks that save their work and end on their own when their process gets SIGTERM."""
        with self._changed:
            return {rank for rank, seat in self._seats.items() if seat.saves}

    def wait(self, limit: float | None = None) -> bool:
        """Wait until every rank has said goodbye (True), or one is lost, or `limit` s have passed
        (False)."""
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self.loss is not None or all(map(self.has_left, range(self.size))), limit
            )
            return ended and self.loss is None

    def hang_up(self, seat: Seat) -> None:
        """Close the connection of a rank that has ended."""
        seat.sock.close()
        with self._changed:
            self._changed.notify_all()

    def wait_until_silent(self, limit: float) -> None:
        """After the ranks' ends, wait until their last words have been read, e.g. about a crash
        (crash.py)."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.loss is not None
                    or all(seat.sock.fileno() < 0 for seat in self._seats.values())
                ),
                limit,
            )

    def wait_until_stopped(self, limit: float, *, late: bool = False) -> bool:
        """After a loss, wait until every rank except the lost one has closed its connection;
        `late`: also ranks that have yet to connect."""
        lost = self.loss.world_rank if self.loss is not None else None
        with self._changed:
            return self._changed.wait_for(
                lambda: all(
                    rank == lost or self.has_left(rank)
                    for rank in (range(self.size) if late else self._seats)
                ),
                limit,
            )
