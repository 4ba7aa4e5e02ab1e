"""Pictures of collectives, of overlap and of calibration. matplotlib is loaded on first use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from minidist.bench.overlap_plots import draw_step, legend, spans_of
from minidist.console import size_text
from minidist.observe.plots import save_picture
from minidist.observe.why_report import draw_paths

COLOURS = {
    "tcp": "#3b6fb6",
    "shm": "#5b9a68",
    "mpi": "#8172b3",
    "nccl": "#4c8c8c",
    "gloo": "#e08e3c",
    "MPI": "#c44e52",
    "copies": "#9aa5b1",
    "bare-tcp": "#6b7280",
    "bare-shm": "#b8a04a",
}
# contenders with dashed lines, so that ours and theirs also differ without colour
PEERS = ("gloo", "MPI", "copies", "bare-tcp", "bare-shm")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_bus_bandwidth(
    path: Path,
    title: str,
    seconds: dict[int, dict[str, dict[int, float]]],
    bandwidth: Callable[[int, float, int], float],
) -> None:
    """Draw one panel per rank count: bus bandwidth (GB/s) of each contender over bytes, both axes
    logarithmic.

    Args:    seconds: {ranks: {contender: {bytes: seconds}}}; bandwidth(bytes, seconds, ranks) ->
             bytes per second.
    Raises:  OSError if `path` cannot be written.
    """
    figure = new_figure(5.2 * len(seconds), 4.2)
    panels = figure.subplots(1, len(seconds), sharey=True, squeeze=False)[0]
    for panel, (ranks, contenders) in zip(panels, seconds.items(), strict=True):
        for index, (name, times) in enumerate(contenders.items()):
            sizes = sorted(times)
            panel.plot(
                sizes,
                [bandwidth(size, times[size], ranks) / 1e9 for size in sizes],
                label=name,
                marker="o",
                markersize=3.5,
                color=COLOURS.get(name.partition("_")[0], f"C{index}"),
                linestyle="--" if name.partition("_")[0] in PEERS else "-",
            )
        _over_bytes(panel, ranks, "message, bytes")
    panels[0].set_ylabel("bus bandwidth, GB/s")
    panels[-1].legend(frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    save_picture(figure, path, dpi=130)


def draw_overlap(path: Path, result: dict[str, Any]) -> None:
    """Draw, for each contender, its all-reduce, its products, and both at once, in ms. Raises
    OSError as above."""
    rows = result["rows"]
    figure = new_figure(1.6 + 1.9 * len(rows), 3.8)
    panel = figure.subplots()
    kinds = (
        ("communicate", "all-reduce", "#3b6fb6"),
        ("compute", "products", "#9aa5b1"),
        ("both", "both", "#5b9a68"),
    )
    for offset, (kind, label, colour) in enumerate(kinds):
        bars = panel.bar(
            [place + 0.27 * (offset - 1) for place in range(len(rows))],
            [row[kind] * 1e3 for row in rows],
            0.25,
            label=label,
            color=colour,
        )
        if kind == "both":
            panel.bar_label(bars, [f"{row['of_longer']:.2f}×" for row in rows], padding=2)
    panel.set_xticks(range(len(rows)), [row["name"] for row in rows])
    panel.set_ylabel("ms")
    panel.set_title(
        f"{size_text(result['nbytes'])} over {result['ranks']} ranks; × the longer of the two",
        loc="left",
    )
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    save_picture(figure, path, dpi=130)


def draw_overlap_step(path: Path, result: dict[str, Any]) -> None:
    """Draw, for each contender, rank 0's last step: computing, and collectives. Raises OSError as
    above.

    With --why it draws a step of all ranks, and its critical path.
    """
    rows = result["rows"]
    if rows[0].get("why") is not None:
        draw_paths(
            path,
            {f"{row['name']}: {1e3 * row['why']['seconds']:.1f} ms": row["why"] for row in rows},
        )
        return
    figure = new_figure(11.0, 1.0 + 0.95 * len(rows))
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    longest = 0.0
    for panel, row in zip(panels, rows, strict=True):
        longest = max(longest, draw_step(panel, spans_of(row["steps"][0])))
        panel.set_title(f"{row['name']}: {row['share']:.0%} hidden", loc="left", fontsize=10)
    for panel in panels:
        panel.set_xlim(0, longest)
    panels[-1].set_xlabel("ms")
    legend(figure)
    save_picture(figure, path, dpi=130)


def draw_save(path: Path, result: dict[str, Any]) -> None:
    """Draw MiB per second of each contender, blocking and in the background. Raises OSError as
    above."""
    rows = result["rows"]
    figure = new_figure(1.6 + 1.9 * len(rows), 3.8)
    panel = figure.subplots()
    colours = [("#3b6fb6" if row["name"] == "minidist" else "#e08e3c") for row in rows]
    bars = panel.bar(range(len(rows)), [row["mib_per_second"] for row in rows], 0.6, color=colours)
    panel.bar_label(bars, [f"{row['mib_per_second']:,.0f}" for row in rows], padding=2)
    panel.set_xticks(range(len(rows)), [f"{row['name']}\n{row['way']}" for row in rows])
    panel.set_ylabel("MiB/s")
    panel.set_title(
        f"checkpoints of {size_text(result['nbytes'])} over {result['ranks']} ranks", loc="left"
    )
    panel.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, dpi=130)


def draw_calibration(path: Path, result: dict[str, Any]) -> None:
    """Draw one panel per rank count: time of an exchange (µs) over its bytes, measured and fitted.
    Raises OSError as above."""
    links = result["links"]
    counts = sorted({link["ranks"] for link in links})
    figure = new_figure(max(7.4, 5.2 * len(counts)), 4.2)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, count in zip(panels, counts, strict=True):
        for link, samples in zip(links, result["samples"], strict=True):
            if link["ranks"] != count:
                continue
            colour = COLOURS.get(link["link"], "#8c6d46")
            points = sorted(
                (moved, time)
                for _, messages, moved, added, crowded, time in samples
                if messages == 1 and not added and not crowded
            )
            sizes = [moved for moved, _ in points]
            panel.plot(sizes, [time * 1e6 for _, time in points], "o", markersize=3.5, color=colour)
            panel.plot(
                sizes,
                [(link["alpha"] + moved * link["beta"]) * 1e6 for moved in sizes],
                color=colour,
                label=link["link"],
            )
        _over_bytes(panel, count, "bytes exchanged")
    panels[0].set_ylabel("µs")
    panels[0].legend(frameon=False)
    figure.suptitle(
        "an exchange: measured (points) and fitted α + nβ (lines)",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    save_picture(figure, path, dpi=130)


def _over_bytes(panel: Any, ranks: Any, label: str) -> None:
    """Set both axes logarithmic, with bytes along the horizontal axis."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(f"{ranks} ranks", loc="left")
    panel.set_xlabel(label)
    panel.xaxis.set_major_formatter(lambda value, _: size_text(value))
    panel.grid(alpha=0.25)
