"""All rules, in the order in which their findings count: what a lost rank explains is not told
twice."""

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
    """What a job's flight recorders say.

    Attributes: findings   the cause first; none: nothing is wrong
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

    Args:    flights: of its ranks (read_flights). steps: their records of steps (read_rank_steps).
             One may be empty.
             stuck: seconds after which an open call of a job that runs is a hang.
    Returns: the findings of the first rule that finds something, in the order: an exception, calls
    that do not fit, a
             stopped or killed rank, a broken link, a hang; a rank that makes the others wait and
             why, a slow link, a slow rank. Before them numbers that are wrong; beside them, always:
             a leak, clocks that differ, ranks without a recorder.
    """
    table = StepTable(steps or {})
    broken = _broken(flights, stuck) if flights else []
    numbers = wrong_numbers(table)
    grown = leaks(table)
    late = [] if broken else held_up(flights, table, explained=bool(numbers or grown))
    told = (
        summary(flights)
        if flights
        else f"{ranks_text(table.ranks)}, by the records of their steps alone: no flight "
        "recorder is here"
    )
    return Diagnosis([*numbers, *broken, *late, *grown, *skewed(flights), *missing(flights)], told)


def _broken(flights: Sequence[RankFlight], stuck: float) -> list[Fault]:
    """Why the job does not go on, if so."""
    return (
        failed_by_itself(flights)
        or mismatches(flights)
        or stopped(flights)
        or _lost(flights, stuck)
        or broken_links(flights)
        or hangs(flights, stuck)
    )


def held_up(flights: Sequence[RankFlight], table: StepTable, *, explained: bool) -> list[Fault]:
    """What the ranks of a job that goes on wait for: a rank and why, or a slow link, or a rank that
    comes late.

    Args:    explained: wrong numbers or a leak were found: then a rank that comes late, of unknown
             cause, is not told.
    """
    return laggards(table) or slow_links(table) or ([] if explained else slow(flights))


def _lost(flights: Sequence[RankFlight], stuck: float) -> list[Fault]:
    """Killed ranks; of a job that was killed as a whole, the hang that it was killed for, if there
    was one."""
    found = killed(flights)
    if found and found[0].cause == "all killed":
        return [*hangs(flights, stuck), *found]
    return found


def summary(flights: Sequence[RankFlight]) -> str:
    """How many ranks and records there are, and whether the job runs."""
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
