"""The figures of lesson 19, as recorded: activations over one step and peaks; inputs kept in other
ways.

python lessons/19_activations/figure.py [--out DIR]      # figure.png, kept.png
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.parallel.memory.kept_inputs import InputKeeper

HERE = Path(__file__).resolve().parent
lab, kept = (load_module(HERE / name, "19") for name in ("experiments.py", "kept.py"))
COLOURS = {"none": "#c44e52", "scores": "#e08e3c", "all": "#3b6fb6"}
NAMES = {
    "none": "everything kept",
    "scores": "scores computed again",
    "all": "blocks' insides computed again",
}
MIB = 2**20
KIB = 2**10
RANKS = 4
KEPT = ("whole", "8bit", "shard", "8bit,shard", "offload")


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 one step's account, the bytes of an input on all ranks of tp, and what
    rounding and pooling lose."""
    alone = lab.record(group) if group.rank == 0 else {}
    group.barrier()
    steps = [kept.step_with(group, way, group.size) for way in KEPT]
    if group.rank > 0:
        return {}
    return alone | {
        "steps": steps,
        "chance": kept.errors(InputKeeper(["8bit"])),
        "nearest": kept.errors(kept.Nearest(["8bit"])),
        "found": list(map(kept.found_by_query, kept.RATIOS)),
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png and kept.png from what was recorded."""
    draw_kept(recorded, folder)
    config = lab.CONFIG
    figure = look.new_figure(
        13.5,
        5.4,
        "Activations over one step: keep them, or make them again, as recorded",
        f"GPT of {config.layers} layers, width {config.width}, {lab.BATCH} sequences of "
        f"{config.context} tokens, float32. The account asked at every module and every gradient.",
    )
    _curves(figure.add_axes((0.055, 0.13, 0.56, 0.64)), recorded["curves"])
    _peaks(figure.add_axes((0.70, 0.13, 0.27, 0.64)), recorded)
    look.save(figure, folder)


def _curves(ax: Any, curves: dict[str, Any]) -> None:
    """Draw the bytes alive over the step; a dot where forward ends."""
    look.quiet(ax, grid="y")
    for which, curve in curves.items():
        seconds, alive = np.array(curve["moments"]).T
        ax.plot(
            1e3 * seconds,
            alive / MIB,
            drawstyle="steps-post",
            color=COLOURS[which],
            linewidth=1.8,
            label=NAMES[which],
        )
        at_turn = alive[np.searchsorted(seconds, curve["turn"]) - 1]
        ax.plot([1e3 * curve["turn"]], [at_turn / MIB], "o", color=COLOURS[which], markersize=7)
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    ax.set_xlabel(
        "milliseconds on a processor; the dot is the end of forward", fontsize=10.5, color=look.SOFT
    )
    ax.set_ylabel("MiB of activations alive", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10.5, loc="upper right")


def _peaks(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw measured peaks as bars, the formula as marks."""
    look.quiet(ax, grid="y")
    peaks = np.array(recorded["peaks"]) / MIB
    blocks = np.arange(len(peaks))
    gain = (recorded["inside"] - recorded["input"]) / MIB
    ax.bar(blocks, peaks, color=look.MEMORY["activations"], width=0.7, label="peak, measured")
    ax.plot(
        blocks,
        peaks[0] - np.minimum(blocks, len(peaks) - 2) * gain,
        "_",
        color=look.INK,
        markersize=22,
        markeredgewidth=2,
        label="formula",
    )
    look.caption(ax, "The peak, for so many blocks")
    ax.set_xlabel(
        "blocks that keep only their input, from the first", fontsize=10.5, color=look.SOFT
    )
    ax.set_ylabel("MiB", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10.5)


def draw_kept(recorded: dict[str, Any], folder: Path) -> None:
    """Draw kept.png: the bytes of an input, the error of 8 bits over draws, what compression
    finds."""
    figure = look.new_figure(
        13.5,
        4.6,
        "Inputs that are kept otherwise, and a context that is not kept, as recorded",
        f"Left: a block's input on a rank of tp={RANKS}. Middle: gradients from inputs of 8 bits. "
        f"Right: one token of {kept.TOKENS} that the last query looks for.",
    )
    _bytes(figure.add_axes((0.055, 0.15, 0.25, 0.58)), recorded["steps"])
    _errors(figure.add_axes((0.385, 0.15, 0.25, 0.58)), recorded)
    _found(figure.add_axes((0.715, 0.15, 0.25, 0.58)), recorded["found"])
    look.save(figure, folder, "kept.png")


def _bytes(ax: Any, steps: list[dict[str, Any]]) -> None:
    """Draw bytes on the device as bars, on the host as outlines."""
    look.quiet(ax, grid="y")
    for place, step in enumerate(steps):
        host = step["moved"] > 0
        ax.bar(
            [place],
            [step["here"] / KIB],
            width=0.65,
            facecolor="none" if host else look.MEMORY["activations"],
            edgecolor=look.MEMORY["activations"],
            linewidth=1.6,
            linestyle="--" if host else "-",
            label="on the host" if host else "on the device" if not place else None,
        )
        ax.text(
            place,
            step["here"] / KIB + 1,
            f"{step['here'] / KIB:g}",
            ha="center",
            fontsize=10,
            color=look.SOFT,
        )
    ax.set_xticks(range(len(steps)), [step["kept"].replace(",", ",\n") for step in steps])
    ax.set_ylabel("KiB of an input on a rank", fontsize=10.5, color=look.SOFT)
    ax.set_ylim(top=80)
    ax.legend(frameon=False, fontsize=10, loc="upper center")


def _errors(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw errors against the number of draws, with both axes logarithmic."""
    look.quiet(ax, grid="y")
    draws = np.array(kept.DRAWS)
    chance = 100 * np.array(recorded["chance"])
    ax.loglog(
        draws,
        chance[0] / np.sqrt(draws),
        ":",
        color=look.INK,
        linewidth=1.5,
        label="first / √draws",
    )
    ax.loglog(draws, chance, "o-", color=COLOURS["all"], label="rounded by chance")
    ax.loglog(
        draws,
        100 * np.array(recorded["nearest"]),
        "s-",
        color=COLOURS["scores"],
        label="rounded to nearest",
    )
    ax.set_xticks(draws, [str(count) for count in draws])
    ax.set_yticks([0.04, 0.1, 0.2, 0.3], ["0.04", "0.1", "0.2", "0.3"])
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks([], minor=True)
    ax.set_xlabel("gradients of one batch in the mean", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("error, % of the gradient's length", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10, loc="lower left")


def _found(ax: Any, found: list[float]) -> None:
    """Draw the found part of the value by ratio, and the formula."""
    look.quiet(ax, grid="y")
    places = np.arange(len(found))
    ax.bar(places, found, width=0.65, color=COLOURS["all"], label="measured")
    ax.plot(
        places,
        [kept.by_formula(ratio) for ratio in kept.RATIOS],
        "_",
        color=look.INK,
        markersize=20,
        markeredgewidth=2,
        label="formula",
    )
    ax.set_xticks(places, [str(ratio) for ratio in kept.RATIOS])
    ax.set_xlabel("tokens in a group; 1 is attention", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("found of the token's value", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10)


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
