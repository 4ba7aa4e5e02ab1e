"""A transport's part for arrays on a GPU: collectives that leave them there, on a stream of the
group's own.

    program's stream   ... x is written | e0             | e1 awaited | the result is read ...
                                          \\              /
    the group's side                       e0 awaited | work | e1                        the host does not wait

Without one, arrays cross to the host and back (buffers.py). A call goes to the device if its arrays
are on the GPU, its algorithm is `auto` or `native`, and DeviceTransport.refusal() has no reason
against it. All ranks of a group must bring arrays of the same kind, else MismatchError. A call that
has no side (it is staged, or its group is one rank alone) works in the program's stream, also where
a worker carries it out (program()).
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
    """The calling thread's stream, which other threads may use, too.

    Raises: DeviceError for CuPy's per-thread default stream: its name means another stream in each
    thread.
    """
    stream = cupy.cuda.get_current_stream()
    if stream.ptr == _PER_THREAD:
        raise DeviceError(
            "communication of arrays on the GPU takes several threads, which cannot share "
            "CuPy's per-thread default stream; unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM, or "
            "take a stream of your own: with cupy.cuda.Stream():"
        )
    return stream


def program() -> AbstractContextManager[None]:
    """The GPU and the stream of the calling thread: inside `with`, another thread works there, too;
    or nothing."""
    cupy = imported_cupy()
    if cupy is None or not cupy.is_available():
        return nullcontext()
    return _working_on(cupy.cuda.Device(), current_stream(cupy))


@contextmanager
def _working_on(device: Any, stream: Any) -> Iterator[None]:
    with device, stream:
        yield


class SideStream(ABC):
    """A group's own stream. Calls of the group are carried out on it, one after the other, in any
    thread of the rank.

    Memory: CuPy's pool hands a freed block out again at once to the stream it was allocated for. So
    what the program gets must come from the program's stream (`allocate`); what only the work needs
    comes from the side's.
    """

    @abstractmethod
    def begin(self) -> Any:
        """Note what the program's stream holds now: the call's arguments are ready behind that."""

    @abstractmethod
    def carry_out(self, begun: Any, work: Callable[[], Any], keep: Any) -> tuple[Any, Any]:
        """Run `work` with the side as the current stream, ordered behind `begun`; `keep` lives
        until the GPU is done.

        Returns: what the work returned, and a mark for join().
        """

    @abstractmethod
    def allocate(self, make: Callable[[], Array]) -> Array:
        """Inside the work: what `make()` allocates for the program to keep."""

    @abstractmethod
    def join(self, done: Any) -> None:
        """Order the current stream behind the mark. Raises: what the transport was aborted with."""


class DeviceLane(ABC):
    """Messages one way between two ranks, from GPU to GPU. Each has a header that travels by the
    host transport, which says so by VIA_LANE in place of a device; headers and messages have the
    same order."""

    @abstractmethod
    def introduction(self) -> np.ndarray:
        """What the sender puts into the next header's message (uint8), so that the receiver can
        meet it here."""

    @abstractmethod
    def send(self, array: Array) -> Handle:
        """Begin to send a contiguous array that the current stream has written; does not wait for
        the receiver.

        The handle's wait() orders the current stream behind the message.
        """

    @abstractmethod
    def recv(self, introduction: np.ndarray, into: Array) -> Handle:
        """Begin to receive the message of the next header into a contiguous array; wait() as
        above."""


VIA_LANE = "lane"


class DeviceTransport(ABC):
    """Collectives and messages between the GPUs of ranks."""

    @abstractmethod
    def refusal(
        self, world_ranks: Sequence[int], op: str | None, dtype: np.dtype | None
    ) -> str | None:
        """Why these ranks cannot do `op` on `dtype` (None: move bytes) here, in words; the same on
        all of them."""

    @abstractmethod
    def native(self, group: int, world_ranks: Sequence[int]) -> Native:
        """The collectives among `world_ranks`, the ranks of the group with that id; called inside a
        side's work."""

    @abstractmethod
    def lane(self, group: int, src: int, dst: int) -> DeviceLane | None:
        """The lane between two world ranks for a group's messages; None where they go by way of the
        host."""

    @abstractmethod
    def finish(self) -> None:
        """Return when the GPU has done what this rank's calls asked of it: the others may still
        need its part."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory that this rank shares with others; finish() has returned. A second call
        does nothing.

        Waits for ranks that share the GPU to close, too, up to the limit, but after abort() a
        moment only.
        """

    @abstractmethod
    def side(self, group: int) -> SideStream:
        """The side of the group with that id."""
