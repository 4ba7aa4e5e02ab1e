"""The figure of lesson 20: where each byte lies during a step, with three stores, and what a slow
disk does meanwhile.

python lessons/20_offload/figure.py [--out DIR]      # figure.png
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "20")
LEVELS = ("device", "host", "disk")
LAYERS = ("parameters", "optimizer", "gradients", "activations", "workspace")


def record(group: Group) -> dict[str, Any]:
    """Return the accounts' samples of a step with each store, and the spans of a step over a slow
    disk."""
    return {
        "homes": {
            name: lab.train(group, plan, watch=True)["moments"] for name, plan in lab.PLANS.items()
        },
        "slow": lab.over_a_slow_disk(group),
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded."""
    config = lab.CONFIG
    figure = look.new_figure(
        13.5,
        9.2,
        "Where each byte lies during a step: device, host and disk, as recorded",
        f"GPT of {config.layers} layers, width {config.width}, {lab.SEQUENCES} sequences of "
        f"{config.context} tokens, float32, AdamW. MiB; asked at every module, on the way forward "
        "and back, and in the update.",
    )
    tops = {
        level: 1.16
        * max(
            sum(moment[level][name] for name in LAYERS)
            for moments in recorded["homes"].values()
            for moment in moments
        )
        / 2**20
        for level in LEVELS
    }
    for column, (name, moments) in enumerate(recorded["homes"].items()):
        for row, level in enumerate(LEVELS):
            ax = figure.add_axes((0.075 + 0.312 * column, 0.715 - 0.19 * row, 0.285, 0.145))
            _stack(ax, moments, level, tops[level])
            if row == 0:
                look.caption(ax, name)
            if column == 0:
                ax.set_ylabel(level, fontsize=11.5, fontweight="bold", color=look.INK)
    figure.legend(
        [look.patch(look.MEMORY[name]) for name in LAYERS],
        [*LAYERS[:-1], "workspace: buffers"],
        ncols=5,
        frameon=False,
        fontsize=10.5,
        labelcolor=look.INK,
        loc="upper left",
        bbox_to_anchor=(0.065, 0.31),
    )
    _lanes(figure.add_axes((0.135, 0.065, 0.85, 0.155)), recorded["slow"])
    look.save(figure, folder)


def _stack(ax: Any, moments: list[dict[str, Any]], level: str, top: float) -> None:
    """Draw the bytes of one level, stacked, over the recorded moments."""
    heights = [np.array([moment[level][name] for moment in moments]) / 2**20 for name in LAYERS]
    look.quiet(ax, grid="y")
    ax.stackplot(
        np.arange(len(moments)),
        heights,
        colors=[look.MEMORY[name] for name in LAYERS],
        step="post",
        linewidth=0,
    )
    phases = [moment["phase"] for moment in moments]
    for phase in ("forward", "backward", "optimizer"):
        start = phases.index(phase)
        ax.axvline(start, color=look.GRID, linewidth=0.9, zorder=0)
        if level == "device":
            ax.text(start, top, f" {phase}", fontsize=9, color=look.SOFT, va="top")
    ax.set_ylim(0, top)
    ax.set_xlim(0, len(moments) - 1)
    ax.set_xticks([])


def _lanes(ax: Any, slow: dict[str, Any]) -> None:
    """Draw what the device and the disk did, by milliseconds."""
    look.quiet(ax, grid="x")
    begin = slow["begin"]
    colors = {
        "forward": look.PHASES["forward"],
        "backward": look.PHASES["backward"],
        "optimizer": look.PHASES["optimizer"],
    }
    for span in slow["spans"]:
        left = 1e3 * (span["start"] - begin)
        width = 1e3 * (span["stop"] - span["start"])
        if span["row"] == "compute" and span["name"] in colors:
            ax.barh(0, width, 0.62, left, color=colors[span["name"]])
            ax.text(left, -0.42, f" {span['name']}", color=look.SOFT, fontsize=9.5, va="bottom")
        elif span["row"] == "compute" and span["name"].startswith("wait"):
            ax.barh(0, width, 0.62, left, color=look.PHASES["wait"], zorder=3)
        elif span["row"] == "moves" and span["name"].split()[0] in ("read", "write"):
            reads = span["name"].startswith("read")
            ax.barh(
                1 if reads else 2,
                width,
                0.62,
                left,
                color=look.RANKS[0 if reads else 1],
                edgecolor="white",
                linewidth=0.8,
            )
            ax.text(
                left + width / 2,
                1 if reads else 2,
                str(int(span["name"].split(".")[-1]) + 1),
                ha="center",
                va="center",
                fontsize=8,
                color="white",
            )
    ax.set_yticks(range(3), ["compute", "disk reads", "disk writes"], fontsize=10.5)
    for label in ax.get_yticklabels():
        label.set_color(look.INK)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(2.5, -0.85)
    end = slow["seconds"]
    last = max(span["stop"] for span in slow["spans"]) - begin
    ax.axvline(1e3 * end, color=look.SOFT, linewidth=1, linestyle="--")
    ax.set_xlim(0, 1e3 * max(end, last))
    ax.set_xlabel("milliseconds", fontsize=10, color=look.SOFT)
    look.caption(
        ax,
        f"One step of eight units (1 to 8) over a disk of {1e3 * lab.ACCESS:.0f} ms an access; "
        "light: the device waits; dashed: the step ends",
    )


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=1)
