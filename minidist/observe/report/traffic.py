"""The sections on traffic: bytes from rank to rank by axis, and the ledger compared with its
formulas."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from minidist.observe.report.run_files import METRICS, RunFiles
from minidist.observe.report.section import Chart, PlainTable, Section

MOST_RANKS = 128
REMEDY = "it is written when a run ends well"


def section(run: RunFiles) -> Section:
    """Return the section: the traffic matrix of each axis and of all axes, and bytes by axis and
    verb."""
    found = Section("traffic", "Traffic from rank to rank")
    ranks = run.metrics.get("ranks") or []
    if not ranks:
        found.missing.append(run.lacks(METRICS, "traffic", REMEDY))
        return found
    if all("sent_to" in rank for rank in ranks):
        _matrix(found, ranks)
    else:
        found.missing.append(
            "No matrix from rank to rank: metrics.json has no bytes by receiver; runs of this "
            "version of minidist train over ranks have them."
        )
    found.tables.append(_by_verb(ranks, max(1, run.metrics.get("steps", 1))))
    return found


def _matrix(found: Section, ranks: Sequence[dict[str, Any]]) -> None:
    shown = {rank["rank"] for rank in ranks[:MOST_RANKS]}
    cells = {
        axis: [
            [rank["rank"], int(peer), axes[axis]]
            for rank in ranks[:MOST_RANKS]
            for peer, axes in rank["sent_to"].items()
            if axes.get(axis) and int(peer) in shown
        ]
        for axis in sorted(
            {axis for rank in ranks for axes in rank["sent_to"].values() for axis in axes}
        )
    }
    sent = sum(
        nbytes
        for rank in ranks
        for verbs in rank["sent_bytes"].values()
        for nbytes in verbs.values()
    )
    known = sum(
        nbytes for rank in ranks for axes in rank["sent_to"].values() for nbytes in axes.values()
    )
    found.lines.append(
        "Payload bytes of all training steps, from the rank of a row to the rank of a column."
    )
    if len(ranks) > MOST_RANKS:
        found.lines.append(f"The matrix has the first {MOST_RANKS} of {len(ranks)} ranks.")
    if known < sent:
        found.lines.append(
            f"{sent - known:,} of {sent:,} bytes have no one receiver: the ranks of a host read "
            "them from shared memory, or a library sent them."
        )
    if cells:
        found.charts.append(
            Chart(
                "traffic",
                "payload bytes from each rank to each other; the table has the sums",
                {"ranks": sorted(shown), "cells": cells},
            )
        )
    elif len(ranks) == 1:
        found.lines.append("There was one rank: it sent nothing.")


def _by_verb(ranks: Sequence[dict[str, Any]], steps: int) -> PlainTable:
    """Return the table of the sums over all ranks."""
    counts = {
        kind: Counter(
            {
                (axis, verb): 0
                for rank in ranks
                for axis, verbs in rank[kind].items()
                for verb in verbs
            }
        )
        for kind in ("sent_bytes", "messages")
    }
    for kind, sums in counts.items():
        for rank in ranks:
            for axis, verbs in rank[kind].items():
                for verb, count in verbs.items():
                    sums[axis, verb] += count
    rows = [
        [axis, verb, f"{nbytes:,}", f"{nbytes / steps:,.0f}", f"{counts['messages'][axis, verb]:,}"]
        for (axis, verb), nbytes in sorted(counts["sent_bytes"].items())
    ]
    return PlainTable(
        "What all ranks sent in training steps, by axis and verb; control: scalars",
        ["axis", "verb", "bytes", "bytes a step", "messages"],
        rows,
        (2, 3, 4),
    )


def ledger_section(run: RunFiles, tables: Sequence[PlainTable], lines: Sequence[str]) -> Section:
    """Return the section: the ledger compared with its formulas. Args: tables, lines: as in the
    terminal at the end of the run."""
    found = Section(
        "ledger", "The ledger beside its formulas", tables=list(tables), lines=list(lines)
    )
    if not run.metrics:
        found.missing.append(run.lacks(METRICS, "ledger", REMEDY))
    elif not tables:
        found.lines.append(
            "No formula to compare with: the run made no step, or had one rank that sent nothing."
        )
    else:
        found.lines.insert(
            0, "Bytes and messages a step, counted as they were sent, beside what theory says."
        )
    return found
