"""A transport within one process: each rank is a thread with a mailbox.

Two kinds of link. "threads" is buffered: a send copies its bytes and is complete at once.
"threads-unbuffered" is a rendezvous: a send is complete only when the receiver has taken the bytes,
straight from the sender's array. The second kind turns a hidden assumption ("my neighbour will
receive some time") into a deadlock that a test can see.

Path of a message: the sender puts it into the receiver's mailbox. There it is matched with the
oldest receive posted for the same (peer, tag); either may arrive first. The next thread of the
receiving rank that waits, for this or for another message, carries out the matched pair. Copies:
one on "threads-unbuffered", two on "threads".
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping

import numpy as np

from minidist.comm.handle import Handle
from minidist.comm.health.wait_state import QUIET, Waits
from minidist.comm.transport import Accept, Likely, Reduce, Tag, Transport
from minidist.errors import CommError, PeerLostError, TimeoutError


class MailTransfer(Handle):
    """A send or a receive of one rank; `complete` changes under that rank's mailbox lock only."""

    def __init__(self, home: "Mailbox", peer: int, tag: Tag) -> None:
        self.home = home
        self.peer = peer
        self.tag = tag
        self.complete = self.matched = False  # matched: the other side has arrived, too
        self.error: BaseException | None = None

    def peers(self) -> tuple[int, ...]:
        """Return the rank for which it waits, if any."""
        return () if self.complete or self.matched else (self.peer,)

    def wait(self) -> None:
        self.home.wait_for(self)

    def done(self) -> bool:
        return self.complete or self.home.waits.error is not None


class MailSend(MailTransfer):
    def __init__(self, home: "Mailbox", peer: int, tag: Tag, view: np.ndarray, meta: bytes) -> None:
        super().__init__(home, peer, tag)
        self.view = view
        self.nbytes = view.nbytes
        self.meta = meta

    def __str__(self) -> str:
        return f"rank {self.peer} to take {self.nbytes} bytes"


class MailReceive(MailTransfer):
    def __init__(
        self, home: "Mailbox", peer: int, tag: Tag, accept: Accept, reduce: Reduce | None
    ) -> None:
        super().__init__(home, peer, tag)
        self.accept = accept
        self.reduce = reduce

    def __str__(self) -> str:
        return f"a message from rank {self.peer}"

    def take(self, send: MailSend) -> None:
        """Move the payload to the array that `accept` returns; an error of `accept` or `reduce`
        belongs to this handle.

        Both arrays are released here: the thread that runs this may continue to wait for another
        message.
        """
        try:
            target = self.accept(send.meta, send.view.nbytes)
            piece = send.view.view(target.dtype)
            if self.reduce is None:
                target[...] = piece
            else:
                self.reduce(target, 0, piece)
        except Exception as error:  # raised again by wait()
            self.error = error
        finally:
            del self.accept, self.reduce, send.view


