"""Messages over byte streams: the common part of tcp, shm and mpi.

A ByteLink moves bytes to and from one peer, in order, and never blocks. Here messages become frames
on it, and frames are matched with receives:

    start_send --> outgoing --+                                    +--> posted[tag]      a receive waits: to its array,
                              |  header|payload|header|payload ... |                     or reduced there in pieces
                              +--------------> link ---------------+
                                                                   +--> unexpected[tag]  no receive yet: buffered

start_send writes at once what the link takes, if no earlier message is queued. The rest waits in
outgoing; later passes write it (_push).

From a receive's wait() to its end: Engine.drive -> _lead (engine.py) -> _pass -> _pull, then

    a short message that is complete,    _take_whole -> the link's whole -> Receive.take (message.py)
    with the header its receive expects
    any other message                    _next_frame -> Frame.take (message.py) -> the link's
                                         read_into, or its piece and then the receive's reduce ->
                                         _settle

and for both _end -> Engine.finish.

A header is read only while a receive from that peer is posted. So a message that arrives
early stays in the link (in the kernel's buffers, in the ring), and a sender that is far ahead must
wait. A message is buffered only if it precedes a message that has a receive, and only within
UNEXPECTED_LIMIT.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress

import numpy as np

from minidist.comm.handle import Finished, Handle
from minidist.comm.health.wait_state import Waits
from minidist.comm.transport import Accept, Likely, Reduce, Tag
from minidist.comm.transports.progress import frames
from minidist.comm.transports.progress.engine import LEFT, Engine
from minidist.comm.transports.progress.message import ByteLink, Frame, Peer, Peers, Receive, Send
from minidist.errors import CommError, LinkLostError, PeerLostError

UNEXPECTED_LIMIT = 256 << 20  # maximum bytes of buffered messages from one peer
_NOTHING = np.empty(0, np.uint8)
_SENT = Finished()
_LAST_WORDS = 0.5  # seconds to wait for a lost peer's messages, unless its link ends first


class StreamTransport(Engine):
    """Messages to and from every other rank, over one ByteLink each."""

    def __init__(
        self, name: str, world_rank: int, limit: float, links: Mapping[int, ByteLink], spins: int
    ) -> None:
        super().__init__(name, world_rank, len(links) + 1, limit, spins)
        self.waits = Waits(self.counts, self.reads, self.resent)
        # the leader raises the error, and wakes the followers
        self.waits.ends.append(lambda error: self._wake())
        self._peers = Peers(world_rank, links)
        self._active: dict[int, Peer] = {}  # peers with a transfer that is new or unfinished

    # --- starting
    # ----------------------------------------------------------------------------------------------------

    def start_send(self, peer: int, tag: Tag, view: np.ndarray, meta: bytes = b"") -> Handle:
        to = self._peers[peer]
        header = frames.pack_header(frames.MESSAGE, tag, meta, view.nbytes, to.link.align)
        taken = 0
        with self.lock:
            to.sent += 1
            if not to.outgoing and to.deaf is None:  # no message is queued before it
                try:
                    taken = to.link.write(header, view.view(np.uint8))
                except OSError as error:
                    self._deafen(to, f"its connection broke ({error})")
            if taken == len(header) + view.nbytes:
                return _SENT
            send = Send(self, peer, tag, view, header)
            send.sent = taken
            self.unfinished += 1
            to.outgoing.append(send)
            while to.outgoing and self._push(to):
                pass
            if to.outgoing:
                self._attend(to)
        return send

    def start_recv(
        self,
        peer: int,
        tag: Tag,
        accept: Accept,
        reduce: Reduce | None = None,
        likely: Likely | None = None,
    ) -> Handle:
        source = self._peers[peer]
        receive = Receive(self, peer, tag, accept, reduce)
        if likely is not None and likely[1] <= source.link.short:
            receive.likely = likely
            receive.header = frames.pack_header(
                frames.MESSAGE, tag, likely[0], likely[1], source.link.align
            )
            receive.length = len(receive.header) + likely[1]
        with self.lock:
            self.unfinished += 1
            early = source.unexpected.take(tag) if source.unexpected else None
            if early is not None and (early.settled or source.mute is None):
                source.unexpected_bytes -= early.header.nbytes
                early.receive = receive
                if not early.settled:  # the leader delivers it, unless the peer is lost before
                    source.receives.add(receive)
            elif source.mute is not None:
                self.finish(receive, self._lost(source, source.mute))
            else:
                source.post(receive)
            delivers = early is not None and early.settled
            if not receive.finished:
                self._attend(source)
        if early is not None and delivers:
            self._deliver(source, early, receive)
        if peer in self.lost and not receive.finished:
            self._await_last_words(source)
        return receive

    def _attend(self, peer: Peer) -> None:
        """Make the leader, or the helper, serve this peer, because a new transfer could not finish
        at once. Under the lock."""
        self._active[peer.rank] = peer
        self._news = True
        if not self._helper_awake:
            self._call_helper()
        if self._asleep:
            self._wake()

    def counts(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Return the number of messages begun to each rank, and taken completely from each; the
        difference is in flight."""
        peers = self._peers.values()
        return (
            {peer.rank: peer.sent for peer in peers if peer.sent},
            {peer.rank: peer.taken for peer in peers if peer.taken},
        )

    def reads(self) -> list[int]:
        """Return the ranks whose arriving messages are read while this rank waits for anything."""
        return [peer.rank for peer in self._peers.values() if peer.reading]

    def resent(self) -> list[int]:
        """Return the ranks to which packets are sent again and again without an acknowledgement."""
        return []

    # --- moving
    # ------------------------------------------------------------------------------------------------------

    def _pass(self) -> bool:
        moved = False
        for peer in list(self._active.values()):
            if peer.outgoing:
                with self.lock:
                    moved |= bool(peer.outgoing) and self._push(peer)
            if peer.receives or peer.frame is not None:
                moved |= self._pull(peer)
        return moved

    def _push(self, peer: Peer) -> bool:
        """Write the first message of the queue as far as the link takes it; return whether it took
        any. Under the lock."""
        send = peer.outgoing[0]
        begun = send.sent - len(send.prefix)
        try:
            if peer.deaf is not None:
                raise OSError(peer.deaf)
            taken = peer.link.write(send.prefix[send.sent :], send.payload[max(0, begun) :])
        except OSError as error:
            self._deafen(peer, f"its connection broke ({error})")
            return True
        send.sent += taken
        if send.sent == send.nbytes:
            peer.outgoing.popleft()
            self.finish(send)
        return taken > 0

    def _pull(self, peer: Peer) -> bool:
        """Read the available part of the message at the front of the link; return whether there was
        any. Called only by the leader."""
        try:
            frame = peer.frame
            fresh = frame is None
            if frame is None:
                receive = peer.next
                if peer.link.look(0 if receive is None else receive.length) < frames.HEADER_BYTES:
                    return False
                if receive is not None and self._take_whole(peer, receive):
                    return True
                frame = self._next_frame(peer)
                if frame is None:
                    return False
            moved = frame.take(peer.link)
            if frame.complete:
                peer.link.skip(-frame.header.nbytes % peer.link.align)
        except (EOFError, OSError) as error:
            self._end_of(peer, error)
        except CommError as error:
            self._lose(peer, f"its data cannot be used: {error}")
        else:
            self._settle(peer, frame)
            return fresh or moved > 0
        return True

    def _take_whole(self, peer: Peer, receive: Receive) -> bool:
        """Take the message at the front of the link, if it is whole and the likely one of the
        receive, the peer's first; return whether it was. Called only by the leader."""
        payload = peer.link.whole(receive.header, receive.likely[1])
        if payload is None:
            return False
        error = receive.take(payload)
        with self.lock:
            peer.taken += 1
            if peer.next is not receive:  # another thread has queued it since
                peer.posted.take(receive.tag)
            self._end(peer, receive, error)
        return True

    def _next_frame(self, peer: Peer) -> Frame | None:
        """Return the frame whose header is at the front of the link, matched; None if the header is
        not complete."""
        start = peer.link.peek(frames.HEADER_BYTES)
        data = start and peer.link.peek(frames.header_length(start, peer.link.align))
        if not data:
            return None
        header = frames.parse_header(data)
        peer.link.skip(len(data))
        if header.kind == frames.GOODBYE:
            raise EOFError(LEFT)
        peer.frame = frame = Frame(header)
        with self.lock:
            peer.queue_next()
            receive = peer.posted.take(header.tag)
            if receive is None:
                self._keep(peer, frame)
        if receive is not None:
            frame.open(receive)
        return frame

    def _keep(self, peer: Peer, frame: Frame) -> None:
        """Buffer a message without a receive, because a later message has one. Under the lock."""
        tag = frame.header.tag
        nbytes = frame.header.nbytes
        if peer.unexpected_bytes + nbytes > UNEXPECTED_LIMIT:
            raise CommError(
                f"a message of {nbytes} bytes (tag {tag.group:x}/{tag.sequence}) that no receive "
                f"asks for arrived before an awaited one; {peer.unexpected_bytes} bytes are "
                f"buffered already, at most {UNEXPECTED_LIMIT} are allowed: receive in the order "
                "in which the peer "
                "sends"
            )
        peer.unexpected_bytes += nbytes
        peer.unexpected[tag].append(frame)
        frame.keep()

    def _settle(self, peer: Peer, frame: Frame) -> None:
        """Finish the receive of a frame that is complete or has failed."""
        if not (frame.complete or frame.failure):
            return
        with self.lock:
            if frame.complete:
                peer.frame = None
                frame.settled = True
                peer.taken += 1
            receive = frame.receive
            if receive is not None and frame.buffer is None:
                self._end(peer, receive, frame.failure)
        if receive is not None and frame.buffer is not None:
            self._deliver(peer, frame, receive)

    def _deliver(self, peer: Peer, frame: Frame, receive: Receive) -> None:
        """Move a buffered message to its receive's array."""
        frame.open(receive)
        with self.lock:
            self._end(peer, receive, frame.failure)

    def _end(self, peer: Peer, receive: Receive, error: Exception | None) -> None:
        """Finish a receive. Under the lock."""
        if not receive.finished:
            peer.receives.discard(receive)
            if peer.next is receive:  # not where a buffered message ends another thread's receive
                peer.next = None
            self.finish(receive, error)

    # --- losing a peer
    # -----------------------------------------------------------------------------------------------

    def _lost(
        self, peer: Peer, why: str, kind: type[PeerLostError] = LinkLostError
    ) -> PeerLostError:
        if why == LEFT or peer.rank in self.lost:
            kind = PeerLostError
        return kind(f"rank {self.world_rank} lost rank {peer.rank}: {why}", world_rank=peer.rank)

    def _deafen(self, peer: Peer, why: str) -> None:
        """Record that nothing more can be sent to `peer`, and fail its sends; its earlier messages
        may still be read. Under the lock."""
        peer.deaf = peer.deaf or why
        while peer.outgoing:
            self.finish(peer.outgoing.popleft(), self._lost(peer, peer.deaf))

    def _end_of(self, peer: Peer, error: EOFError | OSError) -> None:
        """Lose a peer from which reading has ended with `error`."""
        ended = isinstance(error, EOFError)
        self._lose(
            peer,
            (str(error) or "its connection ended without a goodbye")
            if ended
            else f"its connection broke ({error})",
        )

    def _lose(self, peer: Peer, why: str) -> None:
        """Lose a peer: nothing more will arrive from it or can be sent to it."""
        with self.lock:
            peer.mute = why
            peer.frame = None
            self._deafen(peer, why)
            peer.posted.clear()
            for receive in list(peer.receives):
                self._end(peer, receive, self._lost(peer, why))

    def lose(self, error: PeerLostError) -> None:
        assert error.world_rank is not None
        self.lost[error.world_rank] = error
        self._await_last_words(self._peers[error.world_rank])

    def _await_last_words(self, peer: Peer) -> None:
        """Read the remaining messages of a lost peer for a moment; then fail the receives that wait
        for more."""

        def give_up() -> None:
            if peer.mute is None and peer.receives:
                self._lose(peer, str(self.lost[peer.rank]))

        timer = threading.Timer(_LAST_WORDS, give_up)
        timer.daemon = True
        timer.start()

    # --- ending
    # ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye and release the links. A send without a wait may be cut off."""
        if self._closing:
            return
        self.stop()
        for peer in self._peers.values():
            if peer.link.parting and not peer.outgoing and peer.deaf is None:
                goodbye = frames.pack_header(frames.GOODBYE, Tag(0, 0), b"", 0, peer.link.align)
                with suppress(OSError):
                    peer.link.write(goodbye, _NOTHING)
            peer.link.close()
