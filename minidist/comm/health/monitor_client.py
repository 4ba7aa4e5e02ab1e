"""A rank's end of the control connection: it synchronizes with the other ranks, receives news of
lost ranks, and reports how this rank ends.

    link = MonitorClient(address, token, world_rank, world_size)
    infos = link.meet({"port": 4711})   # all-gather through the monitor: ranks exchange addresses
    link.attach(transport.waits, transport.abort, transport.lose)   # from now on a death or a
                                                                    # deadlock ends its waits
    link.goodbye()                      # or link.report(exception)

The monitor is the other end (monitor.py). A daemon thread reads from it; the transport's own
threads never do.
"""

import contextlib
import dataclasses
import errno
import math
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from minidist import errors
from minidist.comm import wire
from minidist.comm.health.acceptor import connect_to_monitor, end_connection, is_loopback
from minidist.comm.health.crash import tell_crash
from minidist.comm.health.failure import Failure, listed, say_line
from minidist.comm.health.wait_state import State, WaitListener, Waits
from minidist.errors import CommError, ConfigError, PeerLostError, TimeoutError

GRACE = 5.0  # seconds that a rank has to end after the job has failed
CONNECT_LIMIT = 60.0  # seconds until a connection must exist, or all ranks must have met
ANSWER_LIMIT = 5.0  # seconds for the monitor's answer to a question


