"""The figures of lesson 02: twelve collectives on four ranks, each message of a run, on a clock of
α.

python lessons/02_collectives/figure.py [--out DIR]      # figure.png, more.png
"""

from pathlib import Path
from typing import Any

from matplotlib.patches import FancyArrowPatch

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
RANKS = 4
COLUMNS = 4
lesson = load_module(HERE / "lesson.py", "02")


def record(group: Group) -> list[dict[str, Any]]:
    """Return the messages of each call on rank 0; [] on other ranks."""
    panels: list[dict[str, Any]] = lesson.record_family(group)
    return panels


def draw(panels: list[dict[str, Any]], folder: Path) -> None:
    """Draw figure.png and more.png from what was recorded."""
    _draw_panels(
        panels[:COLUMNS], "Four all-reduces on four ranks: every message", folder, "figure.png"
    )
    _draw_panels(
        panels[COLUMNS:], "Eight more collectives on four ranks: every message", folder, "more.png"
    )


def _draw_panels(panels: list[dict[str, Any]], title: str, folder: Path, name: str) -> None:
    """Draw one picture: a panel per call, in rows of COLUMNS."""
    longest = max(map(_end, panels))
    tall = 2.85 * (longest + 0.6) / 6.6  # inches of a panel: one scale in both pictures
    step = tall + 1.25
    rows = -(-len(panels) // COLUMNS)
    total = step * rows + 1.2
    figure = look.new_figure(
        14.0,
        total,
        title,
        "As recorded, on a clock on which only messages take time: α each; time runs downwards. "
        "An arrow is a message, in its sender's colour, the thicker the longer.",
    )
    for place, panel in enumerate(panels):
        row, column = divmod(place, COLUMNS)
        bottom = 1 - (1.75 + step * row + tall) / total
        ax = figure.add_axes((0.045 + 0.242 * column, bottom, 0.2, tall / total))
        _space_time(ax, panel, longest, first=column == 0)
    look.save(figure, folder, name)


def _end(panel: dict[str, Any]) -> float:
    """Return when the last message arrived, in α."""
    return float(max(message["stop"] for message in panel["messages"]))


def _space_time(ax: Any, panel: dict[str, Any], longest: float, *, first: bool) -> None:
    """Draw one call: a vertical line for each rank, an arrow for each message; the axis of all
    panels ends at `longest`."""
    messages = panel["messages"]
    end = _end(panel)
    ax.set_title(
        f"{panel['verb']} · {panel['algorithm']}",
        loc="left",
        fontsize=11.5,
        fontweight="bold",
        color=look.INK,
        pad=15,
    )
    for rank in range(RANKS):
        ax.plot(
            [rank, rank], [0, end], color=look.GRID, linewidth=3, zorder=1, solid_capstyle="butt"
        )
        ax.text(
            rank,
            -0.25,
            f"r{rank}",
            ha="center",
            va="bottom",
            fontsize=10,
            fontweight="bold",
            color=look.RANKS[rank],
        )
    for message in messages:
        ax.add_patch(
            FancyArrowPatch(
                (message["src"], message["start"]),
                (message["dst"], message["stop"]),
                arrowstyle="-|>",
                mutation_scale=9,
                shrinkA=0,
                shrinkB=0,
                zorder=2,
                linewidth=0.8 + 2.2 * min(1.0, message["part"]),
                color=look.RANKS[message["src"]],
            )
        )
    look.quiet(ax, grid="y")
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])
    ax.set_yticks(range(int(longest) + 1))
    ax.set_xlim(-0.3, RANKS - 0.7)
    ax.set_ylim(longest + 0.25, -0.35)
    if first:
        ax.set_ylabel("time, α", color=look.SOFT, fontsize=10)
    ax.annotate(
        _count(panel),
        (0.0, 0.0),
        (0.0, -8.0),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10,
        color=look.SOFT,
        va="top",
    )


def _count(panel: dict[str, Any]) -> str:
    """Return a text: number of messages, length of each, bytes in all, bytes of the busiest rank,
    time."""
    messages = panel["messages"]
    sent = [
        sum(message["part"] for message in messages if message["src"] == rank)
        for rank in range(RANKS)
    ]
    parts = sorted((message["part"] for message in messages), reverse=True)
    lengths = list(dict.fromkeys(map(fraction, parts)))
    carried = (
        f"{sum(sent):.3g} n in all, busiest rank {max(sent):.3g} n"
        if max(sent)
        else "without payload"
    )
    return f"{len(messages)} messages of {' and '.join(lengths)}, {_end(panel):g} α\n{carried}"


def fraction(part: float) -> str:
    """Return a message's length as a fraction of a rank's array, to the nearest 1/k: 0.2493 ->
    "n/4"; "0 B" for an empty message."""
    if part == 0:
        return "0 B"
    return f"{part:.2g} n" if part > 1.02 else "n" if part > 0.98 else f"n/{round(1 / part)}"


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
