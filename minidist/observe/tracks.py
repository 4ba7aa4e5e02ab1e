"""Chapter 24 · Tracks: a rank's trace in the form in which the replay plays it, made once for all
ranks of a role.

Memory events are left out, because they take no time. Each call knows its place beforehand: it is
the n-th of its slot. A slot is where the rank meets others: its group along an axis, the messages
to or from one peer, or a lane of moves.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from minidist.errors import MismatchError
from minidist.observe.events import Await, Busy, Event, GroupCall, Start, Sync, Transfer

BUSY, START, WAIT, CALL, SYNC = range(5)
"""Kinds of an op; CALL is a START and the WAIT for it in one."""


class TrackSlot(NamedTuple):
    """Where a rank meets others. Calls of one slot run one after another."""

    kind: str  # "collective", "send", "recv" or "move"
    axis: str  # or the lane of moves
    peer: int = -1  # of messages: rank in the group


Job: TypeAlias = GroupCall | Transfer
"""What a slot runs."""


class Track(NamedTuple):
    """A trace, ready to be played.

    Attributes: ops: (kind, slot, number): (BUSY, place in `works`, 0), (START, WAIT or CALL, slot,
                number of the call in its slot) or (SYNC, 0, 0). Plain tuples: the replay takes
                apart each op of each clock, and a NamedTuple takes longer.
                at: for each op the place of its event in the trace; jobs: what each slot runs, in
                order.
                sooner: place of a WAIT or CALL in `ops` -> Await.sooner, where that is not 0.
    """

    ops: list[tuple[int, int, int]]
    at: list[int]
    works: list[Busy]
    slots: list[TrackSlot]
    jobs: list[tuple[Job, ...]]
    sooner: dict[int, float]


def track_of(trace: Sequence[Event]) -> Track:
    """Return the track of a trace. Raises: MismatchError for a wait whose call was not started
    before."""
    ops = list[tuple[int, int, int]]()
    at = list[int]()
    works = dict[Busy, int]()
    slots = dict[TrackSlot, int]()
    jobs = list[list[Job]]()
    begun = dict[int, tuple[int, int]]()
    known = dict[Job, Job]()
    sooner = dict[int, float]()
    for place, event in enumerate(trace):
        if isinstance(event, Busy):
            op = (BUSY, works.setdefault(event, len(works)), 0)
        elif isinstance(event, Sync):
            op = (SYNC, 0, 0)
        elif isinstance(event, (Start, Transfer)):
            job = event.call if isinstance(event, Start) else event._replace(id=0)
            slot = slots.setdefault(_slot(job), len(slots))
            if slot == len(jobs):
                jobs.append([])
            begun[event.id] = slot, len(jobs[slot])
            jobs[slot].append(known.setdefault(job, job))
            # only the sender starts a message (Station.comers); the receiver only waits for it
            if _slot(job).kind == "recv":
                continue
            op = (START, *begun[event.id])
        elif isinstance(event, Await):
            if event.id not in begun:
                raise MismatchError(
                    f"event {place} of a trace waits for call {event.id}, which no event before it "
                    f"starts; start it, or leave the wait out"
                )
            is_call = bool(ops) and ops[-1] == (START, *begun[event.id])
            if event.sooner:
                sooner[len(ops) - is_call] = event.sooner
            if is_call:
                ops[-1] = (CALL, *begun[event.id])
                continue
            op = (WAIT, *begun[event.id])
        else:
            continue
        ops.append(op)
        at.append(place)
    return Track(ops, at, list(works), list(slots), [tuple(slot) for slot in jobs], sooner)


def _slot(job: Job) -> TrackSlot:
    if isinstance(job, Transfer):
        return TrackSlot("move", job.lane)
    if job.verb in ("send", "recv"):
        return TrackSlot(job.verb, job.axis, job.peer)
    return TrackSlot("collective", job.axis)
