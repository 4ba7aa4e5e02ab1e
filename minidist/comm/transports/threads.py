"""Ranks as threads of one process: for tests, first lessons, and reading.

    results = run_threads(fn, args, size=4, limit=60)   # fn(world, *args) on every rank;
                                                        # results in rank order

The transport is in mailbox.py; this file starts the ranks, and ends all of them when one fails.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from minidist import errors
from minidist.comm import call_site
from minidist.comm.cost.link_model import Profile
from minidist.comm.group import Group
from minidist.comm.health import deadlock
from minidist.comm.health.deadlock import Verdict
from minidist.comm.health.deadlock_arbiter import Arbiter
from minidist.comm.health.failure import Failure, begin_with_rank, ending, words
from minidist.comm.health.wait_state import State, WaitListener
from minidist.comm.ledger import Ledger
from minidist.comm.transports.progress.mailbox import connect
from minidist.errors import CommError, LaunchError, PeerLostError, TimeoutError

_GRACE = 5.0  # seconds that ranks get to end after one has failed


def name_rank(error: BaseException, world_rank: int) -> BaseException:
    """Return the same exception with its traceback; its message now begins with the rank: "rank 3:
    …".

    If its message is not its first argument (KeyError, OSError, …), it gets a cause instead: a
    CommError that names the rank.
    """
    if begin_with_rank(error, world_rank):
        return error
    named = CommError(f"rank {world_rank} failed at {call_site.raised_at(error)}")
    named.__cause__ = error.__cause__
    error.__cause__ = named
    return error


class ThreadListener(WaitListener):
    """The listener of a rank's long waits, which reports them to the arbiter of its run; the rank's
    program is its thread."""

    def __init__(self, job: "ThreadJob", rank: int) -> None:
        self._job = job
        self._rank = rank

    def note(self) -> None:
        self._job.note(self._rank)

    def program(self) -> set[int | None]:
        return {self._job.threads[self._rank].ident}

    def table(self, state: State) -> str:
        return self._job.table({self._rank: state})

    def disagree(self, text: str, world_ranks: tuple[int, ...]) -> None:
        self._job.tell(Verdict("MismatchError", text, list(world_ranks)))

    def spare(self) -> None:
        self._job.expendable.add(self._rank)


class ThreadJob:
    """A run: its ranks, their results, and the first failure."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        size: int,
        limit: float,
        unbuffered: bool,
        profile: Profile | None,
    ) -> None:
        self.fn = fn
        self.args = args
        self.size = size
        self.limit = limit
        self.transports = connect(size, limit, unbuffered)
        for transport in self.transports:
            transport.profile = profile
        self.results: list[Any] = [None] * size
        self.failure: tuple[int, BaseException] | None = None
        self.ended = False  # a rank has failed, and all others have got the error
        self.expendable: set[int] = set()  # ranks without which the run continues
        self.running = set(range(size))
        self.changed = threading.Condition(threading.RLock())
        self.threads = [
            threading.Thread(target=self.run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(size)
        ]
        self.arbiter = Arbiter(self.ask, self.tell)
        self.news: set[int] = set()  # ranks with a new state that the arbiter has not received
        for rank, transport in enumerate(self.transports):
            transport.waits.listener = ThreadListener(self, rank)

    def start(self) -> None:
        """Start the ranks. Raises: LaunchError if the system cannot start another thread; the
        started ranks are ended."""
        for rank, thread in enumerate(self.threads):
            try:
                thread.start()
            except RuntimeError as error:
                self.running -= set(range(rank, self.size))
                raise LaunchError(
                    f"rank {rank} of {self.size} cannot be started as a thread ({error}); see "
                    "`ulimit -v` and `ulimit -u`, or start fewer ranks"
                ) from error

    def run_rank(self, rank: int) -> None:
        """Run a rank: the body of its thread."""
        world = Group(self.transports[rank], Ledger(rank), tuple(range(self.size)))
        try:
            self.results[rank] = self.fn(world, *self.args)
            world.close()
        except BaseException as error:  # run_threads raises it in the caller
            world.ledger.flight.end(*ending(error))
            self.fail(rank, error)
            with suppress(CommError):  # started calls now fail; their error is not the first one
                world.close()
        finally:
            with self.changed:
                self.running.discard(rank)
                self.note(rank)

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure; every other rank raises it at its current or next wait."""
        with self.changed:
            if self.failure is not None:
                return
            spared = rank in self.expendable
            if not spared:
                self.failure = (rank, error)
        how = (
            f"rank {rank} failed with {type(error).__name__}: {words(error)} (at "
            f"{call_site.raised_at(error)})"
        )
        for transport in self.transports:
            (transport.lose if spared else transport.abort)(PeerLostError(how, world_rank=rank))
        with self.changed:
            self.ended = self.ended or not spared
            self.changed.notify_all()

    def wait(self) -> bool:
        """Return whether all ranks ended, or one failed, within the limit. Meanwhile run the
        arbiter in this thread."""
        deadline = time.monotonic() + self.limit
        while (left := deadline - time.monotonic()) > 0:
            due = self.arbiter.due()
            with self.changed:
                self.changed.wait_for(
                    lambda: self.news or not self.running or self.ended,
                    left if due is None else min(left, due),
                )
                if not self.running or self.ended:
                    return True
                news = self.news
                self.news = set()
                running = set(self.running)
            for rank in news:
                state = self.transports[rank].waits.state(with_place=False)
                if rank in running:
                    self.arbiter.heard(rank, state)
                else:
                    self.arbiter.left(rank, state)
            self.arbiter.tick()
        return False

    def note(self, rank: int) -> None:
        """Note that a long wait of a rank has begun or ended, or that the rank has ended."""
        with self.changed:
            self.news.add(rank)
            self.changed.notify_all()

    def ask(self, ranks: list[int], number: int) -> None:
        """Pass the states of these ranks to the arbiter, as its answer."""
        for rank in ranks:
            self.arbiter.heard(rank, self.transports[rank].waits.state(), number)

    def tell(self, verdict: Verdict) -> None:
        """Make the ranks of the arbiter's verdict raise its error."""
        for rank in verdict.ranks:
            self.transports[rank].abort(getattr(errors, verdict.error)(verdict.text))

    def stop(self) -> None:
        """End the ranks that still run, each at its current or next wait."""
        if self.running:
            for transport in self.transports:
                transport.abort(CommError("the run has ended"))
            with self.changed:
                self.changed.wait_for(lambda: not self.running, _GRACE)
        for transport in self.transports:
            transport.close()

    def table(self, said: Mapping[int, State] | None = None) -> str:
        """Return what each rank does, one line each, and how late ranks are that others wait
        for."""
        with self.changed:
            running = set(self.running)
        states = {
            rank: transport.waits.state() for rank, transport in enumerate(self.transports)
        } | dict(said or {})
        return deadlock.table(
            {rank: state for rank, state in states.items() if rank in running},
            {rank: state for rank, state in states.items() if rank not in running},
            self.size,
        )


def run_threads(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    size: int = 1,
    limit: float = 60.0,
    unbuffered: bool = False,
    profile: Profile | None = None,
) -> list[Any]:
    """Run `fn(world, *args)` on `size` ranks, each a thread with its own ledger and memory account
    (account.py).

    Args:    profile: the cost of messages, for algorithm="auto"; None for the defaults.
    Returns: the results of the ranks, in rank order.
    Raises:  the first failure of any rank, of its own type and with its own traceback, naming the
             rank (see name_rank); the other ranks are ended by PeerLostError, which is raised too
             where a rank left by sys.exit(0). TimeoutError if a rank has not ended after `limit`
             seconds (also the limit of every wait inside), naming the ranks that hang, and their
             calls.
    """
    job = ThreadJob(fn, args, size, limit, unbuffered, profile)
    try:
        job.start()
        if not job.wait():
            raise TimeoutError(
                f"{len(job.running)} of {size} ranks had not ended after {limit:g} "
                f"s:\n{job.table()}"
            )
        if job.failure is not None:
            rank, error = job.failure
            if (
                isinstance(error, SystemExit)
                and isinstance(error.code, int | None)
                and not (error.code or 0) & 0xFF
            ):
                # else the program would end without an error
                raise Failure.by_exception(error, rank).error() from error
            raise name_rank(error, rank)
        return job.results
    finally:
        job.stop()
