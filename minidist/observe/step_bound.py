"""Chapter 23 · The critical path of a recorded step, and a lower bound of its length.

The critical path is the chain of work and transfers that ends with the step; each part waits for
the previous part. plain_critical_path follows it backwards over the record.

The lower bound keeps the work and the transfers as recorded, but removes avoidable waits: no call
delays another call, and weights are sent as soon as they are ready. Two limits remain:

    the longest chain    work | transfer of the last bucket | work
    the busiest link     work before its first call | all its calls, one after the other | work
                         after its last call

No order, priority or prefetch of the same calls gives less than the longer limit. Other buckets,
another link or a faster rank may: what_if.py.
"""

from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, cast

from minidist.observe.events import Await, Busy, Event, Start
from minidist.observe.replay import Replayed
from minidist.observe.replay_path import critical_path
from minidist.observe.step_record import StepRecord, only_work


class PathPart(NamedTuple):
    """A part of the critical path; start and stop in seconds of the record; rank: None for a
    transfer."""

    name: str
    rank: int | None
    start: float
    stop: float


def plain_critical_path(record: StepRecord) -> list[PathPart]:
    """Return the chain of work and transfers that determined a step's length, from its begin to its
    end without a gap."""
    # the last rank to end
    rank = max(range(len(record.windows)), key=lambda one: record.windows[one][1])
    now = record.windows[rank][1]
    path = list[PathPart]()
    while now > record.begin:
        held = [
            (min(wait.call.end, wait.stop), wait.call)
            for wait in record.waits[rank]
            if wait.call is not None and wait.start < min(wait.call.end, wait.stop) <= now
        ]
        if not held:
            return [PathPart("work", rank, record.begin, now), *path]
        ended, call = held[-1]  # the last call that this rank stood still for
        path.insert(0, PathPart("work", rank, ended, now))
        path.insert(0, PathPart(call.name, None, call.begin, ended))
        while (before := record.before(call)) is not None:  # the call before it held the link
            call = before
            path.insert(0, PathPart(call.name, None, call.begin, call.end))
        # the first call of the chain waited for its last rank
        rank, now = call.last_rank, call.begin
    return path


# path_of below finds the same chain in the replayed step, which names each piece of work; it also
# handles several groups at once, and a step that what_if.py has changed. lower_bound computes the
# least length of the chain.


def lower_bound(record: StepRecord) -> float:
    """Return the seconds below which no order of the recorded calls can bring the step; at most its
    recorded seconds."""
    moves = {
        number
        for number, call in enumerate(record.calls)
        if call.verb == "all_gather" and call.in_background
    }
    traces = [weights_first(only_work(trace), moves) for trace in record.traces()]
    alone = record.replay([[_apart(event) for event in trace] for trace in traces])
    chain = max(stops[-1] for stops in alone.stops)
    groups = dict.fromkeys(call.group for call in record.calls)
    links = [_link_seconds(record, traces, group) for group in groups]
    # a call does not end on all ranks at the same moment
    return min(record.seconds, max([chain, *links]))


def weights_first(trace: Sequence[Event], gathers: Container[int]) -> list[Event]:
    """Return the trace with these gathers started as soon as their weights are ready: after the
    last update before them."""
    moved = list[Event]()
    updated = 0
    early = 0
    for event in trace:
        if isinstance(event, Start) and event.id in gathers:
            moved.insert(updated + early, event)
            early += 1
            continue
        moved.append(event)
        if isinstance(event, Busy) and event.name == "optimizer":
            updated = len(moved)
            early = 0
    return moved


def _apart(event: Event) -> Event:
    """Return the event; the start of a call gets its own group, so that no other call delays it."""
    if not isinstance(event, Start):
        return event
    return event._replace(call=event.call._replace(axis=f"{event.call.axis}/{event.call.name}"))


def _link_seconds(record: StepRecord, traces: Sequence[Sequence[Event]], group: str) -> float:
    """Return a lower bound by one link: the least work before a call of the group + the seconds of
    its awaited calls + the least work after one of them."""
    head = dict[int, float]()
    tail = dict[int, float]()
    for trace in traces:
        work = 0.0
        total = sum(cast(float, event.work) for event in trace if isinstance(event, Busy))
        for event in trace:
            if isinstance(event, Busy):
                work += cast(float, event.work)
            elif isinstance(event, Start) and event.call.axis == group:
                head[event.id] = max(head.get(event.id, 0.0), work)
            elif isinstance(event, Await) and record.calls[event.id].group == group:
                tail[event.id] = max(tail.get(event.id, 0.0), total - work - event.sooner)
    if not tail:
        return 0.0
    return (
        min(head[call] for call in tail)
        + sum(record.calls[call].alone for call in tail)
        + min(tail.values())
    )


def path_of(record: StepRecord, replayed: Replayed) -> list[dict[str, Any]]:
    """Return the critical path of the replayed step in seconds from its begin; consecutive pieces
    of the same name are joined."""
    begins: dict[str, list[tuple[float, Any]]] = defaultdict(list)
    for station in dict.fromkeys(station for mine in replayed.stations for station in mine):
        begins[station.slot.axis] += list(zip(station.begins, station.jobs, strict=True))
    path = list[dict[str, Any]]()
    for piece in critical_path(replayed, calls=False):
        name = piece.name
        if piece.kind != "busy":
            name = next(
                job.name for begin, job in begins[piece.name] if begin == piece.start
            ).rpartition(" #")[0]
        if path and (path[-1]["name"], path[-1]["rank"], path[-1]["kind"]) == (
            name,
            piece.rank,
            piece.kind,
        ):
            path[-1]["stop"] = piece.stop
        else:
            path.append(
                {
                    "kind": piece.kind,
                    "name": name,
                    "rank": piece.rank,
                    "start": piece.start,
                    "stop": piece.stop,
                }
            )
    return path
