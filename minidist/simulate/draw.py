"""Chapter 24 · The picture of a simulated step: some ranks in time, the fullest rank's memory, and
the axes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minidist.console import size_text
from minidist.observe.plots import MEMORY, save_picture
from minidist.simulate.results import Simulation
from minidist.simulate.timelines import timelines

COLOURS = {
    "forward": "#3b6fb6",
    "backward": "#e08e3c",
    "backward for the input": "#e08e3c",
    "backward for the weights": "#d9b24c",
    "update": "#5b9a68",
}
OTHER = "#9aa5b1"
CALL = "#c44e52"
MOST_RANKS = 8
SHOWS_LIMIT = 0.3  # the limit is drawn if the memory comes to this part of it
HEIGHT = 0.62  # of a rank's row; the strip of its calls below it
GB = 1e9
FINEST = 900  # parts of the step that the picture tells apart


def draw_simulation(path: str | Path, found: Simulation) -> None:
    """Write the picture; the ending of `path` chooses the format (png, svg, pdf). Raises:
    OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 7.0), layout="constrained")
    places = figure.subplot_mosaic(
        [["ranks", "ranks"], ["memory", "axes"]], height_ratios=(1.25, 1.0)
    )
    _draw_ranks(places["ranks"], found, shown_ranks(found))
    _draw_memory(places["memory"], found)
    _draw_axes(places["axes"], found)
    figure.suptitle(
        f"{found.cluster.spec}: {found.step_seconds:.3g} s a step, MFU {found.mfu:.1%}, "
        f"waiting for others {found.bubble:.1%}"
    )
    save_picture(figure, path, dpi=120)


def shown_ranks(found: Simulation) -> list[int]:
    """Return one rank of each stage, at most MOST_RANKS; without a pipeline the first of the
    clocks."""
    stages = {
        found.placement.coordinates(rank)["pp"]: rank
        for rank in reversed(range(len(found.role_of)))
    }
    ranks = (
        [stages[stage] for stage in sorted(stages)]
        if len(stages) > 1
        else list(found.replayed.ranks)
    )
    picks = np.unique(
        np.linspace(0, len(ranks) - 1, min(MOST_RANKS, len(ranks))).round().astype(int)
    )
    return sorted({ranks[pick] for pick in picks} | set(_slowest(found)))


def _slowest(found: Simulation) -> list[int]:
    """Return the rank on which the critical path is longest."""
    spent: dict[int, float] = {}
    for piece in found.path:
        spent[piece.rank] = spent.get(piece.rank, 0.0) + piece.stop - piece.start
    return [max(spent, key=lambda rank: spent[rank])] if spent else []


def _draw_ranks(axes: Any, found: Simulation, ranks: Sequence[int]) -> None:
    """Draw a row per rank: its work by name, and in a strip below the calls of its groups."""
    named: dict[str, str] = {}
    for row, timeline in enumerate(timelines(found, ranks)):
        bars: dict[str, list[tuple[float, float]]] = {}
        for span in sorted(timeline.spans, key=lambda span: span.start):
            name = span.name if span.row == "compute" else "communication"
            bars.setdefault(name, []).append((span.start, span.stop))
        for name, spans in bars.items():
            intervals = _joined(spans, found.step_seconds / FINEST)
            colour = CALL if name == "communication" else COLOURS.get(name, OTHER)
            where = (
                (row + HEIGHT / 2, 0.2) if name == "communication" else (row - HEIGHT / 2, HEIGHT)
            )
            axes.broken_barh(intervals, where, color=colour, linewidth=0)
            named["other work" if colour == OTHER else name] = colour
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(0, found.step_seconds)
    axes.set_xlabel("seconds since the step began")
    for name, colour in named.items():
        axes.barh(0, 0, color=colour, label=name)
    axes.legend(
        frameon=False, ncols=min(5, len(named)), loc="lower right", bbox_to_anchor=(1.0, 1.0)
    )


def _joined(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Return (start, length) of spans in order of start; spans that are nearer than `gap` become
    one."""
    joined: list[tuple[float, float]] = []
    for start, stop in spans:
        if joined and start - joined[-1][1] < gap:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return [(start, max(stop - start, gap)) for start, stop in joined]


def _draw_memory(axes: Any, found: Simulation) -> None:
    """Draw the fullest rank's memory over the step, by category, and the device's limit."""
    changes = found.memory(found.fullest)
    times = [when for when, _ in changes] + [found.step_seconds]
    floor = np.zeros(len(times))
    for category, colour in MEMORY.items():
        held = np.array([after.get(category, 0) for _, after in changes])
        held = np.append(held, held[-1:]) / GB
        if held.any():
            axes.fill_between(
                times, floor, floor + held, step="post", color=colour, linewidth=0, label=category
            )
            floor = floor + held
    if floor.max(initial=0.0) > SHOWS_LIMIT * found.memory_limit / GB:
        axes.axhline(found.memory_limit / GB, color="#444444", linestyle="--", linewidth=1.0)
    axes.set_xlim(0, found.step_seconds)
    axes.set_xlabel("seconds since the step began")
    axes.set_ylabel("GB")
    axes.set_title(
        f"memory of rank {found.fullest}, of {size_text(found.memory_limit)} (dashed)", fontsize=10
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_axes(axes: Any, found: Simulation) -> None:
    """Draw a rank's seconds in which an axis moves bytes, and those in which the rank waits for
    them."""
    uses = {axis: use for axis, use in found.axes.items() if use.seconds > 0 and use.nbytes}
    places = np.arange(len(uses))
    axes.barh(places, [use.seconds for use in uses.values()], color="#d8c3c4", label="calls run")
    axes.barh(
        places,
        [use.exposed for use in uses.values()],
        height=0.4,
        color=CALL,
        label="exposed: the rank waits",
    )
    axes.set_yticks(places, [f"{axis}\n{size_text(use.nbytes)}" for axis, use in uses.items()])
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step, mean of all ranks")
    axes.set_title("communication along each axis", fontsize=10)
    if uses:
        axes.legend(frameon=False, fontsize=8)
