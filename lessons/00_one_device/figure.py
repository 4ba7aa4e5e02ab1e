"""Draw the figure of lesson 00: the recorded memory of two training steps, and the notes' pie.

python lessons/00_one_device/figure.py [--out DIR]      # figure.png and figure.mmd
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
lesson = load_module(HERE / "lesson.py", "00")
# From the bottom up: the category that stays longest is first.
LAYERS = ("parameters", "optimizer", "gradients", "activations")
# Percentages of N2:16.
NOTES_PIE = {"parameters": 35, "optimizer": 45, "gradients": 15, "activations": 5}
NOTES_LIST = {"parameters": 14, "optimizer": 56, "gradients": 14}  # N2:24-26, GB


def draw(record: list[dict[str, Any]], folder: Path) -> None:
    """Draw figure.png and figure.mmd from the recorded account."""
    config = lesson.CONFIG
    figure = look.new_figure(
        13.5,
        6.2,
        "Where the memory goes: two training steps on one device, as recorded",
        f"GPT of {config.layers} layers, width {config.width}, {lesson.BATCH} sequences of "
        f"{config.context} tokens, float32, Adam. Asked at every module and every gradient.",
    )
    _mountain(figure.add_axes((0.055, 0.13, 0.56, 0.66)), record)
    peak = max(record, key=lambda entry: entry["now"]["total"])["now"]
    for index, (title, shares, unit) in enumerate(
        (
            ("The notes' pie (N2:16)", NOTES_PIE, "%"),
            ("The notes' own list (N2:24)", NOTES_LIST, "GB"),
            ("Measured here, at the peak", {name: peak[name] / 2**20 for name in LAYERS}, "MiB"),
        )
    ):
        _pie(figure.add_axes((0.645, 0.60 - 0.285 * index, 0.17, 0.25)), title, shares, unit)
    look.save(figure, folder)
    look.save_mermaid(mermaid(record), folder)


def _mountain(ax: Any, record: list[dict[str, Any]]) -> None:
    """Draw the bytes of each category, stacked, over the recorded moments."""
    moments = np.arange(len(record))
    heights = [np.array([entry["now"][name] for entry in record]) / 2**20 for name in LAYERS]
    look.quiet(ax, grid="y")
    ax.stackplot(
        moments, heights, colors=[look.MEMORY[name] for name in LAYERS], step="post", linewidth=0
    )
    top = float(np.sum(heights, axis=0).max())
    ax.set_ylim(0, 1.25 * top)
    ax.set_xlim(0, len(record) - 1)
    for start, stop, phase, step in _stretches(record):
        ax.plot(
            [start, start],
            [0, top * 1.17],
            color="white" if phase == "backward" else look.GRID,
            linewidth=1,
        )
        if stop - start > 4:
            ax.text((start + stop) / 2, 1.12 * top, phase, ha="center", fontsize=11, color=look.INK)
        if phase == "forward":
            ax.text(
                start, 1.2 * top, f" step {step}", fontsize=11.5, fontweight="bold", color=look.SOFT
            )
    _name_bands(ax, record, heights)
    ax.set_xticks([])
    ax.set_xlabel(
        "recorded moments, in order: modules on the way forward, gradients on the way back",
        fontsize=10.5,
        color=look.SOFT,
    )
    ax.set_ylabel("MiB alive", fontsize=10.5, color=look.SOFT)


def _stretches(record: list[dict[str, Any]]) -> list[tuple[int, int, str, int]]:
    """Return (first, last, phase, step) of each run of moments in one phase."""
    stretches: list[tuple[int, int, str, int]] = []
    for index, entry in enumerate(record):
        if stretches and stretches[-1][2:] == (entry["phase"], entry["step"]):
            stretches[-1] = (stretches[-1][0], index, entry["phase"], entry["step"])
        else:
            stretches.append((index, index, entry["phase"], entry["step"]))
    return stretches


def _name_bands(ax: Any, record: list[dict[str, Any]], heights: list[np.ndarray]) -> None:
    """Write each category's name into its band, early in the second step's backward; the thin one
    gets a leader."""
    backward = [
        index
        for index, entry in enumerate(record)
        if entry["step"] == 1 and entry["phase"] == "backward"
    ]
    spot = backward[len(backward) // 3]
    last = backward[-8]
    floor = np.zeros(len(record))
    for name, height in zip(LAYERS, heights, strict=True):
        if name == "gradients":
            y = floor[last] + height[last] / 2
            ax.annotate(
                name,
                (last, y),
                (last - 3, 2.05 * y),
                ha="center",
                fontsize=11,
                fontweight="bold",
                color=look.MEMORY[name],
                arrowprops={"arrowstyle": "-", "color": look.MEMORY[name], "shrinkB": 0},
            )
        else:
            ax.text(
                spot,
                floor[spot] + 0.45 * height[spot],
                name,
                ha="center",
                va="center",
                fontsize=11,
                color="white",
                fontweight="bold",
            )
        floor = floor + height


def _pie(ax: Any, title: str, shares: dict[str, float], unit: str) -> None:
    """Draw one pie, and at its side a list of its figures."""
    total = sum(shares.values())
    ax.pie(
        list(shares.values()),
        colors=[look.MEMORY[name] for name in shares],
        startangle=90,
        counterclock=False,
        wedgeprops={"linewidth": 1.5, "edgecolor": "white"},
    )
    ax.text(1.35, 1.12, title, fontsize=11, fontweight="bold", color=look.INK, va="center")
    for row, (name, value) in enumerate(shares.items()):
        amount = "" if unit == "%" else f"   {value:.2g} {unit}"
        ax.text(1.35, 0.68 - 0.42 * row, "■", fontsize=11, color=look.MEMORY[name], va="center")
        ax.text(
            1.62,
            0.68 - 0.42 * row,
            f"{name}  {100 * value / total:.0f} %{amount}",
            fontsize=10.5,
            color=look.INK,
            va="center",
        )


def mermaid(record: list[dict[str, Any]]) -> str:
    """Return the measured pie at the peak as a Mermaid diagram, in the form of N2:15."""
    peak = max(record, key=lambda entry: entry["now"]["total"])["now"]
    together = sum(peak[name] for name in LAYERS)
    rows = [f'    "{name}" : {100 * peak[name] / together:.0f}' for name in LAYERS]
    return "\n".join(["pie title memory at the peak of a training step, measured", *rows]) + "\n"


if __name__ == "__main__":
    draw_figure(lesson.record_step, draw, HERE, size=1)
