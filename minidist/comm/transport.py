"""The interface of a transport: it moves bytes between two ranks, and knows nothing else.

    handle = transport.start_send(peer, tag, view, meta)            # the array must not change
                                                                    before wait()
    handle = transport.start_recv(peer, tag, accept, reduce=None)   # accept(meta, nbytes) says
                                                                    where the bytes go
    handle.wait()

A new transport is one short file that keeps the promises below, plus its name in
launch/transports.py and in tests/comm/test_conformance.py, which holds it to them.

Order       Messages between two ranks with the same tag arrive in the order they were started. Tags
            are independent: a message without a receive never holds up one with another tag.
Progress    `wait()` drives the transfer in the calling thread, and while it waits every other
            handle of this rank moves on too. So `start_send; start_recv; wait both` never
            deadlocks, whatever the sizes, on any transport.
Threads     Every method may be called from several threads of the rank at once.
Limits      A wait ends after `limit` seconds at the latest, with errors.TimeoutError that names
            this rank, the peer and the tag. A lost peer raises PeerLostError with its world rank.
            After `abort(error)` every wait that is not yet satisfied raises `error`.
Deadlock    A wait longer than waits.QUIET tells `waits` what it is and for which ranks.
Waiting     A waiting rank yields its core: a short spin at most, then it sleeps in the kernel.
Counting    Transports do not count. Calls do (comm/calls/call.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from minidist.comm.cost.link_model import Profile
from minidist.comm.device_lane import DeviceTransport
from minidist.comm.handle import Handle
from minidist.comm.health.wait_state import Waits
from minidist.comm.native import Native
from minidist.errors import CommError, ConfigError, PeerLostError

Accept = Callable[[bytes, int], np.ndarray]
"""`accept(meta, nbytes)` -> the 1-D contiguous array of exactly `nbytes` bytes that the payload
fills.

Called once, when the header has arrived, in a thread of the receiving rank, under no lock of the
transport. What it raises (MismatchError, say) is raised by the handle's `wait()`; the payload is
then dropped and the link stays usable.
"""

Reduce = Callable[[np.ndarray, int, np.ndarray], None]
"""`reduce(target, start, piece)` combines `piece` into `target[start:start + len(piece)]`, straight
from the buffer.

