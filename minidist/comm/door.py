"""Where ranks come in, and strangers do not: the monitor's listening socket, and the handshake with whoever calls.

Whoever does not pass the handshake (wire.py) within a few seconds, claims a rank that is taken, or comes with another
job size is refused and its address logged. At most PENDING connections may be unproven at a time; the oldest goes
first, so a crowd of slow strangers cannot keep a rank out.
"""

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from minidist.comm import wire
from minidist.errors import CommError, LaunchError

PENDING = 64              # connections that have not proven themselves yet
HANDSHAKE_LIMIT = 10.0    # seconds a connection gets for that

log = logging.getLogger("minidist.control")


@dataclasses.dataclass
class Seat:
    """A rank's place at the monitor."""

    world_rank: int
    pid: int
    host: str
    sock: socket.socket
    left: bool = False
    frozen: bool = False
    expendable: bool = False
    sending: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def send(self, kind: str, **content: Any) -> None:
        """Send one frame; a rank that does not take it is about to be noticed as lost by its own thread."""
        with self.sending, contextlib.suppress(CommError, OSError, ValueError):
            wire.send_frame(self.sock, {"kind": kind, **content}, 1.0)


class Door:
    """A listening socket; each caller is answered in a thread of its own until it has proven itself.

    Args:   host, port: where to listen; port 0 takes a free one. `address` says which.
            enter(sock, hello): seat a caller that knows the token; in the caller's thread. HandshakeError refuses it.
            run(target, *args): start a thread.
    Raises: LaunchError if the port is taken.
    """

    def __init__(self, host: str, port: int, backlog: int, token: bytes,
                 enter: Callable[[socket.socket, dict[str, Any]], None], run: Callable[..., None]) -> None:
        self._token, self._enter, self._run = token, enter, run
        try:
            self.listener = socket.create_server((host, port), backlog=backlog)
        except OSError as error:
            raise LaunchError(f"cannot listen on {host}:{port} ({error.strerror}); is another job using it? choose "
                              "another port with --master-port or MASTER_PORT") from error
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.strangers: dict[socket.socket, None] = {}        # in order of arrival
        self._lock = threading.Lock()
        self._closed = False

    def answer(self) -> None:
        """Somebody knocks."""
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
                hang_up(oldest)
        self._run(self._receive, sock)

    def shut(self) -> None:
        """Hang up on everybody who has not come in."""
        with self._lock:
            self._closed = True
            for sock in (self.listener, *self.strangers):
                hang_up(sock)

    def _receive(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._enter(sock, wire.admit(sock, self._token, HANDSHAKE_LIMIT))
        except (CommError, OSError) as error:
            sock.close()
            if not self._closed:
                log.warning("minidist monitor: %s", error)
        finally:
            with self._lock:
                self.strangers.pop(sock, None)


def hang_up(sock: socket.socket) -> None:
    """Wake whoever reads or accepts on `sock`; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
