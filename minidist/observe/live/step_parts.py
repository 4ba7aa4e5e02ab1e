"""Where each rank's time goes in a step: it computes, its communication is exposed, or it waits for
another rank.

    rank 0      compute ............ | waiting ....... | exposed |
    rank 1      compute .............................. | exposed |      the last to arrive: it waits least

The recorder says for each call how long the program stood still before its end (the records of
steps have the sum
alone: wait_state.spent_in_calls). Up to the moment at which the last rank arrived that is waiting,
and from then on exposed communication. All else of a step is compute: also reading data, and
whatever else the program does. Communication behind computation is in none of the three, because it
costs no time.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minidist.comm.flight.slots import CALL, MESSAGE, STEP, Entry
from minidist.observe.diagnose.flights import RankFlight

Arrivals = dict[tuple[int, ...], dict[int, float]]


@dataclass
class StepParts:
    """One step of one rank, in seconds; sent: bytes by group; stood: seconds of exposed
    communication by group."""

    seconds: float
    exposed: float = 0.0
    waiting: float = 0.0
    sent: dict[int, int] = field(default_factory=dict)
    stood: dict[int, float] = field(default_factory=dict)

    @property
    def compute(self) -> float:
        return max(0.0, self.seconds - self.exposed - self.waiting)


def step_parts(flights: Sequence[RankFlight]) -> dict[int, dict[int, StepParts]]:
    """{rank: {step: its parts}}, of the steps that the rank has ended while its recorder still has
    their begin."""
    arrivals = arrivals_of(flights)
    return {flight.rank: _of_rank(flight, arrivals) for flight in flights}


def arrivals_of(flights: Sequence[RankFlight]) -> Arrivals:
    """For each call when each rank made it, and for each message when its sender began it.

    Returns: {(group, sequence): {world rank: time of day}} of calls, {(group, sequence, sender,
    receiver): …} of
             messages.
    """
    found: Arrivals = defaultdict(dict)
    for flight in flights:
        for entry in flight.of_kind(CALL):
            found[entry["group"], entry["sequence"]][flight.rank] = entry["made"]
        for entry in flight.of_kind(MESSAGE):
            if entry.get("dst") is not None and (ranks := _ranks(flight, entry)):
                found[entry["group"], entry["sequence"], flight.rank, ranks[entry["dst"]]][
                    flight.rank
                ] = entry["begun"]
    return found


def _of_rank(flight: RankFlight, arrivals: Arrivals) -> dict[int, StepParts]:
    parts = {step: StepParts(seconds) for step, seconds in step_seconds(flight).items()}
    for entry in flight.of_kind(CALL, MESSAGE):
        mine = parts.get(-1 if entry["step"] is None else entry["step"])
        if mine is None or not entry["ended"]:
            continue
        group = entry["group"]
        mine.sent[group] = mine.sent.get(group, 0) + entry["nbytes"]
        if stood := entry["stood"]:
            came = max(arrivals.get(_key(flight, entry), {}).values(), default=0.0)
            waiting = min(stood, max(0.0, came - (entry["ended"] - stood)))
            mine.waiting += waiting
            mine.exposed += stood - waiting
            mine.stood[group] = mine.stood.get(group, 0.0) + stood - waiting
    return parts


def step_seconds(flight: RankFlight) -> dict[int, float]:
    """{step: seconds to the begin of the next}. A step made again, after a resumption, counts as it
    was last."""
    begins = [
        (entry["step"], entry["made"])
        for entry in flight.of_kind(STEP)
        if entry["step"] is not None
    ]
    return {
        step: after - begin for (step, begin), (_, after) in zip(begins, begins[1:], strict=False)
    }


def _key(flight: RankFlight, entry: Entry) -> tuple[int, ...]:
    """Of `arrivals`: the call or message that this wait was for."""
    if entry["kind"] == CALL:
        return entry["group"], entry["sequence"]
    ranks = _ranks(flight, entry)
    if entry.get("src") is None or not ranks:
        return ()
    return entry["group"], entry["sequence"], ranks[entry["src"]], flight.rank


def _ranks(flight: RankFlight, entry: Entry) -> list[int]:
    """World ranks of the record's group; none if the header had no room for them."""
    return flight.groups.get(entry["group"], ("", []))[1]


def last_to_arrive(flights: Sequence[RankFlight]) -> dict[int, tuple[int, float]]:
    """{step: (rank, seconds)}: the largest delay of the step's calls, which is the time from the
    last but one rank's arrival to the last one's, and the rank that caused it."""
    steps = {
        (entry["group"], entry["sequence"]): entry["step"]
        for flight in flights
        for entry in flight.of_kind(CALL)
        if entry["step"] is not None
    }
    sizes = {group: len(ranks) for flight in flights for group, (_, ranks) in flight.groups.items()}
    found: dict[int, tuple[int, float]] = {}
    for key, came in arrivals_of(flights).items():
        if len(key) != 2 or key not in steps or len(came) < 2 or len(came) != sizes.get(key[0]):
            continue
        *_, before, last = sorted(came, key=lambda rank: came[rank])
        delay = came[last] - came[before]
        if delay > found.get(steps[key], (0, 0.0))[1]:
            found[steps[key]] = last, delay
    return found


def mean(parts: Iterable[StepParts]) -> StepParts | None:
    """The mean step of several; None of none."""
    listed = list(parts)
    if not listed:
        return None
    count = len(listed)
    sent = defaultdict[int, int](int)
    stood = defaultdict[int, float](float)
    for each in listed:
        for group, nbytes in each.sent.items():
            sent[group] += nbytes
        for group, seconds in each.stood.items():
            stood[group] += seconds
    return StepParts(
        sum(each.seconds for each in listed) / count,
        sum(each.exposed for each in listed) / count,
        sum(each.waiting for each in listed) / count,
        {group: nbytes // count for group, nbytes in sent.items()},
        {group: seconds / count for group, seconds in stood.items()},
    )
