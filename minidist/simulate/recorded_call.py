"""Chapter 24 · A collective call that only counts: what the algorithms see of a rank that runs alone."""

from typing import Any

import numpy as np

from minidist.comm.calls.call import Call
from minidist.comm.handle import Handle
from minidist.comm.transport import Transport
from minidist.device import account
from minidist.device.backend import module_for
from minidist.errors import CommError


class Done(Handle):
    """A transfer that is over."""

    def wait(self) -> None:
        """At once."""

    def done(self) -> bool:
        return True


_DONE = Done()


class RecordedCall(Call):
    """A call whose messages are counted, and go nowhere.

    Args:    shapes: of the blocks that come from each rank.
    Attributes: nbytes, messages: sent by this rank; rooms: (length, dtype) of each workspace.
    """

    def __init__(self, group: Any, verb: str, algorithm: str, shapes: Any) -> None:
        self.rank, self.size, self.nodes, self.world_ranks = group.rank, group.size, group.nodes, group.world_ranks
        self.next_rank, self.prev_rank = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.verb, self.algorithm, self.ledger, self.board = verb, algorithm, group.ledger, None
        self.device = self.origin = "cpu"
        self.shapes, self.nbytes, self.messages = shapes, 0, 0
        self.rooms: list[tuple[int, np.dtype]] = []
        self._dtype = None

    def count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.messages += 1

    def start_send(self, dst: int, array: Any, *, block: bool = False, step: int | None = None,
                   chunk: int | None = None) -> Handle:
        self.nbytes += array.nbytes
        self.messages += 1
        self._dtype = array.dtype
        return _DONE

    def start_recv(self, src: int, into: Any, reduce: Any = None) -> Handle:
        return _DONE

    def start_recv_block(self, src: int, place: Any) -> tuple[Handle, list[Any]]:
        return _DONE, [place(self.shapes[src], self._dtype)]

    def agree(self) -> None:
        """All ranks of a plan agree."""

    def workspace(self, length: int, dtype: np.dtype) -> Any:
        self.rooms.append((length, np.dtype(dtype)))
        return account.current().hold(module_for("cpu").empty(length, dtype), "communication")


class SimTransport(Transport):
    """The transport of a rank that runs alone: it moves nothing."""

    name, limit = "sim", 60.0

    def __init__(self, world_rank: int, world_size: int) -> None:
        self.world_rank, self.world_size = world_rank, world_size

        class _Waits:
            step = 0
        self.waits: Any = _Waits()

    def start_send(self, peer: int, tag: Any, view: Any, meta: bytes = b"") -> Handle:
        raise CommError("a rank that runs alone has nobody to send to")

    def start_recv(self, peer: int, tag: Any, accept: Any, reduce: Any = None) -> Handle:
        raise CommError("a rank that runs alone has nobody to receive from")

    def loopback(self) -> Transport:
        return self

    def close(self) -> None:
        """Nothing is open."""
