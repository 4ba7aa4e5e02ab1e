"""Bytes that a rank moves between its memories: device, host and disk."""

from collections.abc import Iterator
from contextlib import contextmanager


class MemoryTraffic:
    """Bytes moved between memories, by direction ("host to disk"); training steps are counted
    separately from the rest.

    Attributes: step, other: direction -> bytes
    """

    def __init__(self) -> None:
        self.step = dict[str, int]()
        self.other = dict[str, int]()
        self._counted = self.other

    def count(self, source: str, target: str, nbytes: int) -> None:
        """Count `nbytes` that start from one memory to another."""
        way = f"{source} to {target}"
        self._counted[way] = self._counted.get(way, 0) + nbytes

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Context manager: count moves that begin inside as a training step's."""
        before = self._counted
        self._counted = self.step
        try:
            yield
        finally:
            self._counted = before
