"""The section on slow ranks: the ranks that the others waited for, by the flight recorders.

delay of a call     time from the arrival of the last rank but one to that of the last rank
blame of a rank     the sum of the delays of the calls in which it arrived last
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from minidist.observe.diagnose.flights import RankFlight
from minidist.observe.diagnose.matching import group_calls
from minidist.observe.diagnose.rules import summary
from minidist.observe.report.run_files import FLIGHT, RunFiles
from minidist.observe.report.section import Chart, PlainTable, Section, rounded

MOST_COLUMNS = 120
MOST_RANKS = 64
Delay: TypeAlias = tuple[int | None, int, float]


def section(run: RunFiles) -> Section:
    """Return the section: a table by rank, and the delay that each rank caused in each step."""
    found = Section("stragglers", "Slow ranks")
    if not run.flights:
        found.missing.append(
            run.lacks(FLIGHT, "slow ranks", "minidist train keeps the flight recorders there")
        )
        return found
    delays = _without_last_step(list(_delays(run.flights)))
    found.lines.append(f"The flight recorders say: {summary(run.flights)}.")
    if len({flight.host for flight in run.flights}) > 1:
        found.lines.append(
            "The ranks are on several hosts: a delay contains the difference of their clocks."
        )
    if delays:
        found.lines.append(
            f"Below are the last {len(delays):,} collective calls that the recorders hold, without "
            f"those of the last step and of the run's end. A rank that is slow itself waits least: "
            f"it is found by the time that the others wait for it."
        )
        shown = _waited_for_most(delays, [flight.rank for flight in run.flights])
        if len(shown) < len(run.flights):
            found.lines.append(f"The chart has the {len(shown)} ranks that were waited for most.")
        found.charts.append(_chart(shown, delays))
        found.tables.append(_by_rank(run.flights, delays))
    elif len(run.flights) > 1:
        found.lines.append(
            "The recorders hold no collective call that all ranks of its group have ended."
        )
    return found


def _delays(flights: Sequence[RankFlight]) -> Iterator[Delay]:
    """Yield (step, rank that arrived last, seconds between the last rank but one and the last) of
    each call that all ranks have ended."""
    for calls in group_calls(flights):
        if len(calls.ranks) < 2 or set(calls.calls) != set(calls.ranks):
            continue
        for sequence in set.intersection(*(set(mine) for mine in calls.calls.values())):
            row = {rank: mine[sequence] for rank, mine in calls.calls.items()}
            if all(entry["state"] == "ended" for entry in row.values()):
                came = sorted(row, key=lambda rank: row[rank]["made"])
                yield row[came[-1]]["step"], came[-1], row[came[-1]]["made"] - row[came[-2]]["made"]


def _without_last_step(delays: Sequence[Delay]) -> list[Delay]:
    """Return the delays in all steps except the last: the recorders count calls after the last step
    (validation, gathers) as its calls."""
    last = max((step for step, _, _ in delays if step is not None), default=0)
    return [delay for delay in delays if delay[0] is not None and delay[0] < last]


def _waited_for_most(delays: Sequence[Delay], ranks: Sequence[int]) -> list[int]:
    """Return at most MOST_RANKS ranks, those with the largest delays, in order of rank."""
    sums = defaultdict[int, float](float)
    for _, rank, seconds in delays:
        sums[rank] += seconds
    return sorted(sorted(ranks, key=lambda rank: -sums[rank])[:MOST_RANKS])


def _chart(ranks: Sequence[int], delays: Sequence[Delay]) -> Chart:
    """Return the chart of milliseconds by rank and step; with many steps, a column has the largest
    value of several."""
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for step, rank, seconds in delays:
        if step is not None and rank in ranks:
            sums[step, rank] += seconds
    steps = sorted({step for step, _ in sums})
    every = max(1, -(-len(steps) // MOST_COLUMNS))
    column = {step: at // every for at, step in enumerate(steps)}
    cells: dict[tuple[int, int], float] = defaultdict(float)
    for (step, rank), seconds in sums.items():
        cells[column[step], rank] = max(cells[column[step], rank], 1e3 * seconds)
    data: dict[str, Any] = {
        "ranks": list(ranks),
        "steps": steps[::every],
        "every": every,
        "cells": [[at, rank, rounded(ms, 4)] for (at, rank), ms in sorted(cells.items())],
    }
    return Chart(
        "stragglers",
        "milliseconds that others waited for each rank, by step; the table has the sums",
        data,
    )


def _by_rank(flights: Sequence[RankFlight], delays: Sequence[Delay]) -> PlainTable:
    last = Counter(rank for _, rank, _ in delays)
    caused = defaultdict[int, float](float)
    for _, rank, seconds in delays:
        caused[rank] += seconds
    rows = [
        [str(flight.rank), f"{last[flight.rank]:,}", f"{1e3 * caused[flight.rank]:,.1f}"]
        for flight in flights
    ]
    return PlainTable(
        "Ranks that the others waited for",
        ["rank", "calls in which it came last", "ms waited for it"],
        rows,
        range(3),
    )
