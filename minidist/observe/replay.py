"""Chapter 24 · The replay: traces of all ranks, on one clock.

Each rank runs its trace in its own order. It stands still where it waits for a call, and in the real
`replay` also where it waits for a move or for its host. A call begins when all its ranks have come
to it (a message: when its sender has) and the call before it in its group has ended. From that every
time follows:

    rank 0   forward ····· | all_reduce starts | backward ·············· | waits ··| update
    rank 1   forward ··········· | all_reduce starts | backward ······ | waits ····| update
    group                        |all_reduce ······························|

`plain_replay` is the whole idea. What `replay` adds: calls that share links slow each other down
(shared_links.py), ranks that nothing tells apart share one clock (fold.py), traces of one role are
read once (tracks.py), a rank may continue before a call has ended on all ranks (`Await.sooner`),
work ends no sooner than its host has issued it, and the times of all events are kept, 8 bytes each,
for the critical path (replay_path.py).

The host of a GPU issues kernels one after another and runs ahead of the device. It waits for the
device only at a `Sync`, and at a message between stages. So a step takes as long as the longer of
the two queues:

    host     |issue F|issue B|··········· | sync     host is shorter: kernels wait in the queue
    device   |forward ······|backward ··········|

    host     |issue F ·······|issue B ·········|     host is longer: the device waits for kernels
    device   |fo  rw  ar  d  |ba  ck  wa  rd   |
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from minidist.errors import DeadlockError
from minidist.observe.events import (
    Await,
    Busy,
    Event,
    GroupCall,
    Memory,
    Start,
    Sync,
    Transfer,
)
from minidist.observe.fold import Folded, fold, unfolded
from minidist.observe.shared_cores import on_shared_cores
from minidist.observe.shared_links import Running, SharedLinks, busy_links
from minidist.observe.stations import UNKNOWN, Loads, Pricing, Station, make_stations
from minidist.observe.tracks import BUSY, CALL, START, SYNC, WAIT, Track, track_of

__all__ = [
    "Await",
    "Busy",
    "Event",
    "GroupCall",
    "Memory",
    "Replayed",
    "Start",
    "Sync",
    "Transfer",
    "plain_replay",
    "replay",
]


# -------------------------------------------------------------------------------- the plain version


def plain_replay(
    traces: Sequence[Sequence[Event]],
    members: Callable[[str, int], Sequence[int]],
    busy_seconds: Callable[[int, Hashable], float],
    call_seconds: Callable[[GroupCall, tuple[int, ...]], float],
) -> list[float]:
    """Return when each rank ends, in seconds, if links are never shared. No moves.

    Args:    traces: one a rank. members: (axis, rank) -> ranks of its group.
    Raises:  DeadlockError if ranks wait for calls that never begin.
    """
    # (group or pair, number) -> {rank: when it arrived}
    came: dict[Any, dict[int, float]] = defaultdict(dict)
    ended: dict[Any, float] = {}

    def start(rank: int, call: GroupCall, now: float, count: Counter[Any]) -> Any:
        """Start a call; the last rank to start it computes its end. Return its key."""
        comers = group = tuple(members(call.axis, rank))
        if call.verb in ("send", "recv"):
            group = (rank, group[call.peer]) if call.verb == "send" else (group[call.peer], rank)
            comers = group[:1]
            call = call._replace(peer=1)  # the receiver's number in (sender, receiver)
        way = call.axis, group, call.verb in ("send", "recv")
        count[way] += 1
        if rank in comers:
            came[way, count[way]][rank] = now
            if len(came[way, count[way]]) == len(comers):
                begin = max(ended.get((way, count[way] - 1), 0.0), *came[way, count[way]].values())
                ended[way, count[way]] = begin + call_seconds(call, group)
        return way, count[way]

    def play(rank: int) -> Iterator[None]:
        now = 0.0
        count = Counter[Any]()
        started = dict[int, Any]()
        for event in traces[rank]:
            if isinstance(event, Busy):
                now += busy_seconds(rank, event.work)
            elif isinstance(event, Start):
                started[event.id] = start(rank, event.call, now, count)
            elif isinstance(event, Await):
                while started[event.id] not in ended:
                    yield
                now = max(now, ended[started[event.id]])
        ends[rank] = now

    ends = dict[int, float]()
    playing = [play(rank) for rank in range(len(traces))]
    before = (-1, -1)
    while len(ends) < len(traces):
        if before == (before := (len(ended), len(ends))):
            raise DeadlockError(
                f"ranks {[rank for rank in range(len(traces)) if rank not in ends]} wait for ever"
            )
        for one in playing:
            next(one, None)
    return [ends[rank] for rank in range(len(traces))]


# ---------------------------------------------------------------------------------- the real replay

# plain            real
# traces[rank]     Track.ops (tracks.py), made once a role
# way              Station: a group, a pair with its direction, a lane of moves (stations.py)
# count            numbers of jobs: each op has that of its job (tracks.py)
# came             Station.late: when the last one came; Station.missing: how many have not come
# ended            Station.ends
# rank             clock: the ranks that share it do the same at the same time (fold.py)
# play, start      _run; on links that jobs share: SharedLinks.complete (shared_links.py)


class Replayed:
    """The times of all events, in seconds from the common begin.

    Attributes: seconds: until all ranks and calls have ended. tracks: one a role.
                clock_of: rank -> its clock; ranks that share one are alike. ranks: clock -> the
                first rank with it.
                stops: clock -> when each op of its track ended, with 0.0 before the first.
                stations: clock -> station of each slot, with begins and ends of its jobs.
    """

    def __init__(
        self,
        tracks: Sequence[Track],
        role_of: Sequence[int],
        folded: Folded,
        stops: list["array[float]"],
    ) -> None:
        self.tracks = tracks
        self.role_of = role_of
        self.clock_of = folded.clock_of
        self.ranks = folded.ranks
        self.stations = folded.stations
        self.stops = stops
        self._comings: dict[int, dict[tuple[int, int], int]] = {}
        self.seconds = max(
            [stop[-1] for stop in stops] + [station.ends[-1] for station in folded.clocks_to_come]
        )

    def track(self, rank: int) -> Track:
        """Return the track of a rank."""
        return self.tracks[self.role_of[rank]]

    def times(self, rank: int) -> "array[float]":
        """Return when each op of the rank's track ended, with 0.0 before the first."""
        return self.stops[self.clock_of[rank]]

    def stations_of(self, rank: int) -> list[Station]:
        """Return the station of each slot of the rank, or of one that shares its clock."""
        return self.stations[self.clock_of[rank]]

    def comings(self, clock: int) -> dict[tuple[int, int], int]:
        """Return (slot, number) -> the op with which a clock comes to this job."""
        if clock not in self._comings:
            self._comings[clock] = {
                (slot, number): place
                for place, (kind, slot, number) in enumerate(self.track(self.ranks[clock]).ops)
                if kind in (START, CALL)
            }
        return self._comings[clock]


