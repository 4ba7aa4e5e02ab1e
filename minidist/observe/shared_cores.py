"""Chapter 24 · Ranks that share cores, caches or memory: while too many compute, all slow down by
the same factor.

    2 cores     0      1      2      3      4 s
    rank 0      |0 0 0 0 0 0 0|                 2 s of work, at 2/3 of a core: ends at 3 s
    rank 1      |1 1 1 1 1 1 1|                 the same
    rank 2      |2 2 2 2 2 2 2|2 2 2|           3 s of work: 2 s are done at 3 s, then a whole core

The machine is modelled as a link of shared_links.py. A rank that computes uses a share of it: half,
on two cores. Work that two ranks do only half as fast as one rank uses a larger share, because the
ranks share more than cores: a cache, the memory, or the two threads of a core. So each piece of
work is a job of a station that has only this rank. A rank that waits uses nothing.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import count

from minidist.observe.events import Transfer
from minidist.observe.fold import Folded
from minidist.observe.shared_links import Running
from minidist.observe.stations import Cost, Station
from minidist.observe.tracks import BUSY, CALL, Job, Track, TrackSlot

CORES = "cores"


def on_shared_cores(
    job: Folded,
    tracks: Sequence[Track],
    seconds: Sequence[Sequence[float]],
    share: Callable[[int, Hashable], float],
) -> tuple[Folded, list[Track]]:
    """Return the job and its tracks for the replay, with each piece of work as a call of the rank's
    own station.

    Args:    job: unfolded. tracks: of each rank. seconds: of each piece of work of each track, if
             no other rank computes.
             share: (rank, work) -> share of the machine that the work uses.
    """
    stations = []
    played = []
    for rank, (track, mine, known) in enumerate(zip(tracks, job.stations, seconds, strict=True)):
        number = count()
        works = [slot for kind, slot, _ in track.ops if kind == BUSY]
        costs: dict[Job, Cost] = {
            Transfer(place, CORES, 0): Cost(
                known[place], {CORES: share(rank, track.works[place].work)}
            )
            for place in Counter(works)
        }
        station = Station(
            TrackSlot("move", CORES),
            (rank,),
            tuple(Transfer(place, CORES, 0) for place in works),
            costs,
        )
        station.open(1)
        station.sharing = Running(
            station, {work: list(cost.loads.items()) for work, cost in costs.items()}
        )
        stations.append([*mine, station])
        played.append(
            track._replace(
                ops=[(CALL, len(mine), next(number)) if op[0] == BUSY else op for op in track.ops]
            )
        )
    return job._replace(stations=stations), played
