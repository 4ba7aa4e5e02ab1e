"""The figure of lesson 03, drawn from the messages of real runs: one ring message by message, and
bytes by P.

python lessons/03_ring/figure.py [--out DIR]      # figure.png and figure.mmd
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from minidist.grading import load_module
from minidist.launch import run
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
RANKS = 4
MOST = 8
lesson = load_module(HERE / "lesson.py", "03")
CELL = 0.2  # height of a chunk's box, in rows


def bytes_by_size() -> dict[str, list[float]]:
    """Measure the bytes that the busiest rank sends in one all-reduce of n bytes, in units of n,
    for P = 1 .. MOST."""
    n = lesson.ELEMENTS * lesson.FLOAT32
    ways = {"plain": lesson.plain_all_reduce, "ring": lesson.ring_all_reduce}
    return {
        name: [run(lesson.busiest, way, size=size)[0][1] / n for size in range(1, MOST + 1)]
        for name, way in ways.items()
    }


# ------------------------------------------------------------------------------------------ drawing


def draw(messages: list[dict[str, Any]], folder: Path) -> None:
    """Draw figure.png and figure.mmd from what was recorded."""
    figure = look.new_figure(
        13.5,
        6.6,
        "Ring all-reduce on four ranks, every message of a recorded run",
        "Each box is a chunk in a rank's memory, each arrow a message: always to the next rank, "
        "always one chunk.",
    )
    _space_time(figure.add_axes((0.025, 0.09, 0.68, 0.75)), messages)
    _shades(figure.add_axes((0.025, 0.02, 0.68, 0.06)))
    _bars(figure.add_axes((0.755, 0.145, 0.225, 0.62)), bytes_by_size())
    look.save(figure, folder)
    look.save_mermaid(mermaid(messages), folder)


def _space_time(ax: Any, messages: list[dict[str, Any]]) -> None:
    """Draw ranks as rows and the moments between steps as columns; a square per chunk, an arrow per
    message."""
    steps = 2 * (RANKS - 1)
    holds = [[{rank} for _ in range(RANKS)] for rank in range(RANKS)]
    _memory(ax, 0, holds)
    for step in range(steps):
        half = "reduce_scatter" if step < RANKS - 1 else "all_gather"
        now = [message for message in messages if message["step"] == step]
        for message in now:
            _arrow(ax, step, message, look.PHASES[half])
        for message in now:
            parts = set(message["holds"])
            holds[message["dst"]][message["chunk"]] = (
                parts | holds[message["dst"]][message["chunk"]] if step < RANKS - 1 else parts
            )
        _memory(ax, step + 1, holds)
    for start, stop, half, text in (
        (0, RANKS - 1, "reduce_scatter", "reduce-scatter: add and pass on"),
        (RANKS - 1, steps, "all_gather", "all-gather: pass on what is finished"),
    ):
        ax.plot(
            [start + 0.12, stop - 0.12],
            [-0.78, -0.78],
            color=look.PHASES[half],
            linewidth=5,
            solid_capstyle="butt",
        )
        ax.text(
            (start + stop) / 2,
            -0.88,
            text,
            ha="center",
            va="bottom",
            fontsize=11.5,
            fontweight="bold",
            color=look.PHASES[half],
        )
    for rank in range(RANKS):
        ax.text(
            -0.34,
            rank,
            f"rank {rank}",
            ha="right",
            va="center",
            fontsize=12,
            fontweight="bold",
            color=look.INK,
        )
    for step in range(steps):
        ax.text(
            step + 0.5,
            RANKS - 0.28,
            f"step {step % (RANKS - 1)}",
            ha="center",
            va="center",
            fontsize=10.5,
            color=look.SOFT,
        )
    ax.set_xlim(-0.95, steps + 0.35)
    ax.set_ylim(RANKS - 0.1, -1.15)
    look.bare(ax)


def _place(moment: int, rank: int, chunk: int) -> tuple[float, float]:
    """Return the middle of a chunk's square: four stand in a column, c0 at the top."""
    return float(moment), rank + (chunk - (RANKS - 1) / 2) * CELL


def _memory(ax: Any, moment: int, holds: list[list[set[int]]]) -> None:
    """Draw what every rank holds at one moment."""
    for rank, chunks in enumerate(holds):
        for chunk, parts in enumerate(chunks):
            x, y = _place(moment, rank, chunk)
            _box(ax, x, y, f"c{chunk}", len(parts))


