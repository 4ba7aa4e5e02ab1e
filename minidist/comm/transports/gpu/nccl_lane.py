"""NCCL's communicator, and the lanes of messages from GPU to GPU: for two ranks and one direction,
each with its own communicator.

    rank 0    lane 0 -> 1    a thread that makes NCCL's calls, in order; a stream    rank 1
              lane 1 -> 0    another; so two ranks may both send first

In one communicator, calls match in the order in which they are made, and each call waits for the
calls before it. If all messages of two ranks used one communicator, a send could wait for a receive
that is queued after another send. A lane has only sends on one side and only receives on the other,
both in the headers' order, so no circle of waits can form. Its thread also waits until the other
rank has joined, so a send never does. Deadlock detection does not see these waits; the limit ends
them.

Needs several GPUs: not yet run on any.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidist.comm.device_lane import DeviceLane
from minidist.comm.handle import Handle
from minidist.comm.transports.gpu.staging import Gpu, GpuSide
from minidist.device.backend import Array
from minidist.errors import CommError

_STUCK = 1.0  # seconds that abort() waits for a call of NCCL's to return before it aborts around it


class Communicator:
    """NCCL's communicator on a side's stream. All its ranks make it; this blocks until they have.

    It connects all pairs at once: otherwise the first call between two ranks would do so while it
    holds the lock of NCCL's calls.
    """

    def __init__(self, gpu: Gpu, side: GpuSide, size: int, id: bytes, rank: int) -> None:
        self._gpu = gpu
        self._side = side
        nccl = gpu.nccl
        self._comm = nccl.NcclCommunicator(size, id, rank)
        gpu.ends.append(self.abort)
        gpu.check()  # an abort before this communicator was in `ends`
        gpu.watch.failures.append(self.failure)
        with gpu.device, side.stream:
            words = gpu.cupy.empty(2 * size, np.uint8)
            nccl.groupStart()
            for peer in set(range(size)) - {rank}:
                self._comm.send(words[peer:].data.ptr, 1, nccl.NCCL_UINT8, peer, side.stream.ptr)
                self._comm.recv(
                    words[size + peer :].data.ptr, 1, nccl.NCCL_UINT8, peer, side.stream.ptr
                )
            nccl.groupEnd()

    def queue(self, what: str, start: Callable[[Any, int], None]) -> None:
        """Put NCCL's kernels into the stream, as one group: `start(communicator, stream)` makes the
        calls.

        The calls usually return at once, but NCCL may wait for its peers, or for space. The watch
        ends that at the limit.
        """
        gpu = self._gpu
        stream = self._side.stream
        calls = SimpleNamespace(done=False)
        begun = gpu.event(stream)
        with gpu.one_at_a_time:
            gpu.check()
            gpu.watch.follow(f"NCCL's {what}", begun, calls, [])
            try:
                gpu.nccl.groupStart()
                try:
                    start(self._comm, stream.ptr)
                finally:
                    gpu.nccl.groupEnd()
            except gpu.nccl.NcclError as error:
                gpu.check()
                raise CommError(
                    f"rank {gpu.transport.world_rank}: NCCL refuses {what}: {error}; "
                    "NCCL_DEBUG=WARN in the environment says more"
                ) from error
            finally:
                calls.done = True
        gpu.watch.follow(f"NCCL's {what}", begun, gpu.event(stream), [])

    def failure(self) -> str:
        """Return an error that NCCL itself has found (e.g. a peer's connection broke), or ""."""
        try:
            self._comm.check_async_error()
        except self._gpu.nccl.NcclError as error:
            return f"NCCL failed on the GPU: {error}"
        return ""

    def abort(self) -> None:
        """End its kernels, and a call of NCCL that is stuck."""
        free = self._gpu.one_at_a_time.acquire(timeout=_STUCK)
        try:
            self._comm.abort()
        finally:
            if free:
                self._gpu.one_at_a_time.release()


class NcclLane(DeviceLane):
    """A lane on one of its two ranks. Its thread starts with the first message."""

    def __init__(self, gpu: Gpu, src: int, dst: int) -> None:
        self._gpu = gpu
        self._side = GpuSide(gpu)
        self._name = f"lane {src} -> {dst}"
        self._sends = src == gpu.transport.world_rank
        self._rank, self._other = (0, dst) if self._sends else (1, src)
        self._id = b""
        self._parcels: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        gpu.ends.append(lambda: self._parcels.put(None))
        self._last: _Parcel | None = None

    def introduction(self) -> np.ndarray:
        known = self._id
        self._id = self._id or self._gpu.nccl.get_unique_id()
        return np.frombuffer(b"" if known else self._id, np.uint8)

    def send(self, array: Array) -> Handle:
        return self._put(array)

    def recv(self, introduction: np.ndarray, into: Array) -> Handle:
        self._id = self._id or introduction.tobytes()
        return self._put(into)

    def finish(self) -> None:
        """Return when all messages are in the stream's queue. Raises: as a message's wait()."""
        if self._last is not None:
            self._last.wait_for_thread()

    def _put(self, array: Array) -> "_Parcel":
        what = f"{self._name} on the GPU; did rank {self._other} make the matching call?"
        parcel = _Parcel(self._gpu, self._side, what, array)
        if self._last is None:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        self._last = parcel
        self._parcels.put(parcel)
        return parcel

    def _run(self) -> None:
        comm: Communicator | None = None
        while (parcel := self._parcels.get()) is not None:
            try:
                comm = comm or Communicator(self._gpu, self._side, 2, self._id, self._rank)
                work = partial(comm.queue, self._name, partial(self._pass, parcel.array))
                parcel.queued.set_result(self._side.carry_out(parcel.begun, work, parcel.array)[1])
            except Exception as error:  # raised by wait()
                parcel.queued.set_exception(error)

    def _pass(self, array: Array, comm: Any, stream: int) -> None:
        if array.size:
            way = comm.send if self._sends else comm.recv
            way(array.data.ptr, array.nbytes, self._gpu.nccl.NCCL_UINT8, 1 - self._rank, stream)


class _Parcel(Handle):
    """A message in a lane; `queued` gets its mark in the side's stream when the lane's thread has
    put it there."""

    def __init__(self, gpu: Gpu, side: GpuSide, what: str, array: Array) -> None:
        self._gpu = gpu
        self._side = side
        self._what = what
        self.array = array
        self.begun = side.begin()
        self.queued: Future[Any] = Future()

    def wait(self) -> None:
        self._side.join(self.wait_for_thread())

    def wait_for_thread(self) -> Any:
        """Return the mark, when the lane's thread has put the message into its stream's queue."""
        return self._gpu.outcome(self.queued, self._what)

    def done(self) -> bool:
        return self.queued.done() or self._gpu.error is not None
