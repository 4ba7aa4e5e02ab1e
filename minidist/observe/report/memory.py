"""The section on memory: bytes by category over the steps, inside a recorded step, and each rank's
peaks."""

from collections.abc import Sequence
from typing import Any

from minidist.device.account import CATEGORIES
from minidist.observe.report.run_files import METRICS, TRACE, RunFiles
from minidist.observe.report.section import Chart, PlainTable, Section, thinned
from minidist.observe.report.steps import MEMORY_RANKS, RecordedStep, steps_with_memory
from minidist.observe.step_log import STEP_LOG


def section(run: RunFiles, steps: Sequence[RecordedStep], tables: Sequence[PlainTable]) -> Section:
    """Return the section. Args: tables: rank 0's account compared with its formulas, as in the
    terminal."""
    found = Section("memory", "Memory by category")
    _over_steps(run, found)
    inside = [step.step for step in steps_with_memory(steps, run.timelines)]
    if inside:
        found.lines.append(
            "Inside a step the account is recorded whenever an array is made, in the first "
            f"steps of a run: of the steps of this page in {', '.join(map(str, inside))}. Each "
            "point is the highest moment around it."
        )
        if len(run.timelines) > MEMORY_RANKS:
            found.lines.append(f"The page has the first {MEMORY_RANKS} ranks.")
        found.charts.append(
            Chart("memory_step", "live bytes of a rank by category inside the chosen step", {})
        )
    else:
        found.missing.append(
            run.lacks(
                TRACE,
                "memory inside a step",
                "minidist train writes that of the first steps when a run ends well",
            )
        )
    found.tables += tables
    if ranks := run.metrics.get("ranks"):
        found.tables.append(_peaks(ranks))
    else:
        found.missing.append(
            run.lacks(METRICS, "peaks of memory by rank", "it is written when a run ends well")
        )
    return found


def _over_steps(run: RunFiles, found: Section) -> None:
    memory = [line["memory"] for line in run.steps if "memory" in line]
    if not memory:
        found.missing.append(
            run.lacks(
                STEP_LOG, "memory over the steps", "minidist train writes a line a step to it"
            )
        )
        return
    if not any(memory):  # offload=all
        found.lines.append("Rank 0 holds no bytes on its device at the end of any step.")
        return
    names = [name for name in CATEGORIES if any(now.get(name) for now in memory)]
    steps = [line["step"] for line in run.steps if "memory" in line]
    series = {name: thinned(steps, [now.get(name, 0) for now in memory]) for name in names}
    every = series[names[0]]["every"] if names else 1
    found.lines.append(
        "The live bytes of rank 0 at the end of each step. What lives only inside a step is not "
        "in it."
    )
    if every > 1:
        found.lines.append(f"Each point is the highest of {every} steps.")
    found.charts.append(
        Chart(
            "memory",
            "live bytes of rank 0 by category at the end of each step",
            {
                "at": series[names[0]]["at"] if names else [],
                "bytes": {name: series[name]["high"] for name in names},
            },
        )
    )


def _peaks(ranks: Sequence[dict[str, Any]]) -> PlainTable:
    names = [
        name
        for name in (*CATEGORIES, "total")
        if any(rank["memory"].get(name, {}).get("peak") for rank in ranks)
    ]
    rows = [
        [str(rank["rank"]), *(f"{rank['memory'].get(name, {}).get('peak', 0):,}" for name in names)]
        for rank in ranks
    ]
    return PlainTable(
        "The highest bytes of each rank, by category; the total is the peak of the sum",
        ["rank", *names],
        rows,
        range(len(names) + 1),
    )
