"""The timeline of a run: spans of every rank, gathered on rank 0 and written for Perfetto.

    timeline = Timeline(world.rank)
    timeline.follow(world.ledger)                      # collectives and messages, by ledger events
    with timeline.span("forward", step=3): ...         # work, from the code that does it
    timelines = timeline.collect(world)                # on rank 0: all ranks' spans, rank 0's clock
    write_perfetto("trace.json", timelines)            # open it at https://ui.perfetto.dev

Each process of the trace is a rank. Its rows: `compute` (forward, backward, optimizer),
`communication` (each collective, on any thread), `messages` (each message that the rank sent),
`moves` (copies between device, host and disk), `waits` (each wait for a collective) and `receives`
(each message that the rank received, from the moment when it was ready for it). The last two exist
only if the timeline was asked to follow them. Overlap is visible: the all-reduce of a bucket on the
second row starts before `backward` on the first row ends.

Times are seconds of `time.perf_counter()`, one clock for all processes of a host. `clock_offset`
aligns hosts.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.ledger import Event, Ledger
from minidist.comm.records import gather_records
from minidist.device.account import MemoryAccount
from minidist.observe.trace_marks import arrows, counters

ROWS = ("compute", "communication", "messages", "moves", "waits", "receives")
MEMORY_SAMPLES = 1000
MEMORY_EVERY = 1e-3
"""A timeline keeps at most MEMORY_SAMPLES memory samples per rank, from the run's begin on: the
highest of each MEMORY_EVERY seconds."""


@dataclass(frozen=True)
class Span:
    """A named interval of one rank's time, in seconds of `time.perf_counter()`; `row`: one of
    ROWS."""

    name: str
    row: str
    start: float
    stop: float
    details: dict[str, Any] = field(default_factory=dict)


class Timeline:
    """The spans of one rank, in the order in which they ended.

    Args:    rank: this rank in the job, the process number of the trace.
             limit: the largest number of spans to keep: half of them the first, half the last (a
             step of DDP has about 100).
    Attributes: spans: the kept spans. gaps: {index in `spans`: number of spans left out before it}.
    """

    def __init__(self, rank: int, *, limit: int = 100_000) -> None:
        self.rank = rank
        self.limit = limit
        self.spans: list[Span] = []
        self.gaps: dict[int, int] = {}
        self.step: int | None = None
        self.memory: list[tuple[float, dict[str, int]]] = []  # (seconds, live bytes by category)
        self.always: dict[str, Any] = {}  # details of every span from now on
        self._before = 0  # spans of earlier worlds, which stay
        # axis -> names of its collectives that have not ended yet
        self._names: dict[str, deque[str]] = {}
        self._program = ""  # the thread that follows a ledger
        self._rows = 0
        self._share: float | None = None

    @contextmanager
    def span(self, name: str, category: str = "compute", **details: Any) -> Iterator[None]:
        """Record the time of the block; a `step` in the details also marks later collectives."""
        if "step" in details:
            self.step = details["step"]
        self._rows += details.get("rows", 0)
        self._share = details.get("share", self._share)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(
                Span(name, category, start, time.perf_counter(), {"step": self.step, **details})
            )

    def take_own(self) -> tuple[int, float | None]:
        """Return the rows that this rank worked on since the last call, and its share of the loss
        if the strategy reports it."""
        own = self._rows, self._share
        self._rows = 0
        self._share = None
        return own

    def add(self, span: Span) -> None:
        """Keep `span`; if there are more than `limit` spans, drop the oldest after the first half,
        and count it."""
        self.spans.append(
            replace(span, details={**self.always, **span.details}) if self.always else span
        )
        if len(self.spans) > self.limit:
            place = self._before + (self.limit - self._before) // 2
            del self.spans[place]
            self.gaps[place] = self.gaps.get(place, 0) + 1

    @property
    def dropped(self) -> int:
        """Number of spans that were left out."""
        return sum(self.gaps.values())

    def cut_steps(self) -> set[int]:
        """Return the steps next to a gap, which may lack spans."""
        beside = [span for place in self.gaps for span in self.spans[max(0, place - 1) : place + 1]]
        return {span.details["step"] for span in beside if span.details.get("step") is not None}

    def go_on(self, rank: int, ledger: Ledger, *, limit: int, **always: Any) -> None:
        """Continue in a new world with this rank and its ledger. All later spans have the rank and
        these details."""
        self.rank = rank
        self.limit = limit
        self.step = None
        self.always = {"rank": rank, **always}
        self._names = {}
        self._before = len(self.spans)
        self.follow(ledger)

    def announce(self, axis: str, name: str) -> None:
        """Name the next collective along `axis`; a group runs its calls in the order of their
        starts."""
        self._names.setdefault(axis, deque()).append(name)

    def follow(self, ledger: Ledger, *, waits: bool = False, receives: bool = False) -> None:
        """From now on, record every collective and every message that `ledger` reports.

        Args:    waits: also record each wait for a collective, and for each collective whether it
                 ran in the program's thread, which calls this method (`blocking`). `minidist train
                 --why` needs both.
                 receives: also record each received message; trace.json then has an arrow from its
                 send.
        """
        self._program = threading.current_thread().name
        ledger.subscribe(self._on_event, waits=waits, receives=receives)

    def follow_memory(self, account: MemoryAccount, *, limit: int = MEMORY_SAMPLES) -> None:
        """From now on, record the live bytes of `account` whenever an array is made, up to `limit`
        samples.

        Of all samples within MEMORY_EVERY seconds only the highest is kept.
        """
        begin = -MEMORY_EVERY

        def on_change(now: dict[str, int]) -> None:
            nonlocal begin
            moment = time.perf_counter()
            if moment < begin + MEMORY_EVERY:
                if now["total"] >= self.memory[-1][1]["total"]:
                    self.memory[-1] = moment, dict(now)
            elif len(self.memory) < limit:
                begin = moment
                self.memory.append((moment, dict(now)))
            else:
                account.follower = None

        account.follower = on_change

    def _on_event(self, event: Event) -> None:
        if event.kind == "wait":
            self.add(
                Span("wait", "waits", event.start, event.stop, {"step": self.step, **event.details})
            )
            return
        row = {"message": "messages", "receive": "receives"}.get(event.kind, "communication")
        name = event.name
        names = self._names.get(event.details["axis"]) if event.kind == "call" else None
        if names:
            name = names.popleft()
        elif event.kind == "message":
            name = f"{event.name} to rank {event.details['dst']}"
        elif event.kind == "receive":
            name = f"{event.name} from rank {event.details['src']}"
        details = {"hop" if key == "step" else key: value for key, value in event.details.items()}
        if "queued" in details:
            details["blocking"] = event.thread == self._program
        self.add(Span(name, row, event.start, event.stop, {"step": self.step, **details}))

    def collect(self, group: Group) -> list["Timeline"] | None:
        """Gather every rank's timeline on rank 0, in rank order and on rank 0's clock; None on the
        others. All ranks call it.

        Cost:    counted under `control`: `clock_offset`, then one gather of the packed spans.
        """
        offset = clock_offset(group)
        spans = [[s.name, s.row, s.start + offset, s.stop + offset, s.details] for s in self.spans]
        memory = [[moment + offset, now] for moment, now in self.memory]
        gathered = gather_records(
            group,
            {"rank": self.rank, "gaps": [*self.gaps.items()], "spans": spans, "memory": memory},
        )
        if gathered is None:
            return None
        timelines = [Timeline(record["rank"]) for record in gathered]
        for timeline, record in zip(timelines, gathered, strict=True):
            timeline.spans = [Span(*span) for span in record["spans"]]
            timeline.gaps = dict(record["gaps"])
            timeline.memory = [(moment, now) for moment, now in record["memory"]]
        return timelines


def clock_offset(group: Group, *, rounds: int = 5) -> float:
    """Return the seconds to add to this rank's clock to get rank 0's.

    Rank 0 asks each rank for its time and takes the middle of the round trip as the moment of the
    answer. The error is at most half a round trip, so a smaller offset becomes 0.0; on one host,
    which has one clock, it is always 0.0.

    Cost:    on rank 0, 2 * rounds + 1 messages of 8 bytes per peer, counted under `control`.
    """
    with group.ledger.control():
        if group.rank != 0:
            for _ in range(rounds):
                group.recv(src=0)
                group.send(np.array([time.perf_counter()]), dst=0)
            return float(group.recv(src=0)[0])
        for peer in range(1, group.size):
            trips = []  # (seconds of the round trip, offset); the quickest counts
            for _ in range(rounds):
                asked = time.perf_counter()
                group.send(np.zeros(1), dst=peer)
                theirs = float(group.recv(src=peer)[0])
                trip = time.perf_counter() - asked
                trips.append((trip, asked + trip / 2 - theirs))
            trip, offset = min(trips)
            group.send(np.array([offset if abs(offset) > trip / 2 else 0.0]), dst=peer)
    return 0.0


def write_perfetto(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """Write the Chrome trace format: `ph: X` events, `ts` and `dur` in µs from the earliest start.

    Where a timeline has left out spans, an instant event of the rank gives their number and the
    length of the gap. Arrows between messages and counters are added if the timelines have them
    (trace_marks.py).

    Raises:  OSError if `path` cannot be written.
    """
    origin = min((span.start for timeline in timelines for span in timeline.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        events += _names(timeline)
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.row,
                "pid": timeline.rank,
                "tid": ROWS.index(span.row),
                "ts": round((span.start - origin) * 1e6, 3),
                "dur": round((span.stop - span.start) * 1e6, 3),
                "args": {key: value for key, value in span.details.items() if value is not None},
            }
            for span in timeline.spans
        ]
        events += _left_out(timeline, origin)
    events += [*arrows(timelines, ROWS, origin), *counters(timelines, origin)]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file, separators=(",", ":"))


def _left_out(timeline: Timeline, origin: float) -> Iterator[dict[str, Any]]:
    """Yield an instant event at the begin of each gap."""
    for place, count in timeline.gaps.items():
        start = timeline.spans[place - 1].stop if place else origin
        until = timeline.spans[place].start if place < len(timeline.spans) else start
        yield {
            "ph": "i",
            "s": "p",
            "name": f"{count:,} spans are left out here",
            "pid": timeline.rank,
            "tid": 0,
            "ts": round((start - origin) * 1e6, 3),
            "args": {"spans": count, "seconds": max(0.0, until - start)},
        }


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield metadata events: names and order of a rank's process and rows."""

    def about(what: str, row: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": timeline.rank, "tid": row, "args": args}

    yield about("process_name", 0, name=f"rank {timeline.rank}")
    yield about("process_sort_index", 0, sort_index=timeline.rank)
    for row, name in enumerate(ROWS):
        yield about("thread_name", row, name=name)
        yield about("thread_sort_index", row, sort_index=row)
