"""A connection between every two ranks: who dials whom, and who is let in.

    rank 0    listens ............ admits 1, 2, 3
    rank 1    dials 0, then        admits 2, 3
    rank 2    dials 0, 1, then     admits 3
    rank 3    dials 0, 1, 2

Every rank listens before any address is told, so no dial is refused; a rank waits only for lower ones to answer, so
nobody waits in a circle. Each connection goes through wire's mutual handshake on the job's token. Each caller is
answered in a thread of its own: a stranger who says nothing, or nonsense, keeps no rank waiting.
"""

import logging
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from minidist.comm import wire
from minidist.errors import CommError, TimeoutError

_CALLERS = 64                   # strangers and ranks that are answered at a time
_ANSWER = 10.0                  # seconds that a caller has to prove who it is

log = logging.getLogger("minidist.comm")


def join(world_rank: int, world_size: int, token: bytes, listener: socket.socket, dial: Callable[[int], socket.socket],
         limit: float) -> dict[int, socket.socket]:
    """Connect to every other rank: `dial(rank)` the lower ones, admit the higher ones at `listener`, then close it.

    Returns: the connections by world rank, in blocking mode without timeout.
    Raises:  HandshakeError if a rank dialled is not of this job; TimeoutError naming the ranks that did not come.
    """
    deadline = time.monotonic() + limit
    links: dict[int, socket.socket] = {}
    try:
        for rank in range(world_rank):
            links[rank] = _dial(rank, world_rank, token, dial, deadline)
        callers = _Doorkeeper(listener, token, set(range(world_rank + 1, world_size)))
        for _ in range(world_rank + 1, world_size):
            missing = sorted(set(range(world_size)) - set(links) - {world_rank})
            rank, sock = callers.next(max(0.0, deadline - time.monotonic()),
                                      f"rank {world_rank} waited {limit:g} s for a connection from ranks {missing}")
            links[rank] = sock
    except CommError:
        for sock in links.values():
            sock.close()
        raise
    finally:
        _end(listener)
    return links


def _dial(rank: int, world_rank: int, token: bytes, dial: Callable[[int], socket.socket],
          deadline: float) -> socket.socket:
    try:
        sock = dial(rank)
    except OSError as error:
        raise CommError(f"rank {world_rank} cannot connect to rank {rank}: {error}") from error
    try:
        wire.greet(sock, token, {"world_rank": world_rank}, max(0.0, deadline - time.monotonic()))
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


class _Doorkeeper:
    """Answers who calls at a listener; those who prove that they are an expected rank come out of next()."""

    def __init__(self, listener: socket.socket, token: bytes, expected: set[int]) -> None:
        self.listener, self.token, self.expected = listener, token, expected
        self.admitted: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self.lock, self.seats = threading.Lock(), threading.BoundedSemaphore(_CALLERS)
        if expected:
            threading.Thread(target=self.open, name="mesh doorkeeper", daemon=True).start()

    def next(self, seconds: float, late: str) -> tuple[int, socket.socket]:
        """The next rank admitted, and its connection. Raises TimeoutError saying `late` after `seconds`."""
        try:
            return self.admitted.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(late) from None

    def open(self) -> None:
        """Take calls until the listener is shut down or everybody is here."""
        while self.expected:
            self.seats.acquire()
            try:
                sock, _ = self.listener.accept()
            except OSError:  # shut down
                return
            threading.Thread(target=self.answer, args=(sock,), name="mesh admission", daemon=True).start()

    def answer(self, sock: socket.socket) -> None:
        """Admit one caller, or log why not."""
        try:
            rank = wire.admit(sock, self.token, _ANSWER).get("world_rank")
            with self.lock:
                if rank not in self.expected:
                    raise CommError(f"a caller said it is rank {rank!r}; expected are {sorted(self.expected)}")
                self.expected.remove(rank)
            sock.settimeout(None)
            self.admitted.put((rank, sock))
        except (CommError, OSError) as error:
            log.warning("refused a connection: %s", error)
            sock.close()
        finally:
            self.seats.release()


# --- listening and dialling ------------------------------------------------------------------------------------------

def listen_tcp(host: str, buffer_bytes: int) -> socket.socket:
    """A listener at a free port of `host`, whose connections have socket buffers of `buffer_bytes`."""
    listener = _tcp_socket(host, buffer_bytes)
    listener.bind((host, 0))
    listener.listen(128)
    return listener


def dial_tcp(host: str, port: int, buffer_bytes: int, limit: float) -> socket.socket:
    """A connection to `host`:`port` whose socket buffers have `buffer_bytes`."""
    return _connect(_tcp_socket(host, buffer_bytes), (host, port), limit)


def _tcp_socket(host: str, buffer_bytes: int) -> socket.socket:
    """Buffers are sized before it connects or listens (what it accepts inherits them): TCP fixes its window then."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    return sock


def listen_unix() -> socket.socket:
    """A listener for processes of this host: at a name without a file on Linux, elsewhere at a temporary file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("" if sys.platform == "linux" else str(Path(tempfile.mkdtemp(prefix="minidist-")) / "listener"))
    listener.listen(128)
    return listener


def dial_unix(address: str | bytes, limit: float) -> socket.socket:
    """A connection to the listener of another process of this host."""
    return _connect(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address, limit)


def _connect(sock: socket.socket, address: Any, limit: float) -> socket.socket:
    try:
        sock.settimeout(limit)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _end(listener: socket.socket) -> None:
    address = listener.getsockname()
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the doorkeeper; close alone would not
    listener.close()
    if isinstance(address, str) and address:  # listen_unix made a file, in a folder of its own
        Path(address).unlink()
        Path(address).parent.rmdir()
