"""The section on each rank's steps, by its own records: seconds by kind, memory, digests of its
replica.

The records are those of observe/rank_steps.py. `minidist diagnose` judges them; this section shows
them.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from minidist.observe.diagnose.fault import ranks_text
from minidist.observe.diagnose.numbers import GROWTH, MIB, WARM, memory_growth
from minidist.observe.rank_steps import RankSteps
from minidist.observe.report.run_files import STEPS, RunFiles
from minidist.observe.report.section import Chart, PlainTable, Section, rounded, thinned

VALUES = {
    "own computation": ("cpu", 1e3, "ms"),
    "waiting for data": ("input", 1e3, "ms"),
    "in calls": ("calls", 1e3, "ms"),
    "other threads": ("others", 1e3, "ms"),
    "whole step": ("seconds", 1e3, "ms"),
    "targets": ("tokens", 1.0, "targets"),
}
"""{name of a value in the chart: (key in the records, factor, unit)}"""
MOST_COLUMNS = 120
MOST_RANKS = 48
MOST_LINES = 8
WORDS = (
    "Each rank records its own steps. Own computation is processor time of the program's thread "
    "outside of calls; in calls it communicates, or waits for others; other threads of its "
    "process may run beside it. A slow rank is in calls for less time than the others."
)


def section(run: RunFiles, culprits: Collection[int] = ()) -> Section:
    """Return the section: values of each rank in each step, memory and digests. Args: culprits:
    ranks that the charts always show."""
    found = Section("ranks", "Steps rank by rank")
    records = {rank: each for rank, each in sorted(run.records.items()) if each.steps}
    if not records:
        found.missing.append(
            run.lacks(STEPS, "steps by rank", "minidist train writes a line a step and rank")
        )
        return found
    found.lines.append(WORDS)
    shown = _shown(records, culprits)
    if len(shown) < len(records):
        found.lines.append(f"The chart has {len(shown)} of {len(records)} ranks.")
    found.charts.append(_by_step({rank: records[rank] for rank in shown}))
    found.tables.append(_medians(records))
    _memory(found, records, culprits)
    _digests(found, records)
    return found


def _shown(ranks: Collection[int], first: Collection[int], most: int = MOST_RANKS) -> list[int]:
    """Return at most `most` ranks, in order; the ranks of `first` are chosen before others."""
    return sorted(sorted(ranks, key=lambda rank: (rank not in first, rank))[:most])


def _by_step(records: Mapping[int, RankSteps]) -> Chart:
    """Return the chart of each value by rank and step; with many steps, a column has the highest
    value of several."""
    steps = sorted({line["step"] for each in records.values() for line in each.steps})
    every = max(1, -(-len(steps) // MOST_COLUMNS))
    column = {step: at // every for at, step in enumerate(steps)}
    values: dict[str, Any] = {}
    for name, (key, factor, unit) in VALUES.items():
        rows: list[list[float | None]] = [[None] * len(steps[::every]) for _ in records]
        for row, each in zip(rows, records.values(), strict=True):
            for line in each.steps:
                if (value := line.get(key)) is not None:
                    at = column[line["step"]]
                    before = row[column[line["step"]]]
                    row[at] = rounded(max(factor * value, before or 0.0), 4)
        if any(value is not None for row in rows for value in row):
            values[name] = {"unit": unit, "rows": rows}
    return Chart(
        "rank_steps",
        "what each rank did in each step, in milliseconds; the table has the medians",
        {"ranks": [*records], "steps": steps[::every], "every": every, "values": values},
    )


def _medians(records: Mapping[int, RankSteps]) -> PlainTable:
    """Return the table of medians over the steps, without the first (warm-up)."""
    named = {
        name: about
        for name, about in VALUES.items()
        if any(line.get(about[0]) is not None for each in records.values() for line in each.steps)
    }
    rows = []
    for rank, each in records.items():
        lines = each.steps[1:] or each.steps
        row = [str(rank)]
        for key, factor, unit in named.values():
            known = [factor * line[key] for line in lines if line.get(key) is not None]
            row.append(
                ""
                if not known
                else f"{median(known):,.2f}"
                if unit == "ms"
                else f"{median(known):,.0f}"
            )
        busy = Counter(line["busy"] for line in lines if line.get("busy"))
        rows.append([*row, busy.most_common(1)[0][0] if busy else ""])
    head = [name if unit != "ms" else f"{name}, ms" for name, (_, _, unit) in named.items()]
    numbers = range(len(head) + 1)
    title = "Medians of a step by rank"
    if not any(row[-1] for row in rows):
        return PlainTable(title, ["rank", *head], [row[:-1] for row in rows], numbers)
    return PlainTable(title, ["rank", *head, "line of the busy other thread"], rows, numbers)


def _memory(found: Section, records: Mapping[int, RankSteps], culprits: Collection[int]) -> None:
    """Add the resident bytes of each process: a chart of the ranks with the most growth, and a
    table of all ranks."""
    held = {
        rank: sizes
        for rank, each in records.items()
        if (sizes := [(line["step"], line["rss"]) for line in each.steps if line.get("rss")])
    }
    if not held:
        found.lines.append(
            "The memory of each rank is not known: ranks that are threads share one process."
        )
        return
    gained = {
        rank: sizes[-1][1] - sizes[min(WARM, len(sizes) - 1)][1] for rank, sizes in held.items()
    }
    most = sorted(held, key=lambda rank: (rank not in culprits, -gained[rank]))[:MOST_LINES]
    found.lines.append(
        "The memory of a rank's process is what the system counts, also libraries and the "
        "interpreter; diagnosis calls it a leak from 1 MiB a step. Memory by category has a "
        "section of its own."
    )
    if len(most) < len(held):
        found.lines.append(
            f"The chart of memory has the {MOST_LINES} ranks whose memory grew most."
        )
    lines = [
        {
            "rank": rank,
            "mib": thinned(
                [step for step, _ in held[rank]], [rounded(size / MIB) for _, size in held[rank]]
            ),
        }
        for rank in sorted(most)
    ]
    found.charts.append(
        Chart(
            "rank_memory",
            "MiB that the process of each rank holds, by step; the table has the growth",
            {"lines": lines},
        )
    )
    rows = [
        [
            str(rank),
            f"{sizes[-1][1] / MIB:,.1f}",
            f"{gained[rank] / MIB:+,.1f}",
            _growth(records[rank]),
        ]
        for rank, sizes in held.items()
    ]
    head = [
        "rank",
        "MiB at the end",
        f"gained since the first {WARM} steps",
        "a step, where it grew most steadily",
    ]
    found.tables.append(PlainTable("Memory of each rank's process, in MiB", head, rows, range(4)))


def _growth(each: RankSteps) -> str:
    """Return the growth in MiB per step; "not known" for fewer than GROWTH steps."""
    growth, sizes = memory_growth(each)
    return f"{growth / MIB:,.3f}" if len(sizes) >= GROWTH else "not known"


def _digests(found: Section, records: Mapping[int, RankSteps]) -> None:
    """Add the table of the compared replicas, and whether they were equal."""
    groups: defaultdict[str, dict[int, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for rank, each in records.items():
        for line in each.steps:
            for group, digest in (line.get("digest") or {}).items():
                groups[group][line["step"]][rank] = digest
    if not groups:
        found.lines.append(
            "No step of this run has a digest of the weights, so replicas were not compared: "
            "minidist train --digest-every N makes one every N steps."
        )
        return
    rows = [
        [group, _ranks(by_step.values()), f"{len(by_step):,}", str(max(by_step)), _differ(by_step)]
        for group, by_step in sorted(groups.items())
    ]
    found.tables.append(
        PlainTable(
            "Replicas compared by a digest of their weights",
            ["group", "ranks", "comparisons", "last in step", "result"],
            rows,
            (2, 3),
        )
    )


def _ranks(digests: Collection[Mapping[int, str]]) -> str:
    return ranks_text({rank for each in digests for rank in each})


def _differ(by_step: Mapping[int, Mapping[int, str]]) -> str:
    """Return "equal", or the first step whose digests differ."""
    differing: Sequence[int] = [
        step for step, digests in sorted(by_step.items()) if len({*digests.values()}) > 1
    ]
    return f"they differ from step {differing[0]} on" if differing else "equal"
