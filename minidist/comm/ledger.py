"""The ledger: what one rank sent, counted by phase, axis, verb and algorithm; and events for
subscribers.

    with ledger.during("step"):          # phases: "setup" until told otherwise, then what you name
        group.all_reduce(gradients)      # counted under the group's axis and the verb the user
                                         called
        with ledger.control():           # loss, clipping and overflow scalars: counted under the
                                         axis "control"
            group.all_reduce(loss)
    ledger.sent_bytes("step")            # {"dp": {"all_reduce": 1048576}, "control": {"all_reduce":
                                         8}}

Bytes are payload: the signature and shape that ride in a message's header are not counted, nor are
header-only messages by which neighbours compare calls (they carry no payload), nor what a rank
sends to itself (nothing leaves it).
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minidist.comm.flight.message_times import MessageTimes
from minidist.comm.flight.recorder import FlightRecorder

NO_RANK: Mapping[int, int] = {}


@dataclass(frozen=True)
class Event:
    """Something that happened on one rank; times are time.perf_counter() seconds.

    kind "message": one message sent. details: src, dst (world ranks), nbytes, verb, algorithm,
    axis, label, step, chunk
                    (what the algorithm says of the piece in flight; None where it says nothing).
    kind "call":    one verb from begin to end. details: axis, verb, algorithm, op, nbytes, size,
                    sequence, where; for watchers also group (its id, in hexadecimal), messages, and
                    queued: seconds from the program's call to the begin.
    kind "wait":    the program waits for a started call, for watchers alone. details: axis, group,
                    sequence, where.
    kind "receive": one message received, from the moment when this rank was ready for it, for
    subscribers
                    of receives. details: src, dst, nbytes, axis, verb, algorithm, message. While
                    receives have a subscriber, kind "message" has `message` too: between two ranks
                    it tells the message from others.
    """

    kind: str
    name: str
    start: float
    stop: float
    world_rank: int
    thread: str
    details: dict[str, Any] = field(default_factory=dict)


class _Here(threading.local):
    """The state of one thread: control() counts for the thread that called it."""

    in_control = False
    phase: str | None = None  # of a thread that has one of its own


class Ledger:
    """Counts of one rank, shared by all its groups. Safe to use from several threads.

    Attributes: flight    its flight recorder: the last calls, always kept
                times     when messages of its calls left and arrived, if a StepRecorder asks for
                          them; else None
    """

    def __init__(self, world_rank: int = 0) -> None:
        self.world_rank = world_rank
        self.flight = FlightRecorder(world_rank)
        self.times: MessageTimes | None = None
        self._phase = "setup"
        self.subscribers: tuple[Callable[[Event], None], ...] = ()
        self.watchers: tuple[Callable[[Event], None], ...] = ()  # subscribers that get waits too
        # subscribers that get receives too
        self.receivers: tuple[Callable[[Event], None], ...] = ()
        # by (phase, axis, verb, algorithm)
        self._counts: dict[tuple[str, str, str, str], tuple[int, int]] = {}
        # bytes by (phase, axis, world rank)
        self._sent_to: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        self._lock = threading.Lock()
        self._here = _Here()

    def record(
        self,
        axis: str,
        verb: str,
        algorithm: str,
        nbytes: int,
        messages: int = 1,
        phase: str | None = None,
        to: Mapping[int, int] = NO_RANK,
    ) -> None:
        """Add `messages` messages of `nbytes` bytes altogether, sent by this rank (in `phase`, else
        the present).

        Args:    to: the bytes for each world rank. What all read from shared memory, or a library
                 sends, is for none.
        """
        key = (phase or self.phase, axis, verb, algorithm)
        with self._lock:
            for rank, part in to.items():
                self._sent_to[key[0], axis, rank] += part
            total, number = self._counts.get(key, (0, 0))
            self._counts[key] = total + nbytes, number + messages

    @property
    def phase(self) -> str:
        """What calls of this thread are counted under now."""
        return self._here.phase or self._phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count calls begun in the block, by any thread, under `phase`."""
        before = self._phase
        self._phase = phase
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def aside(self, phase: str) -> Iterator[None]:
        """Count calls that this thread begins in the block under `phase`, whatever the others do
        meanwhile."""
        before = self._here.phase
        self._here.phase = phase
        try:
            yield
        finally:
            self._here.phase = before

    @contextmanager
    def control(self) -> Iterator[None]:
        """Count calls that this thread begins in the block under the axis "control"."""
        before = self._here.in_control
        self._here.in_control = True
        try:
            yield
        finally:
            self._here.in_control = before

    @property
    def in_control(self) -> bool:
        """Whether this thread is inside control()."""
        return self._here.in_control

    def sent_bytes(self, phase: str | None = None) -> dict[str, dict[str, int]]:
        """Payload bytes sent, {axis: {verb: bytes}}; of one phase, or of all."""
        return self._by_axis("nbytes", phase)

    def messages(self, phase: str | None = None) -> dict[str, dict[str, int]]:
        """Messages sent, {axis: {verb: messages}}; of one phase, or of all."""
        return self._by_axis("messages", phase)

    def sent_to(self, phase: str | None = None) -> dict[int, dict[str, int]]:
        """Payload bytes sent to each rank, {world rank: {axis: bytes}}; of one phase, or of all.

        What ranks read from shared memory, or a library sends, is in no rank's: the sums may be
        less than sent_bytes.
        """
        table: defaultdict[int, Counter[str]] = defaultdict(Counter)
        with self._lock:
            for (of, axis, rank), nbytes in sorted(self._sent_to.items()):
                if phase in (None, of):
                    table[rank][axis] += nbytes
        return {rank: dict(axes) for rank, axes in sorted(table.items())}

    def rows(self) -> list[dict[str, Any]]:
        """Every count by itself: dicts of phase, axis, verb, algorithm, nbytes, messages, in a
        fixed order."""
        with self._lock:
            return [
                {
                    "phase": phase,
                    "axis": axis,
                    "verb": verb,
                    "algorithm": algorithm,
                    "nbytes": nbytes,
                    "messages": messages,
                }
                for (phase, axis, verb, algorithm), (nbytes, messages) in sorted(
                    self._counts.items()
                )
            ]

    def clear(self) -> None:
        """Forget all counts; subscribers stay."""
        with self._lock:
            self._counts.clear()
            self._sent_to.clear()

    def subscribe(
        self, callback: Callable[[Event], None], *, waits: bool = False, receives: bool = False
    ) -> Callable[[], None]:
        """Call `callback(event)` for each message sent and each call ended, in the thread it
        happened in.

        Args:    waits: for each wait of the program too. receives: for each message received too.
        Returns a function that ends the subscription. Without subscribers no event is made and no
        clock is read.
        """
        self.subscribers = (*self.subscribers, callback)
        self.watchers += (callback,) if waits else ()
        self.receivers += (callback,) if receives else ()

        def unsubscribe() -> None:
            self.subscribers = tuple(other for other in self.subscribers if other is not callback)
            self.watchers = tuple(other for other in self.watchers if other is not callback)
            self.receivers = tuple(other for other in self.receivers if other is not callback)

        return unsubscribe

    def publish(self, event: Event) -> None:
        """Hand `event` to every subscriber."""
        chosen = {"wait": self.watchers, "receive": self.receivers}.get(
            event.kind, self.subscribers
        )
        for subscriber in chosen:
            subscriber(event)

    def publish_now(self, kind: str, name: str, start: float, details: dict[str, Any]) -> None:
        """Publish an event that ends now, in this thread."""
        self.publish(
            Event(
                kind,
                name,
                start,
                time.perf_counter(),
                self.world_rank,
                threading.current_thread().name,
                details,
            )
        )

    def _by_axis(self, column: str, phase: str | None) -> dict[str, dict[str, int]]:
        table: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for row in self.rows():
            if phase is None or row["phase"] == phase:
                table[row["axis"]][row["verb"]] += row[column]
        return {axis: dict(verbs) for axis, verbs in table.items()}
