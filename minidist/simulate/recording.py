"""Chapter 24 · The recorder of a rank: kernels become segments, and these, calls and memory become
events.

    with begun(Recording()) as recording:       # this thread's kernels go to `recording`
        ...
        recording.start(call)                   # ends the segment: Busy(…), then Start(…)
    recording.events

Memory changes many times inside a segment. Of these only what matters to a clock is kept: before
its Busy the changes up to the moment at which the segment holds most, and behind its Busy the
changes from then to its end.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidist.device.account import MemoryAccount
from minidist.device.backend import dtype_name
from minidist.observe.events import Await, Busy, Event, GroupCall, Memory, Start, Sync, Transfer
from minidist.simulate.trace import Kernel, Segment

PYTHON = np.dtype(np.float32)  # of a kernel without arrays


class Recording:
    """The events of one rank so far.

    Args:    device: "cuda" or "cpu": where the rank computes.
    Attributes: events; segments: distinct ones, by their number in `Busy.work`.
                paused: no kernel counts (a collective's own arithmetic: the cost of the call has
                it).
    """

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.events: list[Event] = []
        self.segments: list[Segment] = []
        self.paused = 0
        self._numbers: dict[Any, int] = {}
        self._kernels: dict[tuple[Any, ...], int] = {}
        self._spans: list[tuple[str, int | None]] = [("", None)]
        self._names: dict[str, list[str]] = {}
        self._calls = 0
        self._change: Counter[str] = Counter()  # of the memory since the segment began, by category
        self._rise: dict[str, int] = {}  # where it was highest
        self._sum = self._highest = 0

    # ------------------------------------------------------------------------------------- segments

    def kernel(
        self, kind: str, dtype: np.dtype, flops: float, nbytes: float, size: tuple[int, ...] = ()
    ) -> None:
        """Record a kernel of this rank's device."""
        key = kind, dtype, flops, nbytes, size
        self._kernels[key] = self._kernels.get(key, 0) + 1

    def memory(self, category: str, nbytes: int) -> None:
        """Record a change of the device's account."""
        self._change[category] += nbytes
        self._sum += nbytes
        if self._sum > self._highest:
            self._highest = self._sum
            self._rise = dict(self._change)

    def flush(self) -> None:
        """End the segment."""
        rise = self._rise
        change = self._change
        if rise:
            self.events += [Memory(category, nbytes) for category, nbytes in rise.items() if nbytes]
        if self._kernels:
            found = tuple(self._kernels.items())
            number = self._numbers.setdefault(found, len(self.segments))
            if number == len(self.segments):
                self.segments.append(
                    tuple(
                        (Kernel(kind, dtype_name(dtype), *work), times)
                        for (kind, dtype, *work), times in found
                    )
                )
            self.events.append(Busy(number, *self._spans[-1]))
            self._kernels = {}
        if change:
            change.subtract(rise)
            self.events += [
                Memory(category, nbytes) for category, nbytes in change.items() if nbytes
            ]
            self._rise = {}
            self._change = Counter()
            self._sum = 0
            self._highest = 0

    # ---------------------------------------------------------------------------------------- calls

    def start(self, call: GroupCall) -> int:
        """Record the start of a call. Returns its id."""
        return self._begin(lambda number: Start(number, call))

    def moving(self, way: str, nbytes: int, work: Callable[[], Any]) -> "RecordedMove":
        """Record the start of a copy between memories, on a lane of its own
        (parallel/memory/transfer_lanes.py)."""
        number = self._begin(lambda number: Transfer(number, way, nbytes))
        return RecordedMove(self, number, work())

    def wait(self, number: int) -> None:
        """Record that the rank waits for a call or a move."""
        self.flush()
        self.events.append(Await(number))

    def sync(self) -> None:
        """Record that the host waits for the device, to read a number."""
        self.flush()
        self.events.append(Sync())

    def _begin(self, event: Any) -> int:
        self.flush()
        self._calls += 1
        self.events.append(event(self._calls))
        return self._calls

    # ----------------------------------------------------------------- what a Recorder is asked for

    @contextmanager
    def span(self, name: str, category: str = "compute", **details: Any) -> Iterator[None]:
        """Name the segments inside, with the microbatch if the details tell one."""
        self.flush()
        inner = self._spans[-1][1]
        self._spans.append((name, details.get("microbatch", inner)))
        try:
            yield
        finally:
            self.flush()
            self._spans.pop()

    def announce(self, axis: str, name: str) -> None:
        """Name the next collective along `axis`."""
        self._names.setdefault(axis, []).append(name)

    def name_of_next(self, axis: str) -> str:
        """Return what was announced for the next collective along `axis`, or nothing."""
        names = self._names.get(axis)
        return names.pop(0) if names else ""


class RecordedMove:
    """A move whose work is done, and whose wait() is an event."""

    def __init__(self, recording: Recording, number: int, result: Any) -> None:
        self._recording = recording
        self._number = number
        self._result = result

    def wait(self) -> Any:
        """Return the work's result."""
        self._recording.wait(self._number)
        return self._result

    def done(self) -> bool:
        """Return False: how long the move takes is not known here."""
        return False


class RecordedAccount(MemoryAccount):
    """The memory account of a rank that tells its changes to a recording as they happen."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def hold(self, array: Any, category: str) -> Any:
        """Hold the array as the account does. On a processor what Python does for an op counts too:
        each result goes through here once, forward and backward."""
        if self._recording.device == "cpu" and not self._recording.paused:
            self._recording.kernel("python", PYTHON, 0, 0)
        return super().hold(array, category)

    def _released(self, held: Any) -> None:
        super()._released(held)
        self._recording.memory(held.category, -held.nbytes)

    def _add(self, category: str, nbytes: int) -> None:
        super()._add(category, nbytes)
        self._recording.memory(category, nbytes)


class _Active(threading.local):
    recording: Recording | None = None


active = _Active()
"""active.recording: the recording of the rank that this thread simulates."""


@contextmanager
def begun(recording: Recording) -> Iterator[Recording]:
    """Record this thread's kernels on `recording` while the context lasts."""
    before = active.recording
    active.recording = recording
    try:
        yield recording
    finally:
        active.recording = before


@contextmanager
def pause() -> Iterator[None]:
    """Leave kernels out while the context lasts."""
    recording = active.recording or Recording()
    recording.paused += 1
    try:
        yield
    finally:
        recording.paused -= 1
