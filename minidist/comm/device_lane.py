"""The interfaces for arrays on a GPU: collectives that keep arrays there, on the group's own
stream.

    program's stream   ... x is written | e0             | e1 awaited | the result is read ...
                                          \\              /
    the group's side                       e0 awaited | work | e1                        the host does not wait

Without them, arrays cross to the host and back (buffers.py). A call goes to the device if its
arrays are on the GPU, its algorithm is `auto` or `native`, and DeviceTransport.refusal() returns no
reason against it. All ranks of a group must bring arrays of the same kind, else MismatchError. A
call without a side (it is staged, or its group has only one rank) works in the program's stream,
also in a worker thread (program()).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from minidist.comm.handle import Handle
from minidist.comm.native import Native
from minidist.device.backend import Array, imported_cupy
from minidist.errors import DeviceError

_PER_THREAD = 2  # cudaStreamPerThread


def current_stream(cupy: Any) -> Any:
    """Return the calling thread's stream, which other threads may use, too.

    Raises: DeviceError for CuPy's per-thread default stream: it is another stream in each thread.
    """
    stream = cupy.cuda.get_current_stream()
    if stream.ptr == _PER_THREAD:
        raise DeviceError(
            "communication of arrays on the GPU uses several threads, which cannot share "
            "CuPy's per-thread default stream; unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, or use "
            "your own stream: with cupy.cuda.Stream():"
        )
    return stream


def program() -> AbstractContextManager[None]:
    """Return a context in which another thread works on the calling thread's GPU and stream; it
    does nothing without a GPU."""
    cupy = imported_cupy()
    if cupy is None or not cupy.is_available():
        return nullcontext()
    return _working_on(cupy.cuda.Device(), current_stream(cupy))


@contextmanager
def _working_on(device: Any, stream: Any) -> Iterator[None]:
    with device, stream:
        yield


class SideStream(ABC):
    """A group's own stream. It carries out the group's calls, one after the other, in any thread of
    the rank.

    Memory: CuPy's pool gives a freed block at once to the stream for which it was allocated. So
    arrays for the program must be allocated on the program's stream (`allocate`), arrays only for
    the work on the side's stream.
    """

    @abstractmethod
    def begin(self) -> Any:
        """Return a mark of the current work in the program's stream; after it, the call's arguments
        are ready."""

    @abstractmethod
    def carry_out(self, begun: Any, work: Callable[[], Any], keep: Any) -> tuple[Any, Any]:
        """Run `work` with the side as the current stream, ordered after `begun`; keep `keep` alive
        until the GPU is done.

        Returns: the result of the work, and a mark for join().
        """

    @abstractmethod
    def allocate(self, make: Callable[[], Array]) -> Array:
        """Return `make()`, allocated for the program to keep; called inside the work."""

    @abstractmethod
    def join(self, done: Any) -> None:
        """Order the current stream after the mark. Raises: the error of an aborted transport."""


class DeviceLane(ABC):
    """Messages from one rank's GPU to another's, in one direction. The host transport carries a
    header for each, with VIA_LANE in place of a device; headers and messages have the same
    order."""

    @abstractmethod
    def introduction(self) -> np.ndarray:
        """Return the sender's bytes (uint8) for the next header's message, with which the receiver
        joins the lane."""

    @abstractmethod
    def send(self, array: Array) -> Handle:
        """Begin to send a contiguous array that the current stream has written; do not wait for the
        receiver.

        The handle's wait() orders the current stream after the message.
        """

    @abstractmethod
    def recv(self, introduction: np.ndarray, into: Array) -> Handle:
        """Begin to receive the message of the next header into a contiguous array; wait() as for
        send."""


VIA_LANE = "lane"


class DeviceTransport(ABC):
    """Collectives and messages between the GPUs of ranks."""

    @abstractmethod
    def refusal(
        self, world_ranks: Sequence[int], op: str | None, dtype: np.dtype | None
    ) -> str | None:
        """Return the reason why these ranks cannot do `op` on `dtype` (None: move bytes) here, or
        None; the same on all of them."""

    @abstractmethod
    def native(self, group: int, world_ranks: Sequence[int]) -> Native:
        """Return the collectives for `world_ranks`, the ranks of the group with that id; called
        inside a side's work."""

    @abstractmethod
    def lane(self, group: int, src: int, dst: int) -> DeviceLane | None:
        """Return the lane between two world ranks for a group's messages; None if they are sent
        through the host."""

    @abstractmethod
    def finish(self) -> None:
        """Return when the GPU has finished the work of this rank's calls: other ranks may still
        need it."""

    @abstractmethod
    def close(self) -> None:
        """Free memory that this rank shares with others; call finish() before. A second call does
        nothing.

        It waits for the ranks that share the GPU to close, too, up to the limit; after abort() only
        a moment.
        """

    @abstractmethod
    def side(self, group: int) -> SideStream:
        """Return the side stream of the group with that id."""
