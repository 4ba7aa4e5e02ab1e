"""The figure of lesson 22: sectors by stride, bytes by tokens, and rungs under a roofline, from
counted launches.

python lessons/22_attention_kernels/figure.py [--out DIR]      # figure.png
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "22")
STRIDES = (1, 2, 4, 8)
TOKENS = {1: (32, 64, 96), 2: (32, 64, 128, 256), 3: (64, 128, 256)}
COLOURS = {1: "#c44e52", 2: "#e08e3c", 3: "#3b6fb6"}
LADDER = "#5b9a68"
RUNG_TOKENS = 64


def record(group: Group) -> dict[str, Any]:
    """Return the counted sectors, bytes and intensities."""
    counts = {
        version: {tokens: lab.attention_count(version, tokens) for tokens in TOKENS[version]}
        for version in TOKENS
    }
    return {
        "sectors": {stride: lab.one_warp(stride).sectors for stride in STRIDES},
        "bytes": {
            version: [
                (tokens, count.seen.loads.bytes + count.seen.stores.bytes)
                for tokens, count in each.items()
            ]
            for version, each in counts.items()
        },
        "attention": {version: counts[version][RUNG_TOKENS] for version in counts},
        "ladder": {version: lab.matmul_count(version) for version in lab.LADDER},
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was counted."""
    figure = look.new_figure(
        13.5,
        5.8,
        "What kernels move, counted on the CPU build, and what that allows",
        f"One load of a warp; one head of {lab.HEAD} columns; a roof as the data sheet states it, "
        "and marks where counted bytes put them. Measured on a GPU: benchmarks/results/gpu.",
    )
    _sectors(figure.add_axes((0.025, 0.12, 0.225, 0.62)), recorded["sectors"])
    _bytes(figure.add_axes((0.305, 0.13, 0.26, 0.61)), recorded["bytes"])
    _roofline(figure.add_axes((0.635, 0.13, 0.35, 0.61)), recorded)
    look.save(figure, folder)


def _sectors(ax: Any, sectors: dict[int, int]) -> None:
    """Draw 32 sectors for each stride, those fetched filled, and in each the bytes that were asked
    for darker."""
    look.bare(ax)
    look.caption(ax, "Sectors fetched for 32 floats")
    for row, (stride, fetched) in enumerate(sectors.items()):
        asked = 128 / (32 * fetched)
        for sector in range(32):
            x = sector % 16
            y = -3.2 * row - 1.05 * (sector // 16)
            there = sector < fetched
            ax.add_patch(
                Rectangle(
                    (x, y), 0.9, 0.9, facecolor="#cfe0f2" if there else look.GRID, edgecolor="none"
                )
            )
            if there:
                ax.add_patch(
                    Rectangle((x, y), 0.9, 0.9 * asked, facecolor=COLOURS[3], edgecolor="none")
                )
        ax.text(
            0,
            -3.2 * row + 1.1,
            f"stride {stride}: {fetched} sectors, {100 * asked:g} % asked for"
            if stride > 1
            else f"neighbours: {fetched} sectors, all bytes asked for",
            fontsize=10,
            color=look.INK,
        )
    ax.set_xlim(0, 16)
    ax.set_ylim(-3.2 * len(sectors) + 1.6, 2.2)


def _bytes(ax: Any, counted: dict[int, list[tuple[int, int]]]) -> None:
    """Draw counted bytes as marks, their formulas as lines."""
    look.quiet(ax, grid="y")
    look.caption(ax, "Bytes read and written, by tokens")
    for version, points in counted.items():
        tokens, moved = zip(*points, strict=True)
        line = np.array([n for n in (32, 64, 128, 256, 512, 1024, 2048) if n >= lab.SIDES[version]])
        ax.plot(
            line,
            [sum(lab.attention_bytes(version, int(n))) for n in line],
            color=COLOURS[version],
            linewidth=1.4,
        )
        ax.plot(tokens, moved, "o", color=COLOURS[version], markersize=7, label=lab.RUNGS[version])
    line = np.array([32, 2048])
    ax.plot(
        line,
        4 * line * lab.HEAD * 4,
        color=look.SOFT,
        linewidth=1.2,
        linestyle=":",
        label="q, k, v, y once, float32",
    )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([32, 128, 512, 2048], ["32", "128", "512", "2048"])
    ax.set_xlabel("tokens; dots counted, lines formulas", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("bytes", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10, labelcolor=look.INK, loc="upper left")


def _roofline(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw the stated roofs, and each version of a kernel at its own place."""
    look.quiet(ax, grid="y")
    look.caption(ax, f"Under the roof of an {lab.H100.name}, as stated")
    machine = lab.H100
    reach = np.geomspace(0.1, 2000, 200)
    for rate, peak in machine.rates.items():
        ax.plot(reach, [machine.roof(x, rate) / 1e12 for x in reach], color=look.INK, linewidth=1.6)
        above = rate == "tensor cores"
        ax.text(
            1900,
            peak / 1e12 * (1.12 if above else 0.9),
            f"{rate}: {peak / 1e12:.0f} TFLOP/s",
            ha="right",
            va="bottom" if above else "top",
            fontsize=10,
            color=look.INK,
        )
    ax.text(
        0.62,
        3.9,
        f"memory: {machine.memory / 1e12:.2f} TB/s",
        rotation=39,
        fontsize=10,
        color=look.INK,
        ha="center",
        va="center",
    )
    for version, count in recorded["attention"].items():
        away, side = ((-11, 6), "right") if version == 3 else ((8, -14), "left")
        _mark(ax, count, "o", COLOURS[version], f"attention v{version}", away, side)
    for version, count in recorded["ladder"].items():
        text = {3: "", 4: "v3, v4"}.get(version, f"v{version}")
        away, side = ((8, -27), "left") if version == 1 else ((-11, 4), "right")
        _mark(ax, count, "s", LADDER, f"product {text}" if text else "", away, side)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(0.2, 3000)
    ax.set_xlabel("operations a byte of global memory", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("TFLOP/s at most", fontsize=10.5, color=look.SOFT)


def _mark(
    ax: Any,
    count: Any,
    marker: str,
    colour: str,
    text: str,
    away: tuple[int, int],
    side: str = "left",
) -> None:
    """Draw one version where its intensity reaches the roof."""
    at = (count.intensity, lab.H100.roof(count.intensity, count.rate) / 1e12)
    ax.plot(
        *at,
        marker,
        color=colour,
        markersize=7 if marker == "o" else 12,
        zorder=3,
        markeredgewidth=1.8,
        markerfacecolor=colour if marker == "o" else "none",
    )
    ax.annotate(
        text, at, textcoords="offset points", xytext=away, fontsize=9.5, color=colour, ha=side
    )


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=1)
