"""Chapter 24 · Ranks that share cores, caches or memory: while too many compute, all of them slow
down alike.

    2 cores     0      1      2      3      4 s
    rank 0      |0 0 0 0 0 0 0|                 2 s of work, at 2/3 of a core: ends at 3 s
    rank 1      |1 1 1 1 1 1 1|                 the same
    rank 2      |2 2 2 2 2 2 2|2 2 2|           3 s of work: 2 s are done at 3 s, then a whole core

The machine is a link of shared_links.py, of which a rank that computes asks for a share: with two
cores for half of it. Work that two ranks do half as fast as one asks for more, because they meet
elsewhere: in a cache, the memory, a core of two threads. So a stretch of work is a job of a station
at which its rank alone comes. A rank that waits asks for nothing.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import count

from minidist.observe.events import Transfer
from minidist.observe.fold import Folded
from minidist.observe.shared_links import Running
from minidist.observe.stations import Cost, Station
from minidist.observe.tracks import BUSY, CALL, Job, Meeting, Track

CORES = "cores"


def on_shared_cores(
    job: Folded,
    tracks: Sequence[Track],
    seconds: Sequence[Sequence[float]],
    share: Callable[[int, Hashable], float],
) -> tuple[Folded, list[Track]]:
    """The job and its tracks as the replay plays them: each stretch of work is a call of the rank's
    own station.

    Args:    job: unfolded. tracks, seconds: of each rank; seconds of each of the track's works if
             no other computes.
             share: (rank, work) -> of the machine.
    """
    stations = []
    played = []
    for rank, (track, mine, known) in enumerate(zip(tracks, job.stations, seconds, strict=True)):
        number = count()
        works = [place for kind, place, _ in track.ops if kind == BUSY]
        costs: dict[Job, Cost] = {
            Transfer(place, CORES, 0): Cost(
                known[place], {CORES: share(rank, track.works[place].work)}
            )
            for place in Counter(works)
        }
        station = Station(
            Meeting("move", CORES),
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
