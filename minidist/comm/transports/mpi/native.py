"""MPI's own collectives, as `algorithm="native"`: to compare ours with, in speed and in results.

Each is started without blocking (MPI_Iallreduce, …) and tested, as messages are in transport.py: MPI's blocking calls
burn their core, know no time limit, and do not notice a dead rank.

A group that is not the world needs a communicator of its own. It is made by the group's first native call, after all
its ranks have agreed on that call; there alone MPI waits in its own way.
"""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from minidist.comm.calls.members import WORLD
from minidist.comm.health.wait_state import QUIET
from minidist.comm.native import Native
from minidist.comm.transports.progress.engine import Engine, yield_core
from minidist.errors import CommError, ConfigError, TimeoutError

_OPS = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
_KINDS = {"i1": MPI.INT8_T, "i2": MPI.INT16_T, "i4": MPI.INT32_T, "i8": MPI.INT64_T,
          "u1": MPI.UINT8_T, "u2": MPI.UINT16_T, "u4": MPI.UINT32_T, "u8": MPI.UINT64_T,
          "f4": MPI.FLOAT, "f8": MPI.DOUBLE, "c8": MPI.C_FLOAT_COMPLEX, "c16": MPI.C_DOUBLE_COMPLEX}
_SPINS = 50                         # tests with yielded core before sleeping
_SHORTEST, _LONGEST = 1e-6, 500e-6  # seconds of a sleep


def check(op: str, dtype: np.dtype) -> None:
    """Raises ConfigError unless MPI has this op on this dtype."""
    if _kind(dtype) not in _KINDS or (dtype.kind == "c" and op in ("max", "min")):
        raise ConfigError(f"MPI has no {op} of {dtype}; choose another algorithm than native")


class MpiNative(Native):
    """The collectives of one communicator; `group` is the id of the ranks' group."""

    def __init__(self, engine: Engine, world: MPI.Intracomm, one_at_a_time: threading.Lock, group: int,
                 world_ranks: Sequence[int]) -> None:
        self._engine, self._mpi = engine, one_at_a_time
        self._abandoned: list[tuple[MPI.Request, object]] = []  # MPI may still write to their arrays
        self._others = tuple(rank for rank in world_ranks if rank != engine.world_rank)
        if group == WORLD:
            self._comm = world
            return
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommError("this MPI grants MPI_THREAD_SERIALIZED only, where two groups that make their "
                            "communicators at once can wait for each other; take algorithm native in the world only")
        members = world.Get_group().Incl(list(world_ranks))
        self._comm = world.Create_group(members, group % 32000)

    def barrier(self) -> None:
        self._carry_out(lambda: self._comm.Ibarrier())

    def broadcast(self, octets: np.ndarray, root: int) -> None:
        self._carry_out(lambda: self._comm.Ibcast([octets, MPI.BYTE], root), octets)

    def reduce(self, x: np.ndarray, out: np.ndarray | None, op: str, root: int) -> None:
        source, target = _typed(x, out), None if out is None else [out, _KINDS[_kind(out.dtype)]]
        self._carry_out(lambda: self._comm.Ireduce(source, target, _OPS[op], root), x, out)

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        target = [out, _KINDS[_kind(out.dtype)]]
        self._carry_out(lambda: self._comm.Iallreduce(_typed(x, out), target, _OPS[op]), x, out)

    def reduce_scatter(self, x: np.ndarray, out: np.ndarray, counts: Sequence[int], op: str) -> None:
        target = [out, len(out), _KINDS[_kind(out.dtype)]]
        self._carry_out(lambda: self._comm.Ireduce_scatter(_typed(x, None), target, list(counts), _OPS[op]), x, out)

    def gather(self, octets: np.ndarray, out: np.ndarray | None, counts: Sequence[int], root: int) -> None:
        target = None if out is None else [out, list(counts), MPI.BYTE]
        self._carry_out(lambda: self._comm.Igatherv([octets, MPI.BYTE], target, root), octets, out)

    def all_gather(self, octets: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        self._carry_out(lambda: self._comm.Iallgatherv([octets, MPI.BYTE], [out, list(counts), MPI.BYTE]), octets, out)

    def scatter(self, octets: np.ndarray | None, counts: Sequence[int], out: np.ndarray | None, root: int) -> None:
        source = None if octets is None else [octets, list(counts), MPI.BYTE]
        target = MPI.IN_PLACE if out is None else [out, MPI.BYTE]
        self._carry_out(lambda: self._comm.Iscatterv(source, target, root), octets, out)

    def all_to_all(self, octets: np.ndarray, leaving: Sequence[int], out: np.ndarray, coming: Sequence[int]) -> None:
        self._carry_out(lambda: self._comm.Ialltoallv([octets, list(leaving), MPI.BYTE],
                                                      [out, list(coming), MPI.BYTE]), octets, out)

    def _carry_out(self, start: Callable[[], MPI.Request], *arrays: np.ndarray | None) -> None:
        """Start a collective, and test until it is complete or the limit is reached; between tests yield the core."""
        engine, begun = self._engine, time.monotonic()
        try:
            with self._mpi:
                request = start()
            complete = self._complete_by(request, begun + min(QUIET, engine.limit))
            if not complete and engine.error is None:
                with engine.waits.lasting("the others in a collective of MPI's own", lambda: self._others):
                    complete = self._complete_by(request, begun + engine.limit)
        except MPI.Exception as error:
            raise CommError(f"rank {engine.world_rank}: MPI: {error}") from error
        if not complete:
            self._abandoned.append((request, arrays))
            raise engine.error or TimeoutError(
                f"rank {engine.world_rank} waited {engine.limit:g} s in a collective of MPI's own; did every rank of "
                "the group make the call?")

    def _complete_by(self, request: MPI.Request, deadline: float) -> bool:
        tests, nap = 0, _SHORTEST
        while not self._complete(request):
            if self._engine.error is not None or time.monotonic() >= deadline:
                return False
            tests += 1
            if tests <= _SPINS:
                yield_core()
            else:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST)
        return True

    def _complete(self, request: MPI.Request) -> bool:
        with self._mpi:
            return bool(request.Test())


def _kind(dtype: np.dtype) -> str:
    """ "f4"; a dtype that MPI does not know has a byte order or a name in front."""
    return dtype.str[1:] if dtype.isnative and dtype.isbuiltin == 1 else dtype.str


def _typed(x: np.ndarray, out: np.ndarray | None) -> object:
    """x as MPI takes it: the array, or IN_PLACE where `out` holds it already."""
    return MPI.IN_PLACE if out is not None and np.may_share_memory(x, out) else [x, _KINDS[_kind(x.dtype)]]
