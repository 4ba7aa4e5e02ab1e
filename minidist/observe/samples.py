"""Memory over time: what a memory account held, and when.

    with account.use(SampledAccount()) as memory:
        strategy.step(batch, optimizer)
    memory.samples()                    # [(seconds, {"parameters": bytes, …, "total": bytes}), …]
"""

import time
from typing import Any

from minidist.device.account import CATEGORIES, MemoryAccount

Sample = tuple[float, dict[str, int]]


class SampledAccount(MemoryAccount):
    """A memory account that remembers when each buffer came and when it died."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._events: list[tuple[float, str, int]] = []     # (seconds, category, bytes more)

    def samples(self) -> list[Sample]:
        """(seconds of `time.perf_counter()`, bytes by category) after each change, in order."""
        now, found = dict.fromkeys((*CATEGORIES, "total"), 0), []
        for moment, category, nbytes in sorted(self._events):
            now[category] += nbytes
            now["total"] += nbytes
            found.append((moment, dict(now)))
        return found

    def _released(self, held: Any) -> None:
        super()._released(held)
        self._events.append((time.perf_counter(), held.category, -held.nbytes))

    def _add(self, category: str, nbytes: int) -> None:
        super()._add(category, nbytes)
        self._events.append((time.perf_counter(), category, nbytes))


def stairs(samples: list[Sample], category: str, *, start: float, stop: float) -> tuple[list[float], list[int]]:
    """(ms from `start`, bytes) of one category between two moments: a step at each change, to be drawn as steps."""
    before = [now[category] for moment, now in samples if moment <= start]
    times, values = [0.0], [before[-1] if before else 0]
    for moment, now in samples:
        if start < moment <= stop:
            times.append(1e3 * (moment - start))
            values.append(now[category])
    return [*times, 1e3 * (stop - start)], [*values, values[-1]]
