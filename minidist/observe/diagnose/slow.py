"""Rules for a slow rank (the others wait for it, and it waits least) and for clocks that do not
agree.

    delay of a call     time from the arrival of the last rank but one to that of the last rank
    a rank is slow      the largest delay that it causes in a step is over SHARE of the step, in
                        MOST of the steps, or MOST_OF_FEW of fewer than FEW

A rank that computes 1.5 times as long as the others in a step causes a delay of a third of the
step.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from minidist.comm.flight.slots import CALL, STEP, Entry
from minidist.observe.diagnose.fault import (
    CERTAIN,
    LIKELY,
    POSSIBLE,
    Fault,
    ranks_text,
    span,
)
from minidist.observe.diagnose.flights import RankFlight
from minidist.observe.diagnose.matching import GroupCalls, group_calls

CAUSE = "slow"
SHARE = 0.2
MOST = 0.7
# fewer steps than LEAST_STEPS say nothing; of fewer than ALL_OF the rank must be late in all
LEAST_STEPS = 6
ALL_OF = 10
# on a busy machine one of two ranks is late in 7 of 10 steps by chance
FEW = 20
MOST_OF_FEW = 0.85
LEAST_DELAY = 0.005  # seconds
SKEW = 1.0  # seconds between the clocks of two hosts
TOGETHER = ("all_reduce", "all_gather", "barrier", "all_to_all", "reduce_scatter")
"""Calls that no rank can end before all ranks have made them."""

Delays = dict[int, dict[int, tuple[float, Entry]]]


def skewed(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return a finding for each host whose clock differs: calls that end on all ranks together end
    there at another time of day."""
    shifts = _shifts(flights)
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    for flight in flights:
        hosts[flight.host].append(flight.rank)
    return [
        Fault(
            "clock skew",
            tuple(ranks),
            "",
            f"the clock of {host} is {span(abs(shift))} {'ahead' if shift > 0 else 'behind'}",
            (
                f"calls of {ranks_text(ranks)} end that much "
                f"{'later' if shift > 0 else 'earlier'} than the same calls elsewhere",
            ),
            LIKELY,
            "set the clocks by NTP; times between hosts mean little until then",
        )
        for host, ranks in hosts.items()
        if ranks[0] in shifts
        and abs(shift := statistics.median(shifts[rank] for rank in ranks if rank in shifts))
        >= SKEW
    ]


def _shifts(flights: Sequence[RankFlight]) -> dict[int, float]:
    """Return {rank: seconds by which its clock is ahead}, from calls that all ranks end together;
    {} for one host."""
    if len({flight.host for flight in flights}) == 1:
        return {}
    ahead: defaultdict[int, list[float]] = defaultdict(list)
    for calls in group_calls(flights):
        for entries in _whole_calls(calls):
            middle = statistics.median_low([entry["ended"] for entry in entries.values()])
            for rank, entry in entries.items():
                ahead[rank].append(entry["ended"] - middle)
    return {rank: statistics.median(values) for rank, values in ahead.items()}


def _whole_calls(calls: GroupCalls) -> list[dict[int, Entry]]:
    """Return {rank: entry} for each call of TOGETHER that every rank of the group has ended."""
    if set(calls.calls) != set(calls.ranks) or len(calls.ranks) < 2:
        return []
    common = set.intersection(*(set(mine) for mine in calls.calls.values()))
    rows = [
        {rank: mine[sequence] for rank, mine in calls.calls.items()} for sequence in sorted(common)
    ]
    return [
        row
        for row in rows
        if all(entry["state"] == "ended" and entry["verb"] in TOGETHER for entry in row.values())
    ]


def slow(flights: Sequence[RankFlight]) -> list[Fault]:
    """Return the finding about a rank that the others wait for in most steps."""
    shifts = _shifts(flights)
    seconds = _step_seconds(flights)
    delays = _delays(flights, shifts)
    if not seconds:
        return []
    usual = statistics.median(seconds.values())
    found = []
    for rank, mine in delays.items():
        late = {
            step: pair
            for step, pair in mine.items()
            if step in seconds and pair[0] >= max(LEAST_DELAY, SHARE * usual)
        }
        count = len(set(seconds) & {step for steps in delays.values() for step in steps})
        part = 1.0 if count < ALL_OF else MOST_OF_FEW if count < FEW else MOST
        if count >= LEAST_STEPS and len(late) >= count * part:
            found.append(_slow(flights, rank, late, count, usual))
    return found


def _step_seconds(flights: Sequence[RankFlight]) -> dict[int, float]:
    """Return {step: its seconds} on the rank where it took longest; without the first step
    (warm-up) and the last."""
    longest: dict[int, float] = {}
    for flight in flights:
        starts = {
            entry["step"]: entry["made"]
            for entry in flight.of_kind(STEP)
            if entry["step"] is not None
        }
        for step in [*starts][1:]:
            if step + 1 in starts:
                longest[step] = max(longest.get(step, 0.0), starts[step + 1] - starts[step])
    return longest


def _delays(flights: Sequence[RankFlight], shifts: dict[int, float]) -> Delays:
    """Return {rank: {step: (largest delay that it caused, the call)}}."""
    delays: defaultdict[int, dict[int, tuple[float, Entry]]] = defaultdict(dict)
    for calls in group_calls(flights):
        for row in _whole_calls(calls):
            came = sorted(row, key=lambda rank: row[rank]["made"] - shifts.get(rank, 0.0))
            last = came[-1]
            before = came[-2]
            delay = (
                row[last]["made"]
                - shifts.get(last, 0.0)
                - row[before]["made"]
                + shifts.get(before, 0.0)
            )
            step = row[last]["step"]
            if step is not None and delay > delays[last].get(step, (0.0,))[0]:
                delays[last][step] = delay, row[last]
    return delays


def _slow(
    flights: Sequence[RankFlight],
    rank: int,
    late: dict[int, tuple[float, Entry]],
    count: int,
    usual: float,
) -> Fault:
    delay = statistics.median(pair[0] for pair in late.values())
    where = statistics.mode(pair[1]["where"] for pair in late.values())
    waited = {flight.rank: _in_calls(flight) for flight in flights}
    others = [share for other, share in waited.items() if other != rank]
    least = waited[rank] <= min(others)
    return Fault(
        CAUSE,
        (rank,),
        where,
        f"rank {rank} is slow: the others wait {span(delay)} of a step of {span(usual)} for it",
        (
            f"it was the last to arrive in {len(late)} of {count} steps, first in step {min(late)}",
            f"it spent {waited[rank]:.0%} of its time in calls, the others "
            f"{statistics.median(others):.0%}",
        ),
        CERTAIN if least and len(late) >= ALL_OF else LIKELY if least else POSSIBLE,
        f"look at what rank {rank} computes before {where}, at its data, and at what else runs "
        "on its core",
        (min(late), max(late)),
    )


def _in_calls(flight: RankFlight) -> float:
    """Return the share of its time that a rank spent in calls of TOGETHER."""
    calls = [
        entry for entry in flight.of_kind(CALL) if entry["verb"] in TOGETHER and entry["ended"]
    ]
    if not calls:
        return 0.0
    spent = sum(entry["ended"] - entry["begun"] for entry in calls)
    return float(spent / max(1e-9, calls[-1]["ended"] - calls[0]["made"]))
