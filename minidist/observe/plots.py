"""Pictures of a run, drawn from its recorded numbers. matplotlib is loaded when the first one is
drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEMORY = {
    "parameters": "#3b6fb6",
    "gradients": "#e08e3c",
    "optimizer": "#5b9a68",
    "activations": "#c44e52",
    "communication": "#8172b3",
    "workspace": "#9aa5b1",
}
"""The colour of each category of memory, in every picture."""

INK = "#1f2933"
SOFT = "#616e7c"
GRID = "#e4e7eb"
PAPER = "#ffffff"
RANKS = ("#3b6fb6", "#e08e3c", "#5b9a68", "#c44e52", "#8172b3", "#937860", "#d77fb3", "#4fa8a8")
"""Colours that a colour-blind reader can distinguish."""

WITHOUT = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Metadata that matplotlib must not write into a file of each format: day and version."""


def draw_loss(
    path: str | Path, losses: Sequence[float], *, validation: float | None = None, title: str = ""
) -> None:
    """Write a picture of the training loss over the steps, with its running mean, and the
    validation loss as a line.

    Args:    path: the file; its ending chooses the format (png, svg, pdf).
             losses: one per step, in nats per token. validation: in nats per token, or None.
    Raises:  OSError if `path` cannot be written.
    """
    from matplotlib.figure import Figure  # the object interface: no window system, no global state

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.subplots()
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9bb8d3", linewidth=0.8, label="training, each step")
    window = max(1, len(losses) // 20)
    if window > 1:
        mean = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(
            steps[window - 1 :],
            mean,
            color="#1f4e79",
            linewidth=1.6,
            label=f"training, mean of {window} steps",
        )
    if validation is not None:
        axes.axhline(
            validation,
            color="#c0504d",
            linewidth=1.2,
            linestyle="--",
            label=f"validation {validation:.3f}",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    if len(losses):
        axes.legend(frameon=False)
    save_picture(figure, path, dpi=120)


def save_picture(figure: "Figure", path: str | Path, *, dpi: int, **options: Any) -> None:
    """Write a picture without date, version or random names, so that equal pictures are equal
    files.

    Args:    path: its ending chooses the format (png, svg, pdf); without an ending it is png.
             options: further options of Figure.savefig.
    Raises:  OSError if `path` cannot be written.
    """
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "minidist"}):
        ending = Path(path).suffix.lower()
        metadata = WITHOUT.get(ending or ".png")
        figure.savefig(path, dpi=dpi, format=ending[1:] or "png", metadata=metadata, **options)
