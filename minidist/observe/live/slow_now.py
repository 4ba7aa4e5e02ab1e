"""What holds a run up now: the rules of `minidist diagnose` (observe/diagnose/), over the newest
steps alone.

    slow_now(flights, records)      the slow rank, or link, its cause, and since when; None: nothing
                                    holds the run up
    wrong_now(records)              a number that is not finite, replicas that differ, a jump of the
                                    loss, a leak

So watch and diagnose name the same rank, or link, for the same cause. But diagnose looks at all
steps that are known, and names what was slow at any time; here a fault counts that shows in the
newest GONE steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minidist.observe.diagnose import slow, slow_links
from minidist.observe.diagnose.fault import Fault, ranks_text
from minidist.observe.diagnose.flights import RankFlight
from minidist.observe.diagnose.numbers import leaks, wrong_numbers
from minidist.observe.diagnose.rules import held_up
from minidist.observe.diagnose.step_table import STREAK, StepTable
from minidist.observe.live.step_parts import last_to_arrive, step_seconds
from minidist.observe.rank_steps import RankSteps

NEWEST = 60  # steps that are judged together, where there are records of steps
ARRIVALS = 10  # the same where there are flight recorders alone
GONE = STREAK  # steps on end without a fault, after which it is over: a new streak takes as many

Records = Mapping[int, RankSteps]


@dataclass(frozen=True)
class SlowNow:
    """What the ranks wait for.

    Attributes: ranks   a slow rank; the two of a link, the sender first; all, if all wait for their
                        data
                since   the step, from 1; seconds: since it began
                cause, what, where, sure    as in Fault
    """

    ranks: tuple[int, ...]
    cause: str
    since: int
    seconds: float
    what: str
    where: str
    sure: str

    @property
    def who(self) -> str:
        """ "rank 2", "the link from rank 1 to rank 2"."""
        return (
            f"the link from rank {self.ranks[0]} to rank {self.ranks[1]}"
            if self.cause == slow_links.CAUSE
            else ranks_text(self.ranks)
        )

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """The ranks that are slow themselves: none, if a link is."""
        return () if self.cause == slow_links.CAUSE else self.ranks


def slow_now(flights: Sequence[RankFlight], records: Records | None = None) -> SlowNow | None:
    """What the ranks of a run that goes on wait for.

    Args:    flights: of its ranks. records: of their newest steps; without them the recorders tell
             which rank is late.
    """
    records = {rank: each for rank, each in (records or {}).items() if each.steps}
    newest = min(
        (each.steps[-1]["step"] for each in records.values()), default=_newest_step(flights) - 1
    )
    first = newest - (NEWEST if records else ARRIVALS) + 1
    while found := _faults(flights, records, first, newest):
        now = [fault for fault in found if _last(fault) >= newest - GONE]
        if now:
            since = (
                _late_since(flights, now[0].ranks[0])
                if now[0].cause == slow.CAUSE
                else _shows_since(flights, records, now[0])
            )
            return SlowNow(
                now[0].ranks,
                now[0].cause,
                since + 1,
                _seconds_since(flights, records, since),
                now[0].what,
                now[0].where,
                now[0].sure,
            )
        # they are over; each may have hidden a shorter one after it
        first = max(map(_last, found)) + 1
    return None


def wrong_now(records: Records) -> tuple[str, ...]:
    """What else is wrong in the newest steps, a sentence each."""
    newest = max((each.steps[-1]["step"] for each in records.values() if each.steps), default=0)
    table = _table(records, newest - NEWEST + 1, newest)
    return tuple(fault.what for fault in (*wrong_numbers(table), *leaks(table)))


def _faults(flights: Sequence[RankFlight], records: Records, first: int, last: int) -> list[Fault]:
    """What holds the run up in the steps from `first` to `last`."""
    table = _table(records, first, last)
    between = [
        replace(
            flight,
            entries=[
                entry
                for entry in flight.entries
                if entry["step"] is not None and first - 1 <= entry["step"] <= last + 1
            ],
        )
        for flight in flights
    ]
    found = held_up(between, table, explained=bool(wrong_numbers(table) or leaks(table)))
    return [fault for fault in found if fault.steps is not None and fault.ranks]


def _table(records: Records, first: int, last: int) -> StepTable:
    """The steps from `first` to `last`, and the one before, because a table leaves its first step
    out."""
    return StepTable(
        {
            rank: replace(
                each, steps=[line for line in each.steps if first - 1 <= line["step"] <= last]
            )
            for rank, each in records.items()
        }
    )


def _last(fault: Fault) -> int:
    """The last step in which it shows."""
    assert fault.steps is not None
    return fault.steps[1]


def _shows_since(flights: Sequence[RankFlight], records: Records, fault: Fault) -> int:
    """The step from which a fault shows, with pauses of at most GONE steps: a busy core hides it
    for a step."""
    assert fault.steps is not None
    first = fault.steps[0]
    while True:
        before = [
            other.steps[0]
            for other in _faults(flights, records, first - NEWEST, first + 3 * STREAK)
            if (other.ranks, other.cause) == (fault.ranks, fault.cause)
            and other.steps is not None
            and other.steps[0] < first <= other.steps[1] + GONE
        ]
        if not before:
            return first
        first = min(before)


def _late_since(flights: Sequence[RankFlight], rank: int) -> int:
    """The step since which a rank has been the last to arrive, with pauses of at most two steps."""
    late = last_to_arrive(flights)
    seconds = [each for flight in flights for each in step_seconds(flight).values()]
    least = max(slow.LEAST_DELAY, slow.SHARE * sum(seconds) / max(1, len(seconds)))
    since = max(late, default=0)
    for step in sorted(late, reverse=True):
        if since - step > 2:
            break
        if late[step][0] == rank and late[step][1] >= least:
            since = step
    return since


def _seconds_since(flights: Sequence[RankFlight], records: Records, step: int) -> float:
    """Seconds from the begin of a step to the newest record."""
    begins = [
        entry["made"] for flight in flights for entry in flight.entries if entry["step"] == step
    ]
    begins += [
        line["time"] - line["seconds"]
        for each in records.values()
        for line in each.steps
        if line["step"] == step
    ]
    newest = max((flight.newest for flight in flights), default=0.0)
    return max(0.0, newest - min(begins)) if begins else 0.0


def _newest_step(flights: Sequence[RankFlight]) -> int:
    """The step that the first rank is in."""
    return max(
        (
            entry["step"]
            for flight in flights
            for entry in flight.entries
            if entry["step"] is not None
        ),
        default=0,
    )
