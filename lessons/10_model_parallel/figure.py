"""The figure of lesson 10: one recorded step of model parallelism, and what more ranks do to its
length and idle time.

python lessons/10_model_parallel/figure.py [--out DIR]      # figure.png
"""

from pathlib import Path
from typing import Any

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.nn import GPTConfig

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "10")
SIZES = (1, 2, 4)
ROUNDS = 6
STEPS = 4
CONFIG = GPTConfig(vocabulary=128, context=64, layers=8, width=128, heads=4)
COLORS = {
    "forward": look.PHASES["forward"],
    "backward": look.PHASES["backward"],
    "wait for the activation": look.PHASES["wait"],
    "wait for the gradient": look.PHASES["wait"],
    "optimizer": look.PHASES["optimizer"],
}


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 the spans of the quickest step on 1, 2 and 4 ranks."""
    runs: dict[str, list[Any]] = {str(size): [] for size in SIZES}
    parts = [group.split(0 if group.rank < size else 1) for size in SIZES]
    for _ in range(ROUNDS):  # in turn: other programs then slow all sizes equally
        for size, part in zip(SIZES, parts, strict=True):
            if group.rank < size:
                runs[str(size)].append(lab.recorded_step(part, CONFIG, steps=STEPS, sequences=8))
            group.barrier()
    return (
        {size: min(steps, key=lab.length) for size, steps in runs.items()}
        if group.rank == 0
        else {}
    )


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded."""
    figure = look.new_figure(
        13.5,
        5.2,
        "One step of model parallelism on 4 ranks, as recorded",
        f"GPT of {CONFIG.layers} layers, 2 on each rank, width {CONFIG.width}; quickest of "
        f"{ROUNDS * STEPS} steps. One rank at a time goes forward or backward. Circled: the notes' step "
        "(N0:222); ①, the cut, comes before.",
    )
    _gantt(figure.add_axes((0.06, 0.14, 0.6, 0.6)), recorded[str(SIZES[-1])])
    _lengths(figure.add_axes((0.735, 0.56, 0.25, 0.2)), recorded)
    _idle(figure.add_axes((0.735, 0.14, 0.25, 0.22)), recorded)
    look.save(figure, folder)


def _gantt(ax: Any, ranks: list[Any]) -> None:
    look.quiet(ax, grid="x")
    for rank, spans in enumerate(ranks):
        for name, start, stop in spans:
            if name in COLORS:
                ax.barh(
                    rank,
                    1e3 * (stop - start),
                    0.6,
                    1e3 * start,
                    color=COLORS[name],
                    edgecolor="white",
                    linewidth=0.7,
                )
            if name in ("forward", "backward"):
                look.step_number(
                    ax,
                    500 * (start + stop),
                    rank,
                    2,
                    look.INK if name == "forward" else "white",
                    ha="center",
                )
    names = {
        "forward": "forward",
        "backward": "backward",
        "wait for the gradient": "waits for another rank",
        "optimizer": "optimizer",
    }
    ax.legend(
        [look.patch(COLORS[name]) for name in names],
        list(names.values()),
        frameon=False,
        fontsize=10,
        ncols=4,
        loc="upper left",
        bbox_to_anchor=(-0.02, 1.15),
        labelcolor=look.INK,
        handlelength=1.3,
    )
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))], fontsize=12)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.set_xlabel("milliseconds", color=look.SOFT, fontsize=10.5)


def _lengths(ax: Any, recorded: dict[str, Any]) -> None:
    look.quiet(ax, grid="x")
    lengths = [1e3 * lab.length(recorded[str(size)]) for size in SIZES]
    ax.barh(range(len(SIZES)), lengths, 0.6, color=look.RANKS[0])
    for row, length in enumerate(lengths):
        ax.text(length * 1.02, row, f"{length:.0f} ms", va="center", fontsize=9.5, color=look.INK)
    ax.set_xlim(0, 1.25 * max(lengths))
    ax.set_yticks(range(len(SIZES)), [f"{size} rank{'s' * (size > 1)}" for size in SIZES])
    ax.invert_yaxis()
    look.caption(ax, "Forward and backward take")


def _idle(ax: Any, recorded: dict[str, Any]) -> None:
    look.quiet(ax, grid="x")
    for row, size in enumerate(SIZES):
        measured = lab.idle(recorded[str(size)])
        ideal = (size - 1) / size
        ax.barh(row, 100 * measured, 0.6, color=look.PHASES["wait"])
        ax.plot([100 * ideal] * 2, [row - 0.38, row + 0.38], color=look.INK, linewidth=2)
        ax.text(
            max(100 * measured, 100 * ideal) + 2,
            row,
            f"{measured:.0%}",
            va="center",
            fontsize=9.5,
            color=look.INK,
        )
    ax.set_xlim(0, 100)
    ax.set_yticks(range(len(SIZES)), [f"{size} rank{'s' * (size > 1)}" for size in SIZES])
    ax.invert_yaxis()
    ax.set_xlabel("% of the ranks' time; line: (p-1)/p", color=look.SOFT, fontsize=10)
    look.caption(ax, "Idle")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=SIZES[-1], transport="auto")
