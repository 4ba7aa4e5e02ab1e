"""Chapter 24 · Folding: ranks that nothing tells apart share one clock.

Of 16,384 ranks most do the same at the same time: all replicas along dp, and inside a node the
tensor ranks. Two ranks are alike if their tracks, their seconds and their stations are alike; two
stations if their members, costs and links are; two links if the stations that load them are.
Colours find that (the refinement of Weisfeiler and Leman, 1968): all begin with the colour of what
is their own, and take in the colours of their neighbours, until no colour splits. Then the replay
of one rank, one station and one link of each colour is the replay of all, because equals stay
equal.

A straggler or a slow link has a colour of its own, and so has everything as far as its effect
differs.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from math import fsum
from typing import Any, NamedTuple

from minidist.observe.shared_links import JobLoads
from minidist.observe.stations import Station
from minidist.observe.tracks import Job


class Folded(NamedTuple):
    """The job as the replay plays it.

    Attributes: clock_of: rank -> its clock. ranks: clock -> the first rank that it stands for.
                stations: clock -> station of each slot. loads: of each station that shares links.
                clocks_to_come: of each station how many clocks come to each of its jobs.
    """

    clock_of: list[int]
    ranks: list[int]
    stations: list[list[Station]]
    loads: dict[Station, JobLoads]
    clocks_to_come: dict[Station, int]


def unfolded(own: list[list[Station]], links: Collection[Any]) -> Folded:
    """Return a job with a clock for each rank. `links`: those on which calls can get in each other's way."""
    stations = dict.fromkeys(station for mine in own for station in mine)
    loads = {station: _shares(station, links) for station in stations}
    return Folded(
        list(range(len(own))),
        list(range(len(own))),
        own,
        {station: shares for station, shares in loads.items() if any(shares.values())},
        {station: len(station.comers) for station in stations},
    )


def _shares(station: Station, links: Collection[Any]) -> JobLoads:
    """Return what each job asks of these links; jobs that load links alike share one list."""
    made = {
        id(loads): [(link, share) for link, share in loads.items() if link in links]
        for loads in station.each_load()
    }
    return {job: made[id(cost.loads)] for job, cost in station.costs.items()}


class _Load(NamedTuple):
    """That a job of a station loads a link; the first job of those that load the same."""

    station: int
    job: int
    link: int
    share: float


def fold(own: list[list[Station]], links: Collection[Any], alike: Sequence[Hashable]) -> Folded:
    """Return a job in which ranks that nothing tells apart share one clock. `alike`: what a rank is
    by itself."""
    stations = list(dict.fromkeys(station for mine in own for station in mine))
    number = {station: place for place, station in enumerate(stations)}
    slots = [[number[station] for station in mine] for mine in own]
    loads, jobs = _loads(stations, links)
    of_station = defaultdict[int, list[_Load]](list)
    of_link = defaultdict[int, list[_Load]](list)
    for load in loads:
        of_station[load.station].append(load)
        of_link[load.link].append(load)
    rank_colours = _numbered(alike)
    station_colours = _numbered([_itself(station) for station in stations])
    link_colours = [0] * len(of_link)
    count = 0
    while count < (
        count := len(set(rank_colours)) + len(set(station_colours)) + len(set(link_colours))
    ):
        station_colours = _numbered(
            [
                (
                    station_colours[at],
                    tuple(rank_colours[one] for one in station.group),
                    tuple(
                        sorted(
                            (load.job, link_colours[load.link], load.share)
                            for load in of_station[at]
                        )
                    ),
                )
                for at, station in enumerate(stations)
            ]
        )
        rank_colours = _numbered(
            [
                (colour, *(station_colours[at] for at in mine))
                for colour, mine in zip(rank_colours, slots, strict=True)
            ]
        )
        link_colours = _numbered(
            [
                (
                    link_colours[link],
                    tuple(
                        sorted(
                            (station_colours[load.station], load.job, load.share)
                            for load in of_link[link]
                        )
                    ),
                )
                for link in range(len(link_colours))
            ]
        )
    return _quotient(
        stations, slots, rank_colours, station_colours, link_colours, of_station, of_link, jobs
    )


def _loads(stations: list[Station], links: Collection[Any]) -> tuple[list[_Load], list[Job]]:
    """Return all loads on the given links, and the jobs by number."""
    jobs = dict[Job, int]()
    numbers = {link: number for number, link in enumerate(links)}
    return [
        _Load(at, jobs.setdefault(job, len(jobs)), numbers[link], float(f"{share:.9e}"))
        for at, station in enumerate(stations)
        for job in station.first_jobs().values()
        for link, share in station.costs[job].loads.items()
        if link in links
    ], list(jobs)


def _itself(station: Station) -> Hashable:
    """Return what a station is without its neighbours."""
    return (
        station.slot,
        id(station.jobs),
        tuple(f"{cost.seconds:.9e}" for cost in station.costs.values()),
    )


def _numbered(colours: Sequence[Hashable]) -> list[int]:
    """Return equal colours as equal small numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(colour, len(numbers)) for colour in colours]


def _quotient(
    stations: list[Station],
    slots: list[list[int]],
    rank_colours: list[int],
    station_colours: list[int],
    link_colours: list[int],
    of_station: dict[int, list[_Load]],
    of_link: dict[int, list[_Load]],
    jobs: list[Job],
) -> Folded:
    """Return one rank, station and link of each colour, with the sum of what all alike stations ask
    of the link."""
    first_rank = {colour: rank for rank, colour in reversed(list(enumerate(rank_colours)))}
    first_station = {colour: at for at, colour in reversed(list(enumerate(station_colours)))}
    first_link = {colour: link for link, colour in reversed(list(enumerate(link_colours)))}
    one_of = [stations[first_station[colour]] for colour in station_colours]
    asked: dict[Station, JobLoads] = {}
    for colour, at in first_station.items():
        first = {id(loads): list[tuple[Any, float]]() for loads in stations[at].each_load()}
        mine = {job: first[id(cost.loads)] for job, cost in stations[at].costs.items()}
        for job, link in dict.fromkeys(
            (load.job, link_colours[load.link]) for load in of_station[at]
        ):
            share = fsum(
                load.share
                for load in of_link[first_link[link]]
                if load.job == job and station_colours[load.station] == colour
            )
            mine[jobs[job]].append((link, share))
        if any(mine.values()):
            asked[stations[at]] = mine
    return Folded(
        rank_colours,
        [first_rank[clock] for clock in range(len(first_rank))],
        [[one_of[at] for at in slots[first_rank[clock]]] for clock in range(len(first_rank))],
        asked,
        {
            stations[at]: len({rank_colours[one] for one in stations[at].comers})
            for at in first_station.values()
        },
    )
