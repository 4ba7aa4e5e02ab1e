"""The long waits of a rank: in which call, for which ranks, since when. The waits of all ranks
together show a deadlock.

A wait that ends within QUIET seconds is not reported, and costs nothing. A longer one is reported
when QUIET is over and when it ends: to the monitor, if ranks are processes; to the run, if they are
threads. Both pass it to an Arbiter (deadlock_arbiter.py), which decides by the rules of
deadlock.py.

    state of a rank     waits    its long waits, one per thread
                        sent     messages it has begun to send, by world rank
                        taken    messages it has taken off the link, by world rank
                        reads    world ranks from which it has asked for a message that has not
                                 arrived completely
                        settled  whether every thread of its program is in one of these waits
                        resent   world ranks to which packets are sent again and again without an
                                 acknowledgement

sent is counted where a message begins, taken where it ends (stream.py). If they differ between two
ranks, a message is in flight, and its receiver does not wait in vain; nor does its sender while the
receiver reads, because the receiver takes every message before the message it has asked for.
"""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from minidist.comm import call_site
from minidist.comm.flight.recorder import FlightRecorder
from minidist.comm.signature import Signature
from minidist.errors import CommError, PeerLostError

QUIET = 0.1  # seconds that a wait may last before it is reported


class _ThreadCalls(threading.local):
    """The calls of a thread, outermost first."""

    # whether spent_in_calls was called: reading a thread's clock takes a microsecond or several
    asked = False
    # start of the outermost call: the time, and the thread's processor seconds
    began: "tuple[float, float] | None" = None
    spent = 0.0, 0.0  # in calls so far: seconds, and processor seconds

    def __init__(self) -> None:
        self.calls: list[RunningCall] = []


_here = _ThreadCalls()


class RunningCall:
    """A collective, or the wait for a started call: inside `with call:` the thread's waits belong
    to it.

    Attributes: signature    the call
                world_ranks  the ranks of its group
    """

    signature: Signature
    world_ranks: tuple[int, ...]

    def __enter__(self) -> None:
        calls = _here.calls
        if not calls and _here.asked:
            _here.began = time.perf_counter(), time.thread_time()
        calls.append(self)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        calls = _here.calls
        calls.pop()
        if not calls and _here.began is not None:
            (began, busy) = _here.began
            (spent, worked) = _here.spent
            _here.spent = spent + time.perf_counter() - began, worked + time.thread_time() - busy
            _here.began = None


def spent_in_calls() -> tuple[float, float]:
    """Return the seconds, and the processor seconds, that the calling thread has been in calls and
    in waits for calls so far.

    Counting begins with a thread's first use of this function, so use differences. The flight
    recorder measures the same times per call (`stood`, flight/slots.py): with them `minidist watch`
    divides a wait among ranks and groups. Here they are one sum per thread, which no ring
    overwrites, together with processor seconds, which exclude own computation: with them the
    records of steps (observe/rank_steps.py) distinguish a rank that computes longer from a rank
    that waits. Neither can replace the other; a test checks that they agree.
    """
    _here.asked = True
    return _here.spent


@dataclass(frozen=True)
class Wait:
    """A long wait.

    `peers` are the world ranks it waits for: any of them can delay it; none means another thread of
    the same rank, which carries out `call`. `number` identifies a long wait of a rank. `incoming`:
    it waits for a message from the peer.
    """

    number: int
    call: Signature | None
    members: tuple[int, ...]
    peers: tuple[int, ...]
    what: str
    incoming: bool
    seconds: float

    @property
    def collective(self) -> Signature | None:
        """The call, if it is a collective."""
        return None if self.call is None or self.call.algorithm is None else self.call

    @property
    def where(self) -> str:
        return "an unknown place" if self.call is None else self.call.where