class MonitorClient(WaitListener):
    """A rank's connection to the job's monitor.

    Attributes: limit        maximum seconds of a meeting
                grace        seconds that this process has to end after a failure
                address      the monitor's
                local_host   this host's address on the connection to the monitor; peers reach this
                             rank there too
                beside_monitor  whether the monitor is on this host
                loss         the Failure that ended the job, or None
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        world_rank: int,
        world_size: int,
        *,
        limit: float = CONNECT_LIMIT,
        grace: float = GRACE,
        begun: bool = False,
    ) -> None:
        """Connect, trying again until the monitor listens.

        Args:   limit: seconds until the connection must exist, and maximum seconds of a meeting.
                grace: seconds that this process has to end after a failure.
                begun: the monitor listened before this process began; if none is there, it is gone.
        Raises: HandshakeError if the monitor refuses us; PeerLostError if it is gone; TimeoutError
                naming the address after `limit` seconds.
        """
        hello = {"world_rank": world_rank, "world_size": world_size}
        sock = connect_to_monitor(address, token, hello, f"rank {world_rank}", limit, begun=begun)
        self.world_rank = world_rank
        self.world_size = world_size
        self.limit = limit
        self.address: tuple[str, int] = sock.getpeername()[:2]
        self.local_host: str = sock.getsockname()[0]
        self.beside_monitor = self.local_host == self.address[0] or is_loopback(self.local_host)
        self.loss: Failure | None = None
        self._sock = sock
        self.grace = grace
        self._sending = threading.Lock()
        self._telling = threading.Lock()
        self._asking = threading.Lock()  # one thread at a time: answers do not name their question
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[PeerLostError], None]] = []
        self._waits: Waits | None = None  # of the transport, once it exists; then also:
        self._abort: Callable[[CommError], None] = lambda error: None
        self._lose: Callable[[PeerLostError], None] = lambda error: None
        self._answers: dict[str, Any] = {}  # of the monitor, by kind
        self._end_timer: threading.Timer | None = None
        self._leaving = self._closed = False
        self._listener = threading.Thread(target=self._listen, name="minidist control", daemon=True)
        self._listener.start()

    def meet(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """All-gather small dicts, in world rank order. Every rank calls it the same number of
        times.

        Cost:    2 control frames per rank: its dict to the monitor, P dicts back. For start-up, not
                 for data.
        Raises:  TimeoutError naming the ranks that did not call; PeerLostError if one was lost.
        """
        self._send({"kind": "meet", "info": info})
        infos = self._answer("met", self.limit)
        if infos is None:
            self._send({"kind": "missing"})
            missing = self._answer("missing", ANSWER_LIMIT)
            raise TimeoutError(
                f"rank {self.world_rank} waited {self.limit:g} s for all {self.world_size} ranks "
                "to join"
                + (
                    f"; {listed(missing)} did not join"
                    if missing
                    else "; the monitor does not answer"
                )
            )
        return list(infos)

    def on_loss(self, callback: Callable[[PeerLostError], None]) -> None:
        """Call `callback(error)` when the job fails elsewhere, in the listener's thread; at once if
        it has already failed."""
        with self._changed:
            self._callbacks.append(callback)
            loss = self.loss
        if loss is not None:
            callback(loss.error())

    def attach(
        self,
        waits: Waits,
        abort: Callable[[CommError], None],
        lose: Callable[[PeerLostError], None],
    ) -> None:
        """Report a transport's long waits to the monitor, and abort the transport by errors from
        the monitor."""
        self._waits = waits
        self._abort = abort
        self._lose = lose
        waits.listener = self
        self.on_loss(abort)

    def has_left(self, world_rank: int) -> bool:
        """Return whether that rank has said goodbye to the monitor: a rank does so before it ends
        its other connections."""
        with self._asking, contextlib.suppress(CommError, OSError):
            self._send({"kind": "left"})
            return world_rank in (self._answer("left", ANSWER_LIMIT) or ())
        return False

    def wait_for_loss(self, limit: float) -> Failure | None:
        """Return the loss that ended the job, if the monitor reports it within `limit` s.

        A peer's data connection may break a moment before the monitor gives the reason; a rank that
        is about to report a lost peer asks here first.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.loss is not None or self._closed, limit)
            return self.loss

    def report(self, error: BaseException) -> bool:
        """Report to the job that this rank fails; the others stop. This process then has `grace`
        seconds to end.

        Returns: whether this was the job's first failure, as the monitor says. If it does not
                 answer: True, unless another failure is known, or the input was bad, which all
                 ranks may have found: then only rank 0's is first.
        """
        self._expect_end(f"its own {type(error).__name__}")
        loss = Failure.by_exception(error, self.world_rank)
        noted = self.report_failure(
            loss, error.world_rank if isinstance(error, PeerLostError) else None
        )
        if noted is not None or (self.loss is not None and self.loss.world_rank != self.world_rank):
            return bool(noted)
        return self.world_rank == 0 or not isinstance(error, ConfigError)

    def report_failure(self, loss: Failure, blames: int | None = None) -> Any:
        """Send this rank's `loss`; return whether it was the job's first, or None if the monitor
        does not answer."""
        try:
            self._send({"kind": "failed", "loss": dataclasses.asdict(loss), "blames": blames})
            self._leaving = True  # the monitor may hang up once all others have stopped
            return self._answer("noted", ANSWER_LIMIT, despite_loss=True)
        except CommError:
            self._listener.join(ANSWER_LIMIT)  # it reads what the monitor sent before it closed
            return None

    def lose_with(self, loss: Failure) -> None:
        """Report the loss to the job, and stop this rank as the others: it cannot continue without
        the resource lost here."""
        self.report_failure(loss)
        self._leaving = False
        self._lost(loss)

    @property
    def closed(self) -> bool:
        """True if this rank, or the monitor, has closed the connection."""
        return self._closed

    def saves_when_told(self) -> None:
        """Report that this rank saves its work and ends on its own at a SIGTERM: its launcher then
        passes one on."""
        self._send({"kind": "saves"})

    def goodbye(self, *, together: bool = False) -> None:
        """Report that this rank is done and ends well. Close the connection; with `together`,
        wait_for_all does."""
        self._leaving = not together  # the monitor may close the connection before we do
        with self._changed:
            self._callbacks.clear()
        with contextlib.suppress(CommError):
            self._send({"kind": "goodbye", "state": self._state(), "together": together})
        if not together:
            self.close()

    def wait_for_all(self, limit: float) -> bool:
        """After goodbye(together=True), return whether, within `limit` s, all ranks have said
        goodbye, or `loss` is set."""
        with contextlib.suppress(PeerLostError):
            return self._answer("over", limit) is not None
        return True

    def close(self, *, crashes: bool = False) -> None:
        """Close the connection; without a goodbye before it, the monitor takes this rank for lost.

        `crashes`: only stop reading; if the process crashes before it ends, that is reported to the
        monitor (crash.py).
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._end_timer is not None:
            self._end_timer.cancel()
        # wakes the listener, which closes the socket
        (tell_crash if crashes else end_connection)(self._sock)
        if threading.current_thread() is not self._listener:
            self._listener.join(1.0)

    def wait_until_released(self, limit: float) -> None:
        """After report(), wait until the other ranks have stopped, so that their last words are not
        cut off."""
        self._listener.join(limit)

    def _send(self, frame: dict[str, Any]) -> None:
        with self._sending:
            if self._closed:
                raise PeerLostError(
                    f"rank {self.world_rank} has closed its connection to the job's monitor"
                )
            wire.send_frame(self._sock, frame)

    def _answer(self, kind: str, limit: float, *, despite_loss: bool = False) -> Any:
        """Return the monitor's answer, or None after `limit` seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    kind in self._answers
                    or self._closed
                    or (self.loss is not None and not despite_loss)
                ),
                limit,
            )
            if kind in self._answers:
                return self._answers.pop(kind)
            if self.loss is not None and not despite_loss:
                raise self.loss.error()
        return None

    def _listen(self) -> None:
        with self._sock:
            try:
                while True:
                    self._take(wire.recv_frame(self._sock, None))
            except (CommError, OSError, ValueError):  # ValueError: the socket was closed under us
                if not (self._leaving or self._closed):
                    self._lost(self._lost_link())
            with self._sending, self._changed:  # no thread is sending when the socket goes
                self._closed = True
                self._changed.notify_all()

    def _lost_link(self) -> Failure:
        """Return how the connection to the monitor ended, as far as this host knows: cut, or with
        the monitor.

        Until the ranks have met, rank 0 may listen in place of a monitor that died
        (launch/joining.py).
        """
        lost = "lost its connection to the job's monitor"
        have_met = self._waits is not None
        if have_met and self.beside_monitor and listens(self.address):
            return Failure.here(
                self.world_rank, f"{lost}: it was cut, the monitor still runs", link=True
            )
        return Failure.here(
            self.world_rank,
            f"{lost}: it was cut, or the launcher or rank 0's host has ended or cannot be reached",
        )

    def _take(self, frame: dict[str, Any]) -> None:
        match frame["kind"]:
            case "lost":
                self._lost(Failure(**frame["loss"]))
            case "died":
                self._lose(Failure(**frame["loss"]).error())
            case "ask":
                self.note(frame["round"])
            case "verdict":
                self._abort(getattr(errors, frame["error"])(frame["text"]))
            case kind:
                self._leaving = self._leaving or kind == "over"  # then the monitor closes first
                with self._changed:
                    self._answers[kind] = frame["value"]
                    self._changed.notify_all()

    def note(self, number: int = 0) -> None:
        """Report this rank's waits: unasked (0), or in answer to the monitor's question
        `number`."""
        # with the lock, of two threads' states the later one arrives last
        with self._telling, contextlib.suppress(CommError, OSError):
            self._send({"kind": "waits", "round": number, "state": self._state()})

    def _state(self) -> list[Any]:
        return (State() if self._waits is None else self._waits.state()).packed()

    def disagree(self, text: str, world_ranks: tuple[int, ...]) -> None:
        """Make every other rank of a group raise MismatchError, too."""
        with contextlib.suppress(CommError, OSError):
            self._send({"kind": "mismatch", "text": text, "ranks": list(world_ranks)})

    def spare(self) -> None:
        self._send({"kind": "expendable"})

    def cut(self, world_rank: int) -> None:
        """Report that the link to that rank loses packets."""
        with contextlib.suppress(CommError, OSError):
            self._send({"kind": "cut", "rank": world_rank})

    def table(self, state: State) -> str:
        """Return what all ranks wait for, in words; "" if the monitor does not answer."""
        try:
            self._send({"kind": "table", "state": state.packed()})
            return str(self._answer("table", ANSWER_LIMIT) or "")
        except CommError:
            return ""

    def _lost(self, loss: Failure) -> None:
        """Record the first failure, call the callbacks, and make sure that this process ends."""
        with self._changed:
            if self.loss is not None:
                return
            self.loss = loss
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        self._expect_end(str(loss).splitlines()[0])
        for callback in callbacks:
            callback(loss.error())

    def _expect_end(self, why: str) -> None:
        """End the process by force if it has not said goodbye `grace` seconds from now."""
        with self._changed:
            if self._end_timer is not None or self._closed:
                return
            message = (
                f"minidist: rank {self.world_rank} was still busy {self.grace:g} s "
                f"after {why}; ended"
            )
            self._end_timer = threading.Timer(self.grace, end_process, [message])
            self._end_timer.daemon = True
            try:
                self._end_timer.start()
            # Python 3.12 starts no thread while it ends: then a signal ends it
            except RuntimeError:
                signal.alarm(math.ceil(self.grace))


def listens(address: tuple[str, int]) -> bool:
    """Return whether a process of this host listens there. Nothing connects, so the listener does
    not report a stranger."""
    with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as sock:
        # connections that are closing do not count
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def end_process(message: str) -> None:
    """Print one line and end this process at once, whatever its other threads are doing."""
    say_line(message)
    os._exit(1)
