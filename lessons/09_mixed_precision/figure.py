"""The figure of lesson 09: what rounding costs a gradient, where float16 ends, and a loss scale
that finds itself.

python lessons/09_mixed_precision/figure.py [--out DIR]      # figure.png
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "09")
KINDS = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
COLOURS = {"fp16": "#c44e52", "bf16": "#3b6fb6", "e5m2": "#e08e3c"}
FLOOR = 2.0**-34  # gradients below are drawn here


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from the recorded gradients and steps."""
    figure = look.new_figure(
        14.5,
        5.2,
        "A number of two bytes: digits, range, and a loss scale",
        f"Gradients of a GPT's weights, recorded: {lab.MINE} tokens of a batch of {lab.MANY:,}.",
    )
    _errors(figure.add_axes((0.05, 0.13, 0.27, 0.62)), recorded["full"])
    _histogram(figure.add_axes((0.385, 0.13, 0.27, 0.62)), recorded)
    _scale(figure.add_axes((0.715, 0.13, 0.27, 0.62)), recorded["run"])
    look.save(figure, folder)


def _errors(ax: Any, full: np.ndarray) -> None:
    """Draw the relative error of each recorded gradient, times 2^16 and as it is, when rounded to a
    format."""
    look.quiet(ax, grid="y")
    values = full[full != 0][::7]
    values = np.abs(np.concatenate([values, values * np.float32(lab.SCALE)]))
    for name, kind in KINDS.items():
        error = np.abs(values.astype(kind).astype(np.float32) - values) / values
        ax.plot(
            values, np.maximum(error, 1e-6), ".", color=COLOURS[name], markersize=1.6, alpha=0.5
        )
        ax.plot([], [], "o", color=COLOURS[name], label=name)
    ax.set(xscale="log", yscale="log", ylim=(1e-5, 2))
    ax.axhline(1, color=look.SOFT, linewidth=0.8)
    look.caption(ax, "What rounding takes from a gradient")
    ax.set_xlabel(
        "size of the gradient, without and with a scale of 65,536", fontsize=10, color=look.SOFT
    )
    ax.set_ylabel("error, of the gradient itself (1: it is lost)", fontsize=10, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10, loc="lower left")


def _histogram(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw the sizes of the gradients, and the range that float16 can hold."""
    look.quiet(ax)
    full = recorded["full"]
    scale = lab.SCALE
    present = full != 0
    bins = 2.0 ** np.arange(-34, 2)
    for values, color, label in (
        (full[present], "#9aa5b1", "as they are"),
        (full[present] * scale, "#5b9a68", "times 65,536"),
    ):
        ax.hist(np.maximum(np.abs(values), FLOOR), bins=bins, color=color, alpha=0.85, label=label)
    info = np.finfo(np.float16)
    ax.axvspan(FLOOR, float(info.smallest_subnormal) / 2, color="#c44e52", alpha=0.16)
    ax.axvspan(
        float(info.smallest_subnormal) / 2, float(info.smallest_normal), color="#e08e3c", alpha=0.16
    )
    ax.set_ylim(top=1.35 * ax.get_ylim()[1])
    top = ax.get_ylim()[1]
    lost = [float((recorded[key][present] == 0).mean()) for key in ("plain", "scaled")]
    ax.text(1.5 * FLOOR, 0.97 * top, "becomes 0", fontsize=10, color="#c44e52", va="top")
    ax.text(
        float(info.smallest_subnormal),
        0.97 * top,
        "loses digits",
        fontsize=10,
        color="#b0651b",
        va="top",
    )
    ax.set_xscale("log")
    ax.set_xlim(FLOOR, 2)
    rounded = float((full[present].astype(np.float16) == 0).mean())
    look.caption(
        ax,
        f"Which become 0: {rounded:.0%} by rounding alone;\n{lost[0]:.0%} in a float16 backward, "
        f"{lost[1]:.1%} if scaled",
    )
    ax.set_xlabel("size of the gradient in float32", fontsize=10, color=look.SOFT)
    ax.set_ylabel("gradients", fontsize=10, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10, loc="upper right", bbox_to_anchor=(1.0, 0.92))


def _scale(ax: Any, run: dict[str, list[Any]]) -> None:
    """Draw the scale at each step; a cross where it was too large and the step was skipped."""
    look.quiet(ax, grid="y")
    steps = np.arange(len(run["scale"]))
    scale = np.log2(run["scale"])
    skipped = np.array(run["skipped"])
    ax.plot(steps, scale, drawstyle="steps-mid", color="#5b9a68", linewidth=1.6, label="scale")
    ax.plot(
        steps[skipped],
        scale[skipped],
        "x",
        color="#c44e52",
        markersize=7,
        markeredgewidth=2,
        label=f"skipped: {int(skipped.sum())} steps",
    )
    ax.set_ylim(top=scale.max() + 1)
    ax.yaxis.set_major_formatter(lambda value, _: f"2$^{{{value:.0f}}}$")
    look.caption(ax, "The scale, step by step")
    ax.set_xlabel(
        "step; doubled after 8 good ones, halved by an overflow", fontsize=10, color=look.SOFT
    )
    ax.legend(frameon=False, fontsize=10)


if __name__ == "__main__":
    draw_figure(lab.record, draw, HERE, size=1)
