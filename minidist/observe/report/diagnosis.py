"""The section on faults: the findings of `minidist diagnose` in the flight recorders and the
records of steps."""

from collections.abc import Sequence

from minidist.errors import ConfigError
from minidist.observe.diagnose.fault import Fault, ranks_text
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.report.exposed import has_waits, record_of
from minidist.observe.report.run_files import FLIGHT, STEPS, RunFiles
from minidist.observe.report.section import PlainTable, Section
from minidist.observe.report.steps import RecordedStep, middle
from minidist.observe.what_if import Change, predict

SLOW = ("slow compute", "uneven data", "hogs the interpreter", "slow")
"""Causes inside a step of the trace; the reading of data is before the step."""
HEAD = ("culprit", "cause", "how sure", "where")


def section(
    run: RunFiles, found: list[Fault] | None, recorded: Sequence[RecordedStep] = ()
) -> Section:
    """Return the section: the findings, the cause first, their evidence, and the cost of a slow
    rank.

    Args:    found: result of findings_of. recorded: the steps of the trace.
    """
    part = Section("diagnosis", "What is wrong")
    if found is None:
        part.missing.append(
            run.lacks(
                FLIGHT,
                "diagnosis",
                "minidist train keeps the flight recorders there, and in "
                f"{STEPS} a line a step and rank",
            )
        )
        return part
    read = [name for name, there in ((f"{FLIGHT}/", run.flights), (STEPS, run.records)) if there]
    if not found:
        part.lines.append(f"minidist diagnose finds nothing wrong in {' and '.join(read)}.")
        return part
    part.lines.append(
        f"minidist diagnose finds this in {' and '.join(read)}; the cause stands first."
    )
    part.lines += [
        f"{one.what[0].upper()}{one.what[1:]}. What to do: {one.advice}." for one in found
    ]
    rows = [[_culprit(one), one.cause, one.sure, one.where] for one in found]
    evidence = [[_culprit(one), one.cause, line] for one in found for line in one.evidence]
    part.tables.append(PlainTable("What minidist diagnose finds", HEAD, rows))
    if evidence:
        part.tables.append(PlainTable("The evidence", ("culprit", "cause", "evidence"), evidence))
    part.lines += filter(None, (_without(run, one, recorded) for one in found if one.cause in SLOW))
    return part


def _without(run: RunFiles, fault: Fault, recorded: Sequence[RecordedStep]) -> str | None:
    """Return a line with the predicted time of a recorded step without the fault; None if no step
    with the fault has recorded waits."""
    assert fault.steps is not None
    inside = [step for step in recorded if fault.steps[0] <= step.step <= fault.steps[1]]
    places = [place for place, timeline in enumerate(run.timelines) if timeline.rank in fault.ranks]
    if not inside or len(places) != 1 or len(run.timelines) < 2 or not has_waits(inside):
        return None
    step = middle(inside)
    record = record_of(run, recorded, step)
    now, then = (1e3 * predict(record, Change(without=place)) for place in (None, *places))
    return (
        f"What if: were each kind of work of {ranks_text(fault.ranks)} as short as on the other "
        f"ranks, step {step.step} would take {then:,.3g} ms in place of {now:,.3g} ms, by a "
        "replay of its events."
    )


def findings_of(run: RunFiles) -> list[Fault] | None:
    """Return the findings of diagnose in the run folder; None if there are neither flight recorders
    nor records of steps, or if they are inconsistent."""
    if not run.flights and not run.records:
        return None
    try:
        return diagnose(run.flights, run.records).findings
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        run.missing[FLIGHT] = f"the records cannot be judged ({type(error).__name__}: {error})"
        return None


def _culprit(fault: Fault) -> str:
    return ranks_text(fault.ranks) if fault.ranks else "no rank"