def _box(ax: Any, x: float, y: float, text: str, parts: int, height: float = CELL - 0.034) -> None:
    """Draw one chunk: the more ranks' parts it holds, the darker; green when it holds all."""
    done = parts == RANKS
    shade = 0.10 + 0.72 * (parts - 1) / (RANKS - 1)
    ax.add_patch(
        Rectangle(
            (x - 0.125, y - height / 2),
            0.25,
            height,
            linewidth=0.8,
            zorder=3,
            facecolor=look.MEMORY["optimizer"] if done else (0.23, 0.44, 0.71, shade),
            edgecolor="white" if done else "#9db4d0",
        )
    )
    ax.text(
        x,
        y,
        text,
        ha="center",
        va="center_baseline",
        fontsize=9,
        zorder=4,
        color="white" if done or parts > 2 else look.INK,
    )


def _shades(ax: Any) -> None:
    """Draw the legend of the boxes' colours."""
    for parts in range(1, RANKS + 1):
        x = 0.4 + 1.55 * (parts - 1)
        _box(ax, x, 0.5, "", parts, height=0.5)
        name = {1: "one rank's part", RANKS: "all four: finished"}.get(
            parts, f"sum of {parts} parts"
        )
        ax.text(x + 0.2, 0.5, name, va="center_baseline", fontsize=10, color=look.SOFT)
    ax.set_xlim(-0.95, 2 * (RANKS - 1) + 0.35)
    ax.set_ylim(0, 1)
    look.bare(ax)


def _arrow(ax: Any, step: int, message: dict[str, Any], color: str) -> None:
    """Draw one message from the sender's box to the receiver's box one moment later; past the edge
    it enters again at the other side."""
    x0, y0 = _place(step, message["src"], message["chunk"])
    x1, y1 = _place(step + 1, message["dst"], message["chunk"])
    start = (x0 + 0.14, y0)
    stop = (x1 - 0.14, y1)
    if message["dst"] > message["src"]:
        _draw_arrow(ax, start, stop, color)
        return
    # leaves at the bottom, enters at the top
    low = RANKS - 0.46
    high = -0.6
    middle = x0 + 0.42
    ax.plot(
        [start[0], middle],
        [start[1], low],
        color=color,
        linewidth=1.7,
        linestyle=(0, (3, 1.6)),
        zorder=2,
    )
    _draw_arrow(ax, (x1 - 0.42, high), stop, color, style=(0, (3, 1.6)))
    ax.text(
        middle + 0.03,
        low,
        f"c{message['chunk']} to r{message['dst']}",
        fontsize=8,
        color=color,
        va="bottom",
    )


def _draw_arrow(
    ax: Any, start: tuple[float, float], stop: tuple[float, float], color: str, style: Any = "-"
) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start,
            stop,
            arrowstyle="-|>",
            mutation_scale=11,
            shrinkA=0,
            shrinkB=0,
            color=color,
            linewidth=1.7,
            linestyle=style,
            zorder=2,
        )
    )


def _bars(ax: Any, measured: dict[str, list[float]]) -> None:
    """Draw the busiest rank's measured bytes by number of ranks, and the formulas as lines."""
    sizes = np.arange(1, MOST + 1)
    look.quiet(ax, grid="y")
    ax.bar(sizes - 0.2, measured["plain"], 0.38, color="#c9ced6", label="plain, rank 0 (measured)")
    ax.bar(
        sizes + 0.2,
        measured["ring"],
        0.38,
        color=look.PHASES["reduce_scatter"],
        label="ring, every rank (measured)",
    )
    ax.plot(
        sizes, sizes - 1, color=look.SOFT, linewidth=1.2, marker="o", markersize=3.5, label="P - 1"
    )
    ax.plot(
        sizes,
        2 * (sizes - 1) / sizes,
        color=look.PHASES["all_gather"],
        linewidth=1.6,
        marker="o",
        markersize=3.5,
        label="2 (P - 1) / P",
    )
    ax.set_ylim(0, 1.3 * (MOST - 1))
    ax.set_xticks(sizes)
    ax.set_xlabel("ranks P", color=look.SOFT, fontsize=10.5)
    ax.legend(frameon=False, fontsize=9.5, loc="upper left", labelcolor=look.INK)
    look.caption(ax, "Bytes the busiest rank sends,\nin units of the tensor")


def mermaid(messages: list[dict[str, Any]]) -> str:
    """Return the recorded messages as a Mermaid sequence diagram, in the form that the notes use
    (N2:50)."""
    size = max(message["src"] for message in messages) + 1
    lines = [
        "sequenceDiagram",
        *(f"    participant r{rank} as rank {rank}" for rank in range(size)),
    ]
    for message in messages:
        if message["src"] == 0:
            half = "reduce-scatter" if message["step"] < size - 1 else "all-gather"
            lines.append(
                f"    Note over r0, r{size - 1}: {half}, step {message['step'] % (size - 1)}"
            )
        parts = "+".join(str(rank) for rank in message["holds"])
        lines.append(f"    r{message['src']}->>r{message['dst']}: c{message['chunk']} ({parts})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    draw_figure(lesson.record_messages, draw, HERE, size=RANKS)
