"""The link that stream.py puts messages on: two streams of bytes, to and from one peer."""

from abc import ABC, abstractmethod

import numpy as np


class ByteLink(ABC):
    """Two streams of bytes, to and from one peer. No method blocks.

    The end of the incoming stream raises EOFError, once all bytes before it were read; a broken link raises OSError.
    Frames begin at multiples of `align` bytes.
    """

    align = 1
    parting = True      # say goodbye before closing

    @abstractmethod
    def write(self, prefix: bytes, payload: np.ndarray) -> int:
        """Take bytes from the front of prefix + payload (uint8); how many were taken, 0 when the link is full."""

    @abstractmethod
    def peek(self, count: int) -> bytes | None:
        """The next `count` bytes (at most 8 KiB), not consumed; None while fewer are there."""

    @abstractmethod
    def piece(self, most: int, itemsize: int) -> np.ndarray:
        """Whole items that are there, as uint8, aligned: at most `most` bytes, perhaps none; not consumed.

        They may lie in memory that the peer wrote to.
        """

    @abstractmethod
    def skip(self, count: int) -> None:
        """Consume `count` bytes that peek or piece has shown, or padding up to `align`."""

    @abstractmethod
    def read_into(self, target: np.ndarray) -> int:
        """Consume bytes into the front of `target` (uint8, not empty); how many, 0 when none are there."""

    @abstractmethod
    def close(self) -> None:
        """Release what the link holds."""


class PolledLink(ByteLink):
    """A link that the kernel can watch: poll_loop.py sleeps on it."""

    @abstractmethod
    def fileno(self) -> int:
        """The file to poll."""

    @abstractmethod
    def arm(self, reading: bool, writing: bool) -> int:
        """The poll events that end a sleep in which we wait to read or to write; 0 if the link is ready already."""

    @abstractmethod
    def disarm(self, events: int) -> None:
        """The sleep is over; poll reported `events` of this link."""
