"""A message in the queue (Send), a posted receive (Receive), or an incoming message (Frame); the
link, and the peer at its end."""

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NoReturn, TypeVar

import numpy as np

from minidist.comm.transport import Accept, Likely, Reduce, Tag
from minidist.comm.transports.progress import frames
from minidist.comm.transports.progress.engine import Engine, Operation
from minidist.errors import CommError


class ByteLink(ABC):
    """Two streams of bytes, to and from one peer. No method blocks.

    When all bytes have been read, the end of the incoming stream raises EOFError; a broken link
    raises OSError. Frames begin at multiples of `align` bytes.
    """

    align = 1
    short = 4 << 10  # maximum bytes of a payload that whole() looks for
    parting = True  # send GOODBYE before closing

    @abstractmethod
    def write(self, prefix: bytes, payload: np.ndarray) -> int:
        """Take bytes from the front of prefix + payload (uint8). Return their number, 0 if the link
        is full."""

    def look(self, most: int = 0) -> int:
        """Return the number of bytes that have arrived, as far as is known; at least that of a
        header if one has. `most`: the bytes of the message that is looked for."""
        return 0 if self.peek(frames.HEADER_BYTES) is None else frames.HEADER_BYTES

    @abstractmethod
    def peek(self, count: int) -> bytes | None:
        """Return the next `count` bytes (at most a header and `short`), not consumed; None if fewer
        have arrived."""

    def whole(self, header: bytes, nbytes: int) -> np.ndarray | None:
        """Consume the message at the front if it is complete and has exactly this header. Return
        its payload (uint8), valid until the next call of the link; None for another message.

        Args:    nbytes: of the payload, at most `short`.
        """
        try:
            data = self.peek(len(header) + nbytes)
        except EOFError:  # fewer will ever come: of another message, or of a half
            return None
        if data is None or not data.startswith(header):
            return None
        self.skip(len(data) + -nbytes % self.align)
        return np.frombuffer(data, np.uint8, offset=len(header))

    @abstractmethod
    def piece(self, most: int, itemsize: int) -> np.ndarray:
        """Return at most `most` bytes (uint8) of whole items, aligned, not consumed; possibly in
        memory that the peer writes."""

    @abstractmethod
    def skip(self, count: int) -> None:
        """Consume `count` bytes returned by peek or piece, or padding up to `align`."""

    @abstractmethod
    def read_into(self, target: np.ndarray) -> int:
        """Consume bytes into the front of `target` (uint8, not empty). Return their number, 0 if
        none have arrived."""

    @abstractmethod
    def close(self) -> None:
        """Release the link's resources."""


class Send(Operation):
    """A message to send; `sent` bytes of prefix + payload have left."""

    def __init__(
        self, engine: Engine, peer: int, tag: Tag, view: np.ndarray, prefix: bytes
    ) -> None:
        self.engine = engine
        self.peer = peer
        self.tag = tag
        self.prefix = prefix
        self.payload = view.view(np.uint8)
        self.sent = 0
        self.nbytes = len(prefix) + view.nbytes

    def __str__(self) -> str:
        return (
            f"rank {self.peer} to take {len(self.payload)} bytes (tag "
            f"{self.tag.group:x}/{self.tag.sequence}; {max(0, self.sent - len(self.prefix))} "
            "have left)"
        )


class Receive(Operation):
    """A receive; `header` is that of its `likely` message, b"" if it has none; `length` that of
    header and payload."""

    incoming = True
    likely: Likely = b"", 0, None
    header = b""
    length = 0

    def __init__(
        self, engine: Engine, peer: int, tag: Tag, accept: Accept, reduce: Reduce | None
    ) -> None:
        self.engine = engine
        self.peer = peer
        self.tag = tag
        self.accept = accept
        self.reduce = reduce

    def __str__(self) -> str:
        return f"a message from rank {self.peer} (tag {self.tag.group:x}/{self.tag.sequence})"

    def target(self, meta: bytes, nbytes: int) -> np.ndarray:
        """Return the array that the message fills. Raises: what `accept` raises; CommError if the
        array cannot be filled."""
        target = self.accept(meta, nbytes)
        if target.nbytes != nbytes or target.ndim != 1 or not target.flags.c_contiguous:
            raise CommError(
                f"{self} has {nbytes} bytes, but the array to fill has {target.nbytes}, shape "
                f"{target.shape}"
            )
        if self.reduce is None and not target.flags.writeable:
            raise CommError(f"{self} cannot be stored: the array to fill is read-only")
        return target

    def take(self, payload: np.ndarray) -> Exception | None:
        """Copy or reduce the whole payload of the likely message into its array; return the error
        of `accept` or `reduce`."""
        meta, nbytes, target = self.likely
        try:
            if target is None:
                target = self.target(meta, nbytes)
            if self.reduce is None:
                target.view(np.uint8)[...] = payload
            else:
                self.reduce(target, 0, payload.view(target.dtype))
        except Exception as error:  # wait() raises it
            return error
        return None


