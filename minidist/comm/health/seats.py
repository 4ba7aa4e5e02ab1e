"""The places of the ranks at the monitor: which have come, have left or are lost; and waits until
that changes."""

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
    """A rank's place at the monitor. `system` names the process table its pid belongs to
    (process_state.py).

    `done`: it has said goodbye; `left`: and hung up, or is about to; `ended`: its process has
    ended, after the goodbye. `saves`: told to stop by SIGTERM, it saves its work and ends by
    itself.
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
        """Send one frame. An error is ignored: the monitor reads from every seat, and finds a lost
        rank there."""
        with self.sending, contextlib.suppress(CommError, OSError, ValueError):
            wire.send_frame(self.sock, {"kind": kind, **content}, 1.0)

    def unheard(self) -> bool:
        """Whether it has said something, or hung up, that was not read yet."""
        poll = select.poll()
        with contextlib.suppress(ValueError):
            poll.register(self.sock, select.POLLIN)
            return bool(poll.poll(0))
        return True  # it was closed meanwhile


@dataclasses.dataclass
class AgentSeat(Seat):
    """A node agent's place at the monitor (node_agent.py); it covers `ranks`, or, if there are
    none, its whole system.

    `unanswered` looks were sent since it last spoke; `told` is how ranks ended, "" where it does
    not know.
    """

    ranks: tuple[int, ...] = ()
    unanswered: int = 0
    told: dict[int, str] = dataclasses.field(default_factory=dict)

    def covers(self, seat: Seat) -> bool:
        """Whether it looks after that rank."""
        return seat.world_rank in self.ranks if self.ranks else seat.system == self.system


class Seats:
    """What the monitor knows of each rank. A thread that changes it holds `_changed`, and notifies
    those that wait.

    Attributes:
        size: ranks of the job.
        loss: the first rank that did not end well, or None.
        spared: expendable ranks that did not end well, by world rank; the job goes on without them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.loss: Failure | None = None
        self.spared: dict[int, Failure] = {}
        self._changed = threading.Condition()
        self._seats: dict[int, Seat] = {}
        # ranks that will not come, for which none has waited yet
        self._never: dict[int, Failure] = {}

    def present(self) -> dict[int, Seat]:
        """The ranks that are here and have not said goodbye, by world rank."""
        with self._changed:
            return {rank: seat for rank, seat in self._seats.items() if not seat.left}

    def staying(self) -> dict[int, Seat]:
        """The ranks whose process has not ended well, as far as is known, by world rank."""
        with self._changed:
            return {rank: seat for rank, seat in self._seats.items() if not seat.ended}

    def awaited(self) -> set[int]:
        """The ranks that have not come, if another is here and waits for them."""
        with self._changed:
            return set(range(self.size)).difference(self._seats) if self.present() else set()

    def has_left(self, world_rank: int) -> bool:
        """Whether this rank has said goodbye, or its connection is gone."""
        with self._changed:
            return world_rank in self._seats and self._seats[world_rank].left

    def has_come(self, world_rank: int) -> bool:
        """Whether this rank has been here."""
        with self._changed:
            return world_rank in self._seats

    @property
    def savers(self) -> set[int]:
        """The ranks that save their work and end by themselves when their process is sent
        SIGTERM."""
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
        """After the ranks' ends: wait until what they said last is heard, as of a crash
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
        """After a loss: wait until every rank but the lost one has hung up; `late`: also those that
        are yet to come."""
        lost = self.loss.world_rank if self.loss is not None else None
        with self._changed:
            return self._changed.wait_for(
                lambda: all(
                    rank == lost or self.has_left(rank)
                    for rank in (range(self.size) if late else self._seats)
                ),
                limit,
            )
