"""The figure of lesson 19: activations over one step, three ways, and the peak for every number of blocks, as recorded.

    python lessons/19_activations/figure.py [--out DIR]      # figure.png
"""

from pathlib import Path
from typing import Any

import numpy as np
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

from minidist.grading import load_module

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "19")
COLOURS = {"none": "#c44e52", "scores": "#e08e3c", "all": "#3b6fb6"}
NAMES = {"none": "everything kept", "scores": "scores computed again", "all": "blocks' insides computed again"}
MIB = 2**20


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """figure.png from the recorded account."""
    config = lab.CONFIG
    figure = look.new_figure(13.5, 5.4, "Activations over one step: keep them, or make them again, as recorded",
                             f"GPT of {config.layers} layers, width {config.width}, {lab.BATCH} sequences of "
                             f"{config.context} tokens, float32. The account asked at every module and every gradient.")
    _curves(figure.add_axes((0.055, 0.13, 0.56, 0.64)), recorded["curves"])
    _peaks(figure.add_axes((0.70, 0.13, 0.27, 0.64)), recorded)
    look.save(figure, folder)


def _curves(ax: Any, curves: dict[str, Any]) -> None:
    """Bytes alive over the step; a dot where forward ends."""
    look.quiet(ax, grid="y")
    for which, curve in curves.items():
        seconds, alive = np.array(curve["moments"]).T
        ax.plot(1e3 * seconds, alive / MIB, drawstyle="steps-post", color=COLOURS[which], linewidth=1.8,
                label=NAMES[which])
        at_turn = alive[np.searchsorted(seconds, curve["turn"]) - 1]
        ax.plot([1e3 * curve["turn"]], [at_turn / MIB], "o", color=COLOURS[which], markersize=7)
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    ax.set_xlabel("milliseconds; the dot is the end of forward", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("MiB of activations alive", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10.5, loc="upper right")


def _peaks(ax: Any, recorded: dict[str, Any]) -> None:
    """Measured peaks as bars, the formula as marks."""
    look.quiet(ax, grid="y")
    peaks = np.array(recorded["peaks"]) / MIB
    blocks, gain = np.arange(len(peaks)), (recorded["inside"] - recorded["input"]) / MIB
    ax.bar(blocks, peaks, color=look.MEMORY["activations"], width=0.7, label="peak, measured")
    ax.plot(blocks, peaks[0] - np.minimum(blocks, len(peaks) - 2) * gain, "_", color=look.INK, markersize=22,
            markeredgewidth=2, label="formula")
    look.caption(ax, "The peak, for so many blocks")
    ax.set_xlabel("blocks that keep their input alone, from the first", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("MiB", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10.5)


if __name__ == "__main__":
    draw_figure(lab.record, draw, HERE, size=1)
