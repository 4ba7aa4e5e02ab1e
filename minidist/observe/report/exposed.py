"""The section on overlap: how long each rank computed and waited in a step, and for what it waited.

With --why a run records its waits: then each exposed millisecond has a call, a line and a cause
(observe/why.py). Without --why the section has only the sums.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minidist.observe.overlap import Overlap, measure, together
from minidist.observe.report.run_files import RunFiles
from minidist.observe.report.section import Chart, PlainTable, Section, rounded
from minidist.observe.report.steps import RecordedStep, no_step
from minidist.observe.step_record import StepRecord, record_step
from minidist.observe.timeline import Timeline
from minidist.observe.why import CAUSES, exposed_of
from minidist.observe.why_report import causes_line, foresight_line, headline, place

MOST_ROWS = 60
STILL = "stood still"


def section(
    run: RunFiles, recorded: Sequence[RecordedStep], steps: Sequence[RecordedStep]
) -> Section:
    """Return the section. Args: recorded: all steps of the trace; steps: the steps on the page."""
    found = Section("overlap", "Overlap, and what exposed communication waits for")
    if not steps:
        found.missing.append(no_step(run, "overlap"))
        return found
    explains = has_waits(steps)
    if not explains and len(run.timelines) > 1:
        found.missing.append(
            "No causes of exposed milliseconds: the run did not record its waits; train with --why."
        )
    if "why" in run.metrics:
        why = run.metrics["why"]
        told = (
            f"Step {why['step']}: {headline(why)}",
            causes_line(why),
            foresight_line(why["foresight"]),
        )
        found.lines += [f"{line[0].upper()}{line[1:]}." for line in told]
    parts = {
        step.step: [
            measure(_of_step(timeline, step, place_of), steps=[step.step])
            for place_of, timeline in enumerate(run.timelines)
        ]
        for step in steps
    }
    data = [
        _packed(step, parts[step.step], _causes(run, recorded, step) if explains else None)
        for step in steps
    ]
    found.charts.append(
        Chart(
            "overlap",
            "milliseconds of each rank in the chosen step: computing, and standing still "
            "by cause; the table below names calls and lines",
            {
                "ranks": [timeline.rank for timeline in run.timelines],
                "causes": [*CAUSES] if explains else [STILL],
                "steps": data,
            },
        )
    )
    if len(steps) > 1:
        found.charts.append(
            Chart("causes", "mean exposed milliseconds of a rank in each kept step, by cause", {})
        )
    found.tables.append(_shares(run.timelines, list(parts.values())))
    return found


def has_waits(steps: Sequence[RecordedStep]) -> bool:
    """Return whether the run recorded its waits."""
    return any(
        "group" in span.details
        for step in steps
        for spans in step.spans
        for span in spans
        if span.row == "communication"
    )


def record_of(run: RunFiles, recorded: Sequence[RecordedStep], step: RecordedStep) -> StepRecord:
    """Return the record of a step with waits. The steps before and after it show which calls held
    its link."""
    at = recorded.index(step)
    around = recorded[max(0, at - 1) : at + 2]
    timelines = []
    for place_of, timeline in enumerate(run.timelines):
        part = Timeline(timeline.rank)
        part.spans = list(
            {id(span): span for near in around for span in near.spans[place_of]}.values()
        )
        part.spans = [
            replace(span, details={"blocking": False, "messages": 0, **span.details})
            if span.row == "communication"
            else span
            for span in part.spans
        ]
        timelines.append(part)
    return record_step(timelines, step.step)


def _of_step(timeline: Timeline, step: RecordedStep, place_of: int) -> Timeline:
    """Return the part of a timeline inside a step."""
    part = Timeline(timeline.rank)
    part.spans = step.spans[place_of]
    return part


def _causes(
    run: RunFiles, recorded: Sequence[RecordedStep], step: RecordedStep
) -> list[dict[str, Any]]:
    """Return the waits of all ranks in a step with their causes, the longest first."""
    sums: dict[tuple[Any, ...], float] = defaultdict(float)
    for row in exposed_of(record_of(run, recorded, step)):
        sums[row.rank, row.call, CAUSES.index(row.cause), row.by, place(row.where)] += row.seconds
    rows = sorted(sums.items(), key=lambda item: -item[1])
    return [
        {
            "rank": rank,
            "call": call,
            "cause": cause,
            "by": by,
            "where": where,
            "ms": rounded(1e3 * seconds),
        }
        for (rank, call, cause, by, where), seconds in rows
    ]


def _packed(
    step: RecordedStep, parts: Sequence[Overlap], rows: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """Return a step's milliseconds by rank: length, waiting by cause, communication, hidden."""
    lengths = [1e3 * (stop - start) for start, stop in step.windows]
    still = [[0.0] * (len(CAUSES) if rows is not None else 1) for _ in parts]
    if rows is None:
        for mine, part in zip(still, parts, strict=True):
            mine[0] = rounded(1e3 * part.waited)
    for row in rows or []:
        still[row["rank"]][row["cause"]] = rounded(still[row["rank"]][row["cause"]] + row["ms"])
    return {
        "step": step.step,
        "length": [rounded(each) for each in lengths],
        "still": still,
        "communication": [rounded(1e3 * part.communication) for part in parts],
        "hidden": [rounded(1e3 * part.hidden) for part in parts],
        "rows": (rows or [])[:MOST_ROWS],
        "more": rounded(sum(row["ms"] for row in (rows or [])[MOST_ROWS:])),
    }


def _shares(timelines: Sequence[Timeline], steps: Sequence[Sequence[Overlap]]) -> PlainTable:
    """Return the table of each rank's means over the kept steps."""
    rows = []
    for place_of, timeline in enumerate(timelines):
        sums = together([parts[place_of] for parts in steps])
        count = len(steps)
        rows.append(
            [
                str(timeline.rank),
                *(
                    f"{1e3 * seconds / count:.2f}"
                    for seconds in (sums.computation, sums.communication, sums.hidden, sums.waited)
                ),
                f"{100 * sums.share:.1f}",
            ]
        )
    return PlainTable(
        "Milliseconds of a step by rank, means over the steps of this page",
        ["rank", "computing", "communication", "of it hidden", STILL, "% hidden"],
        rows,
        range(6),
    )