def replay(
    traces: Sequence[Sequence[Event]],
    role_of: Sequence[int],
    members: Callable[[str, int], Sequence[int]],
    busy_seconds: Callable[[int, Hashable], float],
    call_cost: Callable[[GroupCall, tuple[int, ...]], tuple[float, Loads]],
    *,
    move_seconds: Callable[[int, Transfer], float] = lambda rank, move: 0.0,
    folded: bool = True,
    core_share: Callable[[int, Hashable], float] | None = None,
    issue_seconds: Callable[[int, Hashable], float] = lambda rank, work: 0.0,
) -> Replayed:
    """Put the traces of all ranks on one clock.

    Args:    traces: one a role. role_of: rank -> role. members: (axis, rank) -> ranks of its group,
             in group order.
             busy_seconds: (rank, work) -> seconds.
             call_cost: (call, its group) -> seconds alone, {link: share of its capacity used
             meanwhile}. The group of a message is (sender, receiver), and the call is the sender's.
             folded: ranks that nothing tells apart share a clock; the times are the same.
             core_share: (rank, work) -> the share of the machine that the work asks for, where
             ranks share cores; while all shares together are more than 1, all slow down by that
             sum. None: each rank has its own.
             issue_seconds: (rank, work) -> seconds in which the rank's host issues the work; 0
             where a processor computes itself.
    Raises:  DeadlockError: waits that never end, with ranks and calls. MismatchError: calls that do
             not fit together.
    Cost:    about 1 µs an event and clock.
    """
    tracks = [track_of(trace) for trace in traces]
    own = make_stations(tracks, role_of, Pricing(members, call_cost, move_seconds))
    seconds = [
        tuple(busy_seconds(rank, busy.work) for busy in tracks[role].works)
        for rank, role in enumerate(role_of)
    ]
    issue = [
        tuple(issue_seconds(rank, busy.work) for busy in tracks[role].works)
        for rank, role in enumerate(role_of)
    ]
    links = busy_links(dict.fromkeys(station for mine in own for station in mine))
    alike = list(zip(role_of, seconds, issue, strict=True))
    job = fold(own, links, alike) if folded and not core_share else unfolded(own, links)
    for station, clocks_to_come in job.clocks_to_come.items():
        station.open(clocks_to_come)
        station.sharing = Running(station, job.loads[station]) if station in job.loads else None
    played = [tracks[role_of[rank]] for rank in job.ranks]
    shared = on_shared_cores(job, played, seconds, core_share) if core_share else (job, played)
    stops = _play(
        *shared, [seconds[rank] for rank in job.ranks], [issue[rank] for rank in job.ranks]
    )
    return Replayed(tracks, role_of, job, stops)