@dataclass(frozen=True)
class State:
    """The report of a rank about its waits at one moment; the module's docstring has the table."""

    waits: tuple[Wait, ...] = ()
    sent: Mapping[int, int] = field(default_factory=dict)
    taken: Mapping[int, int] = field(default_factory=dict)
    settled: bool = False
    doing: str = ""  # the program's place, if the rank does not wait
    reads: frozenset[int] = frozenset()
    resent: frozenset[int] = frozenset()

    def same(self, other: "State") -> bool:
        """Return whether nothing has happened between the two states."""
        return (
            [wait.number for wait in self.waits] == [wait.number for wait in other.waits]
            and self.sent == other.sent
            and self.taken == other.taken
        )

    def packed(self) -> list[Any]:
        """Return the state as a frame of the control connection carries it."""
        return [
            [list(vars(wait).values()) for wait in self.waits],
            dict(self.sent),
            dict(self.taken),
            self.settled,
            self.doing,
            self.reads,
            self.resent,
        ]

    @classmethod
    def unpacked(cls, packed: Any) -> "State":
        """Return the state from packed(). Raises: TypeError or ValueError for anything else."""
        waits, sent, taken, settled, doing, reads, resent = packed
        return cls(
            tuple(_wait(*fields) for fields in waits),
            _counts(sent),
            _counts(taken),
            bool(settled),
            str(doing),
            frozenset(map(int, reads)),
            frozenset(map(int, resent)),
        )


def _counts(values: Any) -> dict[int, int]:
    return {int(rank): int(count) for rank, count in dict(values).items()}


def _wait(
    number: int, call: Any, members: Any, peers: Any, what: str, incoming: bool, seconds: float
) -> Wait:
    signature = None if call is None else Signature._make(call)
    if signature is not None:  # bad values raise TypeError here, not in the arbiter
        hash(signature)
        signature.agrees(signature)
    return Wait(
        int(number),
        signature,
        tuple(map(int, members)),
        tuple(map(int, peers)),
        str(what),
        bool(incoming),
        float(seconds),
    )


class WaitListener:
    """The listener of a rank's long waits: the connection to the monitor (monitor_client.py), or
    the run of ranks that are threads. This base class has no other ranks."""

    def note(self) -> None:
        """Note that a wait has become long, or has ended."""

    def program(self) -> set[int | None]:
        """Return the threads that run the rank's program; a thread without a wait may still end the
        others' waits."""
        return _program()

    def table(self, state: State) -> str:
        """Return what all ranks wait for, in words; `state` is this rank's own state."""
        return ""

    def disagree(self, text: str, world_ranks: tuple[int, ...]) -> None:
        """Report to every rank of a group that their calls do not match."""

    def has_left(self, world_rank: int) -> bool:
        """Return whether that rank has said goodbye to the job."""
        return False

    def cut(self, world_rank: int) -> None:
        """Report that the link to that rank loses packets."""

    def spare(self) -> None:
        """Ask that this rank's death is reported, but does not end the job."""


