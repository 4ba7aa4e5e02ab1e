"""A transport for reading: blocking sockets and one thread per peer, nothing else. Lessons 01 and
02 explain it.

    rank 0                                              rank 1
    start_send: header, payload -- one connection -->   read, a thread: header, payload --> mailbox
                                                        wait: mailbox --> the array of the receive

    connect   every rank listens and sends its address to the others; each rank dials the lower
              ranks and admits the higher ones
    frame     a header of 28 bytes (group, sequence, length of meta, length of payload), then meta,
              then the payload
    send      blocks until the kernel has taken every byte
    receive   a thread for each peer reads frames forever and puts them into the mailbox
              (mailbox.py matches them)

Two ranks that send to each other at the same time do not deadlock: neither send waits for the other
rank's program, because the reading thread there empties the connection. The price is memory and a
copy: every message is stored completely before the receive takes it. tcp.py keeps the same promises
without these costs; jobs use it.
"""

import queue
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from minidist.comm import wire
from minidist.comm.handle import Handle
from minidist.comm.health.acceptor import HANDSHAKE_LIMIT, is_silent, keep_alive, listen
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.wait_state import Waits
from minidist.comm.transport import Tag
from minidist.comm.transports.progress.full_mesh import hang_up, listening
from minidist.comm.transports.progress.mailbox import Mailbox, MailSend
from minidist.errors import CommError, LinkLostError, PeerLostError, TimeoutError

HEADER = struct.Struct("<QQIQ")  # group, sequence, bytes of meta, bytes of payload
REASON_LIMIT = 2.0  # seconds that the monitor has to say why a connection ended

# connections that have passed the handshake, with their ranks
Callers = queue.SimpleQueue[tuple[int, socket.socket]]


# --- connecting
# ------------------------------------------------------------------------------------------------------


def connect(
    link: MonitorClient, token: bytes, limit: float, *, host: str, node: int = 0
) -> "PlainTcp":
    """Connect this rank to all others: dial every lower rank, admit every higher one.

    Args:    host: the address to listen at: this host's own, as seen by the other ranks.
    Raises:  HandshakeError if a dialled rank is not of this job; OSError if it cannot be reached;
             TimeoutError naming the ranks that did not connect.
    """
    connections: dict[int, socket.socket] = {}
    callers: Callers = queue.SimpleQueue()
    try:
        with listen(host, 0) as listener, listening(listener):
            threading.Thread(target=accept, args=(listener, token, callers), daemon=True).start()
            addresses = [info["address"] for info in link.meet({"address": listener.getsockname()})]
            for rank in range(link.world_rank):
                connections[rank] = socket.create_connection(tuple(addresses[rank][:2]), limit)
                wire.greet(connections[rank], token, {"world_rank": link.world_rank}, limit)
            while len(connections) < len(addresses) - 1:
                rank, connections[rank] = callers.get(timeout=limit)
    except BaseException as error:
        hang_up(connections)
        if isinstance(error, queue.Empty | socket.timeout) and not isinstance(error, TimeoutError):  # noqa: UP041
            missing = sorted(set(range(link.world_size)) - {link.world_rank, *connections})
            raise TimeoutError(
                f"rank {link.world_rank} waited {limit:g} s for ranks {missing} to connect"
            ) from None
        raise
    return PlainTcp(link.world_rank, limit, connections)


def accept(listener: socket.socket, token: bytes, callers: Callers) -> None:
    """Answer callers forever (body of a thread): each in its own thread, so that a silent stranger
    delays no rank."""

    def answer(sock: socket.socket) -> None:
        try:
            callers.put((wire.admit(sock, token, HANDSHAKE_LIMIT)["world_rank"], sock))
        except (CommError, OSError):  # a stranger
            sock.close()

    with suppress(OSError):  # `listening` is over
        while True:
            threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()


# --- bytes
# -----------------------------------------------------------------------------------------------------------


def send_all(sock: socket.socket, header: bytes, payload: np.ndarray) -> None:
    """Send every byte of both; return when the kernel has taken them. Raises OSError if the
    connection breaks."""
    sock.sendall(header)
    sock.sendall(payload.view(np.uint8).data)


def receive(sock: socket.socket, nbytes: int) -> np.ndarray:
    """Return the next `nbytes` bytes, received in any number of pieces. Raises EOFError if the
    connection ends first."""
    data = np.empty(nbytes, np.uint8)
    missing = data.data
    while missing:
        with suppress(BlockingIOError, socket.timeout):  # noqa: UP041 - a socket's time limit is for sends
            count = sock.recv_into(missing)
            if count == 0:
                raise EOFError("its connection ended")
            missing = missing[count:]
    return data


# --- the transport
# ---------------------------------------------------------------------------------------------------


