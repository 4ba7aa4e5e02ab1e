"""BarrierStore at the monitor: every rank brings a small dict, and gets all of them when the last one has come."""

from collections import defaultdict
from typing import Any


class BarrierStore:
    """Of `size` ranks, by number. Belongs to one thread."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._brought: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def arrive(self, number: int, world_rank: int, info: Any) -> list[Any] | None:
        """What all brought, in world rank order, if this rank is the last to come; else None."""
        brought = self._brought[number]
        brought[world_rank] = info
        if len(brought) < self._size:
            return None
        del self._brought[number]
        return [brought[rank] for rank in range(self._size)]

    def missing(self, number: int) -> list[int]:
        """The ranks that have not come."""
        return sorted(set(range(self._size)) - set(self._brought[number]))
