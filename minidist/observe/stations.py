"""Chapter 24 · Stations: where the ranks of a replay meet.

A station is a group, a pair with its direction, or a lane of moves. It runs its jobs one after
another: the n-th begins when all ranks that take part have come to it and the one before has ended.

    collective   the group's ranks          begins when the last of them starts it
    message      sender -> receiver         begins when the sender starts it; the receiver only
                                            waits for its end
    move         one rank                   begins when the rank starts it
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

from minidist.errors import MismatchError
from minidist.observe.events import GroupCall, Transfer
from minidist.observe.tracks import Job, Track, TrackSlot

UNKNOWN = -1.0  # a time that is not yet known

# link -> share of its capacity that a call alone uses, from 0 to 1
Loads: TypeAlias = Mapping[Any, float]


class Cost(NamedTuple):
    """A job alone: its seconds, and the links that it loads meanwhile."""

    seconds: float
    loads: Loads


class Station:
    """One station; the lists have a place for each of its jobs.

    Attributes: slot: as the first of the group sees it. host_waits: whether a rank that waits for
                a job here waits on its host too: for a message between stages.
                group: its ranks; of a message the sender and the receiver.
                comers: the ranks that begin its jobs: of a message the sender, else the group.
                alone: seconds of each job.
                missing: how many clocks have not yet come to each job.
                late: when the last clock came to each job.
                begins, ends: times of each job, or UNKNOWN.
                waiting: {number of a job: ranks that wait for its end}.
                sharing: see shared_links.py.
    """

    __slots__ = (
        "alone",
        "begins",
        "comers",
        "costs",
        "ends",
        "group",
        "jobs",
        "late",
        "missing",
        "sharing",
        "slot",
        "host_waits",
        "waiting",
    )

    def __init__(
        self, slot: TrackSlot, group: tuple[int, ...], jobs: tuple[Job, ...], costs: dict[Job, Cost]
    ) -> None:
        self.slot = slot
        self.host_waits = slot.kind == "send" and slot.axis == "pp"
        self.group = group
        self.jobs = jobs
        self.costs = costs
        self.comers = group[:1] if slot.kind == "send" else group
        self.sharing: Any = None

    def open(self, clocks_to_come: int) -> None:
        """Make the lists, for a replay in which so many clocks come to each job."""
        count = len(self.jobs)
        self.alone = [self.costs[job].seconds for job in self.jobs]
        self.missing = [clocks_to_come] * count
        self.late = [0.0] * count
        self.begins = [UNKNOWN] * count
        self.ends = [UNKNOWN] * count
        self.waiting: dict[int, list[int]] = {}

    def each_load(self) -> list[Loads]:
        """Return the loads of its jobs; jobs that share one object load links alike."""
        return list({id(cost.loads): cost.loads for cost in self.costs.values()}.values())

    def first_jobs(self) -> dict[int, Job]:
        """Return the first job of each of these loads, by the id of the loads."""
        return {id(cost.loads): job for job, cost in reversed(list(self.costs.items()))}

    def __str__(self) -> str:
        if self.slot.kind == "collective":
            return f"the {self.slot.axis} group of ranks {_some(self.group)}"
        if self.slot.kind == "move":
            return f"lane {self.slot.axis} of rank {self.group[0]}"
        return f"the {self.slot.axis} messages from rank {self.group[0]} to rank {self.group[1]}"


def _some(ranks: Sequence[int]) -> str:
    return (
        ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"
    )


class Pricing(NamedTuple):
    """The functions that say how long jobs take, and which ranks form a group."""

    members: Callable[[str, int], Sequence[int]]  # (axis, rank) -> ranks of its group
    call_cost: Callable[[GroupCall, tuple[int, ...]], tuple[float, Loads]]
    move_seconds: Callable[[int, Transfer], float]

    def cost(self, job: Job, group: tuple[int, ...], slot: TrackSlot) -> Cost:
        """Return the cost of a job of the station of `group`."""
        if isinstance(job, Transfer):
            return Cost(self.move_seconds(group[0], job), {})
        if slot.kind == "send":
            job = job._replace(peer=1)  # the receiver's number in (sender, receiver)
        return Cost(*self.call_cost(job, group))


def make_stations(
    tracks: Sequence[Track], role_of: Sequence[int], pricing: Pricing
) -> list[list[Station]]:
    """Return for each rank the station of each slot of its track. Stations that several ranks come
    to are one object.

    Raises:  MismatchError if members of a group call different things, or a message is received
             that is not sent.
    """
    made: dict[Any, Station] = {}
    places = [{slot: number for number, slot in enumerate(track.slots)} for track in tracks]
    group_of = _groups(pricing)
    agreed = set[Any]()

    def station(slot: TrackSlot, rank: int) -> Station:
        """Return the station of a slot, seen from the first of its group."""
        group = (rank,) if slot.kind == "move" else group_of(slot.axis, rank)
        if slot.kind == "recv":
            slot, group = TrackSlot("send", slot.axis, group.index(rank)), (group[slot.peer], rank)
        elif slot.kind == "send":
            group = rank, group[slot.peer]
        # a group is one object, and may be long
        key = slot, id(group) if slot.kind == "collective" else group
        if key not in made:
            lists = [
                tracks[role_of[one]].jobs[place]
                if (place := places[role_of[one]].get(slot)) is not None
                else ()
                for one in (group[:1] if slot.kind == "send" else group)
            ]
            if (roles := (slot, tuple(map(id, lists)))) not in agreed:
                _check_agree(slot, group, lists)
                agreed.add(roles)
            costs = {job: pricing.cost(job, group, slot) for job in dict.fromkeys(lists[0])}
            made[key] = Station(slot, group, lists[0], costs)
        return made[key]

    def checked(slot: TrackSlot, rank: int, jobs: tuple[Job, ...]) -> Station:
        found = station(slot, rank)
        if slot.kind == "recv" and len(jobs) > len(found.jobs):
            raise MismatchError(
                f"rank {rank} receives {len(jobs)} messages of {found}, but only "
                f"{len(found.jobs)} are sent"
            )
        return found

    return [
        [
            checked(slot, rank, jobs)
            for slot, jobs in zip(tracks[role].slots, tracks[role].jobs, strict=True)
        ]
        for rank, role in enumerate(role_of)
    ]


def _groups(pricing: Pricing) -> Callable[[str, int], tuple[int, ...]]:
    """Return the ranks of the group of a rank along an axis; asked for once a group."""
    known: dict[tuple[str, int], tuple[int, ...]] = {}

    def group_of(axis: str, rank: int) -> tuple[int, ...]:
        if (axis, rank) not in known:
            ranks = tuple(pricing.members(axis, rank))
            known.update({(axis, one): ranks for one in ranks})
        return known[axis, rank]

    return group_of


def _check_agree(slot: TrackSlot, group: tuple[int, ...], lists: Sequence[tuple[Job, ...]]) -> None:
    """Check that all members call the same verbs by the same algorithms. Raises: MismatchError."""
    for rank, jobs in zip(group, lists, strict=False):
        for number, (first, other) in enumerate(zip_longest(lists[0], jobs)):
            told = [
                f"an {job.verb} ({job.algorithm})" if isinstance(job, GroupCall) else "nothing more"
                for job in (first, other)
            ]
            if told[0] != told[1] and slot.kind == "collective":
                raise MismatchError(
                    f"call {number} along {slot.axis}: rank {group[0]} calls {told[0]}, rank "
                    f"{rank} {told[1]}"
                )
