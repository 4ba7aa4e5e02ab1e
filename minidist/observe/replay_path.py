"""Chapter 24 · Where the time of a replay goes: of each rank, and along the critical path.

    time_of(replayed, rank)     what the rank did all the time: computed, stood still for bytes,
                                stood still for others
    critical_path(replayed)     the chain of events that determined the end

A rank that waits is exposed to communication while bytes of the group move, and idle before that:
then it waits for other ranks. On a GPU busy also has the time in which the device waits for its
host (replay.py). No other waiting counts as computing. Both accounts add up to the whole time.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from minidist.observe.replay import Replayed
from minidist.observe.stations import Station
from minidist.observe.tracks import BUSY

Seconds: TypeAlias = defaultdict[str, float]


def _none() -> Seconds:
    return defaultdict(float)


@dataclass
class RankTime:
    """Seconds of a rank between two moments; they add up.

    Attributes: busy: by the name of the work. exposed: waited while bytes moved, by axis (or lane).
                idle: waited for other ranks, by the axis along which it waited; "end": after its
                last event.
    """

    busy: Seconds = field(default_factory=_none)
    exposed: Seconds = field(default_factory=_none)
    idle: Seconds = field(default_factory=_none)


def time_of(
    replayed: Replayed, rank: int, begin: float = 0.0, end: float | None = None
) -> RankTime:
    """Return what a rank did between two moments (default: all the time)."""
    end = replayed.seconds if end is None else end
    found = RankTime()
    stations = replayed.stations_of(rank)
    times = replayed.times(rank)
    works = replayed.track(rank).works
    busy = defaultdict[int, float](float)
    for place, (kind, slot, number) in enumerate(replayed.track(rank).ops):
        stop = times[place + 1]
        start = times[place]
        if stop <= begin or stop == start:
            continue
        start = max(start, begin)
        if kind == BUSY:
            busy[slot] += min(stop, end) - start
        elif start < end:
            station = stations[slot]
            moving = _moving(station, number, start, min(stop, end))
            found.exposed[station.slot.axis] += moving
            found.idle[station.slot.axis] += min(stop, end) - start - moving
    for slot, seconds in busy.items():
        found.busy[works[slot].name] += seconds
    if times[-1] < end:
        found.idle["end"] += end - max(times[-1], begin)
    return found


def _moving(station: Station, number: int, start: float, stop: float) -> float:
    """Return seconds between start and stop in which a station runs the given job, or one before
    it."""
    seconds = 0.0
    for at in range(number, -1, -1):
        begin = station.begins[at]
        end = station.ends[at]
        if end <= start:
            break
        seconds += max(0.0, min(stop, end) - max(start, begin))
    return seconds


# -------------------------------------------------------------------------------- the critical path


class PathPiece(NamedTuple):
    """A piece of the critical path; `rank`: where it ran, of a call one of its ranks."""

    # "busy", "call" (as long as it takes alone), "shared links" (what sharing added) or "move"
    kind: str
    name: str  # of the work; the axis of a call; the lane of a move
    rank: int
    start: float
    stop: float


def critical_path(replayed: Replayed, begin: float = 0.0, *, calls: bool = True) -> list[PathPiece]:
    """Return the pieces that determined the end, from `begin` on, each beginning when the one
    before it stops.

    Args:    calls: the end is that of all ranks and calls; else that of the last rank, whatever is
             still on its way.
    """
    pieces = [
        piece._replace(start=max(piece.start, begin))
        for piece in _backwards(replayed, begin, calls)
        if piece.stop > max(piece.start, begin)
    ]
    return pieces[::-1]


def _backwards(replayed: Replayed, begin: float, calls: bool) -> Iterator[PathPiece]:
    """Yield the pieces of the path, from its end."""
    clock = max(range(len(replayed.stops)), key=lambda clock: replayed.stops[clock][-1])
    place = len(replayed.stops[clock]) - 2
    # a call that no rank waited for ends last
    if calls and replayed.seconds > replayed.stops[clock][-1]:
        station = next(
            station
            for mine in replayed.stations
            for station in mine
            if station.ends[-1] == replayed.seconds
        )
        pieces, clock, place = _through(replayed, station, len(station.ends) - 1, replayed.seconds)
        yield from pieces
    while place >= 0 and replayed.stops[clock][place + 1] > begin:
        rank = replayed.ranks[clock]
        kind, slot, number = replayed.track(rank).ops[place]
        start, stop = replayed.stops[clock][place : place + 2]
        if kind == BUSY:
            yield PathPiece("busy", replayed.track(rank).works[slot].name, rank, start, stop)
        elif stop > start:
            pieces, clock, place = _through(replayed, replayed.stations[clock][slot], number, stop)
            yield from pieces
            continue
        place -= 1


def _through(
    replayed: Replayed, station: Station, number: int, stop: float
) -> tuple[list[PathPiece], int, int]:
    """Return the pieces of a job and of those before it in its station that held it up.

    Args:    stop: when the rank continued that waited for the job.
    Returns: the pieces, and the clock and op before them.
    """
    pieces = []
    while True:
        begin = station.begins[number]
        end = min(station.ends[number], stop)
        middle = min(end, begin + station.alone[number])
        kind = "move" if station.slot.kind == "move" else "call"
        pieces += [
            PathPiece("shared links", station.slot.axis, station.group[0], middle, end),
            PathPiece(kind, station.slot.axis, station.group[0], begin, middle),
        ]
        if number == 0 or station.late[number] >= begin:
            break
        number -= 1
    places = (
        (clock, _coming(replayed, clock, station, number))
        for clock in dict.fromkeys(replayed.clock_of[rank] for rank in station.comers)
    )
    clock, place = max(places, key=lambda found: replayed.stops[found[0]][found[1]])
    return pieces, clock, place - 1


def _coming(replayed: Replayed, clock: int, station: Station, number: int) -> int:
    """Return the op with which a clock comes to a job."""
    track = replayed.track(replayed.ranks[clock])
    slot = next(
        place
        for place, one in enumerate(replayed.stations[clock])
        if one is station and track.slots[place].kind != "recv"
    )
    return replayed.comings(clock)[slot, number]