class Waits:
    """The long waits of one rank. Safe to use from any thread.

    Attributes: counts   -> (sent, taken), of the rank's transport
                reads    -> the world ranks from which it reads
                resent   -> the world ranks to which its packets are sent again and again without an
                         acknowledgement
                listener the WaitListener that is notified of the waits
                held     functions that return the destinations of messages held back before
                         sending, one entry per message
                error    the error of an aborted transport, else None
                ends     functions called with it: each ends the waits of a transport, of a link to
                         itself, of a device
                step     the training step of the program, if it reports it
                workers  the threads that now carry out started calls
                flight   the rank's flight recorder, which keeps the long waits
                hearsay  maximum seconds to wait for the reason of a broken link; None: the
                         transport's own limit
    """

    def __init__(
        self,
        counts: Callable[[], tuple[Mapping[int, int], Mapping[int, int]]] | None = None,
        reads: Callable[[], Iterable[int]] | None = None,
        resent: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        self.counts = counts or (lambda: ({}, {}))
        self.reads = reads or tuple
        self.resent = resent or tuple
        self.listener = WaitListener()
        self.step: int | None = None
        self.flight: FlightRecorder | None = None
        self.hearsay: float | None = None
        self.held: list[Callable[[], list[int]]] = []
        self.error: CommError | None = None
        self.ends: list[Callable[[CommError], None]] = []
        self.workers: set[int | None] = set()
        # by number: the thread, and a function that returns its current wait
        self._lasting: dict[int, tuple[int, Callable[[], Wait]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def disagree(self, text: str, world_ranks: tuple[int, ...]) -> None:
        """Report to every rank of a group that their calls do not match."""
        self.listener.disagree(text, world_ranks)

    def left(self, world_rank: int) -> bool:
        """Return whether that rank has said goodbye to the job."""
        return self.listener.has_left(world_rank)

    def cut(self, world_rank: int) -> None:
        """Report that the link to that rank loses packets."""
        self.listener.cut(world_rank)

    def spare(self) -> None:
        """Ask that this rank's death is reported, but does not end the job."""
        self.listener.spare()

    def abort(self, error: CommError) -> None:
        """End every current and later wait; all raise the first error. From any thread."""
        self.error = self.error or error
        for end in list(self.ends):
            end(self.error)

    def failure(self, world_rank: int, signature: Signature | None = None) -> CommError | None:
        """Return the error that a wait of this rank raises after an abort, or None; `signature`:
        see located()."""
        if isinstance(self.error, PeerLostError):
            return self.located(self.error, world_rank, signature)
        return self.error

    @contextmanager
    def lasting(
        self, what: str, peers: Callable[[], tuple[int, ...]], *, incoming: bool = False
    ) -> Iterator[None]:
        """Report the block as a wait that is already long: `what` in words, `peers()` the ranks it
        waits for now."""
        running = next(reversed(_here.calls), None)
        call, members = (None, ()) if running is None else (running.signature, running.world_ranks)
        number = next(self._numbers)
        since = time.monotonic() - QUIET

        def now() -> Wait:
            return Wait(number, call, members, peers(), what, incoming, time.monotonic() - since)

        with self._lock:
            self._lasting[number] = threading.get_ident(), now
        record = self._recorded(what, peers(), call)
        self.listener.note()
        try:
            yield
        finally:
            with self._lock:
                del self._lasting[number]
            if self.flight is not None:
                self.flight.ended(record)
            self.listener.note()

    def _recorded(self, what: str, peers: tuple[int, ...], call: Signature | None) -> int:
        """Record a long wait in the flight recorder; return its number there."""
        if self.flight is None:
            return 0
        group, sequence = (0, 0) if call is None or call.algorithm is None else call[:2]
        return self.flight.waiting(what, peers, QUIET, group=group, sequence=sequence)

    def state(self, *, with_place: bool = True) -> State:
        """Return this rank's current state.

        Args:    with_place: with the line at which its program runs. It is read from a frame of
                 another thread that may just return, and CPython 3.11.7 has crashed there: ask for it
                 only where it is told.
        """
        with self._lock:
            lasting = dict(self._lasting.values())  # of nested waits of a thread, the innermost
        busy = self.listener.program() | self.workers
        counted, taken = self.counts()
        sent = Counter(counted)
        for held in list(self.held):
            sent.update(held())
        running = sorted(thread for thread in busy - set(lasting) if thread is not None)
        return State(
            tuple(now() for now in lasting.values()),
            sent,
            taken,
            not running,
            call_site.doing(running[0]) if running and with_place else "",
            frozenset(self.reads()),
            frozenset(self.resent()),
        )

    def described(self, state: State) -> str:
        """Return all ranks' waits, as the last lines of an error; `state`: of this rank when its
        time was over.

        Takes up to half a second, in which this rank waits for nothing else. Empty without a
        listener.
        """
        table = self.listener.table(state)
        return f"\n{table}" if table else ""

    def located(
        self, error: PeerLostError, world_rank: int, signature: Signature | None = None
    ) -> PeerLostError:
        """Return `error` with the step and call in its first line (`signature`, or the current
        call)."""
        if signature is None and _here.calls:
            signature = _here.calls[-1].signature
        if signature is None:
            return error
        first, *rest = str(error).split("\n")
        step = "" if self.step is None else f"step {self.step}, "
        first = f"{first.rstrip(':')}; rank {world_rank} was in {step}{signature.describe()}"
        return type(error)("\n".join([first, *rest]), error.world_rank)


def _program() -> set[int | None]:
    """Return the threads of this process that run the program: not our daemon threads, nor idle
    pool workers."""
    frames = call_site.frames()
    try:
        return {
            thread.ident
            for thread in threading.enumerate()
            if not thread.daemon and not _idles(frames.get(thread.ident or 0))
        }
    finally:
        # it holds this function's own frame, and so itself: a cycle that keeps arrays of all stacks
        frames.clear()


def _idles(frame: FrameType | None) -> bool:
    """Return whether this is the innermost frame of an idle thread of concurrent.futures."""
    return frame is not None and frame.f_globals.get("__name__") == "concurrent.futures.thread"