class Mailbox(Transport):
    """A rank's mailbox; `peers` are the mailboxes of all ranks, including this one."""

    def __init__(
        self,
        world_rank: int,
        peers: Mapping[int, "Mailbox"],
        world_size: int,
        limit: float,
        unbuffered: bool,
        waits: Waits | None = None,
    ) -> None:
        self.name = "threads-unbuffered" if unbuffered else "threads"
        self.world_rank = world_rank
        self.world_size = world_size
        self.limit = limit
        self.lost: dict[int, PeerLostError] = {}
        self.waits = Waits() if waits is None else waits
        self.waits.ends.append(self._interrupt)
        self._peers = peers
        self._unbuffered = unbuffered
        self._changed = threading.Condition(threading.Lock())
        self._arrived: defaultdict[tuple[int, Tag], deque[MailSend]] = defaultdict(deque)
        self._posted: defaultdict[tuple[int, Tag], deque[MailReceive]] = defaultdict(deque)
        self._matched: deque[tuple[MailReceive, MailSend]] = deque()

    def start_send(self, peer: int, tag: Tag, view: np.ndarray, meta: bytes = b"") -> Handle:
        send = MailSend(self, peer, tag, view if self._unbuffered else view.copy(), meta)
        send.complete = not self._unbuffered
        self._peers[peer].deliver(self.world_rank, send)
        return send

    def start_recv(
        self,
        peer: int,
        tag: Tag,
        accept: Accept,
        reduce: Reduce | None = None,
        likely: Likely | None = None,
    ) -> Handle:
        recv = MailReceive(self, peer, tag, accept, reduce)
        with self._changed:
            self._posted[peer, tag].append(recv)
            self._match((peer, tag))
        return recv

    def loopback(self) -> "Mailbox":
        return loopback(self.world_rank, self.limit, self.waits)

    def _interrupt(self, error: CommError) -> None:
        with self._changed:
            self._changed.notify_all()

    def lose(self, error: PeerLostError) -> None:
        assert error.world_rank is not None
        with self._changed:
            self.lost[error.world_rank] = error
            self._changed.notify_all()

    def close(self) -> None:
        self.waits.ends[:] = [end for end in self.waits.ends if end != self._interrupt]
        self._arrived.clear()
        self._posted.clear()

    def wait_for(self, handle: MailTransfer) -> None:
        """Carry out matched pairs until `handle` is complete; sleep if there are none. Report a
        long wait."""
        start = time.monotonic()
        limit = self.limit
        done = self._carry_out(handle, start + min(QUIET, limit))
        if not done:
            with self.waits.lasting(
                str(handle), handle.peers, incoming=isinstance(handle, MailReceive)
            ):
                done = self._carry_out(handle, start + limit)
                state = self.waits.state()
        if not done:
            raise TimeoutError(
                f"rank {self.world_rank} waited {self.limit:g} s for {handle} (group "
                f"{handle.tag.group:x}); did rank {handle.peer} make the matching call?"
                f"{self.waits.described(state)}"
            )
        if handle.error is not None:
            raise handle.error

    def _carry_out(self, handle: MailTransfer, deadline: float) -> bool:
        """Carry out pairs until the deadline; return whether `handle` is complete."""
        while (pair := self._next_pair(handle, deadline)) is not None:
            recv, send = pair
            recv.take(send)
            self._finish(recv)
            if not send.complete:
                send.home._finish(send)
        return handle.complete

    def _next_pair(
        self, handle: MailTransfer, deadline: float
    ) -> tuple[MailReceive, MailSend] | None:
        """Return the next matched pair to carry out, or None if `handle` is complete or the
        deadline is over."""
        with self._changed:
            while not handle.complete:
                if (failure := self.waits.failure(self.world_rank)) is not None:
                    raise failure
                if self._matched:
                    return self._matched.popleft()
                if handle.peer in self.lost:
                    raise self.waits.located(self.lost[handle.peer], self.world_rank)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
        return None

    def deliver(self, source: int, send: MailSend) -> None:
        """Take a message from rank `source`. Called by the sending rank's thread."""
        key = (source, send.tag)
        with self._changed:
            self._arrived[key].append(send)
            if self._match(key):
                self._changed.notify_all()

    def _match(self, key: tuple[int, Tag]) -> bool:
        """Pair the oldest message with the oldest receive of the same peer and tag, if both exist;
        return whether they do."""
        arrived = self._arrived[key]
        posted = self._posted[key]
        if not (arrived and posted):
            return False
        recv = posted.popleft()
        send = arrived.popleft()
        if not arrived:  # a tag without messages takes no memory
            del self._arrived[key]
        if not posted:
            del self._posted[key]
        recv.matched = send.matched = True
        self._matched.append((recv, send))
        return True

    def _finish(self, transfer: MailTransfer) -> None:
        with self._changed:
            transfer.complete = True
            self._changed.notify_all()


def connect(size: int, limit: float, unbuffered: bool) -> list[Mailbox]:
    """Return the mailboxes of `size` ranks, connected to each other."""
    peers: dict[int, Mailbox] = {}
    for rank in range(size):
        peers[rank] = Mailbox(rank, peers, size, limit, unbuffered)
    return list(peers.values())


def loopback(world_rank: int, limit: float, waits: Waits | None = None) -> Mailbox:
    """Return a rank's buffered link to itself, which the other transports lack. `waits`: of its
    transport."""
    peers: dict[int, Mailbox] = {}
    peers[world_rank] = Mailbox(world_rank, peers, 1, limit, unbuffered=False, waits=waits)
    return peers[world_rank]
