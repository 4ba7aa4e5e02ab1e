"""The GPU of a rank: the side streams, a thread that watches their work, and short messages between
ranks over the host.

No call waits for the GPU. A thread checks now and then whether the GPU has finished the queued
work, so that the limit holds, a lost peer is noticed, and arrays live as long as the GPU uses them.
The watch aborts work that waits longer than the limit (ncclCommAbort).

Run on one H200.
"""

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.comm.device_lane import SideStream, current_stream
from minidist.comm.native import Native
from minidist.comm.transport import Tag, Transport
from minidist.device.backend import Array
from minidist.errors import CommError, TimeoutError

WORDS = 1 << 62
"""The sequence of the tag of messages about devices between a group's ranks; not counted."""

# seconds between two checks of the watch
_SHORTEST = 0.0005
_LONGEST = 0.02
NOTHING = np.empty(0, np.uint8)


class Gpu:
    """A rank's GPU and the transport for which it works.

    Attributes: error  the error of an aborted transport, else None
                ends   functions that abort work for which the GPU waits
                nccl   CuPy's module; a thread holds `one_at_a_time` during a call
    """

    def __init__(self, transport: Transport, cupy: Any, device_id: int) -> None:
        self.transport = transport
        self.cupy = cupy
        self.nccl = cupy.cuda.nccl
        self.one_at_a_time = threading.Lock()
        self.device = cupy.cuda.Device(device_id)
        self.error: CommError | None = None
        self.ends: list[Callable[[], None]] = []
        self.watch = Watch(self)
        transport.waits.ends.append(self.abort)

    def event(self, stream: Any, *, interprocess: bool = False) -> Any:
        """Return an event after the current work of `stream`."""
        event = self.cupy.cuda.Event(disable_timing=True, interprocess=interprocess)
        event.record(stream)
        return event

    def check(self) -> None:
        """Raise the error of an aborted transport, if any."""
        if self.error is not None:
            raise self.error

    def abort(self, error: CommError) -> None:
        """Abort the GPU's work, at the transport's abort() and close(): no new call begins, and
        work for which the GPU waits ends."""
        self.error = self.error or error
        with self.watch.changed:  # its thread ends when no flight remains
            self.watch.changed.notify_all()
        if self.ends:  # a library may be slow, the caller must not wait
            ends = self.ends
            self.ends = []
            threading.Thread(target=self._end, args=(ends,), name="gpu abort", daemon=True).start()

    def _end(self, ends: Sequence[Callable[[], None]]) -> None:
        with self.device:
            for end in ends:
                end()

    def within_limit(self, work: Callable[[], Any], what: str) -> Any:
        """Return `work()`, which may block in a library forever; its thread is then left behind.

        Raises: the error of the work; TimeoutError after the limit; the error of an aborted
        transport.
        """
        future: Future[Any] = Future()

        def carry_out() -> None:
            try:
                with self.device:
                    future.set_result(work())
            except Exception as error:  # raised by the waiting thread
                future.set_exception(error)

        threading.Thread(target=carry_out, name=what, daemon=True).start()
        return self.outcome(future, what)

    def outcome(self, future: "Future[Any]", what: str) -> Any:
        """Return the result of work in another thread. Raises: as within_limit()."""
        transport = self.transport
        deadline = time.monotonic() + transport.limit
        while not wait([future], _LONGEST).done:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {transport.world_rank} waited {transport.limit:g} s for {what}"
                )
        return future.result()


@dataclass(eq=False)
class Flight:
    """Work in a stream's queue: it may begin at event `begun` and ends at `done`; `keep` holds its
    arrays."""

    what: str
    begun: Any
    done: Any
    keep: list[Any]
    since: float | None = None  # time of the first check that found it begun


