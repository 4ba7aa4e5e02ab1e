"""The ledger: counts of the bytes that one rank sent, by phase, axis, verb and algorithm; and
events for subscribers.

    with ledger.during("step"):          # phases: "setup" at first, then the names you give
        group.all_reduce(gradients)      # counted under the group's axis and the user's verb
        with ledger.control():           # loss, clipping and overflow scalars: counted under the
                                         # axis "control"
            group.all_reduce(loss)
    ledger.sent_bytes("step")            # {"dp": {"all_reduce": 1048576},
                                         #  "control": {"all_reduce": 8}}

Bytes are payload. Not counted are: the signature and shape in a message's header, the messages
without payload by which neighbours compare calls, and messages of a rank to itself.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minidist.comm import call_site
from minidist.comm.flight.message_times import MessageTimes
from minidist.comm.flight.recorder import FlightRecorder
from minidist.comm.observers import CallMessage, MessageWatch, ObservedCall, Observer

NO_RANK: Mapping[int, int] = {}


@dataclass(frozen=True)
class Event:
    """An event on one rank; times are time.perf_counter() seconds.

    kind "message": one message sent. details: src, dst (world ranks), nbytes, verb, algorithm,
                    axis, label, step, chunk (as the algorithm describes the message; else None).
    kind "call":    one verb from start to end. details: axis, verb, algorithm, op, nbytes, size,
                    sequence, where; for watchers also group (its id, in hexadecimal), messages, and
                    queued: seconds from the program's call to the start.
    kind "wait":    the program waits for a started call; only for watchers. details: axis, group,
                    sequence, where.
    kind "receive": one message received, from the moment when this rank was ready for it; only for
                    subscribers of receives. details: src, dst, nbytes, axis, verb, algorithm,
                    message. While receives have a subscriber, kind "message" has `message` too: it
                    identifies the message between two ranks.
    """

    kind: str
    name: str
    start: float
    stop: float
    world_rank: int
    thread: str
    details: dict[str, Any] = field(default_factory=dict)


class _Here(threading.local):
    """The state of one thread: control() has effect only in the thread that called it."""

    in_control = False
    phase: str | None = None  # the thread's own phase, if it has one


class Ledger(Observer):
    """Counts of one rank, shared by all its groups. Safe to use from several threads.

    Attributes: flight      its flight recorder, which always keeps the last calls
                times       departure and arrival times of its messages, if a StepRecorder needs
                            them; else None
                observers   the observers of its calls (observers.py)
                message_observers   the observers of calls and messages
    """

    observers: tuple[Observer, ...]
    message_observers: tuple[Observer, ...]

    def __init__(self, world_rank: int = 0) -> None:
        self.world_rank = world_rank
        self.flight = FlightRecorder(world_rank)
        self._times: MessageTimes | None = None
        self._events = CallEvents(self)
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
        self._choose_observers()

    @property
    def times(self) -> MessageTimes | None:
        return self._times

    @times.setter
    def times(self, times: MessageTimes | None) -> None:
        self._times = times
        self._choose_observers()

    def on_made(self, call: ObservedCall, begun: bool) -> None:
        # a queued call is reported again, by the worker, which has labels of its own
        if not call.axis:
            here = self._here
            call.phase = here.phase or self._phase
            call.axis = "control" if here.in_control else call.group_axis

    def on_end(self, call: ObservedCall, failed: bool) -> None:
        self.record(
            call.axis,
            call.verb,
            call.algorithm,
            call.nbytes,
            call.messages,
            call.phase,
            call.sent_to,
        )

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
        """Add `messages` messages of `nbytes` bytes in total, sent by this rank (in `phase`, or the
        current one).

        Args:    to: the bytes for each world rank. Shared memory that all read, and bytes that a
                 library sends, count for no rank.
        """
        key = (phase or self.phase, axis, verb, algorithm)
        with self._lock:
            for rank, part in to.items():
                self._sent_to[key[0], axis, rank] += part
            total, number = self._counts.get(key, (0, 0))
            self._counts[key] = total + nbytes, number + messages

    @property
    def phase(self) -> str:
        """The phase under which calls of this thread are counted now."""
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
        """Count calls that this thread begins in the block under `phase`, independently of other
        threads."""
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
        """True inside a control() block of this thread."""
        return self._here.in_control

    def sent_bytes(self, phase: str | None = None) -> dict[str, dict[str, int]]:
        """Return the payload bytes sent, {axis: {verb: bytes}}; in one phase, or in all."""
        return self._by_axis("nbytes", phase)

    def messages(self, phase: str | None = None) -> dict[str, dict[str, int]]:
        """Return the number of messages sent, {axis: {verb: messages}}; in one phase, or in all."""
        return self._by_axis("messages", phase)

    def sent_to(self, phase: str | None = None) -> dict[int, dict[str, int]]:
        """Return the payload bytes sent to each rank, {world rank: {axis: bytes}}; in one phase, or
        in all.

        Bytes that ranks read from shared memory, or that a library sends, count for no rank: the
        sums may be less than sent_bytes.
        """
        table: defaultdict[int, Counter[str]] = defaultdict(Counter)
        with self._lock:
            for (of, axis, rank), nbytes in sorted(self._sent_to.items()):
                if phase in (None, of):
                    table[rank][axis] += nbytes
        return {rank: dict(axes) for rank, axes in sorted(table.items())}

    def rows(self) -> list[dict[str, Any]]:
        """Return every single count: dicts of phase, axis, verb, algorithm, nbytes, messages, in a
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

    def set_aside(self, phase: str, other: str) -> None:
        """Move what was counted under `phase` to the phase `other`, so that `phase` begins anew."""
        with self._lock:
            for key in [key for key in self._counts if key[0] == phase]:
                nbytes, messages = self._counts.pop(key)
                before = self._counts.get((other, *key[1:]), (0, 0))
                self._counts[(other, *key[1:])] = before[0] + nbytes, before[1] + messages
            for of, axis, rank in [key for key in self._sent_to if key[0] == phase]:
                self._sent_to[other, axis, rank] += self._sent_to.pop((of, axis, rank))

    def clear(self) -> None:
        """Delete all counts; subscribers stay."""
        with self._lock:
            self._counts.clear()
            self._sent_to.clear()

    def subscribe(
        self, callback: Callable[[Event], None], *, waits: bool = False, receives: bool = False
    ) -> Callable[[], None]:
        """Call `callback(event)` for each message sent and each call ended, in the thread of the
        event.

        Args:    waits: also for each wait of the program. receives: also for each message received.
        Returns a function that ends the subscription. Without subscribers no event is made and no
        clock is read.
        """
        self.subscribers = (*self.subscribers, callback)
        self.watchers += (callback,) if waits else ()
        self.receivers += (callback,) if receives else ()
        self._choose_observers()

        def unsubscribe() -> None:
            self.subscribers = tuple(other for other in self.subscribers if other is not callback)
            self.watchers = tuple(other for other in self.watchers if other is not callback)
            self.receivers = tuple(other for other in self.receivers if other is not callback)
            self._choose_observers()

        return unsubscribe

    def publish(self, event: Event) -> None:
        """Pass `event` to every subscriber of its kind."""
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

    def labels(self, axis: str) -> tuple[str, str]:
        """Return the phase and the axis under which a call of this thread, made now in a group for
        `axis`, is counted."""
        here = self._here
        return here.phase or self._phase, "control" if here.in_control else axis

    def _choose_observers(self) -> None:
        messages: list[Observer] = [] if self._times is None else [self._times]
        if self.subscribers:
            messages.append(self._events)
        self.message_observers = tuple(messages)
        self.observers = (self.flight, self, *messages)

    def _by_axis(self, column: str, phase: str | None) -> dict[str, dict[str, int]]:
        table: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for row in self.rows():
            if phase is None or row["phase"] == phase:
                table[row["axis"]][row["verb"]] += row[column]
        return {axis: dict(verbs) for axis, verbs in table.items()}