class Frame:
    """An incoming message: copied or reduced into an array, buffered, or dropped."""

    receive: Receive | None = None  # None until a receive is posted for it
    filled = 0  # bytes of payload that have arrived
    buffer: np.ndarray | None = None  # holds them until then
    # complete, and the leader is done with it; without a receive until then, it is delivered by the
    # thread that posts the receive
    settled = False
    failure: Exception | None = None  # the error of `accept` or `reduce`; the rest is dropped
    _into: np.ndarray | None = None  # the array to fill, as uint8
    _total: np.ndarray | None = None  # the array to reduce into

    def __init__(self, header: frames.Header) -> None:
        self.header = header
        self.nbytes = header.nbytes

    @property
    def complete(self) -> bool:
        return self.filled == self.nbytes

    def keep(self) -> None:
        """Buffer the payload of this message, which has no receive yet."""
        self.buffer = self._into = np.empty(self.nbytes, np.uint8)

    def open(self, receive: Receive) -> None:
        """Set the receive of this message, whose array takes the payload, buffered or still to
        arrive."""
        self.receive = receive
        try:
            target = receive.target(self.header.meta, self.nbytes)
            if self.buffer is not None:
                values = self.buffer.view(target.dtype)
                receive.reduce(target, 0, values) if receive.reduce else np.copyto(target, values)
            elif receive.reduce is None:
                self._into = target.view(np.uint8)
            else:
                self._total = target
        except Exception as error:  # the receive raises it
            self.failure = error

    def take(self, link: ByteLink) -> int:
        """Move bytes from the link to their destination. Return their number."""
        left = self.nbytes - self.filled
        if not left:
            return 0
        if self._into is not None:
            moved = link.read_into(self._into[self.filled :] if self.filled else self._into)
        else:
            piece = link.piece(left, 1 if self._total is None else self._total.itemsize)
            moved = len(piece)
            if moved:
                self._reduce(piece)
                link.skip(moved)
        self.filled += moved
        return moved

    def _reduce(self, piece: np.ndarray) -> None:
        """Combine a piece in place; without a total, drop it."""
        total = self._total
        receive = self.receive
        if total is None or receive is None or receive.reduce is None:
            return
        try:
            receive.reduce(total, self.filled // total.itemsize, piece.view(total.dtype))
        except Exception as error:  # the receive raises it
            self.failure = error
            self._total = None


Item = TypeVar("Item", Receive, Frame)


class ByTag(defaultdict[Tag, "deque[Item]"]):
    """First-in-first-out queues by tag; a tag without items takes no memory."""

    def __init__(self) -> None:
        super().__init__(deque)

    def take(self, tag: Tag) -> Item | None:
        """Remove and return the oldest item of `tag`, or None."""
        items = self.get(tag)
        if items is None:
            return None
        item = items.popleft()
        if not items:
            del self[tag]
        return item


class Peer:
    """A peer: the link, and the messages in both directions. The engine's lock guards them, except
    `frame`, which belongs to the leader."""

    def __init__(self, rank: int, link: ByteLink) -> None:
        self.rank = rank
        self.link = link
        self.outgoing: deque[Send] = deque()
        self.sent = self.taken = 0  # messages begun, and messages taken completely
        self.posted: ByTag[Receive] = ByTag()
        self.unexpected: ByTag[Frame] = ByTag()
        self.unexpected_bytes = 0
        self.receives: set[Receive] = set()  # posted and not finished
        # the only one of them, not in `posted`, if it has a likely message
        self.next: Receive | None = None
        self.frame: Frame | None = None  # the frame whose payload is being read
        self.awaited = 0  # waits for the peer at a board (shm/exchange_board.py)
        self.deaf: str | None = None  # why nothing more can be sent to it
        self.mute: str | None = None  # why nothing more will arrive from it

    def post(self, receive: Receive) -> None:
        """Add a receive."""
        if receive.header and not self.receives:
            self.next = receive
        else:
            self.queue_next()
            self.posted[receive.tag].append(receive)
        self.receives.add(receive)

    def queue_next(self) -> None:
        """Put `next`, if there is one, to the other receives."""
        if self.next is not None:
            self.posted[self.next.tag].append(self.next)
            self.next = None

    @property
    def reading(self) -> bool:
        """True if there is something to read: a message with a receive, or the rest of a refused
        one."""
        return bool(self.receives) or self.frame is not None


class Peers(dict[int, Peer]):
    """The peers of a rank, by world rank. Raises: CommError for a rank without a link."""

    def __init__(self, world_rank: int, links: Mapping[int, ByteLink]) -> None:
        super().__init__((rank, Peer(rank, link)) for rank, link in links.items())
        self._world_rank = world_rank

    def __missing__(self, rank: int) -> NoReturn:
        raise CommError(f"rank {self._world_rank} of {len(self) + 1} has no link to rank {rank}")
