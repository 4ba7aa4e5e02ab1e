"""The parts of each rank's time in a step: compute, exposed communication, waiting for another
rank.

    rank 0      compute ............ | waiting ....... | exposed |
    rank 1      compute .............................. | exposed |      the last to arrive: it waits least

The recorder has, for each call, how long the program was blocked before the call ended (the records
of steps have only the sum: wait_state.spent_in_calls). Until the last rank arrives, this time is
waiting; from then on it is exposed communication. The rest of a step is compute, including reading
data and other work of the program. Communication hidden behind computation belongs to none of the
three, because it costs no time.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minidist.comm.flight.slots import CALL, MESSAGE, STEP, Entry
from minidist.observe.diagnose.flights import RankFlight

Arrivals = dict[tuple[int, ...], dict[int, float]]


@dataclass
class StepParts:
    """A step of one rank, in seconds; sent: bytes by group; stood: seconds of exposed
    communication, by group."""

    seconds: float
    exposed: float = 0.0
    waiting: float = 0.0
    sent: dict[int, int] = field(default_factory=dict)
    stood: dict[int, float] = field(default_factory=dict)

    @property
    def compute(self) -> float:
        return max(0.0, self.seconds - self.exposed - self.waiting)


def step_parts(flights: Sequence[RankFlight]) -> dict[int, dict[int, StepParts]]:
    """Return {rank: {step: its parts}} of the ended steps whose begin is still in the rank's
    recorder."""
    arrivals = arrivals_of(flights)
    return {flight.rank: _of_rank(flight, arrivals) for flight in flights}


def arrivals_of(flights: Sequence[RankFlight]) -> Arrivals:
    """Return when each rank made each call, and when the sender began each message.

    Returns: {(group, sequence): {world rank: time of day}} for calls, {(group, sequence, sender,
             receiver): …} for messages.
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
    """Return {step: seconds to the begin of the next step}. If a step was made again after a
    resumption, the last time counts."""
    begins = [
        (entry["step"], entry["made"])
        for entry in flight.of_kind(STEP)
        if entry["step"] is not None
    ]
    return {
        step: after - begin for (step, begin), (_, after) in zip(begins, begins[1:], strict=False)
    }


def _key(flight: RankFlight, entry: Entry) -> tuple[int, ...]:
    """Return the key in `arrivals` of the call or message that this record waited for."""
    if entry["kind"] == CALL:
        return entry["group"], entry["sequence"]
    ranks = _ranks(flight, entry)
    if entry.get("src") is None or not ranks:
        return ()
    return entry["group"], entry["sequence"], ranks[entry["src"]], flight.rank


def _ranks(flight: RankFlight, entry: Entry) -> list[int]:
    """Return the world ranks of the record's group; [] if the header had no space for them."""
    return flight.groups.get(entry["group"], ("", []))[1]


def last_to_arrive(flights: Sequence[RankFlight]) -> dict[int, tuple[int, float]]:
    """Return {step: (rank, seconds)}: the largest delay of the step's calls, and the rank that
    caused it. The delay is the time from the arrival of the last rank but one to that of the last
    rank."""
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
    """Return the mean of several steps; None for no step."""
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
