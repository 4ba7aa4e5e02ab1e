"""Pictures of measurements: bus bandwidth over message size, tokens/s over ranks. matplotlib is loaded on first use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

COLOURS = {"sockets": "#3b6fb6", "shm": "#5b9a68", "mpi": "#8172b3", "gloo": "#e08e3c", "MPI": "#c44e52",
           "minidist": "#3b6fb6", "separate": "#9aa5b1", "PyTorch": "#e08e3c"}
PEERS = ("gloo", "MPI", "PyTorch")  # dashed, so that ours and theirs differ without colour too


def draw_bus_bandwidth(path: Path, title: str, seconds: dict[int, dict[str, dict[int, float]]],
                       bandwidth: Callable[[int, float, int], float]) -> None:
    """One panel a rank count: bus bandwidth (GB/s) of each contender over bytes, both axes logarithmic.

    Args:    seconds: {ranks: {contender: {bytes: seconds}}}; bandwidth(bytes, seconds, ranks) -> bytes a second.
    Raises:  OSError if `path` cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(seconds), 4.2), layout="constrained")
    panels = figure.subplots(1, len(seconds), sharey=True, squeeze=False)[0]
    for panel, (ranks, contenders) in zip(panels, seconds.items(), strict=True):
        for index, (name, times) in enumerate(contenders.items()):
            sizes = sorted(times)
            panel.plot(sizes, [bandwidth(size, times[size], ranks) / 1e9 for size in sizes], label=name, marker="o",
                       markersize=3.5, color=COLOURS.get(name.partition("_")[0], f"C{index}"),
                       linestyle="--" if name.partition("_")[0] in PEERS else "-")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(f"{ranks} ranks", loc="left")
        panel.set_xlabel("message, bytes")
        panel.xaxis.set_major_formatter(lambda value, _: bytes_text(value))
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("bus bandwidth, GB/s")
    panels[-1].legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=130)


def draw_steps(path: Path, rows: list[dict[str, Any]]) -> None:
    """Two panels: tokens/s and peak memory of each contender, by rank count. Raises OSError as above."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    labels = [f"{row['name']}\n{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}" for row in rows]
    colours = [COLOURS[row["name"]] for row in rows]
    speeds = [row["tokens_per_second"] for row in rows]
    peaks = [row["peak_bytes"] / 2**20 for row in rows]
    for panel, values, title in ((speed, speeds, "tokens/s"), (memory, peaks, "peak MiB above import, a rank")):
        bars = panel.bar(labels, values, color=colours)
        panel.bar_label(bars, fmt="{:,.0f}", padding=2)
        panel.set_title(title, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(y=0.12)
    figure.savefig(path, dpi=130)


def bytes_text(value: float) -> str:
    """1024.0 -> "1 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.0f} GiB"
