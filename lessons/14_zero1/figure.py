"""Draw the figures of lesson 14: a rank's memory through a step of DDP and of ZeRO-1, and by ranks.

paper.png is the chart of the ZeRO paper, which N0:299 shows, in its own size: bars by the formula.

The axis counts arrays, not milliseconds: four ranks on few cores take turns, and that is not what
this figure is about.

    python lessons/14_zero1/figure.py [--out DIR]
"""

from pathlib import Path
from typing import Any

from minidist.comm.group import Group
from minidist.lessons import figures as look
from minidist.lessons import zero_figures as shapes
from minidist.lessons import zero_lab as lab
from minidist.lessons.running import draw_figure
from minidist.parallel.zero.memory_formula import MIXED, STATE, state_bytes

RANKS = 4
HELD = (*STATE, "activations")
PAPER = {"parameters": 7_500_000_000, "ranks": 64}
FORMULAS = ("(2 + 2 + K)Ψ", "2Ψ + 2Ψ + KΨ/N", "2Ψ + (2 + K)Ψ/N", "(2 + 2 + K)Ψ/N")


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 its quickest step under DDP and ZeRO-1, and the bytes per parameter of
    ZeRO-1 on 1, 2, … ranks."""
    steps = {stage: lab.recorded(group, stage) for stage in (0, 1)}
    parameters, _ = lab.parameter_bytes(lab.MEASURED)
    by_size = {}
    for size in (1, 2, 3, 4):
        part = group.split(0 if group.rank < size else None)
        if part is not None:
            seen = lab.memory(part, 1)
            by_size[size] = [seen[name]["now"] / parameters for name in STATE]
    return {
        "steps": {stage: ranks[0] for stage, ranks in steps.items() if ranks},
        "by_size": by_size,
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded, and paper.png from the formula."""
    _paper(folder)
    figure = look.new_figure(
        13.5,
        5.0,
        "ZeRO-1 divides the optimizer's state, and nothing else",
        f"Rank 0 of {RANKS} through a recorded step, from array to array that came or went; "
        f"float32 with Adam, {lab.MEASURED.layers} layers of width {lab.MEASURED.width}. "
        "Right: on 1 to 4 ranks. Steps as in N0:331.",
    )
    top = (
        1.08
        * max(
            sum(now[name] for name in HELD)
            for step in recorded["steps"].values()
            for _, now in step["samples"]
        )
        / 2**20
    )
    for place, (stage, step) in enumerate(recorded["steps"].items()):
        ax = figure.add_axes((0.055 + 0.315 * place, 0.12, 0.275, 0.58))
        shapes.memory_by_change(ax, step, HELD, top=top)
        look.caption(ax, f"{lab.NAMES[stage]}, MiB")
    _by_size(figure.add_axes((0.70, 0.12, 0.285, 0.58)), recorded["by_size"])
    shapes.legend(figure, HELD, (0.045, 0.845))
    look.save(figure, folder)


def _paper(folder: Path) -> None:
    """Draw what one device holds between steps under each stage, in GB."""
    billions = PAPER["parameters"] / 1e9
    figure = look.new_figure(
        11.0,
        3.9,
        "What one device holds: the chart of N0:299, by the formula",
        f"Ψ = {billions:g} billion parameters, N = {PAPER['ranks']} devices, mixed precision with "
        f"Adam: K = {MIXED.optimizer} bytes of optimizer state a parameter.",
    )
    ax = look.quiet(figure.add_axes((0.105, 0.12, 0.84, 0.56)), grid="x")
    for stage, formula in enumerate(FORMULAS):
        held = state_bytes(PAPER["parameters"], MIXED, zero=stage, ranks=PAPER["ranks"])
        left = 0.0
        for name in STATE:
            ax.barh(
                stage,
                held[name] / 1e9,
                0.62,
                left,
                color=look.MEMORY[name],
                edgecolor="white",
                linewidth=0.6,
            )
            left += held[name] / 1e9
        ax.text(
            left + 1, stage, f"{left:.1f} GB   {formula}", va="center", fontsize=11, color=look.INK
        )
    ax.set_yticks(
        range(len(FORMULAS)), [lab.NAMES[stage] for stage in range(len(FORMULAS))], fontsize=11
    )
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(FORMULAS) - 0.5, -0.5)
    ax.set_xlim(0, 155)
    ax.set_xlabel("GB", color=look.SOFT, fontsize=10.5, labelpad=1)
    shapes.legend(figure, STATE, (0.095, 0.79))
    look.save(figure, folder, "paper.png")


def _by_size(ax: Any, by_size: dict[int, list[float]]) -> None:
    """Draw the bytes per parameter as bars, one for each number of ranks."""
    look.quiet(ax)
    below = [0.0] * len(by_size)
    for index, name in enumerate(STATE):
        heights = [each[index] for each in by_size.values()]
        ax.bar(range(len(by_size)), heights, 0.62, bottom=below, color=look.MEMORY[name])
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, total in enumerate(below):
        ax.text(place, total + 0.25, f"{total:.1f}", ha="center", fontsize=11, color=look.INK)
    ax.axhline(8, color=look.SOFT, linewidth=1, linestyle="--")
    ax.set_xticks(range(len(by_size)), [f"{size} rank{'s' * (size > 1)}" for size in by_size])
    ax.set_yticks([0, 4, 8, 12, 16])
    ax.set_ylim(0, 18)
    look.caption(ax, "ZeRO-1, bytes a parameter; dashed: limit")


if __name__ == "__main__":
    draw_figure(record, draw, Path(__file__).resolve().parent, size=RANKS, transport="auto")
