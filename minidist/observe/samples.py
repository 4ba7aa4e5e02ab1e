"""Memory over time: the bytes in a memory account after each change.

with account.use(SampledAccount()) as memory:
    strategy.step(batch, optimizer)
memory.samples()                    # [(seconds, {"parameters": bytes, …, "total": bytes}), …]
"""

import time
from typing import Any

from minidist.device.account import CATEGORIES, MemoryAccount

Sample = tuple[float, dict[str, int]]


class SampledAccount(MemoryAccount):
    """A memory account that also records the moment at which each buffer is made and freed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._events: list[tuple[float, str, int]] = []  # (seconds, category, bytes more)

    def samples(self) -> list[Sample]:
        """Return (seconds of `time.perf_counter()`, bytes by category) after each change, in
        order."""
        now = dict.fromkeys((*CATEGORIES, "total"), 0)
        found = []
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


def stairs(
    samples: list[Sample], category: str, *, start: float, stop: float
) -> tuple[list[float], list[int]]:
    """Return one category between two moments, to be drawn as a step function.

    Args:    start, stop: seconds of `time.perf_counter()`.
    Returns: the moments of change in ms from `start`, and the bytes from each moment on.
    """
    before = [now[category] for moment, now in samples if moment <= start]
    times = [0.0]
    values = [before[-1] if before else 0]
    for moment, now in samples:
        if start < moment <= stop:
            times.append(1e3 * (moment - start))
            values.append(now[category])
    return [*times, 1e3 * (stop - start)], [*values, values[-1]]