class MessageEvent(MessageWatch):
    """The event of one message, made when the message is sent or its receive posted, and published
    when it is complete."""

    def __init__(self, ledger: Ledger, kind: str, details: dict[str, Any]) -> None:
        self._ledger = ledger
        self._kind = kind
        self._details = details
        self._start = time.perf_counter()

    def accepted(self, nbytes: int) -> None:
        self._details["nbytes"] = nbytes

    def over(self, was_there: bool) -> None:
        self._ledger.publish_now(self._kind, self._details["verb"], self._start, self._details)


class CallEvents(Observer):
    """The observer that makes events of calls, messages and waits for the ledger's subscribers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # number of messages of a call so far, by direction and peer; by the call's group and
        # sequence
        self._numbers: defaultdict[tuple[int, int], Counter[tuple[str, int]]] = defaultdict(Counter)

    def on_made(self, call: ObservedCall, begun: bool) -> None:
        if begun:
            call.began = time.perf_counter()

    def on_send(self, call: ObservedCall, message: CallMessage) -> MessageEvent:
        details = {
            **_named(call),
            "src": message.src,
            "dst": message.dst,
            "nbytes": message.nbytes,
            "step": message.step,
            "chunk": message.chunk,
            "label": "" if message.chunk is None else f"c{message.chunk}",
        }
        if self._ledger.receivers:
            details["message"] = self._number(call, "sent", message.dst)
        return MessageEvent(self._ledger, "message", details)

    def on_receive(self, call: ObservedCall, message: CallMessage) -> MessageEvent | None:
        if not self._ledger.receivers:
            return None
        details = {
            **_named(call),
            "src": message.src,
            "dst": message.dst,
            "nbytes": message.nbytes,
            "message": self._number(call, "received", message.src),
        }
        return MessageEvent(self._ledger, "receive", details)

    def on_end(self, call: ObservedCall, failed: bool) -> None:
        signature = call.signature
        self._numbers.pop(signature[:2], None)
        if not call.began:  # the subscription began in the middle of the call
            return
        details = {
            **_named(call),
            "op": signature.op,
            "nbytes": call.nbytes,
            "size": call.size,
            "sequence": signature.sequence,
            "where": signature.where,
        }
        if call.asked:
            details["group"] = f"{signature.group:x}"
            details["messages"] = call.messages
            details["queued"] = call.began - call.asked
        self._ledger.publish_now("call", call.verb, call.began, details)

    def on_wait(self, call: ObservedCall, start: float) -> None:
        if self._ledger.watchers:
            details = {
                **_named(call),
                "group": f"{call.signature.group:x}",
                "sequence": call.signature.sequence,
                "where": call_site.caller(),
            }
            self._ledger.publish_now("wait", call.verb, start, details)

    def _number(self, call: ObservedCall, way: str, peer: int) -> str:
        """Return a name of the next message to or from `peer` that is unique in the job."""
        signature = call.signature
        numbers = self._numbers[signature[:2]]
        numbers[way, peer] += 1
        return f"{signature.group:x}.{signature.sequence}.{numbers[way, peer]}"


def _named(call: ObservedCall) -> dict[str, Any]:
    return {"axis": call.axis, "verb": call.verb, "algorithm": call.algorithm}
