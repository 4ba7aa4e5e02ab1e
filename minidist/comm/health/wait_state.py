"""A rank's waits that last: in which call, for which ranks, since when. All ranks' waits together show a deadlock.

A wait that ends within QUIET seconds is not reported, and costs nothing. One that lasts is reported when it begins to
last and when it ends: to the monitor, where ranks are processes; to the run, where they are threads. Both pass it to an
Arbiter (deadlock_arbiter.py), which decides by the rules of deadlock.py.

    state of a rank     waits    its lasting waits, one a thread
                        sent     messages it has begun to send, by world rank
                        taken    messages it has taken off the link, by world rank
                        reads    world ranks from which it has asked for a message that has not come whole
                        settled  whether every thread of its program is in one of these waits

sent and taken are counted where a message begins and ends (stream.py). Where they differ between two ranks, a message
is in flight, and its receiver does not wait in vain; nor does its sender while the receiver reads, because the receiver
takes every message before the one it has asked for.
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol

from minidist.comm import call_site
from minidist.comm.health.running_call import running_call
from minidist.comm.signature import Signature
from minidist.errors import CommError, PeerLostError

QUIET = 0.1     # seconds that a wait may last before anybody is told


class RunsCalls(Protocol):
    """What Waits needs of a CallWorker."""

    unfinished: int

    def ident(self) -> int | None:
        """The thread that carries out the calls."""


@dataclass(frozen=True)
class Wait:
    """One lasting wait.

    `peers` are the world ranks waited for: any of them can keep it waiting; none means another thread of the same rank,
    which carries out `call`. `number` tells the lasting waits of a rank apart. `incoming`: for a message from the peer.
    """

    number: int
    call: Signature | None
    members: tuple[int, ...]
    peers: tuple[int, ...]
    what: str
    incoming: bool
    seconds: float

    @property
    def collective(self) -> bool:
        return self.call is not None and self.call.algorithm is not None

    @property
    def where(self) -> str:
        return "an unknown place" if self.call is None else self.call.where


@dataclass(frozen=True)
class State:
    """What a rank says of its waits at one moment; the module's docstring has the table."""

    waits: tuple[Wait, ...] = ()
    sent: Mapping[int, int] = field(default_factory=dict)
    taken: Mapping[int, int] = field(default_factory=dict)
    settled: bool = False
    doing: str = ""         # where the rank's program is, for a rank that does not wait
    reads: frozenset[int] = frozenset()

    def same(self, other: "State") -> bool:
        """Whether nothing at all has happened between the two."""
        return ([wait.number for wait in self.waits] == [wait.number for wait in other.waits]
                and self.sent == other.sent and self.taken == other.taken)

    def packed(self) -> list[Any]:
        """As a frame of the control connection carries it."""
        waits = [[wait.number, None if wait.call is None else list(wait.call), list(wait.members), list(wait.peers),
                  wait.what, wait.incoming, wait.seconds] for wait in self.waits]
        return [waits, dict(self.sent), dict(self.taken), self.settled, self.doing, sorted(self.reads)]

    @classmethod
    def unpacked(cls, packed: Any) -> "State":
        """Raises: TypeError or ValueError if it is nothing that packed() made."""
        waits, sent, taken, settled, doing, reads = packed
        return cls(tuple(_wait(*fields) for fields in waits), _counts(sent), _counts(taken), bool(settled), str(doing),
                   frozenset(map(int, reads)))


def _wait(number: int, call: Any, members: Any, peers: Any, what: str, incoming: bool, seconds: float) -> Wait:
    signature = None
    if call is not None:
        group, sequence, verb, algorithm, op, root, dtype, shape, where = call
        signature = Signature(int(group), int(sequence), str(verb), _text(algorithm), _text(op),
                              None if root is None else int(root), _text(dtype),
                              None if shape is None else _integers(shape), str(where))
    return Wait(int(number), signature, _integers(members), _integers(peers), str(what), bool(incoming), float(seconds))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _integers(values: Any) -> tuple[Any, ...]:
    return tuple(None if value is None else int(value) for value in values)


def _counts(values: Any) -> dict[int, int]:
    return {int(rank): int(count) for rank, count in dict(values).items()}


@dataclass
class _Lasting:
    wait: Wait                                  # as it began
    peers: Callable[[], tuple[int, ...]]
    since: float

    def now(self) -> Wait:
        return replace(self.wait, peers=self.peers(), seconds=time.monotonic() - self.since)


