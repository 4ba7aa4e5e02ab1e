"""The figure of lesson 15: gradients in memory through a step, of ZeRO-1 and ZeRO-2, with the
buckets that travel.

python lessons/15_zero2/figure.py [--out DIR]
"""

from pathlib import Path
from typing import Any

from minidist.comm.group import Group
from minidist.lessons import figures as look
from minidist.lessons import zero_figures as shapes
from minidist.lessons import zero_lab as lab
from minidist.lessons.running import draw_figure
from minidist.observe.samples import stairs

RANKS = 4
HELD = ("parameters", "gradients", "optimizer", "activations")


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 its last step under ZeRO-1 and under ZeRO-2."""
    return {
        "steps": [
            [stage, ranks[0]] for stage in (1, 2) for ranks in [lab.recorded(group, stage)] if ranks
        ],
        "bytes": lab.parameter_bytes(lab.MEASURED)[1],
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded."""
    figure = look.new_figure(
        13.5,
        6.6,
        "ZeRO-2: gradients come, travel and go, bucket by bucket",
        f"Rank 0 of {RANKS} through the quickest of 11 recorded steps; float32 with Adam, "
        f"{lab.MEASURED.layers} layers of width {lab.MEASURED.width}. Below: gradients alone. "
        "Steps as in N0:350.",
    )
    steps = recorded["steps"]
    top = (
        1.08
        * max(sum(now[name] for name in HELD) for _, step in steps for _, now in step["samples"])
        / 2**20
    )
    for place, (stage, step) in enumerate(steps):
        ax = figure.add_axes((0.055 + 0.49 * place, 0.50, 0.43, 0.27))
        shapes.memory_over_time(ax, step, HELD, top=top)
        look.caption(ax, f"{lab.NAMES[stage]}, MiB")
        _gradients(
            figure.add_axes((0.055 + 0.49 * place, 0.09, 0.43, 0.27)),
            stage,
            step,
            recorded["bytes"],
        )
    shapes.legend(figure, HELD, (0.045, 0.875))
    look.save(figure, folder)


def _gradients(ax: Any, stage: int, step: dict[str, Any], nbytes: int) -> None:
    """Draw the bytes of gradients over time, and above them each bucket's reduce-scatter."""
    start = step["start"]
    stop = step["stop"]
    samples = [(moment, now) for moment, now in step["samples"]]
    times, values = stairs(samples, "gradients", start=start, stop=stop)
    heights = [value / 2**20 for value in values]
    whole = nbytes / 2**20
    look.quiet(ax, grid="y")
    ax.fill_between(times, heights, step="post", color=look.MEMORY["gradients"], linewidth=0)
    for span in step["spans"]:
        if span["name"].startswith("reduce_scatter bucket") and span["start"] >= start:
            left = 1e3 * (span["start"] - start)
            width = 1e3 * (span["stop"] - span["start"])
            ax.barh(
                1.16 * whole,
                width,
                0.13 * whole,
                left,
                color=look.PHASES["reduce_scatter"],
                edgecolor="white",
                linewidth=0.4,
            )
    if stage == 2:
        shard = whole / RANKS
        ahead = 2 * lab.BUCKET / 2**20
        ax.axhline(shard, color=look.INK, linewidth=1, linestyle=":")
        ax.axhline(shard + ahead, color=look.INK, linewidth=1, linestyle="--")
        ax.text(
            times[-1],
            shard + ahead + 0.03,
            "shard + two buckets",
            ha="right",
            va="bottom",
            fontsize=9.5,
            color=look.INK,
        )
        ax.text(
            times[-1], shard + 0.03, "shard", ha="right", va="bottom", fontsize=9.5, color=look.INK
        )
    ax.set_xlim(0, times[-1])
    ax.set_ylim(0, 1.3 * whole)
    ax.set_xlabel("milliseconds", color=look.SOFT, fontsize=10.5)
    look.caption(
        ax, f"{lab.NAMES[stage]}: gradients, MiB; blue: step 5, each bucket's reduce-scatter"
    )


if __name__ == "__main__":
    draw_figure(record, draw, Path(__file__).resolve().parent, size=RANKS, transport="auto")