`target` is what `accept` returned; `piece` is 1-D, typed like `target`, holds whole elements, and
is only read (it may be the sender's own memory). Pieces cover the target once, in order; an empty
message may bring none.
"""


class ShortReceive(NamedTuple):
    """A message of which the receiver knows what it will look like; `into()` is called when it is
    there."""

    peer: int
    meta: bytes
    nbytes: int
    into: Callable[[], np.ndarray]


class Tag(NamedTuple):
    """What keeps streams of messages apart: a group's 64-bit id, and a number within it (unsigned
    64-bit both)."""

    group: int
    sequence: int


class Board(ABC):
    """Memory where every rank of a group shows what it has, and all look. One thread at a time.

    Attributes: lends   whether the ranks may also read() each other's own memory; the same on all
                        of them
    """

    lends: bool = False

    @abstractmethod
    def show(self, meta: bytes, arrays: Sequence[np.ndarray]) -> list[tuple[bytes, np.ndarray]]:
        """Show `arrays` (1-D, contiguous), at most SHOWN_BYTES (limits.py) in all.

        Returns: for each rank its meta, and its arrays one after the other as uint8, where they
        lie: only to be read,
                 and only until the next show() or close().
        Raises:  PeerLostError, TimeoutError, what `abort` was given.
        """

    @abstractmethod
    def lendable(self, array: np.ndarray) -> bool:
        """Whether the others can read() this array of ours. Memory that a device's driver has
        mapped, they cannot."""

    @abstractmethod
    def read(self, rank: int, address: int, target: np.ndarray) -> None:
        """Fill a contiguous array with the bytes at `address` of another rank's memory, until its
        next show(); only where `lends`. Raises: PeerLostError, what `abort` was given.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the place back. Every rank has returned from its last show()."""


class Transport(ABC):
    """One rank's end of the links to every other rank of the job.

    Attributes: name        "threads", "tcp", "shm+tcp", …
                world_rank  this rank in the job
                world_size  number of ranks in the job
                limit       seconds that any one wait may last; may be changed between calls
                waits       this rank's lasting waits, for the detection of deadlocks
                profile     what messages cost, as rank 0 told when the job met; None if it was not
                            measured
                device      for arrays on the GPU (device_lane.py); None where they travel by way of
                            the host
    """

    name: str
    world_rank: int
    world_size: int
    limit: float
    waits: Waits
    profile: Profile | None = None
    device: DeviceTransport | None = None

    @property
    def inside(self) -> str:
        """The link class (comm/cost/link_model.py) between ranks of one node."""
        return self.name

    @property
    def shared_bytes(self) -> int:
        """At most so much memory that ranks of one host share is this rank's to write; in no
        account (account.py)."""
        return 0

    @abstractmethod
    def start_send(self, peer: int, tag: Tag, view: np.ndarray, meta: bytes = b"") -> Handle:
        """Begin to send `view` (1-D, contiguous, host memory, any dtype, perhaps read-only or
        empty) and `meta` to the world rank `peer`; messages to oneself go by loopback().
        """

    @abstractmethod
    def start_recv(
        self, peer: int, tag: Tag, accept: Accept, reduce: Reduce | None = None
    ) -> Handle:
        """Begin to receive the next message of `tag` from `peer` into what `accept` returns, or
        `reduce` it there."""

    def swap(
        self,
        tag: Tag,
        sends: Sequence[tuple[int, np.ndarray, bytes]],
        receives: Sequence[ShortReceive],
    ) -> tuple[list[Handle], list[bool]] | None:
        """Send short messages and take those that come back, without any ado, where the links to
        all are idle.

        Args:    sends: (peer, view, meta), as start_send's; receives: at most one from each peer.
        Returns: the handles of the sends, and which of `receives` have come; the others are yet to
        be received by
                 start_recv, one that looks otherwise among them. None: nothing was sent, go on as
                 usual.
        """
        return None

    @abstractmethod
    def loopback(self) -> "Transport":
        """A buffered link of this rank to itself, its only peer; it ends with this transport's
        waits."""

    def reserve_board(self) -> int:
        """Where a board of this rank may lie, for open_board(); -1 where ranks share no memory, or
        none is left."""
        return -1

    def open_board(self, world_ranks: Sequence[int], places: Sequence[int]) -> "Board | None":
        """The board of a group whose ranks reserved these places; None if one of them had none."""
        return None

    def check_native(self, op: str | None, dtype: np.dtype | None) -> None:
        """Raises ConfigError unless this transport has collectives of its own, and for this op on
        this dtype."""
        raise self._without_native()

    def _without_native(self) -> ConfigError:
        return ConfigError(
            f"transport {self.name} has no collectives of its own; algorithm native is for ranks "
            "of mpi, and of nccl with arrays on the GPU: choose auto, or another"
        )

    def native(self, group: int, world_ranks: Sequence[int]) -> Native:
        """Its own collectives among `world_ranks`, the ranks of the group with that id.

        Raises ConfigError as check_native() does.
        """
        raise self._without_native()

    def abort(self, error: CommError) -> None:
        """Make every unfinished wait of this rank, now or later, raise `error`. From any thread."""
        self.waits.abort(error)

    def lose(self, error: PeerLostError) -> None:
        """One rank is lost and the job goes on, if the transport can: waits for it raise `error`.
        From any thread."""
        self.abort(error)

    @abstractmethod
    def close(self) -> None:
        """Release threads, connections, memory and files. Messages that were waited for have been
        delivered."""
