"""A listening socket of the job: connecting to the monitor's, and deciding which connections to
admit.

A connection that does not pass the handshake (wire.py) within a few seconds, claims a rank that is
taken, or names another job size is refused; the first TOLD refusals are logged with the address. At
most PENDING connections, or two for each rank that may connect, are unproven at a time; the oldest
is closed first: many slow strangers cannot keep a rank out. A rank whose connection is closed
for others calls again. A rank that has passed the handshake is notified of it only when its
connection can no longer be closed for others.
"""

import contextlib
import errno
import logging
import os
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from minidist.comm import wire
from minidist.comm.health.process_state import this_system
from minidist.errors import CommError, HandshakeError, LaunchError, PeerLostError, TimeoutError

PENDING = 64  # connections that have not passed the handshake yet
QUEUE = 4096  # callers that the kernel keeps until they are accepted; a system may keep fewer
# errors of accept: the system has no more
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FILES = 8  # open files for each rank of the job: connection, shared memory, inherited files
# errors that do not end by waiting: no route, no IPv6
_NO_WAY = (errno.ENETUNREACH, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
TOLD = 10  # refusals that are logged: strangers cannot fill a disk
HANDSHAKE_LIMIT = 10.0  # seconds that a connection has for the handshake
SILENCE = 5.0  # seconds of silence after which a host is lost
RESENT = 3  # number of unanswered resends after which a link counts as losing packets
_INFO = struct.Struct("=xxBB52xI")
"""Fields of the kernel's tcp_info: tcpi_retransmits and tcpi_probes, which return to 0 at each
acknowledgement, and tcpi_last_ack_recv, the milliseconds since the last one."""

log = logging.getLogger("minidist.comm")


class Acceptor:
    """A listening socket; each caller is answered in a thread of its own until it has passed the
    handshake.

    Args: enter(sock, hello): seat a caller that knows the token; in the caller's thread.
          HandshakeError refuses it.
          size: ranks that may connect. run(target, *args): start a thread. name: of the listener,
          for the log. fail(error): this process has no file, memory or thread for another caller,
          and no stranger to send away.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        enter: Callable[[socket.socket, dict[str, Any]], None],
        size: int,
        run: Callable[..., None],
        name: str,
        *,
        fail: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self._fail = fail
        self.listener = listener
        self._token = token
        self._enter = enter
        self._run = run
        self._name = name
        self._room = max(PENDING, 2 * size)
        self._refused = 0
        self.strangers: dict[socket.socket, None] = {}  # in order of arrival
        self._proven: set[socket.socket] = set()  # connections that are being seated
        self._lock = threading.Lock()
        self._closed = False

    def accept(self) -> None:
        """Accept a waiting connection."""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:  # gone again, or no file is left, or this listener is closing
            if error.errno in EXHAUSTED and not self._send_one_away():
                self._fail(error)
            time.sleep(0.01)
            return
        with contextlib.suppress(OSError):  # gone again
            keep_alive(sock)
        with self._lock:
            if self._closed:
                sock.close()
                return
            self.strangers[sock] = None
        if len(self.strangers) > self._room:
            self._send_one_away()
        try:
            self._run(self._receive, sock)
        except RuntimeError as error:  # no thread can be started
            with self._lock:
                self.strangers.pop(sock, None)
            sock.close()
            self._fail(OSError(errno.EAGAIN, str(error)))

    def _send_one_away(self) -> bool:
        """Close the connection of the oldest stranger; return whether there was one."""
        with self._lock:
            oldest = next(iter(self.strangers), None)
            if oldest is None:
                return False
            del self.strangers[oldest]
            end_connection(oldest)
            return True

    def close(self) -> None:
        """Close the listener and every connection that has not been admitted."""
        with self._lock:
            self._closed = True
            for sock in (self.listener, *self.strangers, *self._proven):
                end_connection(sock)

    def _receive(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(True)
            hello = wire.admit(
                sock, self._token, HANDSHAKE_LIMIT, proven=lambda: self._note_proven(sock)
            )
            self._enter(sock, hello)
        except (CommError, OSError) as error:
            with self._lock:
                self._refused += not self._closed
                told = not self._closed and self._refused <= TOLD
            if told:
                log.warning(
                    "%s: %s%s",
                    self._name,
                    error,
                    " (no more refusals are reported)" * (self._refused == TOLD),
                )
            sock.close()
        finally:
            with self._lock:
                self.strangers.pop(sock, None)
                self._proven.discard(sock)

    def _note_proven(self, sock: socket.socket) -> None:
        """Record that the caller is no stranger: its connection is not closed for others.
        PeerLostError if it was."""
        with self._lock:
            if self._closed or sock not in self.strangers:
                raise PeerLostError(
                    f"{wire.address_of(sock)} was turned away; it may connect again"
                )
            del self.strangers[sock]
            self._proven.add(sock)


def shortage(error: OSError, size: int) -> str:
    """Return which resource a system lacks, in words, and a remedy if one is known; `size`: ranks
    of the job."""
    words = error.strerror or str(error)
    remedies = {
        errno.EMFILE: f"; let `ulimit -n` be {FILES * size}",
        errno.ENOMEM: "; let `ulimit -v` be larger, or take transport tcp",
    }
    return words + remedies.get(error.errno or 0, "")


def where_to_listen(host: str) -> str:
    """Return the address at which `host`, this machine, listens for other machines: `host` if it is
    an address, else "" (all addresses).

    The meaning of a name differs between machines: Debian's /etc/hosts has a machine's own name as
    127.0.1.1, and the name may mean a network card that no other machine reaches. Every caller must
    know the job's token. `localhost` means this machine on every machine.
    """
    if host == "localhost":
        return host
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError:
        return ""
    return host


def plain_address(text: str) -> str:
    """Return the address or name of a host without the brackets that a port's `:` needs:
    [fd00::1].

    Raises: LaunchError for a link-local address, which means another host on each network card.
    """
    address = text.removeprefix("[").removesuffix("]")
    if address.lower().startswith("fe80:"):
        raise LaunchError(
            f"{text} is a link-local address, which needs a network card's name; give the host's "
            "name or another of its addresses (`ip address`)"
        )
    return address


def is_loopback(address: str) -> bool:
    """Return whether this address reaches only this machine itself."""
    return address.startswith("127.") or address == "::1"


def listen(host: str, port: int) -> socket.socket:
    """Return a listener at an address of this host, IPv4 or IPv6, or at all its addresses ("");
    port 0: a free one.

    Raises: LaunchError if the port is taken, or the address does not belong to this host.
    """
    every = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if every or ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=QUEUE, dualstack_ipv6=every
        )
    except OSError as error:
        where = wire.written((host or "any address", port))
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            remedy = (
                "is another job using it? choose another port with --master-port or MASTER_PORT"
            )
        else:
            remedy = (
                f"it has to be an address of this host, {platform.node()}: give "
                "--master-addr or MASTER_ADDR one"
            )
        raise LaunchError(f"cannot listen on {where} ({error.strerror}); {remedy}") from error


def connect_to_monitor(
    address: tuple[str, int],
    token: bytes,
    hello: dict[str, Any],
    name: str,
    limit: float,
    *,
    begun: bool = False,
) -> socket.socket:
    """Return a connection to the monitor, tried again until it listens.

    Args:   hello: describes this process to the job, in addition to its number and system. name:
            the same, for messages.
            begun: the monitor listened before this process began; if none is there, it is gone.
    Raises: HandshakeError if it refuses us; PeerLostError if it is gone; TimeoutError naming the
            address after `limit` seconds, or at once if this host has no route there.
    """
    deadline = time.monotonic() + limit
    who = {"pid": os.getpid(), "host": platform.node(), "system": this_system()}
    try:
        sock = call(
            lambda: _dial(address, deadline), token, hello | who, deadline, patient=not begun
        )
    except PeerLostError as error:
        if begun:
            raise PeerLostError(
                f"{name} has lost the job's monitor at {wire.written(address)} ({error})"
            ) from error
        no_way = isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_WAY
        when = "and this host has no route to it" if no_way else f"within {limit:g} s"
        raise TimeoutError(
            f"{name} could not reach the job's monitor at {wire.written(address)} {when} ({error})"
        ) from error
    try:
        welcome = wire.recv_frame(sock, max(deadline - time.monotonic(), 1.0))
        if welcome.get("kind") != "welcome":
            raise HandshakeError(
                f"the monitor at {wire.written(address)} refused {name}: {welcome.get('reason')}"
            )
    except (CommError, OSError):
        sock.close()
        raise
    return sock


def _dial(address: tuple[str, int], deadline: float) -> socket.socket:
    """Return a connection to a monitor, set up for control frames."""
    sock = socket.create_connection(address, timeout=max(deadline - time.monotonic(), 0.1))
    set_up(sock)
    return sock


def call(
    dial: Callable[[], socket.socket],
    token: bytes,
    hello: dict[str, Any],
    deadline: float,
    *,
    patient: bool = False,
) -> socket.socket:
    """Return a connection made by `dial()` that has passed the handshake, in blocking mode.

    It calls again while the listener's queue is full or the Acceptor has closed the connection in
    favour of others. With `patient` it also calls again while the address has no listener yet.
    Raises: HandshakeError if it is refused, TimeoutError at the deadline, PeerLostError if the peer
    is gone.
    """
    while True:
        sock = None
        try:
            sock = dial()
            wire.greet(sock, token, hello, max(deadline - time.monotonic(), 0.1))
            sock.settimeout(None)
            return sock
        except (HandshakeError, OSError) as error:
            if sock is not None:
                sock.close()
            hung_up = isinstance(error, HandshakeError) and error.__cause__ is not None
            waits = patient and not isinstance(error, CommError) and error.errno not in _NO_WAY
            busy = hung_up or waits or isinstance(error, BlockingIOError)
            if busy and time.monotonic() < deadline:
                time.sleep(0.02)
            elif isinstance(error, CommError) and not hung_up:
                raise
            else:
                raise PeerLostError(str(error)) from error


def set_up(sock: socket.socket) -> None:
    """Send without delay, and end the connection SILENCE seconds after the other host became
    silent.

    The kernels do it, whatever the processes do: while nothing is sent, each asks the other by
    empty packets (keep-alive); sent data must be acknowledged in time (TCP_USER_TIMEOUT). That also
    ends a connection whose other side does not read for that time: it reads each control frame.
    """
    keep_alive(sock)
    _set_tcp(sock, "TCP_USER_TIMEOUT", int(1000 * SILENCE))


def keep_alive(sock: socket.socket) -> None:
    """Set up a link that carries data, whose other side may leave bytes unread while it computes.

    The kernel asks only while everything is acknowledged; a waiting rank checks is_silent(), too.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set_tcp(sock, "TCP_NODELAY", 1)
    _set_tcp(sock, "TCP_KEEPIDLE", 1)
    _set_tcp(sock, "TCP_KEEPINTVL", 1)
    _set_tcp(sock, "TCP_KEEPCNT", int(SILENCE) - 1)


def _set_tcp(sock: socket.socket, name: str, value: int) -> None:
    """Set a TCP option, if the system has it."""
    if hasattr(socket, name):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def unanswered(sock: socket.socket) -> tuple[int, float]:
    """Return the number of unanswered probes or resends of the kernel, and the seconds since the
    last answer.

    (0, 0.0) if the system does not say. A peer that does not read still answers: its kernel does.
    """
    if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_INFO"):
        with contextlib.suppress(OSError):  # it is closed
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
            resent, asked, milliseconds = _INFO.unpack(told)
            return max(resent, asked), milliseconds / 1000
    return 0, 0.0


def is_silent(sock: socket.socket) -> bool:
    """Return whether nothing sent on this socket was acknowledged for SILENCE s, although it was
    sent again."""
    times, seconds = unanswered(sock)
    return times >= RESENT and seconds >= SILENCE


def end_connection(sock: socket.socket) -> None:
    """Wake the thread that reads or accepts on `sock`; that thread closes the socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
