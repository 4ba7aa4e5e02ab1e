"""Moves between memories: device, host, disk. Each lane is a thread, so what moves hides behind
what computes.

    lane = TransferLane("host", "disk", traffic, recorder=timeline)
    move = lane.start("write blocks.0", nbytes, lambda: ...)    # begins behind earlier moves
    move.wait()                                                 # its result, or its error

A lane is to memories what a link is to ranks: it carries one thing at a time, and a `Pace` makes it
as slow as a bus or a disk that one does not have. On one machine a copy costs the processor the
time it takes; a slow lane sleeps instead, which is how two cores can show a move hidden behind
computation.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, cast

from minidist.device.backend import is_simulated
from minidist.device.memory_traffic import MemoryTraffic
from minidist.errors import ConfigError, TimeoutError
from minidist.parallel.step.recorder import Recorder

LIMIT = 300.0
"""Seconds that a wait for one move may take: a disk that is slower than that is taken for lost."""


@dataclass(frozen=True)
class Pace:
    """A lane's least time: `latency` seconds a move, and `per_byte` seconds a byte. Raises
    ConfigError below 0."""

    latency: float = 0.0
    per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency), ("per_byte", self.per_byte)):
            if not 0 <= value < float("inf"):
                raise ConfigError(
                    f"pace of a lane: {name} is {value!r}; choose a number of seconds from 0 up"
                )


class Move:
    """A move under way; done() tells whether wait() would return or raise at once."""

    def __init__(self, what: str, future: "Future[Any]") -> None:
        self.what = what
        self._future = future
        self.done = future.done

    def wait(self) -> Any:
        """The work's result, or what it raised; from any thread, also again. TimeoutError after
        LIMIT seconds."""
        try:
            return self._future.result(LIMIT)
        except FutureTimeout as error:
            if self.done():
                raise
            raise TimeoutError(
                f"{self.what}: not done after {LIMIT:g} s; is the disk still there?"
            ) from error


class TransferLane:
    """Carries moves out one after the other, in the order they were started.

    Args:    source, target: "device", "host" or "disk", for the traffic and the recorder.
             pace: how slow it is at least.
    """

    def __init__(
        self,
        source: str,
        target: str,
        traffic: MemoryTraffic,
        *,
        recorder: Recorder,
        pace: Pace | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.traffic = traffic
        self.recorder = recorder
        self.pace = pace or Pace()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{source} to {target}")

    def start(self, what: str, nbytes: int, work: Callable[[], Any]) -> Move:
        """Begin `work()`, which moves `nbytes`; they are counted now."""
        self.traffic.count(self.source, self.target, nbytes)
        if is_simulated():  # by chapter 24's recorder
            move: Move = cast(Any, self.recorder).moving(
                f"{self.source} to {self.target}", nbytes, work
            )
            return move

        def carry_out() -> Any:
            with self.recorder.span(
                what, "moves", bytes=nbytes, way=f"{self.source} to {self.target}"
            ):
                # arrives at the end, as over a bus
                time.sleep(self.pace.latency + nbytes * self.pace.per_byte)
                return work()

        return Move(what, self._thread.submit(carry_out))

    def close(self) -> None:
        """Carry out what was started, and end the thread. What failed unnoticed stays so: wait()
        tells."""
        self._thread.shutdown(wait=True)