class PlainTcp(Mailbox):
    """A rank's mailbox, filled from its connections."""

    def __init__(
        self, world_rank: int, limit: float, connections: Mapping[int, socket.socket]
    ) -> None:
        self._connections = connections
        # a message is sent in one piece
        self._sending = {rank: threading.Lock() for rank in connections}
        self._sent: Counter[int] = Counter()
        self._taken: Counter[int] = Counter()
        self._closing = False
        waits = Waits(lambda: (dict(self._sent), dict(self._taken)), lambda: list(connections))
        super().__init__(world_rank, {}, len(connections) + 1, limit, unbuffered=False, waits=waits)
        self.name = "plain-tcp"
        for sock in connections.values():
            keep_alive(sock)
            sock.settimeout(limit)
        self._readers = [
            threading.Thread(
                target=self.read, args=peer, name=f"reader of rank {peer[0]}", daemon=True
            )
            for peer in connections.items()
        ]
        self._readers.append(
            threading.Thread(target=self.watch, name="watch of links", daemon=True)
        )
        for reader in self._readers:
            reader.start()

    def start_send(self, peer: int, tag: Tag, view: np.ndarray, meta: bytes = b"") -> Handle:
        """Send a whole message; the returned handle is complete."""
        send = MailSend(self, peer, tag, view, meta)
        sock = self._connections[peer]
        header = HEADER.pack(tag.group, tag.sequence, len(meta), view.nbytes)
        with self._sending[peer]:
            self._sent[peer] += 1
            try:
                sock.settimeout(self.limit)
                send_all(sock, header + meta, view)
            except OSError as error:
                self._shut(sock)  # no byte may follow half a message
                raise self._reason(peer, error) from error
        send.complete = True
        return send

    def read(self, peer: int, sock: socket.socket) -> None:
        """Put every message of a peer into the mailbox, until its connection ends (body of a
        thread)."""
        try:
            while True:
                group, sequence, meta_bytes, nbytes = HEADER.unpack(receive(sock, HEADER.size).data)
                meta = receive(sock, meta_bytes).tobytes()
                message = MailSend(self, peer, Tag(group, sequence), receive(sock, nbytes), meta)
                message.complete = True
                self.deliver(peer, message)
                self._taken[peer] += 1  # last: until then the message counts as in flight
        except (EOFError, OSError) as error:
            self.ended(peer, str(error))

    def watch(self) -> None:
        """End connections that lose packets (body of a thread); their readers then report it."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._closing, 1.0):
                for peer in [peer for peer, sock in self._connections.items() if is_silent(sock)]:
                    self.waits.cut(peer)  # the peer may wait for a message of this rank
                    self._shut(self._connections[peer], socket.SHUT_RDWR)

    def ended(self, peer: int, why: str) -> None:
        """Lose a peer whose connection ended. The monitor usually gives the reason in a moment;
        else waits raise this `why`."""
        deadline = time.monotonic() + REASON_LIMIT
        left = False
        while not (told := self._told(peer)) and time.monotonic() < deadline:
            left = left or self.waits.left(peer)
        if left and not told:
            self.lose(
                PeerLostError(f"rank {self.world_rank} lost rank {peer}: it has left the job", peer)
            )
        elif not told:
            self.lose(
                LinkLostError(
                    f"rank {self.world_rank} lost rank {peer}: {why}; the link between rank "
                    f"{self.world_rank} and rank {peer} is lost: look at the network between them",
                    world_rank=peer,
                )
            )
        # ends a send that blocks: nobody takes its bytes any more
        self._shut(self._connections[peer])

    def _told(self, peer: int) -> bool:
        """Return whether the reason for the end of a peer's connection arrives within 0.1 s."""
        with self._changed:
            return bool(
                self._changed.wait_for(
                    lambda: self._closing or self.waits.error or peer in self.lost, 0.1
                )
            )

    def _interrupt(self, error: CommError) -> None:
        super()._interrupt(error)
        for sock in self._connections.values():
            self._shut(sock)  # ends a send that blocks

    def close(self) -> None:
        """End the connections and their reading threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for sock in self._connections.values():
            self._shut(sock, socket.SHUT_RDWR)
        for reader in self._readers:
            reader.join()
        hang_up(self._connections)
        super().close()

    def _shut(self, sock: socket.socket, how: int = socket.SHUT_WR) -> None:
        with suppress(OSError):  # the other side has gone
            sock.shutdown(how)

    def _reason(self, peer: int, error: OSError) -> Exception:
        """Return the error of a failed send: TimeoutError, or the loss of the peer with the
        monitor's reason."""
        if isinstance(error, socket.timeout):  # noqa: UP041
            return TimeoutError(
                f"rank {self.world_rank} waited {self.limit:g} s for rank {peer} to take a message"
            )
        with self.waits.lasting(f"rank {peer} to take a message", lambda: (peer,)):
            self.ended(peer, f"its connection broke ({error})")
        reason = self.lost.get(peer) or self.waits.error
        assert reason is not None
        return (
            self.waits.located(reason, self.world_rank)
            if isinstance(reason, PeerLostError)
            else reason
        )
