"""The section on energy: joules by rank, and the watts of rank 0 over the steps. An estimate is
named as such."""

from statistics import median

from minidist.observe.energy import energy_in_words
from minidist.observe.report.run_files import METRICS, RunFiles
from minidist.observe.report.section import (
    Chart,
    PlainTable,
    Section,
    rounded,
    thinned,
    thinning_line,
)
from minidist.observe.step_log import STEP_LOG


def section(run: RunFiles) -> Section:
    """Return the section on the run's energy."""
    found = Section("energy", "Energy")
    energy = run.metrics.get("energy")
    if energy:
        words = energy_in_words(energy)
        found.lines.append(f"{words[0].upper()}{words[1:]}.")
        name = "joules, an estimate" if energy["estimate"] else "joules"
        rows = [
            [str(rank), f"{joules:,.1f}", f"{busy:,.2f}"]
            for rank, (joules, busy) in enumerate(
                zip(energy["by_rank"], energy["busy_seconds"], strict=True)
            )
        ]
        found.tables.append(
            PlainTable("Energy by rank", ["rank", name, "busy seconds"], rows, range(3))
        )
    else:
        found.missing.append(
            run.lacks(METRICS, "energy of the run", "it is written when a run ends well")
        )
    _watts(run, found)
    return found


def _watts(run: RunFiles, found: Section) -> None:
    """Add the watts of rank 0: joules over time between two consecutive steps."""
    lines = [line for line in run.steps if "joules" in line]
    points = [
        (later["step"], (later["joules"] - line["joules"]) / (later["time"] - line["time"]))
        for line, later in zip(lines, lines[1:], strict=False)
        if later["time"] > line["time"] and later["joules"] >= line["joules"]
    ]
    if not points:
        found.missing.append(
            run.lacks(STEP_LOG, "watts over the steps", "a run of two steps or more has them")
        )
        return
    estimate = any(line.get("energy_source") == "estimate" for line in lines)
    series = thinned([step for step, _ in points], [rounded(watts, 5) for _, watts in points])
    found.lines.append(
        f"Rank 0 used {median(watts for _, watts in points):.1f} W (median of the steps"
        f"{'; an estimate' if estimate else ', of the counters that it reads'})."
    )
    found.lines += thinning_line(series["every"])
    found.charts.append(
        Chart(
            "watts",
            "watts of rank 0 over the steps" + (", an estimate" if estimate else ""),
            {"watts": series, "estimate": estimate},
        )
    )
