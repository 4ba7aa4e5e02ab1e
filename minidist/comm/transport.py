"""The interface of a transport: it moves bytes between two ranks, and does nothing else.

    handle = transport.start_send(peer, tag, view, meta)            # the array must not change
                                                                    # before wait()
    handle = transport.start_recv(peer, tag, accept, reduce=None)   # accept(meta, nbytes) returns
                                                                    # the array to fill
    handle.wait()

Of tcp, shm and mpi these functions are StreamTransport's (transports/progress/stream.py), and
wait() is Operation's (transports/progress/engine.py). transports/__init__.py lists all transports.
A new transport is one short file that keeps the promises below, plus its name in
launch/transports.py and in tests/comm/test_conformance.py, which tests the promises.

Order       Messages between two ranks with the same tag arrive in the order of their start. Tags
            are independent: a message without a receive never blocks a message with another tag.
Progress    `wait()` drives the transfer in the calling thread, and meanwhile also every other
            transfer of this rank. So `start_send; start_recv; wait both` never deadlocks, whatever
            the sizes, on any transport.
Threads     Every method may be called from several threads of the rank at once.
Limits      A wait ends after at most `limit` seconds, with errors.TimeoutError that names this
            rank, the peer and the tag. A lost peer raises PeerLostError with its world rank. After
            `abort(error)` every unfinished wait raises `error`.
Deadlock    A wait longer than QUIET (health/wait_state.py) is reported to `waits`, with a text and
            its ranks.
Waiting     A waiting rank yields its core: it spins only briefly, then sleeps in the kernel.
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
transport. If it raises an error (e.g. MismatchError), the handle's `wait()` raises it; the payload
is then dropped and the link stays usable.
"""

Reduce = Callable[[np.ndarray, int, np.ndarray], None]
"""`reduce(target, start, piece)` combines `piece` into `target[start:start + len(piece)]`, straight
from the receive buffer.

`target` is the array that `accept` returned; `piece` is 1-D, has the dtype of `target`, holds whole
elements, and is only read (it may be the sender's own memory). Pieces cover the target once, in
order; an empty message may have no piece.
"""


Likely = tuple[bytes, int, np.ndarray | None]
"""The meta and the bytes of the payload that a message probably has, and the array that `accept`
then returns, if that is known. A short message that has both is recognised by comparing bytes."""


class Tag(NamedTuple):
    """The name of a stream of messages: a group's 64-bit id, and a number within it (both unsigned
    64-bit). The number does not count calls; Signature.sequence does (signature.py)."""

    group: int
    sequence: int


class Board(ABC):
    """Memory in which every rank of a group shows arrays that all others read. One thread at a
    time.

    Attributes: lends   whether the ranks may also read() each other's own memory; the same on all
                        of them
    """

    lends: bool = False

    @abstractmethod
    def show(self, meta: bytes, arrays: Sequence[np.ndarray]) -> list[tuple[bytes, np.ndarray]]:
        """Show `arrays` (1-D, contiguous), at most SHOWN_BYTES (limits.py) in all.

        Returns: for each rank its meta, and its arrays joined as uint8, in place: read-only, valid
                 until the next show() or close().
        Raises:  PeerLostError, TimeoutError, the error given to `abort`.
        """

    @abstractmethod
    def lendable(self, array: np.ndarray) -> bool:
        """Return whether other ranks can read() this rank's array; not if a device's driver has
        mapped its memory."""

    @abstractmethod
    def read(self, rank: int, address: int, target: np.ndarray) -> None:
        """Fill a contiguous array with the bytes at `address` of another rank's memory, before its
        next show(); only if `lends`. Raises: PeerLostError, the error given to `abort`.
        """

    @abstractmethod
    def close(self) -> None:
        """Give this rank's part back. Every rank has returned from its last show()."""


class Transport(ABC):
    """A rank's end of the links to every other rank of the job.

    Attributes: name        "threads", "tcp", "shm+tcp", …
                world_rank  this rank in the job
                world_size  number of ranks in the job
                limit       maximum seconds of a wait; may be changed between calls
                waits       this rank's long waits, for the detection of deadlocks
                profile     the cost of messages, sent by rank 0 when the job started; None if not
                            measured
                device      the transport of arrays on the GPU (device_lane.py); None if they are
                            sent through the host
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
        """The link class (comm/cost/link_model.py) of links between ranks of one node."""
        return self.name

    @property
    def shared_bytes(self) -> int:
        """Maximum bytes of the host's shared memory that this rank may write; in no memory account
        (account.py)."""
        return 0

    @abstractmethod
    def start_send(self, peer: int, tag: Tag, view: np.ndarray, meta: bytes = b"") -> Handle:
        """Begin to send `view` (1-D, contiguous, host memory, any dtype, possibly read-only or
        empty) and `meta` to the world rank `peer`; a rank sends to itself by loopback().
        """

    @abstractmethod
    def start_recv(
        self,
        peer: int,
        tag: Tag,
        accept: Accept,
        reduce: Reduce | None = None,
        likely: Likely | None = None,
    ) -> Handle:
        """Begin to receive the next message of `tag` from `peer` into the array that `accept`
        returns, or to `reduce` it there. `likely` may make it faster, and changes nothing else."""

    @abstractmethod
    def loopback(self) -> "Transport":
        """Return a buffered link of this rank to itself, its only peer; an abort of this transport
        also ends its waits."""

    def reserve_board(self) -> int:
        """Reserve and return this rank's place of a board, for open_board(); -1 if ranks share no
        memory, or no place is left."""
        return -1

    def open_board(self, world_ranks: Sequence[int], places: Sequence[int]) -> "Board | None":
        """Return the board of a group whose ranks reserved these places; None if one is -1."""
        return None

    def check_native(self, op: str | None, dtype: np.dtype | None) -> None:
        """Raise ConfigError unless this transport has its own collectives, and supports this op on
        this dtype."""
        raise self._without_native()

    def _without_native(self) -> ConfigError:
        return ConfigError(
            f"transport {self.name} has no collectives of its own; algorithm native is for ranks "
            "of mpi, and of nccl with arrays on the GPU: choose auto, or another"
        )

    def native(self, group: int, world_ranks: Sequence[int]) -> Native:
        """Return its own collectives for `world_ranks`, the ranks of the group with that id.

        Raises ConfigError as check_native() does.
        """
        raise self._without_native()

    def abort(self, error: CommError) -> None:
        """Make every unfinished wait of this rank, now or later, raise `error`. From any thread."""
        self.waits.abort(error)

    def lose(self, error: PeerLostError) -> None:
        """Make waits for a lost rank raise `error`; the job continues, if the transport can. From
        any thread."""
        self.abort(error)

    @abstractmethod
    def close(self) -> None:
        """Release threads, connections, memory and files. Messages whose wait() has returned are
        delivered."""
