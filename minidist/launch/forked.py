"""Run a function on ranks that are copies of this process: any callable, over TCP or shared memory.

    results = run_forked(fn, args, size=4, transport="auto", limit=60)

The parent is the monitor, forks, and reads each rank's result from a pipe: packed (comm/wire.py), never pickled.
"""

import contextlib
import os
import platform
import selectors
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidist.comm import wire
from minidist.comm.cost.link_model import load_profile
from minidist.comm.group import Group
from minidist.comm.health.failure import Failure, how_it_ended
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.ledger import Ledger
from minidist.comm.transport import Transport
from minidist.device import account
from minidist.launch import failures, transports
from minidist.launch.children import Children, Forked, flush_output
from minidist.launch.membership import limit_blas_threads

GRACE = 2.0                             # seconds the other ranks get to end after one has failed
_LENGTH = struct.Struct(">Q")


def run_forked(fn: Callable[..., Any], args: Sequence[Any], *, size: int, transport: str, limit: float,
               nodes: Sequence[int] = ()) -> list[Any]:
    """`fn(world, *args)` on `size` forked ranks.

    Args:    nodes: a number for each rank, equal on those that act as ranks of one node (left out: all are).
    Returns: what each rank returned, in rank order: numbers, strings, NumPy arrays, and lists, tuples, dicts of them;
             None of a rank that was lost and expendable.
    Raises:  the first failure, as failures.first_failure makes it; TimeoutError naming ranks not ended in `limit` s.
    """
    flush_output()                      # or each child would print again what is still buffered here
    job = ForkedJob(size, transport, limit, nodes or [0] * size)
    try:
        job.start(fn, args)
        outcomes = job.collect(time.monotonic() + limit)
        if job.monitor.loss is not None:
            raise failures.first_failure(job.monitor.loss, outcomes.get(job.monitor.loss.world_rank))
        late = set(range(size)) - set(outcomes) - set(job.monitor.spared)
        if late:
            raise failures.late(late, size, limit, job.monitor.table())
        return [outcomes.get(rank, {}).get("result") for rank in range(size)]
    finally:
        job.end()


class ForkedJob:
    """The parent's side: the monitor, the children, and the pipes their results come through."""

    def __init__(self, size: int, transport: str, limit: float, nodes: Sequence[int]) -> None:
        self.size, self.transport, self.limit, self.nodes = size, transport, limit, nodes
        self.token = wire.new_token()
        self.profile = load_profile()           # once, for all ranks
        self.processes: dict[int, Forked] = {}
        self.children = Children(self.processes)
        self.monitor = Monitor(size, self.token, how=self.children.how)
        self.pipes: list[socket.socket] = []
        self.unheard: set[int] = set()          # ranks whose pipe has not ended

    def start(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        """Fork every rank; only then start the monitor's threads."""
        transports.load(self.transport)         # once, here, rather than in every child
        for rank in range(self.size):
            ours, theirs = socket.socketpair()
            self.pipes.append(ours)
            self.unheard.add(rank)

            def body(rank: int = rank, theirs: socket.socket = theirs) -> int:
                for inherited in self.pipes:
                    inherited.close()
                self.monitor.close_in_child()
                return ForkedRank(rank, self, theirs).run(fn, args)

            with theirs:
                self.processes[rank] = Forked(body)
        self.monitor.start()

    def collect(self, deadline: float) -> dict[int, dict[str, Any]]:
        """What each rank handed over; ends early, after GRACE, if one was lost."""
        outcomes: dict[int, dict[str, Any]] = {}
        buffers = [bytearray() for _ in range(self.size)]
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self.pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while self.unheard and time.monotonic() < deadline:
                for key, _ in selector.select(min(0.1, max(0.0, deadline - time.monotonic()))):
                    data = self.pipes[key.data].recv(1 << 20)
                    buffers[key.data] += data
                    if not data:
                        selector.unregister(key.fileobj)
                        self.unheard.discard(key.data)
                        self._note(key.data, bytes(buffers[key.data]), outcomes)
                if self.monitor.spared:
                    self.monitor.end_frozen()
                if self.monitor.loss is not None:
                    self.monitor.end_frozen()
                    deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes

    def _note(self, rank: int, data: bytes, outcomes: dict[int, dict[str, Any]]) -> None:
        """A rank's pipe has ended: with its outcome, or because the rank died."""
        pid = self.processes[rank].pid
        if len(data) >= _LENGTH.size and len(data) == _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            outcomes[rank] = wire.unpack(data[_LENGTH.size:])
            error = outcomes[rank].get("error")
            if error is not None:       # it may have failed before it could reach the monitor
                how = f"failed with {error['name']}: {error['message']}"
                self.monitor.lose(Failure(rank, pid, platform.node(), how, error["traceback"]))
            return
        code = self.children.code(rank, 1.0)
        how = "closed its pipe" if code is None else how_it_ended(code)
        self.monitor.lose(Failure(rank, pid, platform.node(), how))

    def end(self) -> None:
        """Nothing is left over: no process, no thread, no socket."""
        self.children.end(0.0 if self.unheard else GRACE)
        self.monitor.close()
        for pipe in self.pipes:
            pipe.close()


@contextlib.contextmanager
def _only_this_process() -> Iterator[None]:
    """A child that the block forks ends where it would leave the block: it is not the rank."""
    process, status = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == process:
            raise
        status = Failure.by_exception(error, 0).status
        if not isinstance(error, SystemExit):
            traceback.print_exc()
    if os.getpid() != process:
        flush_output()
        os._exit(status)


class ForkedRank:
    """The child's side."""

    def __init__(self, rank: int, job: ForkedJob, pipe: socket.socket) -> None:
        self.rank, self.job, self.pipe = rank, job, pipe
        self.link: MonitorClient | None = None
        self.transport: Transport | None = None

    def run(self, fn: Callable[..., Any], args: Sequence[Any]) -> int:
        """Run the function and hand over what comes of it; returns the exit status."""
        try:
            outcome = wire.pack({"result": self._call(fn, args)})
        except (SystemExit, KeyboardInterrupt) as error:
            if self.link is not None:
                self.link.report(error)
            return 1
        except Exception as error:      # handed over, and raised again by the parent
            if self.link is not None:
                self.link.report(error)
            outcome = wire.pack({"error": failures.encode(error)})
        if self.link is not None:
            self.link.goodbye()                             # before the transport, so that no abort meets a closed one
        if self.transport is not None:
            self.transport.close()
        flush_output()
        with contextlib.suppress(OSError):                  # the parent may have given up
            self.pipe.sendall(_LENGTH.pack(len(outcome)) + outcome)
        return 0

    def _call(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        job = self.job
        if job.size > 1:
            limit_blas_threads(None, job.size)
        self.link = MonitorClient(job.monitor.address, job.token, self.rank, job.size, limit=job.limit)
        self.transport = transports.build(job.transport, self.link, job.token, job.limit, node=job.nodes[self.rank])
        self.link.attach(self.transport.waits, self.transport.abort, self.transport.lose)
        self.transport.profile = job.profile
        world = Group(self.transport, Ledger(self.rank), tuple(range(job.size)), nodes=job.nodes)
        with account.use(account.MemoryAccount()), _only_this_process():
            result = fn(world, *args)
        world.close()
        return result
