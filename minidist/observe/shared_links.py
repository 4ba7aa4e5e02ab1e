"""Chapter 24 · Links that several calls use at the same time.

A single call takes `alone` seconds and uses a share of the capacity of each of its links. While the
shares on a link add up to more than 1, each call on it slows down by this sum; a call on several
links slows down by the largest sum. So speeds change only when a call begins or ends; between two
such moments each call runs at constant speed:

    call    alone    its link    0      1      2      3      4      5 s
    a       2 s      all of it   |a a a a|a a a|                        1 s alone, then at half speed: ends at 3 s
    b       2 s      all of it          |b b b b|b b b b|               begins at 1 s; from 3 s on alone: ends at 4 s
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from minidist.observe.stations import UNKNOWN, Station
from minidist.observe.tracks import Job

FULL = 1.0 + 1e-9  # sums of shares are not exact

JobLoads = Mapping[Job, Sequence[tuple[Any, float]]]


def busy_links(stations: Iterable[Station]) -> dict[Any, None]:
    """Return the links on which calls may use more than the capacity, in a fixed order.

    A station runs one job at a time.
    """
    most: dict[Any, float] = defaultdict(float)
    for station in stations:
        worst: dict[Any, float] = {}
        for loads in station.each_load():
            for link, share in loads.items():
                if share > worst.get(link, 0.0):
                    worst[link] = share
        for link, share in worst.items():
            most[link] += share
    return {link: None for link, share in most.items() if share > FULL}


class Running:
    """The state of the job that a station runs on shared links; one object per station.

    Attributes: loads     the links and shares of each job of the station
            number    the number of the running job
            seconds_left  seconds alone of the work that is not done at time `since`
            slowness  the factor by which it takes longer now
            turn      the turn of its valid end in the heap; entries with another turn are old
    """

    __slots__ = ("loads", "number", "seconds_left", "since", "slowness", "station", "turn")

    def __init__(self, station: Station, loads: JobLoads) -> None:
        self.station = station
        self.loads = loads
        self.number = -1
        self.turn = -1
        self.seconds_left = 0.0
        self.since = 0.0
        self.slowness = 0.0

    @property
    def links(self) -> Sequence[tuple[Any, float]]:
        """(link, share) pairs of the running job."""
        return self.loads[self.station.jobs[self.number]]


class SharedLinks:
    """The clock of all calls that share links; it lets them begin and end in the order of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Running]] = []
        self._turns = count()
        self._asked: dict[Any, float] = defaultdict(float)  # link -> sum of shares
        self._users: dict[Any, dict[Running, None]] = defaultdict(dict)
        # calls whose speed must be computed again before time advances
        self._changed: dict[Running, None] = {}
        self._now = 0.0

    def complete(self, station: Station, number: int) -> None:
        """Schedule a job of a station whose ranks have all arrived; it begins when the station's
        previous job has ended."""
        before = station.ends[number - 1] if number else 0.0
        if before != UNKNOWN:
            heapq.heappush(
                self._heap,
                (max(before, station.late[number]), next(self._turns), True, station.sharing),
            )

    def next_end(self) -> tuple[Station, int] | None:
        """Advance time to the next end of a job and return (station, number of the job); None if no
        job runs."""
        while self._heap or self._changed:
            if self._changed and (not self._heap or self._heap[0][0] > self._now):
                self._settle()
            time, turn, begins, running = heapq.heappop(self._heap)
            if begins:
                self._now = time
                self._begin(running)
            elif turn == running.turn:
                self._now = time
                return self._end(running)
        return None

    def _begin(self, running: Running) -> None:
        station = running.station
        running.number += 1
        running.seconds_left = station.alone[running.number]
        running.since = self._now
        running.slowness = 0.0
        station.begins[running.number] = self._now
        self._changed[running] = None
        for link, share in running.links:
            self._asked[link] += share
            self._users[link][running] = None
            if self._asked[link] > FULL:
                self._changed.update(self._users[link])

    def _end(self, running: Running) -> tuple[Station, int]:
        station = running.station
        number = running.number
        station.ends[number] = self._now
        running.turn = -1
        self._changed.pop(running, None)
        for link, share in running.links:
            users = self._users[link]
            del users[running]
            if self._asked[link] > FULL:
                self._changed.update(users)
            self._asked[link] = self._asked[link] - share if users else 0.0
        if number + 1 < len(station.jobs) and not station.missing[number + 1]:
            self.complete(station, number + 1)
        return station, number

    def _settle(self) -> None:
        """Compute speed and end of every call whose links have changed."""
        for running in self._changed:
            slowness = max((self._asked[link] for link, _ in running.links), default=1.0)
            slowness = slowness if slowness > FULL else 1.0
            if slowness != running.slowness:
                if running.slowness:
                    running.seconds_left -= (self._now - running.since) / running.slowness
                running.since = self._now
                running.slowness = slowness
                running.turn = next(self._turns)
                end = self._now + max(0.0, running.seconds_left) * slowness
                heapq.heappush(self._heap, (end, running.turn, False, running))
        self._changed.clear()
