"""A message on its way: out (Send), asked for (Receive), or coming in (Frame)."""

from collections.abc import Callable

import numpy as np

from minidist.comm.transport import Accept, Reduce, Tag
from minidist.comm.transports import frames
from minidist.comm.transports.engine import Engine, Operation
from minidist.comm.transports.link import ByteLink
from minidist.errors import CommError


class Send(Operation):
    """A message on its way out: `sent` bytes of prefix + payload have left."""

    def __init__(self, engine: Engine, peer: int, tag: Tag, view: np.ndarray, prefix: bytes) -> None:
        super().__init__(engine, peer, tag)
        self.prefix, self.payload, self.sent = prefix, view.view(np.uint8), 0

    def __str__(self) -> str:
        return (f"rank {self.peer} to take {len(self.payload)} bytes (tag {self.tag.group:x}/{self.tag.sequence}; "
                f"{max(0, self.sent - len(self.prefix))} have left)")


class Receive(Operation):
    """A message asked for: `accept` says where its payload goes."""

    def __init__(self, engine: Engine, peer: int, tag: Tag, accept: Accept, reduce: Reduce | None) -> None:
        super().__init__(engine, peer, tag)
        self.accept, self.reduce = accept, reduce

    def __str__(self) -> str:
        return f"a message from rank {self.peer} (tag {self.tag.group:x}/{self.tag.sequence})"


class Frame:
    """A message on its way in: copied or reduced into an array, buffered, or dropped."""

    def __init__(self, header: frames.Header) -> None:
        self.header = header
        self.receive: Receive | None = None         # None while nobody has asked for it
        self.filled = 0                             # bytes of payload that have come
        self.buffer: np.ndarray | None = None       # holds them while nobody has asked for them
        self.failure: Exception | None = None       # what `accept` or `reduce` raised; the rest is dropped
        self._move: Callable[[ByteLink], int] = self._drop

    @property
    def complete(self) -> bool:
        return self.filled == self.header.nbytes

    def take(self, link: ByteLink) -> int:
        """Move bytes from the link to where they belong; how many."""
        moved = self._move(link) if self.filled < self.header.nbytes else 0
        self.filled += moved
        return moved

    def keep(self) -> None:
        """Nobody has asked for this message yet: buffer its payload."""
        self.buffer = np.empty(self.header.nbytes, np.uint8)
        self._move = self._copier(self.buffer)

    def open(self, receive: Receive) -> None:
        """Have `receive` say where the payload goes: the bytes to come, or those buffered already."""
        self.receive = receive
        try:
            self._aim(receive)
        except Exception as error:  # the receive raises it
            self.failure = error

    def _aim(self, receive: Receive) -> None:
        nbytes = self.header.nbytes
        target = receive.accept(self.header.meta, nbytes)
        if target.nbytes != nbytes or target.ndim != 1 or not target.flags.c_contiguous:
            raise CommError(f"{receive} has {nbytes} bytes, and was to fill {target.nbytes}, shape {target.shape}")
        if self.buffer is None:
            self._move = (self._copier(target) if receive.reduce is None else self._reducer(target, receive.reduce))
        elif receive.reduce is None:
            target[...] = self.buffer.view(target.dtype)
        else:
            receive.reduce(target, 0, self.buffer.view(target.dtype))

    def _drop(self, link: ByteLink) -> int:
        moved = len(link.piece(self.header.nbytes - self.filled, 1))
        link.skip(moved)
        return moved

    def _copier(self, target: np.ndarray) -> Callable[[ByteLink], int]:
        octets = target.view(np.uint8)
        return lambda link: link.read_into(octets[self.filled:])

    def _reducer(self, target: np.ndarray, reduce: Reduce) -> Callable[[ByteLink], int]:
        dtype, size = target.dtype, target.itemsize

        def move(link: ByteLink) -> int:
            piece = link.piece(self.header.nbytes - self.filled, size)
            if len(piece):
                try:
                    reduce(target, self.filled // size, piece.view(dtype))
                except Exception as error:  # the receive raises it
                    self.failure, self._move = error, self._drop
                link.skip(len(piece))
            return len(piece)

        return move
