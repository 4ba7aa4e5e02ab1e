"""The timeline of a run: spans of every rank, gathered on rank 0 and written for Perfetto.

    timeline = Timeline(world.rank)
    timeline.follow(world.ledger)                      # collectives and messages, from the ledger's events
    with timeline.span("forward", step=3): ...         # work, from the code that does it
    timelines = timeline.collect(world)                # on rank 0: every rank's spans on rank 0's clock
    write_perfetto("trace.json", timelines)            # open it at https://ui.perfetto.dev

A process of the trace is a rank. Its rows: `compute` (forward, backward, optimizer), `communication` (each collective,
on any thread), `messages` (each that the rank sent), `moves` (copies between device, host and disk) and `waits` (for
each collective by itself, if the timeline was asked to follow them). Overlap is visible: the all-reduce of a bucket on
the second row starts before `backward` on the first row ends.

Times are seconds of `time.perf_counter()`, one clock for all processes of a host. `clock_offset` aligns hosts.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.ledger import Event, Ledger
from minidist.observe.records import gather_records

ROWS = ("compute", "communication", "messages", "moves", "waits")


@dataclass(frozen=True)
class Span:
    """A named interval of one rank's time, in seconds of `time.perf_counter()`; `row` is one of ROWS."""

    name: str
    row: str
    start: float
    stop: float
    details: dict[str, Any] = field(default_factory=dict)


class Timeline:
    """The spans of one rank, in the order in which they ended.

    Args:    rank: this rank in the job, the process number of the trace.
             limit: the most spans to keep; later ones are only counted, in `dropped` (a step of DDP has about 100).
    """

    def __init__(self, rank: int, *, limit: int = 100_000) -> None:
        self.rank = rank
        self.limit = limit
        self.spans: list[Span] = []
        self.dropped = 0
        self.step: int | None = None
        self.always: dict[str, Any] = {}            # details of every span from now on
        self._names: dict[str, deque[str]] = {}     # axis -> names of its collectives that have not ended yet
        self._program = ""                          # the thread that follows a ledger

    @contextmanager
    def span(self, name: str, category: str = "compute", **details: Any) -> Iterator[None]:
        """Record the time of the block; a `step` among the details also marks the collectives that run meanwhile."""
        if "step" in details:
            self.step = details["step"]
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(Span(name, category, start, time.perf_counter(), {"step": self.step, **details}))

    def add(self, span: Span) -> None:
        """Keep `span`, or only count it if `limit` spans are kept already."""
        if len(self.spans) < self.limit:
            self.spans.append(replace(span, details={**self.always, **span.details}) if self.always else span)
        else:
            self.dropped += 1

    def go_on(self, rank: int, ledger: Ledger, *, limit: int, **always: Any) -> None:
        """In a new world, as this rank: follow its ledger. All spans from now on have the rank and these details."""
        self.rank, self.limit, self.step, self.always = rank, limit, None, {"rank": rank, **always}
        self._names = {}
        self.follow(ledger)

    def announce(self, axis: str, name: str) -> None:
        """Name the next collective along `axis`: a group runs its calls in the order in which they are started."""
        self._names.setdefault(axis, deque()).append(name)

    def follow(self, ledger: Ledger, *, waits: bool = False) -> None:
        """From now on, record every collective and every message that `ledger` reports.

        Args:    waits: each wait for a collective too, and of each collective whether it ran in the calling thread
                 (`blocking`), which is the program's. `minidist train --why` needs both.
        """
        self._program = threading.current_thread().name
        ledger.subscribe(self._on_event, waits=waits)

    def _on_event(self, event: Event) -> None:
        if event.kind == "wait":
            self.add(Span("wait", "waits", event.start, event.stop, {"step": self.step, **event.details}))
            return
        row, name = ("messages" if event.kind == "message" else "communication"), event.name
        names = self._names.get(event.details["axis"]) if event.kind == "call" else None
        if names:
            name = names.popleft()
        elif event.kind == "message":
            name = f"{event.name} to rank {event.details['dst']}"
        details = {"hop" if key == "step" else key: value for key, value in event.details.items()}
        if "queued" in details:
            details["blocking"] = event.thread == self._program
        self.add(Span(name, row, event.start, event.stop, {"step": self.step, **details}))

    def collect(self, group: Group) -> list["Timeline"] | None:
        """Gather every rank's timeline on rank 0, in rank order and on rank 0's clock; None on the others. All ranks
        call it.

        Cost:    counted under `control`: `clock_offset`, then one gather of the packed spans.
        """
        offset = clock_offset(group)
        spans = [asdict(Span(s.name, s.row, s.start + offset, s.stop + offset, s.details)) for s in self.spans]
        gathered = gather_records(group, {"rank": self.rank, "dropped": self.dropped, "spans": spans})
        if gathered is None:
            return None
        timelines = [Timeline(record["rank"]) for record in gathered]
        for timeline, record in zip(timelines, gathered, strict=True):
            timeline.spans = [Span(**span) for span in record["spans"]]
            timeline.dropped = record["dropped"]
        return timelines


def clock_offset(group: Group, *, rounds: int = 5) -> float:
    """Seconds to add to this rank's clock to get rank 0's.

    Rank 0 asks each rank for its time and takes the middle of the round trip as the moment of the answer. The error is
    at most half a round trip, so a smaller offset counts as 0.0; on one host, which has one clock, it always is.

    Cost:    on rank 0, 2 * rounds + 1 messages of 8 bytes a peer, counted under `control`.
    """
    with group.ledger.control():
        if group.rank != 0:
            for _ in range(rounds):
                group.recv(src=0)
                group.send(np.array([time.perf_counter()]), dst=0)
            return float(group.recv(src=0)[0])
        for peer in range(1, group.size):
            trips = []      # (seconds there and back, offset), of which the quickest counts
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

    Raises:  OSError if `path` cannot be written.
    """
    origin = min((span.start for timeline in timelines for span in timeline.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for timeline in timelines:
        events += _names(timeline)
        events += [{"ph": "X", "name": span.name, "cat": span.row, "pid": timeline.rank, "tid": ROWS.index(span.row),
                    "ts": round((span.start - origin) * 1e6, 3), "dur": round((span.stop - span.start) * 1e6, 3),
                    "args": {key: value for key, value in span.details.items() if value is not None}}
                   for span in timeline.spans]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Metadata events: names and order of a rank's process and rows."""
    def about(what: str, row: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": timeline.rank, "tid": row, "args": args}

    yield about("process_name", 0, name=f"rank {timeline.rank}")
    yield about("process_sort_index", 0, sort_index=timeline.rank)
    for row, name in enumerate(ROWS):
        yield about("thread_name", row, name=name)
        yield about("thread_sort_index", row, sort_index=row)