class Watch:
    """A thread that watches flights: it releases their arrays, and aborts the transport if one
    fails or exceeds the limit."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        # each returns an error that a library has found itself, or ""
        self.failures: list[Callable[[], str]] = []
        self._flights: list[Flight] = []
        self.changed = threading.Condition()
        threading.Thread(
            target=self._run, name=f"gpu watch of rank {gpu.transport.world_rank}", daemon=True
        ).start()

    def follow(self, what: str, begun: Any, done: Any, keep: list[Any]) -> None:
        """Watch one more flight."""
        with self.changed:
            self._flights.append(Flight(what, begun, done, keep))
            self.changed.notify_all()

    def finish(self) -> None:
        """Return when the GPU has finished all flights. Raises: the error of an aborted transport
        or of a late flight."""
        with self.changed:
            waits = bool(self._flights)
            while self._flights and self._gpu.error is None:
                self.changed.wait(_LONGEST)
        if waits:  # flights ended by an abort are over, but not done
            self._gpu.check()

    def _run(self) -> None:
        pause = _SHORTEST
        with self._gpu.device:
            while flights := self._wait_for_flights():
                try:
                    landed = [flight for flight in flights if flight.done.done]
                    self._judge([flight for flight in flights if flight not in landed])
                except Exception as error:  # of CUDA: this process can no longer use the GPU
                    transport = self._gpu.transport
                    transport.abort(
                        CommError(f"rank {transport.world_rank}: the GPU failed: {error}")
                    )
                    return
                with self.changed:
                    for flight in landed:
                        self._flights.remove(flight)
                        flight.keep.clear()
                    self.changed.notify_all()
                pause = _SHORTEST if landed else min(2 * pause, _LONGEST)
                time.sleep(pause)

    def _wait_for_flights(self) -> list[Flight]:
        with self.changed:
            while not self._flights and self._gpu.error is None:
                self.changed.wait()
            return list(self._flights)

    def _judge(self, waiting: list[Flight]) -> None:
        """Abort the transport if a flight failed or is late. Its time counts from the check that
        finds it begun: before, it waits for its own rank's work."""
        transport = self._gpu.transport
        now = time.monotonic()
        for flight in waiting:
            if flight.since is None and flight.begun.done:
                flight.since = now
        late = [
            flight for flight in waiting if flight.since and now - flight.since > transport.limit
        ]
        failed = [
            text
            for failure in self.failures
            if waiting and self._gpu.error is None and (text := failure())
        ]
        if self._gpu.error is not None:
            return
        if failed:
            transport.abort(CommError(f"rank {transport.world_rank}: {failed[0]}"))
        elif late:
            transport.abort(
                TimeoutError(
                    f"rank {transport.world_rank} waited {transport.limit:g} s for the GPU in "
                    f"{late[0].what}; is every rank of the group still there?"
                )
            )


class GpuSide(SideStream):
    """A group's side: see device_lane.py. Its work begins after an event in a stream of the
    program."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        with gpu.device:
            self.stream = gpu.cupy.cuda.Stream(non_blocking=True)
        self._program: Any = None  # the program's stream of the current work

    def begin(self) -> tuple[Any, Any]:
        self._gpu.check()
        with self._gpu.device:
            stream = current_stream(self._gpu.cupy)
            return stream, self._gpu.event(stream)

    def carry_out(
        self, begun: tuple[Any, Any], work: Callable[[], Any], keep: Any
    ) -> tuple[Any, Any]:
        gpu = self._gpu
        gpu.check()
        self._program, ready = begun
        with gpu.device, self.stream:
            self.stream.wait_event(ready)
            result = work()
            done = gpu.event(self.stream)
        held = [keep, begun, result]
        gpu.watch.follow("the end of a call", ready, done, held)
        return result, (self._program, done, held)

    def allocate(self, make: Callable[[], Array]) -> Array:
        assert self._program is not None, "inside the work"
        with self._gpu.device:  # also in a thread that receives for another
            with self._program:
                array = make()
            self.stream.wait_event(self._gpu.event(self._program))
        return array

    def join(self, done: Any) -> None:
        self._gpu.check()
        program, event, held = done
        with self._gpu.device:
            stream = self._gpu.cupy.cuda.get_current_stream()
            stream.wait_event(event)
        if stream.ptr == program.ptr:
            held.clear()  # later work of this stream, which owns the memory, runs after their use


class GpuNative(Native):
    """The common part of NCCL and CUDA IPC: collectives of arrays on the host, and small values,
    sent over the host."""

    def __init__(self, gpu: Gpu, side: GpuSide, group: int, world_ranks: Sequence[int]) -> None:
        self._gpu = gpu
        self._side = side
        self._tag = Tag(group, WORDS)
        self._world_ranks = tuple(world_ranks)
        self._rank = world_ranks.index(gpu.transport.world_rank)
        self._size = len(world_ranks)

    def _tell(self, mine: np.ndarray) -> list[np.ndarray]:
        """Return every rank's bytes (uint8, of any length), in rank order: P-1 messages per rank,
        at once, not counted."""
        heard = {self._rank: mine}

        def accept_from(rank: int) -> Callable[[bytes, int], np.ndarray]:
            return lambda meta, nbytes: heard.setdefault(rank, np.empty(nbytes, np.uint8))

        transport = self._gpu.transport
        others = set(range(self._size)) - {self._rank}
        arriving = [
            transport.start_recv(self._world_ranks[rank], self._tag, accept_from(rank))
            for rank in others
        ]
        leaving = [
            transport.start_send(self._world_ranks[rank], self._tag, mine) for rank in others
        ]
        for handle in arriving + leaving:
            handle.wait()
        return [heard[rank] for rank in range(self._size)]

    def barrier(self) -> None:
        self._tell(NOTHING)

    def all_gather(self, octets: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        if isinstance(octets, np.ndarray):
            np.concatenate(self._tell(octets), out=out)
        else:
            self._gather_on_gpu(octets, out, counts)

    @abstractmethod
    def _gather_on_gpu(self, octets: Array, out: Array, counts: Sequence[int]) -> None:
        """Run all_gather() for arrays on the GPU."""


def parts(array: Any, counts: Sequence[int]) -> list[Any]:
    """Return consecutive views of `counts` elements each."""
    edges = np.cumsum([0, *counts]).tolist()
    return [array[start:stop] for start, stop in zip(edges[:-1], edges[1:], strict=True)]
