"""Chapter 24 · A rank that fails in the middle of a step, and when the others stand still for it.

    for stall in stalls(found, rank=3, after=0.4):          # seconds into the step
        print(stall.rank, stall.seconds, stall.waits_for)   # 2  0.41  "all_reduce of the tp group of ranks 0, 1, 2, 3"

The rank stops at its first event after that moment. A group misses it first, then the groups of
that group's ranks: the standstill spreads as far as anybody waits. (A real job does not stand
there: its monitor names the rank and ends it.)
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from minidist.errors import ConfigError
from minidist.observe.events import Busy, GroupCall
from minidist.observe.replay import Replayed
from minidist.observe.tracks import BUSY

if TYPE_CHECKING:
    from minidist.simulate.results import Simulation

FAILED = "failed"
NEVER = 1e15  # seconds


class Stall(NamedTuple):
    """A rank that stands still: when it began to, in seconds of the step, and for what it waits."""

    rank: int
    seconds: float
    waits_for: str


def stalls(found: "Simulation", rank: int, after: float) -> list[Stall]:
    """Return the ranks that stand still because `rank` fails, the first one first; it is one of
    them.

    Args:    after: seconds into the step, before its end.
    Raises:  ConfigError if there is no such rank, or if the step ends before.
    """
    require_rank(rank, len(found.role_of))
    if not 0 <= after < found.step_seconds:
        raise ConfigError(
            f"rank {rank} cannot fail after {after:g} s: the step takes {found.step_seconds:.4g} "
            "s; choose less"
        )
    ops = found.replayed.track(rank).at
    times = found.replayed.times(rank)
    place = min(bisect_right(times, found.begin + after) - 1, len(ops) - 1)
    trace = found.traces[found.role_of[rank]]
    broken = replace(
        trace,
        events=[*trace.events[: ops[place]], Busy(FAILED, FAILED), *trace.events[ops[place] :]],
    )
    roles = [len(found.traces) if one == rank else role for one, role in enumerate(found.role_of)]
    replayed = found.replay_traces([*found.traces, broken], roles)
    stopped = [
        _stall(replayed, one, found.begin)
        for one in range(len(roles))
        if replayed.times(one)[-1] >= NEVER
    ]
    return sorted(stopped, key=lambda stall: (stall.seconds, stall.rank))


def require_rank(rank: int, size: int) -> None:
    """Raise ConfigError if a job of `size` ranks has no such rank that could fail."""
    if not 0 <= rank < size:
        raise ConfigError(
            f"no rank {rank} can fail: the plan has {size} ranks; choose one below {size}"
        )


def _stall(replayed: Replayed, rank: int, begin: float) -> Stall:
    """Return the stall of a rank, from the last moment at which it continued."""
    times = replayed.times(rank)
    track = replayed.track(rank)
    place = bisect_right(times, NEVER / 2) - 1
    kind, slot, number = track.ops[place]
    if kind == BUSY:
        return Stall(rank, times[place] - begin, "nothing: it failed")
    station = replayed.stations_of(rank)[slot]
    job = station.jobs[number]
    return Stall(
        rank,
        times[place] - begin,
        f"{job.verb if isinstance(job, GroupCall) else 'move'} of {station}",
    )


def describe(found: "Simulation", spread: Sequence[Stall]) -> str:
    """Return one line: the first rank that waits, how many ranks wait in the end, and since
    when."""
    failed, *others = sorted(spread, key=lambda stall: not stall.waits_for.startswith("nothing"))
    if not others:
        return (
            f"rank {failed.rank} fails {failed.seconds:.4g} s into the step; no other "
            "rank waits for it in this step"
        )
    last = others[-1]
    return (
        f"rank {failed.rank} fails {failed.seconds:.4g} s into the step: rank {others[0].rank} "
        f"is the first to stand still, at {others[0].seconds:.4g} s in {others[0].waits_for}; "
        f"{len(others):,} of {len(found.role_of) - 1:,} others do, the last at "
        f"{last.seconds:.4g} s"
    )