class Waits:
    """The lasting waits of one rank. Safe to use from any thread.

    Attributes: counts   -> (sent, taken), of the rank's transport
                reads    -> the world ranks that it reads from
                program  -> the threads that run the rank's program; one in no wait may yet end the others' waits
                tell     called when a wait begins to last, and when it ends; None without a listener
                table    (state) -> what all ranks wait for, in words; `state` is what this rank says of itself
                disagree (text, world ranks) tells every rank of a group that their calls do not match; None as tell
                spare    asks that this rank's death be reported, and not end the job; None without a listener
                held     each gives the destinations of messages held back on their way out, one entry a message
                ends     abort() of links that belong to the transport and tell their waits here
                step     the training step that the program is in, if it says so
                workers  those that carry out started calls
    """

    def __init__(self, counts: Callable[[], tuple[Mapping[int, int], Mapping[int, int]]] | None = None,
                 reads: Callable[[], Iterable[int]] | None = None) -> None:
        self.counts, self.reads = counts or _nothing, reads or tuple
        self.program: Callable[[], set[int | None]] = _program
        self.tell: Callable[[], None] | None = None
        self.table: Callable[[State], str] | None = None
        self.disagree: Callable[[str, tuple[int, ...]], None] | None = None
        self.spare: Callable[[], None] | None = None
        self.step: int | None = None
        self.held: list[Callable[[], list[int]]] = []
        self.ends: list[Callable[[CommError], None]] = []
        self.workers: weakref.WeakSet[RunsCalls] = weakref.WeakSet()
        self._lasting: dict[int, _Lasting] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @contextmanager
    def lasting(self, what: str, peers: Callable[[], tuple[int, ...]], *, incoming: bool = False) -> Iterator[None]:
        """The block is a wait that lasts already: `what` in words, `peers()` the ranks it is for, now."""
        running, thread = running_call(), threading.get_ident()
        call, members = (None, ()) if running is None else (running.signature, running.world_ranks)
        wait = Wait(next(self._numbers), call, members, (), what, incoming, 0.0)
        with self._lock:
            outer = self._lasting.get(thread)
            self._lasting[thread] = _Lasting(wait, peers, time.monotonic() - QUIET)
        self._say()
        try:
            yield
        finally:
            with self._lock:
                if outer is None:
                    del self._lasting[thread]
                else:
                    self._lasting[thread] = outer
            self._say()

    def state(self) -> State:
        """What this rank says of its waits, now."""
        with self._lock:
            lasting = dict(self._lasting)
        busy = self.program() | {worker.ident() for worker in list(self.workers) if worker.unfinished}
        counted, taken = self.counts()
        sent = dict(counted)
        for held in list(self.held):
            for peer in held():
                sent[peer] = sent.get(peer, 0) + 1
        running = sorted(thread for thread in busy - set(lasting) if thread is not None)
        return State(tuple(each.now() for each in lasting.values()), sent, taken, not running,
                     call_site.doing(running[0]) if running else "", frozenset(self.reads()))

    def described(self, state: State) -> str:
        """All ranks' waits, as the last lines of an error; `state`: as this rank's were when its time was up.

        Costs up to half a second, in which this rank waits for nothing else. Empty without a listener.
        """
        table = "" if self.table is None else self.table(state)
        return f"\n{table}" if table else ""

    def located(self, error: PeerLostError, world_rank: int) -> PeerLostError:
        """`error`, whose first line now says in which step and call this rank met it."""
        running = running_call()
        if running is None:
            return error
        first, *rest = str(error).split("\n")
        step = "" if self.step is None else f"step {self.step}, "
        first = f"{first.rstrip(':')}; rank {world_rank} was in {step}{running.signature.describe()}"
        return PeerLostError("\n".join([first, *rest]), error.world_rank)

    def _say(self) -> None:
        if self.tell is not None:
            self.tell()


def _nothing() -> tuple[dict[int, int], dict[int, int]]:
    return {}, {}


def _program() -> set[int | None]:
    """Threads of this process that are the program's: not ours, which are daemons, nor those of an idle pool."""
    frames = call_site.frames()
    try:
        return {thread.ident for thread in threading.enumerate()
                if not thread.daemon and not _idles(frames, thread.ident)}
    finally:
        frames.clear()      # it holds this function's own frame, and so itself: a cycle that keeps all stacks' arrays


def _idles(frames: Mapping[int, FrameType], thread: int | None) -> bool:
    """Whether the thread is one of concurrent.futures' that has nothing to do."""
    frame = frames.get(thread) if thread is not None else None
    return frame is not None and frame.f_globals.get("__name__") == "concurrent.futures.thread"
