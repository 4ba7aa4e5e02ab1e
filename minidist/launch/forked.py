"""Run a function on ranks that are copies of this process: any callable, over TCP or shared memory.

    results = run_forked(fn, args, size=4, transport="auto", limit=60)

The parent runs the monitor and forks. A rank leaves its outcome in an unnamed file that it shares
with the parent: packed (comm/wire.py), never pickled.
"""

import contextlib
import encodings.idna  # noqa: F401 - once: else each rank imports it when it looks up the monitor's address
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, Any

from threadpoolctl import ThreadpoolController

from minidist.comm import wire
from minidist.comm.cost.link_model import load_profile
from minidist.comm.group import Group
from minidist.comm.health.acceptor import shortage
from minidist.comm.health.failure import Failure, ending, how_it_ended
from minidist.comm.health.flight_signals import hear_dump_signal
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.process_state import PATIENCE
from minidist.comm.ledger import Ledger
from minidist.comm.transport import Transport
from minidist.device import account
from minidist.errors import LaunchError
from minidist.launch import failures, transports
from minidist.launch.children import Children, Forked, flush_output
from minidist.launch.membership import limit_blas_threads

GRACE = 2.0  # seconds the other ranks get to end after one has failed
_LOOK = 0.005  # seconds between looks at the monitor


def run_forked(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    size: int,
    transport: str,
    limit: float,
    nodes: Sequence[int] = (),
    patience: float = PATIENCE,
) -> list[Any]:
    """Run `fn(world, *args)` on `size` forked ranks.

    Args:    nodes: a number for each rank; ranks with equal numbers act as ranks of one node
             (default: all ranks are on one node).
    Returns: what each rank returned, in rank order: numbers, strings, NumPy arrays, and lists,
             tuples, dicts of them; None for a rank that was lost and expendable.
    Raises:  the first failure, as failures.first_failure makes it; TimeoutError naming ranks not
             ended in `limit` s.
    """
    flush_output()  # otherwise each child would print the buffered text again
    transports.allow_open_files(size)
    transports.load(transport)  # once, here, rather than in every child
    deadline = time.monotonic() + limit
    try:
        job = ForkedJob(size, transport, limit, nodes or [0] * size, patience)
    except OSError as error:
        raise LaunchError(f"cannot start {size} ranks: {shortage(error, size)}") from error
    try:
        for rank in range(size):
            if time.monotonic() > deadline:
                raise failures.late(range(rank, size), size, limit, "they had not been started yet")
            try:
                job.processes[rank] = Forked(partial(_run_rank, rank, job, fn, args))
            except LaunchError as error:
                raise LaunchError(f"rank {rank} of {size}: {error}") from error
        job.monitor.start()  # now: no thread may run where a process is forked
        outcomes = job.collect(deadline)
        if job.monitor.loss is not None:
            raise failures.first_failure(job.monitor.loss, outcomes)
        if job.waiting:
            raise failures.late(job.waiting, size, limit, job.monitor.table())
        return [outcomes.get(rank, {}).get("result") for rank in range(size)]
    finally:
        job.children.end(0.0)
        job.monitor.close()
        for file in job.files:
            file.close()


class ForkedJob:
    """The parent's side: the monitor, the children, and the files of their outcomes."""

    def __init__(
        self, size: int, transport: str, limit: float, nodes: Sequence[int], patience: float
    ) -> None:
        self.size = size
        self.transport = transport
        self.limit = limit
        self.nodes = nodes
        self.files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115 - see run_forked
        self.token = wire.new_token()
        self.profile = load_profile()  # once, for all ranks; the libraries, too
        self.libraries = ThreadpoolController() if size > 1 else None
        self.processes: dict[int, Forked] = {}
        self.children = Children(self.processes, patience=patience)
        self.monitor = Monitor(
            size, self.token, how=lambda seat: self.children.how(seat.world_rank), patience=patience
        )
        self.waiting = set(range(size))  # ranks whose end has not been noted

    def collect(self, deadline: float) -> dict[int, dict[str, Any]]:
        """Return the outcome of each rank; stop GRACE seconds after a rank was lost."""
        outcomes: dict[int, dict[str, Any]] = {}
        while self.waiting and time.monotonic() < deadline:
            self.children.wait(_LOOK)
            for rank in self.waiting - set(self.children.running()):
                self.waiting.discard(rank)
                self._note(rank, outcomes)
            for loss in self.children.frozen(self.monitor.awaited()):
                self.monitor.miss(loss)
            if self.monitor.loss is not None:
                deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes

    def _note(self, rank: int, outcomes: dict[int, dict[str, Any]]) -> None:
        """Record the end of a rank's process: with 0 and an outcome, or as lost."""
        process = self.processes[rank]
        file = self.files[rank]
        file.seek(0)
        code = process.poll()
        data = file.read()
        assert code is not None
        how = how_it_ended(code)
        trace = ""
        if code == 0 and data:
            outcomes[rank] = wire.unpack(data)
            error = outcomes[rank].get("error")
            if error is None:
                return  # an error may have occurred before the rank could reach the monitor
            how = f"failed with {error['name']}: {error['message']}"
            trace = error["traceback"]
        self.monitor.lose(Failure(rank, process.pid, platform.node(), how, trace))


@contextlib.contextmanager
def _only_this_process() -> Iterator[None]:
    """End a child that the block forks where it would leave the block: it is not the rank."""
    process = os.getpid()
    status = 0
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


def _run_rank(rank: int, job: ForkedJob, fn: Callable[..., Any], args: Sequence[Any]) -> int:
    """Run the function in the child and write its outcome; return the exit status."""
    link: MonitorClient | None = None
    transport: Transport | None = None
    world: Group | None = None
    job.monitor.listener.close()
    try:
        if job.size > 1:
            limit_blas_threads(None, job.size, job.libraries)
        link = MonitorClient(
            job.monitor.address, job.token, rank, job.size, limit=job.limit, begun=True
        )
        transport = transports.build(
            job.transport, link, job.token, job.limit, node=job.nodes[rank]
        )
        link.attach(transport.waits, transport.abort, transport.lose)
        transport.profile = job.profile
        world = Group(transport, Ledger(rank), tuple(range(job.size)), nodes=job.nodes)
        hear_dump_signal()
        with account.use(account.MemoryAccount()), _only_this_process():
            result = fn(world, *args)
        world.close()
        outcome = wire.pack({"result": result})
    except BaseException as error:
        if link is not None:
            link.report(error)
        if world is not None:
            world.ledger.flight.end(*ending(error))
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return 1
        outcome = wire.pack({"error": failures.encode(error)})  # the parent raises it again
    if link is not None:
        link.goodbye()  # before the transport closes, so that no abort reaches a closed transport
    if transport is not None:
        transport.close()
    flush_output()
    with job.files[rank] as file:
        file.write(outcome)
    return 0
