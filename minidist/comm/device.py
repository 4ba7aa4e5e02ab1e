"""What a transport has for arrays on a GPU: collectives that leave them there, on a stream of the group's own.

    program's stream   ... x is written | e0             | e1 awaited | the result is read ...
                                          \\              /
    the group's side                       e0 awaited | work | e1                        nobody waits on the host

Without one, arrays cross to the host and back (arrays.py), whatever the transport. A call goes to the device if its
arrays are on the GPU, its algorithm is `auto` or `native`, and Device.refusal() has nothing against it. All ranks of
a group must bring arrays of the same kind: one that brings a host array calls another algorithm: a MismatchError.

Not yet measured on a GPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.backend import Array
from minidist.comm.native import Native

if TYPE_CHECKING:
    from minidist.comm.transport import Handle


class Side(ABC):
    """A group's own stream. Calls of the group are carried out on it, one after the other, in any thread of the rank.

    Memory: CuPy's pool hands a freed block out again at once to the stream it was allocated for. So what the program
    gets must come from the program's stream (`allocate`); what only the work needs comes from the side's.
    """

    @abstractmethod
    def begin(self) -> Any:
        """Note what the program's stream holds now: the call's arguments are ready behind that."""

    @abstractmethod
    def carry_out(self, begun: Any, work: Callable[[], Any], keep: Any) -> tuple[Any, Any]:
        """Run `work` with the side as the current stream, ordered behind `begun`; `keep` lives until the GPU is done.

        Returns: what the work returned, and a mark for join().
        """

    @abstractmethod
    def allocate(self, make: Callable[[], Array]) -> Array:
        """Inside the work: what `make()` allocates for the program to keep."""

    @abstractmethod
    def join(self, done: Any) -> None:
        """Order the current stream behind the mark. Raises: what the transport was aborted with."""


class Lane(ABC):
    """Messages one way between two ranks, from GPU to GPU. Each has a header that travels by the host transport, which
    says so by VIA_LANE in place of a device; headers and messages have the same order."""

    @abstractmethod
    def introduction(self) -> np.ndarray:
        """What the sender puts into the next header's message (uint8), so that the receiver can meet it here."""

    @abstractmethod
    def send(self, array: Array) -> "Handle":
        """Begin to send a contiguous array that the current stream has written; does not wait for the receiver.

        The handle's wait() orders the current stream behind the message.
        """

    @abstractmethod
    def recv(self, introduction: np.ndarray, into: Array) -> "Handle":
        """Begin to receive the message of the next header into a contiguous array; wait() as above."""


VIA_LANE = "lane"


class Device(ABC):
    """Collectives and messages between the GPUs of ranks."""

    @abstractmethod
    def refusal(self, world_ranks: Sequence[int], op: str | None, dtype: np.dtype | None) -> str | None:
        """Why these ranks cannot do `op` on `dtype` (None: move bytes) here, in words; the same on all of them."""

    @abstractmethod
    def native(self, group: int, world_ranks: Sequence[int]) -> Native:
        """The collectives among `world_ranks`, the ranks of the group with that id; called inside a side's work."""

    @abstractmethod
    def lane(self, group: int, src: int, dst: int) -> Lane | None:
        """The lane between two world ranks for a group's messages; None where they go by way of the host."""

    @abstractmethod
    def finish(self) -> None:
        """Return when the GPU has done what this rank's calls asked of it: the others may still need its part."""

    @abstractmethod
    def side(self, group: int) -> Side:
        """The side of the group with that id."""
