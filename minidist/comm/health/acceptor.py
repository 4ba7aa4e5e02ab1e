"""The monitor's listening socket: how to connect to it, and which connections are let in.

A connection that does not pass the handshake (wire.py) within a few seconds, claims a rank that is taken, or names
another job size is refused and its address logged. At most PENDING connections may be unproven at a time; the oldest is
closed first, so many slow strangers cannot keep a rank out.
"""

import contextlib
import dataclasses
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from minidist.comm import wire
from minidist.comm.health.process_state import this_system
from minidist.errors import CommError, HandshakeError, LaunchError, TimeoutError

PENDING = 64              # connections that have not proven themselves yet
HANDSHAKE_LIMIT = 10.0    # seconds a connection gets for that
SILENCE = 5.0             # seconds of silence after which a host is lost

log = logging.getLogger("minidist.control")


@dataclasses.dataclass
class Seat:
    """A rank's place at the monitor. `system` names the process table its pid belongs to (process_state.py)."""

    world_rank: int
    pid: int
    host: str
    sock: socket.socket
    left: bool = False
    expendable: bool = False
    system: str = ""
    sending: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def send(self, kind: str, **content: Any) -> None:
        """Send one frame. An error is ignored: the monitor reads from every seat, and finds a lost rank there."""
        with self.sending, contextlib.suppress(CommError, OSError, ValueError):
            wire.send_frame(self.sock, {"kind": kind, **content}, 1.0)


@dataclasses.dataclass
class AgentSeat(Seat):
    """A node agent's place at the monitor (node_agent.py); it covers `ranks`, or, if there are none, its whole system.

    `unanswered` looks were sent since it last spoke; `told` is how ranks ended, "" where it does not know.
    """

    ranks: tuple[int, ...] = ()
    unanswered: int = 0
    told: dict[int, str] = dataclasses.field(default_factory=dict)

    def covers(self, seat: Seat) -> bool:
        """Whether it looks after that rank."""
        return seat.world_rank in self.ranks if self.ranks else seat.system == self.system


class Acceptor:
    """A listening socket; each caller is answered in a thread of its own until it has proven itself.

    Args: enter(sock, hello): seat a caller that knows the token; in the caller's thread. HandshakeError refuses it.
          run(target, *args): start a thread.
    """

    def __init__(self, listener: socket.socket, token: bytes, enter: Callable[[socket.socket, dict[str, Any]], None],
                 run: Callable[..., None]) -> None:
        self.listener, self._token, self._enter, self._run = listener, token, enter, run
        self.strangers: dict[socket.socket, None] = {}        # in order of arrival
        self._lock = threading.Lock()
        self._closed = False

    def accept(self) -> None:
        """A connection is waiting: accept it."""
        try:
            sock, _ = self.listener.accept()
        except OSError:                                        # gone again, or no file is left, or we are closing
            time.sleep(0.01)
            return
        with self._lock:
            if self._closed:
                sock.close()
                return
            self.strangers[sock] = None
            if len(self.strangers) > PENDING:
                oldest = next(iter(self.strangers))
                del self.strangers[oldest]
                end_connection(oldest)
        self._run(self._receive, sock)

    def close(self) -> None:
        """Close the listener and every connection that has not come in."""
        with self._lock:
            self._closed = True
            for sock in (self.listener, *self.strangers):
                end_connection(sock)

    def _receive(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(True)
            _set_up(sock)
            self._enter(sock, wire.admit(sock, self._token, HANDSHAKE_LIMIT))
        except (CommError, OSError) as error:
            sock.close()
            if not self._closed:
                log.warning("minidist monitor: %s", error)
        finally:
            with self._lock:
                self.strangers.pop(sock, None)


def listen(host: str, port: int, size: int) -> socket.socket:
    """A listener for `size` ranks; port 0 takes a free one. Raises LaunchError if the port is taken."""
    try:
        return socket.create_server((host, port), backlog=max(128, size))
    except OSError as error:
        raise LaunchError(f"cannot listen on {host}:{port} ({error.strerror}); is another job using it? choose "
                          "another port with --master-port or MASTER_PORT") from error


def connect_to_monitor(address: tuple[str, int], token: bytes, hello: dict[str, Any], name: str,
                       limit: float) -> socket.socket:
    """The caller's side: a connection to the monitor, tried again until it listens.

    Args:   hello: says what this process is to the job, beside its number and system. name: the same, for messages.
    Raises: HandshakeError if it refuses us; TimeoutError naming the address after `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while True:
        left = deadline - time.monotonic()
        try:
            sock = socket.create_connection(address, timeout=max(left, 0.1))
            break
        except OSError as error:
            if left <= 0:
                raise TimeoutError(f"{name} could not reach the job's monitor at {address[0]}:{address[1]} within "
                                   f"{limit:g} s ({error})") from error
            time.sleep(min(0.05, left))
    try:
        sock.settimeout(None)
        _set_up(sock)
        who = {"pid": os.getpid(), "host": platform.node(), "system": this_system()}
        wire.greet(sock, token, hello | who, max(deadline - time.monotonic(), 1.0))
        welcome = wire.recv_frame(sock, max(deadline - time.monotonic(), 1.0))
        if welcome.get("kind") != "welcome":
            raise HandshakeError(f"the monitor at {address[0]}:{address[1]} refused {name}: {welcome.get('reason')}")
    except (CommError, OSError):
        sock.close()
        raise
    return sock


def _set_up(sock: socket.socket) -> None:
    """Send at once, and end the connection SILENCE seconds after the other host fell silent.

    The kernels do it, whatever the processes do: while nothing is sent, each asks the other by empty packets.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", int(SILENCE) - 1),
                        ("TCP_USER_TIMEOUT", int(1000 * SILENCE))):
        if hasattr(socket, name):                           # not every system has them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def end_connection(sock: socket.socket) -> None:
    """Wake the thread that reads or accepts on `sock`; it closes the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
