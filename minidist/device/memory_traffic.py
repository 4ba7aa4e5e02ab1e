"""Bytes that a rank moves between its memories: device, host and disk."""

from collections.abc import Iterator
from contextlib import contextmanager


class MemoryTraffic:
    """Bytes moved between memories, by direction ("host to disk"); those of training steps apart
    from the rest.

    Attributes: step, other: direction -> bytes
    """

    def __init__(self) -> None:
        self.step = dict[str, int]()
        self.other = dict[str, int]()
        self._counted = self.other

    def count(self, source: str, target: str, nbytes: int) -> None:
        """`nbytes` set out from one memory to the other."""
        way = f"{source} to {target}"
        self._counted[way] = self._counted.get(way, 0) + nbytes

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Moves that begin inside count as a training step's."""
        before = self._counted
        self._counted = self.step
        try:
            yield
        finally:
            self._counted = before
