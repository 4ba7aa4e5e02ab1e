"""Draw the figures of lesson 08: memory over time for 1, 2 and 4 passes, as recorded; and what each
strategy sends.

python lessons/08_accumulation/figure.py [--out DIR]      # figure.png and traffic.png
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
passing = load_module(HERE / "experiments.py", "08")
# From the bottom up: the category that stays longest is first.
LAYERS = ("parameters", "optimizer", "gradients", "activations")
SHADES = {1: "#bcd0e8", 2: "#7fa3d1", 4: "#2f5d9b"}
PASSES = (1, 2, 4)
STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from the recorded account, and traffic.png from the ledger."""
    config = passing.CONFIG
    figure = look.new_figure(
        11.0,
        6.2,
        "One batch in 1, 2 and 4 passes, as recorded",
        f"What is alive during a step, noted at every module and gradient. GPT of {config.layers} "
        f"layers, width {config.width}, {passing.ROWS} × {config.context} tokens.",
    )
    top = max(entry["total"] for run in recorded["memory"].values() for entry in run) / 2**20
    for index, passes in enumerate(PASSES):
        _mountain(
            figure.add_axes((0.075 + 0.31 * index, 0.08, 0.28, 0.65)),
            passes,
            recorded["memory"][passes],
            top,
            first=not index,
        )
    look.save(figure, folder)
    figure = look.new_figure(
        9.0,
        5.4,
        "What each strategy sends in A passes",
        f"One step on {recorded['size']} ranks, all ranks together, counted by the ledger.",
    )
    _traffic(figure.add_axes((0.09, 0.09, 0.88, 0.68)), recorded["traffic"], recorded["size"])
    look.save(figure, folder, "traffic.png")


def _mountain(
    ax: Any, passes: int, record: list[dict[str, int]], top: float, *, first: bool
) -> None:
    """Draw the bytes of each category, stacked, over the recorded moments of one step."""
    look.quiet(ax, grid="y")
    heights = [np.array([entry[name] for entry in record]) / 2**20 for name in LAYERS]
    ax.stackplot(
        np.arange(len(record)),
        heights,
        colors=[look.MEMORY[name] for name in LAYERS],
        step="post",
        linewidth=0,
    )
    ax.set_ylim(0, 1.06 * top)
    ax.set_xlim(0, len(record) - 1)
    ax.set_xticks([])
    ax.set_xlabel(
        "forward and backward" if passes == 1 else f"{passes} × forward and backward",
        fontsize=10.5,
        color=look.SOFT,
    )
    peak = max(float(value) for value in heights[-1])
    look.caption(ax, f"{passes} pass{'es' * (passes > 1)}: activations ≤ {peak:.1f} MiB")
    if first:
        ax.set_ylabel("MiB alive", fontsize=10.5, color=look.SOFT)
        ax.legend(
            [look.patch(look.MEMORY[name]) for name in reversed(LAYERS)],
            list(reversed(LAYERS)),
            frameon=False,
            fontsize=10,
            labelcolor=look.INK,
            loc="upper left",
            ncols=4,
            bbox_to_anchor=(-0.08, 1.2),
            handlelength=1.2,
            columnspacing=1.4,
        )
    else:
        ax.tick_params(labelleft=False)


def _traffic(ax: Any, runs: list[dict[str, Any]], size: int) -> None:
    """Draw the elements sent in a step in units of Ψ(P-1), a group of bars per strategy."""
    look.quiet(ax, grid="y")
    for run in runs:
        unit = run["parameters"] * (size - 1)
        place = run["zero"] + 0.27 * (PASSES.index(run["passes"]) - 1)
        bar = ax.bar(place, run["elements"] / unit, 0.25, color=SHADES[run["passes"]])
        ax.bar_label(bar, [f"{run['elements'] / unit:g}"], padding=2, fontsize=9.5, color=look.INK)
    ax.set_xticks(range(4), STRATEGIES, fontsize=10.5)
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel("elements sent in a step, in Ψ(P-1)", fontsize=10.5, color=look.SOFT)
    ax.legend(
        [look.patch(SHADES[passes]) for passes in PASSES],
        [f"A = {passes}" for passes in PASSES],
        frameon=False,
        fontsize=10,
        labelcolor=look.INK,
        loc="upper left",
    )


if __name__ == "__main__":
    draw_figure(passing.record, draw, HERE, size=4)
