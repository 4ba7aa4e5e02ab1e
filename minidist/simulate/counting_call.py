"""Chapter 24 · A collective call that only counts: what the algorithms see of a rank that runs
alone.

Its bytes and messages go into the ledger. How long a call takes is found elsewhere, from other runs
of the algorithms: ProgramCall (messages.py) writes down each operation, and walk.py walks them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.calls.buffers import Place, Rows
from minidist.comm.calls.call import Call
from minidist.comm.handle import Handle
from minidist.comm.transport import Transport
from minidist.device import account
from minidist.device.backend import module_for
from minidist.errors import CommError


class Done(Handle):
    """A transfer that is over."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        return True


_DONE = Done()


class NoLibrary:
    """A library of collectives that moves nothing."""

    def __getattr__(self, verb: str) -> Any:
        return lambda *_: None


NO_LIBRARY = NoLibrary()


class CountingCall(Call):
    """A call whose messages are counted, and go nowhere.

    Args:    dtype: of the blocks that come; held: whether workspace counts in the account.
    Attributes: nbytes, messages: sent by this rank; rooms: (length, dtype) of each workspace.
    """

    def __init__(
        self, group: Any, verb: str, algorithm: str, dtype: np.dtype, *, held: bool
    ) -> None:
        self.rank = group.rank
        self.size = group.size
        self.nodes = group.nodes
        self.world_ranks = group.world_ranks
        self.next_rank, self.prev_rank = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.verb = verb
        self.algorithm = algorithm
        self.signature = None  # type: ignore[assignment]  # SubsetCall hands it on, unread
        self.ledger = group.ledger
        self.board = None
        self.device = self.origin = "cpu"
        self.dtype = dtype
        self.nbytes = 0
        self.messages = 0
        self._held = held
        self.rooms: list[tuple[int, np.dtype]] = []

    def start_send(
        self,
        dst: int,
        array: Any,
        *,
        block: bool = False,
        step: int | None = None,
        chunk: int | None = None,
    ) -> Handle:
        self.count(array.nbytes)
        return _DONE

    def start_recv(self, src: int, into: Any, reduce: Any = None) -> Handle:
        return _DONE

    def start_recv_block(self, src: int, place: Any, like: Any = None) -> tuple[Handle, list[Any]]:
        return _DONE, [place(place.shape, self.dtype)]

    def native(self) -> Any:
        return NO_LIBRARY

    def agree(self) -> None:
        """Do nothing: all ranks of a plan agree."""

    def workspace(self, length: int, dtype: np.dtype) -> Any:
        self.rooms.append((length, np.dtype(dtype)))
        room = module_for("cpu").empty(length, dtype)
        return account.current().hold(room, "communication") if self._held else room


class DeclaredPlace:
    """Where an incoming block goes (calls/buffers.py), which knows the block's shape in advance."""

    def __init__(self, place: Place, shape: tuple[int, ...]) -> None:
        self._place = place
        self.shape = shape

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return self._place(shape, dtype)


class DeclaredRows(Rows):
    """The result of a gather whose blocks' lengths are known. Args: as Rows'; lengths: of each
    rank's block."""

    def __init__(self, result: Any, own: Any, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        super().__init__(result, own, len(lengths))

    def place(self, rank: int, count: int = 1) -> DeclaredPlace:
        rows = sum(self.lengths[rank : rank + count])
        return DeclaredPlace(super().place(rank, count), (rows, *self._own.shape[1:]))

    @property
    def place_whole(self) -> DeclaredPlace:
        """Return the place where all blocks at once are received."""
        return DeclaredPlace(super().place_whole, (sum(self.lengths), *self._own.shape[1:]))


class SimTransport(Transport):
    """The transport of a rank that runs alone: it moves nothing."""

    name = "sim"
    limit = 60.0

    def __init__(self, world_rank: int, world_size: int) -> None:
        self.world_rank = world_rank
        self.world_size = world_size

        class _Waits:
            step = 0

        self.waits: Any = _Waits()

    def start_send(self, peer: int, tag: Any, view: Any, meta: bytes = b"") -> Handle:
        raise CommError("a rank simulated by itself has no rank to send to")

    def start_recv(self, peer: int, tag: Any, accept: Any, *_: Any) -> Handle:
        raise CommError("a rank simulated by itself has no rank to receive from")

    def loopback(self) -> Transport:
        return self

    def close(self) -> None:
        """Do nothing: nothing is open."""