def _play(
    job: Folded,
    tracks: list[Track],
    seconds: list[tuple[float, ...]],
    issue: list[tuple[float, ...]],
) -> list["array[float]"]:
    """Run all clocks to their ends; returns when each op ended."""
    stops = [array("d", (0.0,)) for _ in tracks]
    hosts = [0.0] * len(tracks)  # when the host of each clock has issued what ran so far
    todo = [iter(track.ops) for track in tracks]
    sharing = SharedLinks()
    ready = list(range(len(tracks)))

    def ended(station: Station, number: int, end: float) -> None:
        """Wake the clocks that wait for a job."""
        for clock in station.waiting.pop(number, ()):
            mine = end - tracks[clock].sooner.get(len(stops[clock]) - 1, 0.0)
            stops[clock].append(max(stops[clock][-1], mine))
            if station.host_waits:
                hosts[clock] = max(hosts[clock], stops[clock][-1])
            ready.append(clock)

    while True:
        while ready:
            clock = ready.pop()
            sooner = tracks[clock].sooner
            hosts[clock] = _run(
                clock,
                todo[clock],
                sooner,
                stops[clock],
                seconds[clock],
                issue[clock],
                hosts[clock],
                job.stations[clock],
                sharing,
                ended,
            )
        found = sharing.next_end()
        if found is None:
            break
        station, number = found
        ended(station, number, station.ends[number])
    if any(station.waiting for station in job.clocks_to_come):
        raise DeadlockError(_deadlock(job, tracks, stops))
    return stops


def _run(
    clock: int,
    todo: Iterator[tuple[int, int, int]],
    sooner: dict[int, float],
    stops: "array[float]",
    seconds: tuple[float, ...],
    issue: tuple[float, ...],
    host: float,
    stations: list[Station],
    sharing: SharedLinks,
    ended: Callable[[Station, int, float], None],
) -> float:
    """Run one clock until it waits for a job whose end is not known yet, or to its end. Returns the
    time of its host, which begins at `host`."""
    now = stops[-1]
    for kind, slot, number in todo:
        if kind == BUSY:
            now += seconds[slot]
            host += issue[slot]
            if host > now:
                now = host
        elif kind == SYNC:
            host = now
        else:
            station = stations[slot]
            if kind != WAIT:  # START, CALL: the clock comes to the job
                if now > station.late[number]:
                    station.late[number] = now
                station.missing[number] -= 1
                if not station.missing[number]:
                    if station.sharing is not None:
                        sharing.complete(station, number)
                    else:
                        begin = station.late[number]
                        if number and station.ends[number - 1] > begin:
                            begin = station.ends[number - 1]
                        station.begins[number] = begin
                        station.ends[number] = end = begin + station.alone[number]
                        if number in station.waiting:
                            ended(station, number, end)
            if kind != START:  # WAIT, CALL: the clock waits for the job's end
                end = station.ends[number]
                if end == UNKNOWN:
                    station.waiting.setdefault(number, []).append(clock)
                    return host
                if sooner:
                    end -= sooner.get(len(stops) - 1, 0.0)
                if end > now:
                    now = end
                if now > host and station.host_waits:
                    host = now
        stops.append(now)
    return host


def _deadlock(job: Folded, tracks: list[Track], stops: list["array[float]"]) -> str:
    """Return a text: the ring of ranks that wait for each other."""
    at = {
        clock: (station, number)
        for station in job.clocks_to_come
        for number, clocks in station.waiting.items()
        for clock in clocks
    }

    def came(clock: int, station: Station, wanted: int) -> bool:
        """Return True if a clock has come to a job."""
        stations = job.stations[clock]
        return any(
            kind in (START, CALL) and stations[slot] is station and number == wanted
            for kind, slot, number in tracks[clock].ops[: len(stops[clock])]
        )

    path = list[int]()
    clock = min(at)
    told = []
    while clock not in path:
        path.append(clock)
        station, number = at[clock]
        late = [
            one
            for one in (job.clock_of[rank] for rank in station.comers)
            if not came(one, station, number)
        ]
        verb = station.jobs[number]
        told.append(
            f"rank {job.ranks[clock]} in {verb.verb if isinstance(verb, GroupCall) else 'move'} "
            f"{number} of {station} for rank {job.ranks[late[0]] if late else job.ranks[clock]}"
        )
        clock = late[0] if late else clock
    return f"deadlock: these ranks wait for each other: {'; '.join(told[path.index(clock) :])}"
