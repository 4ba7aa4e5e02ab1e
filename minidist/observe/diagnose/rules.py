"""All rules, in the order of their priority: what a lost rank explains is not reported twice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minidist.comm.flight.slots import CALL, MESSAGE
from minidist.observe.diagnose.fault import Fault, ranks_text, span
from minidist.observe.diagnose.flights import DUMPED, RUNS, RankFlight
from minidist.observe.diagnose.hangs import STUCK, hangs
from minidist.observe.diagnose.laggards import laggards
from minidist.observe.diagnose.lost_ranks import (
    broken_links,
    failed_by_itself,
    killed,
    missing,
    stopped,
)
from minidist.observe.diagnose.mismatches import mismatches
from minidist.observe.diagnose.numbers import leaks, wrong_numbers
from minidist.observe.diagnose.slow import skewed, slow
from minidist.observe.diagnose.slow_links import slow_links
from minidist.observe.diagnose.step_table import StepTable
from minidist.observe.rank_steps import RankSteps


@dataclass(frozen=True)
class Diagnosis:
    """The result of all rules for a job.

    Attributes: findings   the cause first; empty: nothing is wrong
                summary    one line about the job
    """

    findings: list[Fault]
    summary: str


def diagnose(
    flights: Sequence[RankFlight],
    steps: Mapping[int, RankSteps] | None = None,
    *,
    stuck: float = STUCK,
) -> Diagnosis:
    """Find what is wrong with a job.

    Args:    flights: flight recorders of its ranks (read_flights). steps: the ranks' records of
             steps (read_rank_steps). One of the two may be empty.
             stuck: seconds after which an open call of a running job is a hang.
    Returns: first the wrong numbers. Then the findings of the first rule that finds something, in
             this order: an exception, calls that do not match, a stopped or killed rank, a broken
             link, a hang; a rank for which the others wait and the cause, a slow link, a slow rank.
             Then always: a leak, clocks that differ, ranks without a recorder.
    """
    table = StepTable(steps or {})
    broken = _broken(flights, stuck) if flights else []
    numbers = wrong_numbers(table)
    grown = leaks(table)
    late = [] if broken else held_up(flights, table, explained=bool(numbers or grown))
    told = (
        summary(flights)
        if flights
        else f"{ranks_text(table.ranks)}, only by the records of their steps: no flight "
        "recorder is here"
    )
    return Diagnosis([*numbers, *broken, *late, *grown, *skewed(flights), *missing(flights)], told)


def _broken(flights: Sequence[RankFlight], stuck: float) -> list[Fault]:
    """Return the findings that explain why the job does not continue; [] if none does."""
    return (
        failed_by_itself(flights)
        or mismatches(flights)
        or stopped(flights)
        or _lost(flights, stuck)
        or broken_links(flights)
        or hangs(flights, stuck)
    )


def held_up(flights: Sequence[RankFlight], table: StepTable, *, explained: bool) -> list[Fault]:
    """Return what slows a running job: a rank and the cause, or a slow link, or a rank that arrives
    late.

    Args:    explained: wrong numbers or a leak were found; then a rank that is late from an unknown
             cause is not reported.
    """
    return laggards(table) or slow_links(table) or ([] if explained else slow(flights))


def _lost(flights: Sequence[RankFlight], stuck: float) -> list[Fault]:
    """Return the killed ranks; before them, if the whole job was killed, the hang that was perhaps
    the reason."""
    found = killed(flights)
    if found and found[0].cause == "all killed":
        return [*hangs(flights, stuck), *found]
    return found


def summary(flights: Sequence[RankFlight]) -> str:
    """Return a line with the number of ranks and calls, and whether the job runs."""
    calls = sum(len(flight.of_kind(CALL, MESSAGE)) for flight in flights)
    runs = [flight for flight in flights if flight.process in (RUNS, DUMPED) and flight.end is None]
    well = [flight.rank for flight in flights if flight.end == ""]
    steps = [
        entry["step"] for flight in flights for entry in flight.entries if entry["step"] is not None
    ]
    told = f"{ranks_text(flight.rank for flight in flights)}, {calls:,} calls"
    told += f", the last in step {max(steps)}" if steps else ""
    if runs:
        runs_now = any(flight.process == RUNS for flight in runs)
        told += "; the job runs" if runs_now else "; the job ran when it was dumped"
        if not (newest := max(flight.newest for flight in runs)):
            return f"{told} and has recorded nothing yet"
        return (
            f"{told}, its newest record {'is' if runs_now else 'was'} "
            f"{span(max(f.seen for f in runs) - newest)} old"
        )
    ended = "every rank" if len(well) == len(flights) else ranks_text(well) if well else "no rank"
    return f"{told}; {ended} ended well"
