"""A connection between every two ranks: which side dials, and which caller is admitted.

    rank 0    listens ............ admits 1, 2, 3
    rank 1    dials 0, then        admits 2, 3
    rank 2    dials 0, 1, then     admits 3
    rank 3    dials 0, 1, 2

Every rank listens before any address is told, so no dial is refused. A rank waits only for lower ones to answer, so no
ranks wait in a circle. Both ranks of a connection prove that they know the job's token (wire.py). Each caller is
answered in a thread of its own: a stranger that sends nothing, or nonsense, delays no rank.
"""

import logging
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minidist.comm import wire
from minidist.errors import CommError, PeerLostError, TimeoutError

_CALLERS = 64                   # callers that are answered at a time
_ANSWER = 10.0                  # seconds that a caller has to prove that it belongs to the job

log = logging.getLogger("minidist.comm")


def connect(world_rank: int, ranks: Iterable[int], listener: socket.socket, dial: Callable[[int], socket.socket],
            token: bytes, limit: float) -> dict[int, socket.socket]:
    """Connect to those of `ranks` that are not this one: `dial(rank)` the lower ones, admit the higher at `listener`.

    Returns: the connections by world rank, in blocking mode without timeout.
    Raises:  PeerLostError naming a rank that cannot be reached; HandshakeError if a rank dialled is not of this job, or
             ended the handshake; TimeoutError naming the ranks that did not come.
    """
    deadline, connections = time.monotonic() + limit, dict[int, socket.socket]()
    try:
        for rank in sorted(rank for rank in ranks if rank < world_rank):
            try:
                connections[rank] = dial(rank)
                wire.greet(connections[rank], token, {"world_rank": world_rank}, max(0.0, deadline - time.monotonic()))
            except CommError as error:
                raise type(error)(f"rank {world_rank} cannot connect to rank {rank}: {error}") from error
            except OSError as error:
                raise PeerLostError(f"rank {world_rank} cannot connect to rank {rank}: {error}", rank) from error
            connections[rank].settimeout(None)
        missing = {rank for rank in ranks if rank > world_rank}
        news: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        if missing:
            threading.Thread(target=_admit, args=(listener, token, set(missing), news), daemon=True).start()
        while missing:
            try:
                rank, connections[rank] = news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"rank {world_rank} waited {limit:g} s for ranks {sorted(missing)} to connect"
                                   ) from None
            missing.remove(rank)
    except BaseException:
        hang_up(connections)
        raise
    return connections


def hang_up(connections: Mapping[int, socket.socket]) -> None:
    for sock in connections.values():
        sock.close()


def _admit(listener: socket.socket, token: bytes, expected: set[int],
           news: "queue.SimpleQueue[tuple[int, socket.socket]]") -> None:
    """Answer callers until all expected ranks are in the news, or the listener is shut down."""
    lock, seats = threading.Lock(), threading.BoundedSemaphore(_CALLERS)

    def answer(sock: socket.socket) -> None:
        try:
            rank = wire.admit(sock, token, _ANSWER).get("world_rank")
            with lock:
                if rank not in expected:
                    raise CommError(f"a caller said it is rank {rank!r}; expected are {sorted(expected)}")
                expected.remove(rank)
            sock.settimeout(None)
            news.put((rank, sock))
        except (CommError, OSError) as error:
            log.warning("refused a connection: %s", error)
            sock.close()
        finally:
            seats.release()

    while expected:
        seats.acquire()
        try:
            sock, _ = listener.accept()
        except OSError:  # shut down
            return
        threading.Thread(target=answer, args=(sock,), name="answering a caller", daemon=True).start()


# --- listening and dialling ------------------------------------------------------------------------------------------

def listen_unix() -> socket.socket:
    """A listener for processes of this host: at a name without a file on Linux, elsewhere at a temporary file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("" if sys.platform == "linux" else str(Path(tempfile.mkdtemp(prefix="minidist-")) / "listener"))
    listener.listen(128)
    return listener


def dial(sock: socket.socket, address: Any, limit: float) -> socket.socket:
    """The socket, connected to the listener at `address`."""
    try:
        sock.settimeout(limit)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def listening(*listeners: socket.socket) -> Iterator[None]:
    """Afterwards they are closed, whatever happened."""
    try:
        yield
    finally:
        for listener in listeners:
            address = listener.getsockname()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept(); close alone would not
            listener.close()
            if isinstance(address, str) and address:  # listen_unix made a file, in a folder of its own
                Path(address).unlink()
                Path(address).parent.rmdir()
