"""The section on what is wrong: what `minidist diagnose` finds in the flight recorders and the records of steps."""

from minidist.errors import ConfigError
from minidist.observe.diagnose.fault import Fault, ranks_text
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.report.run_files import FLIGHT, STEPS, RunFiles
from minidist.observe.report.section import PlainTable, Section

HEAD = ("culprit", "cause", "where", "what", "how sure", "what to do")


def section(run: RunFiles, found: list[Fault] | None) -> Section:
    """The findings, the cause first, and the evidence of each. Args: found: of findings_of."""
    part = Section("diagnosis", "What is wrong")
    if found is None:
        part.missing.append(run.lacks(FLIGHT, "diagnosis", "minidist train keeps the flight recorders there, and in "
                                      f"{STEPS} a line a step and rank"))
        return part
    read = [name for name, there in ((f"{FLIGHT}/", run.flights), (STEPS, run.records)) if there]
    if not found:
        part.lines.append(f"minidist diagnose finds nothing wrong in {' and '.join(read)}.")
        return part
    part.lines.append(f"minidist diagnose finds this in {' and '.join(read)}; the cause stands first.")
    rows = [[_culprit(one), one.cause, one.where, one.what, one.sure, one.advice] for one in found]
    evidence = [[_culprit(one), one.cause, line] for one in found for line in one.evidence]
    part.tables.append(PlainTable("What minidist diagnose finds", HEAD, rows))
    if evidence:
        part.tables.append(PlainTable("The evidence", ("culprit", "cause", "evidence"), evidence))
    return part


def findings_of(run: RunFiles) -> list[Fault] | None:
    """What diagnose finds in the run folder; None if it has neither recorders nor records, or they make no sense."""
    if not run.flights and not run.records:
        return None
    try:
        return diagnose(run.flights, run.records).findings
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        run.missing[FLIGHT] = f"the records cannot be judged ({type(error).__name__}: {error})"
        return None


def _culprit(fault: Fault) -> str:
    return ranks_text(fault.ranks) if fault.ranks else "no rank"
