"""Ranks as threads of one process: for tests, first lessons, and reading.

    results = run_threads(fn, args, size=4, limit=60)      # fn(world, *args) on every rank; results in rank order

The transport is in mailbox.py; here is what starts the ranks, and ends them all when one fails.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from minidist.comm import source
from minidist.comm.group import Group
from minidist.comm.ledger import Ledger
from minidist.comm.profile import Profile
from minidist.comm.transports.mailbox import connect
from minidist.errors import CommError, PeerLostError, TimeoutError

_GRACE = 5.0  # seconds that ranks get to end after one has failed


def name_rank(error: BaseException, world_rank: int) -> BaseException:
    """The same exception, its traceback untouched, now saying which rank raised it: "rank 3: …".

    The rank goes in front of the message where the message is the exception's first argument, as it nearly always is.
    Any other exception (KeyError, OSError, …) gets a CommError that names the rank as its cause; Python prints both.
    """
    if error.args and isinstance(error.args[0], str) and str(error) == error.args[0]:
        name = f"rank {world_rank}"
        if not error.args[0].startswith(name):
            error.args = (f"{name}: {error.args[0]}", *error.args[1:])
        return error
    who = CommError(f"rank {world_rank} failed at {source.raised_at(error)}")
    who.__cause__, error.__cause__ = error.__cause__, who
    return error


class _Job:
    """What the ranks of one run share: results, and the first failure."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], size: int, limit: float, unbuffered: bool,
                 profile: Profile | None) -> None:
        self.fn, self.args, self.size, self.limit = fn, args, size, limit
        self.transports = connect(size, limit, unbuffered)
        for transport in self.transports:
            transport.profile = profile
        self.results: list[Any] = [None] * size
        self.failure: tuple[int, BaseException] | None = None
        self.running = set(range(size))
        self.changed = threading.Condition()
        self.threads = [threading.Thread(target=self.run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
                        for rank in range(size)]

    def run_rank(self, rank: int) -> None:
        """The body of a rank's thread."""
        world = Group(self.transports[rank], Ledger(rank), tuple(range(self.size)))
        try:
            self.results[rank] = self.fn(world, *self.args)
            world.close()
        except BaseException as error:  # run_threads raises it in the caller
            self.fail(rank, error)
            with suppress(CommError):  # started calls now fail; their error is not the one to tell
                world.close()
        finally:
            with self.changed:
                self.running.discard(rank)
                self.changed.notify_all()

    def fail(self, rank: int, error: BaseException) -> None:
        """Remember the first failure; every other rank learns of it at its present or next wait."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = (rank, error)
        if isinstance(error, TimeoutError):
            error.args = (f"{error.args[0]}\nmeanwhile {self.table(but=rank)}",)
        how = f"rank {rank} failed with {type(error).__name__}: {error} (at {source.raised_at(error)})"
        for transport in self.transports:
            transport.abort(PeerLostError(how, world_rank=rank))

    def wait(self) -> bool:
        """Whether all ranks ended, or one failed, within the limit."""
        with self.changed:
            return self.changed.wait_for(lambda: not self.running or self.failure is not None, self.limit)

    def stop(self) -> None:
        """End the ranks that still run, each at its present or next wait."""
        if self.running:
            for transport in self.transports:
                transport.abort(CommError("the run has ended"))
            with self.changed:
                self.changed.wait_for(lambda: not self.running, _GRACE)
        for transport in self.transports:
            transport.close()

    def table(self, but: int | None = None) -> str:
        """What each rank (`but` one) is in the middle of: "rank 0 in all_reduce at train.py:40; rank 1 has ended"."""
        with self.changed:
            running = set(self.running)
        return "; ".join(f"rank {rank} in {source.doing(self.threads[rank].ident)}" if rank in running
                         else f"rank {rank} has ended" for rank in range(self.size) if rank != but)


def run_threads(fn: Callable[..., Any], args: Sequence[Any] = (), size: int = 1, limit: float = 60.0,
                unbuffered: bool = False, profile: Profile | None = None) -> list[Any]:
    """Run `fn(world, *args)` on `size` ranks, each a thread with a ledger of its own and (account.py) a memory account.

    Args:    profile: what messages cost, for algorithm="auto"; None for the defaults.
    Returns: what each rank returned, in rank order.
    Raises:  the first failure of any rank, of its own type and with its own traceback, naming the rank (see name_rank);
             the other ranks are ended by PeerLostError. TimeoutError if a rank has not ended after `limit` seconds
             (also the limit of every wait inside), naming who hangs and in which call.
    """
    job = _Job(fn, args, size, limit, unbuffered, profile)
    for thread in job.threads:
        thread.start()
    try:
        if not job.wait():
            raise TimeoutError(f"{len(job.running)} of {size} ranks had not ended after {limit:g} s: {job.table()}")
        if job.failure is not None:
            rank, error = job.failure
            raise name_rank(error, rank)
        return job.results
    finally:
        job.stop()
