"""Chapter 23 · The report of why.py in the terminal, and as a picture with the critical path in
colour."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from minidist.observe.plots import INK, SOFT, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Report = dict[str, Any]

ROWS = 12
"""Largest number of rows of the table; one more row has the sum of the others."""

COLOURS = {
    "forward": "#7fb0de",
    "backward": "#2f5d9b",
    "optimizer": "#5b9a68",
    "all_reduce": "#c44e52",
    "reduce_scatter": "#c44e52",
    "all_gather": "#e08e3c",
    "no core": "#4a4a4a",
}
OTHER = "#9aa5b1"
WAIT = "#f3d3a8"
PALE = 0.28


def place(where: str) -> str:
    """Return the line of a call in short form: from "minidist/" on, or the name of another file."""
    return where[where.rfind("minidist/") :] if "minidist/" in where else where.rpartition("/")[2]


def headline(report: Report) -> str:
    """Return one line: seconds of the step, its lower bound, and the ranks' computing and
    waiting."""
    ranks = len(report["exposed"])
    computing, exposed = (1e3 * sum(report[kind]) / ranks for kind in ("computing", "exposed"))
    return (
        f"the step took {1e3 * report['seconds']:.1f} ms; its own work and transfers need at "
        f"least {1e3 * report['bound']:.1f} ms (× {report['seconds'] / report['bound']:.2f}); a "
        f"rank computed {computing:.1f} ms and stood still {exposed:.1f} ms"
    )


def why_table(report: Report, title: str = "where ranks stood still") -> Table:
    """Return a table with a row per rank, call and cause, the longest first, and the sum over all
    ranks."""
    sums: dict[tuple[Any, ...], float] = defaultdict(float)
    for row in report["rows"]:
        cause = row["cause"] if row["by"] is None else f"{row['cause']} ({row['by']})"
        sums[row["rank"], row["call"], cause, place(row["where"])] += row["seconds"]
    table = Table(
        Column("ms", justify="right"),
        Column("rank", justify="right"),
        "call",
        "cause",
        "asked for at",
        title=title,
        title_justify="left",
        header_style="bold",
    )
    rows = sorted(sums.items(), key=lambda item: -item[1])
    for (rank, call, cause, where), seconds in rows[:ROWS]:
        table.add_row(f"{1e3 * seconds:.2f}", str(rank), call, cause, where)
    if len(rows) > ROWS:
        table.add_row(
            f"{1e3 * sum(seconds for _, seconds in rows[ROWS:]):.2f}",
            "",
            f"{len(rows) - ROWS} more",
            "",
            "",
        )
    if rows:
        table.rows[-1].end_section = True
    table.add_row(f"{1e3 * sum(sums.values()):.2f}", "all", "", "", "")
    return table


def causes_line(report: Report) -> str:
    """Return one line: the milliseconds of all ranks by cause."""
    return "by cause, all ranks: " + ", ".join(
        f"{cause} {1e3 * seconds:.1f} ms"
        for cause, seconds in sorted(report["causes"].items(), key=lambda it: -it[1])
    )


def foresight_line(found: dict[str, Any]) -> str:
    """Return one line: how many calls the previous step predicts, and the gain of knowing all."""
    known = (
        "no step before it was recorded"
        if found["known"] is None
        else f"{found['known']} of its {found['calls']} calls are those of the step before, in "
        "the same order"
    )
    return f"{known}; the most urgent call first would save {1e3 * found['gain']:.1f} ms"


# -------------------------------------------------------------------------------------- the picture


def draw_why(path: str | Path, report: Report, title: str = "") -> None:
    """Write the step as a picture: one row per rank, and one row of calls; parts that are not on
    the critical path are pale.

    Raises:  OSError if `path` cannot be written.
    """
    draw_paths(path, {title or "the critical path of a step": report})


def draw_paths(path: str | Path, reports: dict[str, Report]) -> None:
    """Write a picture of several steps below each other, with their titles, on one time scale."""
    from matplotlib.figure import Figure

    heights = [1.2 + 0.5 * len(report["work"]) for report in reports.values()]
    figure = Figure(figsize=(11.0, 0.5 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(reports), 1, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(max(report["seconds"], report["bound"]) for report in reports.values())
    for panel, (title, report) in zip(panels, reports.items(), strict=True):
        draw_path(panel, report)
        panel.set_title(title, loc="left", fontsize=11, color=INK)
        panel.set_xlim(0, 1e3 * longest * 1.005)
    panels[-1].set_xlabel("ms")
    legend(figure)
    save_picture(figure, path, dpi=130)


def draw_path(axes: "Axes", report: Report) -> None:
    """Draw a report into matplotlib axes, from 0 ms at the step's begin."""
    ranks = len(report["work"])

    def bar(row: int, start: float, stop: float, colour: str, shade: float) -> None:
        axes.barh(
            row, 1e3 * (stop - start), 0.68, 1e3 * start, color=colour, alpha=shade, linewidth=0
        )

    for rank, pieces in enumerate(report["work"]):
        for name, start, stop in pieces:
            bar(rank, start, stop, _colour(name), PALE)
    for rank, start, stop in _standing(report["rows"]):
        bar(rank, start, stop, WAIT, 1.0)
    for call in report["calls"]:
        if call["end"] > 0:
            bar(
                ranks,
                max(0.0, call["begin"]),
                min(call["end"], report["seconds"]),
                _colour(call["verb"]),
                PALE,
            )
    verbs = {call["name"]: call["verb"] for call in report["calls"]}
    for piece in report["path"]:
        busy = piece["kind"] == "busy"
        bar(
            piece["rank"] if busy else ranks,
            piece["start"],
            piece["stop"],
            _colour(piece["name"] if busy else verbs[piece["name"]]),
            1.0,
        )
    axes.axvline(1e3 * report["bound"], color=INK, linestyle="--", linewidth=1.0)
    axes.text(
        1e3 * report["bound"],
        -0.62,
        "lower bound ",
        ha="right",
        va="center",
        fontsize=8.5,
        color=SOFT,
    )
    axes.set_yticks(range(ranks + 1), [*(f"rank {rank}" for rank in range(ranks)), "calls"])
    axes.set_ylim(ranks + 0.5, -0.85)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _colour(name: str) -> str:
    return COLOURS.get(name, WAIT if name.startswith("wait") else OTHER)


def _standing(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """Return (rank, start, stop) of each wait; the rows of its causes begin at the same moment."""
    sums: dict[tuple[int, float], float] = defaultdict(float)
    for row in rows:
        sums[row["rank"], row["start"]] += row["seconds"]
    return [(rank, start, start + seconds) for (rank, start), seconds in sums.items()]


def legend(figure: Any) -> None:
    """Add a legend of the colours below the figure."""
    from matplotlib.patches import Patch

    names = {
        "forward": "forward",
        "backward": "backward",
        "optimizer": "optimizer",
        "all_gather": "all-gather",
        "all_reduce": "all-reduce, reduce-scatter",
        "no core": "no core",
    }
    patches = [Patch(facecolor=COLOURS[name]) for name in names] + [
        Patch(facecolor=OTHER),
        Patch(facecolor=WAIT),
    ]
    figure.legend(
        patches,
        [*names.values(), "other work", "stands still"],
        loc="outside lower center",
        ncols=len(patches),
        frameon=False,
        fontsize=8.5,
    )
