"""MPI's own collectives, as `algorithm="native"`: to compare speed and results with ours.

Each is started without blocking (MPI_Iallreduce, …) and tested, as messages are in transport.py:
MPI's blocking calls use their core fully, know no time limit, and do not notice a dead rank.

A group other than the world needs its own communicator. The group's first native call makes it,
after all its ranks have agreed on that call; only there MPI waits in its own way.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from minidist.comm.calls.members import WORLD
from minidist.comm.native import Native
from minidist.comm.transport import Tag
from minidist.comm.transports.progress.engine import Engine, Operation
from minidist.errors import CommError

if TYPE_CHECKING:
    from minidist.comm.transports.mpi.transport import MpiTransport

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
KINDS = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f4", "f8", "c8", "c16")


class MpiCall(Operation):
    """A collective in progress; MPI writes to its arrays until it is complete."""

    def __init__(
        self, engine: Engine, request: MPI.Request, arrays: object, others: tuple[int, ...]
    ) -> None:
        self.engine = engine
        self.peer = engine.world_rank
        self.tag = Tag(0, 0)
        self.request = request
        self.arrays = arrays
        self.others = others

    def peers(self) -> tuple[int, ...]:
        return () if self.finished else self.others

    def in_vain(self) -> str:
        return "in a collective of MPI's own; did every rank of the group make the call?"

    def __str__(self) -> str:
        return "the others in a collective of MPI's own"


class MpiNative(Native):
    """The collectives of one communicator; `group` is the id of the ranks' group. MPI takes the
    dtype from the arrays."""

    def __init__(self, engine: "MpiTransport", group: int, world_ranks: Sequence[int]) -> None:
        self._engine = engine
        self._comm = engine.comm
        self._others = tuple(rank for rank in world_ranks if rank != engine.world_rank)
        if group == WORLD:
            return
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommError(
                "this MPI grants MPI_THREAD_SERIALIZED only, where two groups that make their "
                "communicators at once can wait for each other; use algorithm native in the world "
                "group only"
            )
        members = engine.comm.Get_group().Incl(list(world_ranks))
        self._comm = engine.comm.Create_group(members, group % 32000)

    def barrier(self) -> None:
        self._carry_out(lambda: self._comm.Ibarrier())

    def broadcast(self, octets: np.ndarray, root: int) -> None:
        self._carry_out(lambda: self._comm.Ibcast([octets, MPI.BYTE], root), octets)

    def reduce(self, x: np.ndarray, out: np.ndarray | None, op: str, root: int) -> None:
        self._carry_out(lambda: self._comm.Ireduce(_source(x, out), out, _OPS[op], root), x, out)

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        self._carry_out(lambda: self._comm.Iallreduce(_source(x, out), out, _OPS[op]), x, out)

    def reduce_scatter(
        self, x: np.ndarray, out: np.ndarray, counts: Sequence[int], op: str
    ) -> None:
        # MPI refuses an empty `out` that begins where x does
        target = out if out.size else np.empty(0, out.dtype)
        self._carry_out(
            lambda: self._comm.Ireduce_scatter(x, target, list(counts), _OPS[op]), x, target
        )

    def gather(
        self, octets: np.ndarray, out: np.ndarray | None, counts: Sequence[int], root: int
    ) -> None:
        target = None if out is None else [out, list(counts), MPI.BYTE]
        self._carry_out(lambda: self._comm.Igatherv([octets, MPI.BYTE], target, root), octets, out)

    def all_gather(self, octets: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        self._carry_out(
            lambda: self._comm.Iallgatherv([octets, MPI.BYTE], [out, list(counts), MPI.BYTE]),
            octets,
            out,
        )

    def scatter(
        self, octets: np.ndarray | None, counts: Sequence[int], out: np.ndarray | None, root: int
    ) -> None:
        source = None if octets is None else [octets, list(counts), MPI.BYTE]
        target = MPI.IN_PLACE if out is None else [out, MPI.BYTE]
        self._carry_out(lambda: self._comm.Iscatterv(source, target, root), octets, out)

    def all_to_all(
        self, octets: np.ndarray, leaving: Sequence[int], out: np.ndarray, coming: Sequence[int]
    ) -> None:
        self._carry_out(
            lambda: self._comm.Ialltoallv(
                [octets, list(leaving), MPI.BYTE], [out, list(coming), MPI.BYTE]
            ),
            octets,
            out,
        )

    def _carry_out(self, start: Callable[[], MPI.Request], *arrays: np.ndarray | None) -> None:
        """Start a collective, and wait for it as for a message."""
        try:
            with self._engine.one_at_a_time:
                call = MpiCall(self._engine, start(), arrays, self._others)
        except MPI.Exception as error:
            raise CommError(f"rank {self._engine.world_rank}: MPI: {error}") from error
        with self._engine.lock:
            self._engine.unfinished += 1
            self._engine.calls.append(call)
        call.wait()


def _source(x: np.ndarray, out: np.ndarray | None) -> object:
    """Return x as MPI's argument: the array, or IN_PLACE if `out` contains it already."""
    return MPI.IN_PLACE if out is not None and np.may_share_memory(x, out) else x
