"""Finds what slows a run now: the rules of `minidist diagnose` (observe/diagnose/), applied only to
the newest steps.

    slow_now(flights, records)      the slow rank or link, its cause and since when; None: nothing
                                    slows the run
    wrong_now(records)              a number that is not finite, replicas that differ, a jump of the
                                    loss, a leak

So watch and diagnose name the same rank, or link, for the same cause. But diagnose uses all known
steps, and names what was slow at any time; here only faults of the newest GONE steps count.
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
ARRIVALS = 10  # the same if there are only flight recorders
GONE = STREAK  # consecutive steps without a fault after which it is over: as long as a new streak

Records = Mapping[int, RankSteps]


@dataclass(frozen=True)
class SlowNow:
    """The fault that the ranks wait for now.

    Attributes: ranks   a slow rank; the two ranks of a link, the sender first; all ranks, if all
                        wait for their data
                since   the first step of the fault, from 1; seconds: time since this step began
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
        """The rank or link as text: "rank 2", "the link from rank 1 to rank 2"."""
        return (
            f"the link from rank {self.ranks[0]} to rank {self.ranks[1]}"
            if self.cause == slow_links.CAUSE
            else ranks_text(self.ranks)
        )

    @property
    def slow_ranks(self) -> tuple[int, ...]:
        """The slow ranks; none if a link is slow."""
        return () if self.cause == slow_links.CAUSE else self.ranks


def slow_now(flights: Sequence[RankFlight], records: Records | None = None) -> SlowNow | None:
    """Return what the ranks of a running run wait for; None if nothing slows it.

    Args:    flights: flight recorders of its ranks. records: of their newest steps; without records
             the flight recorders show which rank is late.
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
        # these faults are over; each may have hidden a shorter one after it
        first = max(map(_last, found)) + 1
    return None


def wrong_now(records: Records) -> tuple[str, ...]:
    """Return one sentence for each wrong number or leak in the newest steps."""
    newest = max((each.steps[-1]["step"] for each in records.values() if each.steps), default=0)
    table = _table(records, newest - NEWEST + 1, newest)
    return tuple(fault.what for fault in (*wrong_numbers(table), *leaks(table)))


def _faults(flights: Sequence[RankFlight], records: Records, first: int, last: int) -> list[Fault]:
    """Return the faults that slow the run in the steps from `first` to `last`."""
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
    """Return the table of the steps from `first` to `last`, made with one step more because a table
    leaves out its first step."""
    return StepTable(
        {
            rank: replace(
                each, steps=[line for line in each.steps if first - 1 <= line["step"] <= last]
            )
            for rank, each in records.items()
        }
    )


def _last(fault: Fault) -> int:
    """Return the last step in which a fault is visible."""
    assert fault.steps is not None
    return fault.steps[1]


def _shows_since(flights: Sequence[RankFlight], records: Records, fault: Fault) -> int:
    """Return the first step of a fault, which may pause for at most GONE steps: a busy core can
    hide it for a step."""
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
    """Return the step since which a rank has been the last to arrive, with pauses of at most two
    steps."""
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
    """Return the seconds from the begin of a step to the newest record."""
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
    """Return the newest step that a rank has begun."""
    return max(
        (
            entry["step"]
            for flight in flights
            for entry in flight.entries
            if entry["step"] is not None
        ),
        default=0,
    )
