"""A connection between every two ranks: the higher rank dials, the lower rank admits.

    rank 0    listens ............ admits 1, 2, 3
    rank 1    dials 0,             admits 2, 3
    rank 2    dials 0, 1,          admits 3
    rank 3    dials 0, 1, 2

Every rank listens before any address is sent, so no dial is refused. A rank admits callers while it
dials, so no ranks wait for each other in a circle. Both ranks of a connection prove that they know
the job's token (wire.py). Each caller is answered in a thread of its own: a stranger that sends
nothing, or wrong data, delays no rank, nor do many strangers (acceptor.py).
"""

import builtins
import platform
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from minidist.comm import wire
from minidist.comm.health.acceptor import QUEUE, SILENCE, Acceptor, call, keep_alive
from minidist.errors import CommError, LinkLostError, PeerLostError, TimeoutError

News = queue.SimpleQueue["tuple[int, socket.socket] | OSError"]
"""A rank that has connected and its connection, or the error why no other can be taken."""

DIAL_LIMIT = 2 * SILENCE  # seconds in which the host of a listening rank must answer


def connect(
    world_rank: int,
    ranks: Iterable[int],
    listener: socket.socket,
    dial: Callable[[int], socket.socket],
    token: bytes,
    limit: float,
) -> dict[int, socket.socket]:
    """Connect to those of `ranks` that are not this one: `dial(rank)` the lower ones, admit the
    higher ones at `listener`.

    Returns: the connections by world rank, in blocking mode without timeout.
    Raises:  PeerLostError naming a rank that cannot be reached; HandshakeError if a rank dialled is
             not of this job, or ended the handshake; TimeoutError naming the ranks that did not
             connect.
    """
    deadline = time.monotonic() + limit
    connections = dict[int, socket.socket]()
    missing = {rank for rank in ranks if rank > world_rank}
    news: News = queue.SimpleQueue()
    if missing:
        threading.Thread(
            target=_admit, args=(listener, token, set(missing), news), daemon=True
        ).start()
    try:
        for rank in sorted(rank for rank in ranks if rank < world_rank):
            try:
                connections[rank] = call(
                    partial(dial, rank), token, {"world_rank": world_rank}, deadline
                )
            except CommError as error:
                error.args = (f"rank {world_rank} cannot connect to rank {rank}: {error}",)
                if isinstance(error, PeerLostError):
                    error.world_rank = rank
                raise
        while missing:
            try:
                came = news.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(
                    f"rank {world_rank} waited {limit:g} s for ranks {sorted(missing)} to connect"
                ) from None
            if isinstance(came, OSError):
                raise came
            rank, connections[rank] = came
            missing.remove(rank)
    except BaseException:
        hang_up(connections)
        raise
    return connections


def hang_up(connections: Mapping[int, socket.socket]) -> None:
    for sock in connections.values():
        sock.close()


def _admit(listener: socket.socket, token: bytes, expected: set[int], news: "News") -> None:
    """Answer callers until all expected ranks have connected, or the listener is closed; put them,
    or an error, into `news`."""
    lock = threading.Lock()

    def enter(sock: socket.socket, hello: dict[str, Any]) -> None:
        rank = hello.get("world_rank")
        with lock:
            if rank not in expected:
                raise CommError(
                    f"a connecting process says that it is rank {rank!r}; expected are "
                    f"{sorted(expected)}"
                )
            expected.remove(rank)
        sock.settimeout(None)
        news.put((rank, sock))

    def run(target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, name="answering a caller", daemon=True).start()

    acceptor = Acceptor(
        listener, token, enter, len(expected), run, "refused a connection", fail=news.put
    )
    while expected and listener.fileno() >= 0:
        acceptor.accept()


# --- listening and dialling
# ------------------------------------------------------------------------------------------


def listen_unix() -> socket.socket:
    """Return a listener for processes of this host: at a name without a file on Linux, elsewhere at
    a temporary file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(
        ""
        if platform.system() == "Linux"
        else str(Path(tempfile.mkdtemp(prefix="minidist-")) / "listener")
    )
    listener.listen(QUEUE)
    return listener


def dial(sock: socket.socket, address: Any, limit: float) -> socket.socket:
    """Return the socket, connected to the listener at `address`.

    Raises: LinkLostError if that host does not answer for DIAL_LIMIT s: its kernel answers at once,
            whatever the listening rank does; OSError as the system reports it.
    """
    try:
        keep_alive(sock)
        sock.settimeout(min(limit, DIAL_LIMIT))
        sock.connect(address)
    except builtins.TimeoutError as error:
        sock.close()
        raise LinkLostError(
            f"{wire.written(address)} did not answer for {min(limit, DIAL_LIMIT):g} s: packets "
            "to it are lost; is there a firewall between the hosts?"
        ) from error
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def listening(*listeners: socket.socket) -> Iterator[None]:
    """Close the listeners after the block, also after an error."""
    try:
        yield
    finally:
        for listener in listeners:
            address = listener.getsockname()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept(); close alone would not
            listener.close()
            # listen_unix made a file, in a folder of its own
            if isinstance(address, str) and address:
                Path(address).unlink()
                Path(address).parent.rmdir()
