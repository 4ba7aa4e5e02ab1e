"""Pictures of measurements: bus bandwidth over message size, tokens/s over ranks. matplotlib is loaded on first use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

COLOURS = {"tcp": "#3b6fb6", "shm": "#5b9a68", "mpi": "#8172b3", "gloo": "#e08e3c", "MPI": "#c44e52",
           "copies": "#9aa5b1", "bare-tcp": "#6b7280",
           "minidist": "#3b6fb6", "separate": "#9aa5b1", "PyTorch": "#e08e3c"}
STAGES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
PEERS = ("gloo", "MPI", "copies", "bare-tcp", "PyTorch")  # dashed, so that ours and theirs differ without colour too


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
        _over_bytes(panel, ranks, "message, bytes")
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


def draw_stages(path: Path, rows: list[dict[str, Any]]) -> None:
    """A panel a rank count: ms a step of each ZeRO stage of ours beside its peers'. Raises OSError as above."""
    from matplotlib.figure import Figure

    counts = sorted({row["ranks"] for row in rows})
    figure = Figure(figsize=(1.0 + 6.0 * len(counts), 4.4), layout="constrained")
    for panel, count in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        shown = [row for row in rows if row["ranks"] == count]
        places: list[float] = []
        place = 0.0
        for row in shown:
            place += 1.0 if row["name"] != "minidist" or not places else 1.7      # a gap before the next stage
            places.append(place)
            ours = next(other for other in shown if other["name"] == "minidist" and other["zero"] == row["zero"])
            mine = row is ours
            bar = panel.barh(place, row["step_seconds"] * 1e3, 0.86, color=COLOURS["minidist" if mine else "PyTorch"])
            ratio = "" if mine else f"  ({row['step_seconds'] / ours['step_seconds']:.2f}× ours)"
            panel.bar_label(bar, [f"{row['step_seconds'] * 1e3:,.0f}{ratio}"], padding=3, fontsize=9)
        panel.set_yticks(places, [f"minidist {STAGES[row['zero']]}" if row["name"] == "minidist" else
                                  f"PyTorch {row['name']}" for row in shown], fontsize=9)
        panel.invert_yaxis()
        panel.set_title(f"{count} ranks, ms a step", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.28)
    figure.savefig(path, dpi=130)


def draw_plans(path: Path, rows: list[dict[str, Any]]) -> None:
    """A panel a plan: tokens/s of ours, of what trains without a cut, and of PyTorch's. Raises OSError as above."""
    from matplotlib.figure import Figure

    plans = [*dict.fromkeys(row["plan"] for row in rows)]
    across = min(2, len(plans))
    down = -(-len(plans) // across)
    figure = Figure(figsize=(6.4 * across, 0.4 + 2.2 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharex=True).flat
    for panel in panels[len(plans):]:
        panel.remove()
    for panel, plan in zip(panels, plans, strict=False):
        shown = [row for row in rows if row["plan"] == plan]
        ours = shown[0]["tokens_per_second"]
        bars = panel.barh([f"{plan_label(row)}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in shown],
                          [row["tokens_per_second"] for row in shown],
                          color=[COLOURS["minidist" if row["cut"] and row["name"] == "minidist" else
                                         "PyTorch" if row["name"] == "PyTorch" else "separate"] for row in shown])
        panel.bar_label(bars, [f"{row['tokens_per_second']:,.0f}" + ("" if row is shown[0] else
                               f"  (ours {ours / row['tokens_per_second']:.2f}×)") for row in shown], padding=3)
        panel.invert_yaxis()
        panel.set_title(f"{plan}: tokens/s", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.5)
    figure.savefig(path, dpi=130)


def plan_label(row: dict[str, Any]) -> str:
    """A contender of `minidist bench step --plan`, as tables and pictures call it: "PyTorch 1F1B + DTensor"."""
    return f"{row['name']} {row['cut']}" if row["cut"] and row["name"] == "PyTorch" else str(row["name"])


def draw_overlap(path: Path, result: dict[str, Any]) -> None:
    """For each contender its all-reduce, its products, and both at once, in ms. Raises OSError as above."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(1.6 + 1.9 * len(rows), 3.8), layout="constrained")
    panel = figure.subplots()
    kinds = (("communicate", "all-reduce", "#3b6fb6"), ("compute", "products", "#9aa5b1"), ("both", "both", "#5b9a68"))
    for offset, (kind, label, colour) in enumerate(kinds):
        bars = panel.bar([place + 0.27 * (offset - 1) for place in range(len(rows))],
                         [row[kind] * 1e3 for row in rows], 0.25, label=label, color=colour)
        if kind == "both":
            panel.bar_label(bars, [f"{row['of_longer']:.2f}×" for row in rows], padding=2)
    panel.set_xticks(range(len(rows)), [row["name"] for row in rows])
    panel.set_ylabel("ms")
    panel.set_title(f"{bytes_text(result['nbytes'])} over {result['ranks']} ranks; × the longer of the two", loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=130)


def draw_overlap_step(path: Path, result: dict[str, Any]) -> None:
    """For each contender rank 0's last step as recorded: computing, and collectives. Raises OSError as above."""
    from matplotlib.figure import Figure

    from minidist.observe.overlap_plots import draw_step, legend, spans_of

    rows = result["rows"]
    figure = Figure(figsize=(11.0, 1.0 + 0.95 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    longest = 0.0
    for panel, row in zip(panels, rows, strict=True):
        longest = max(longest, draw_step(panel, spans_of(row["steps"][0])))
        panel.set_title(f"{row['name']}: {row['share']:.0%} hidden", loc="left", fontsize=10)
    for panel in panels:
        panel.set_xlim(0, longest)
    panels[-1].set_xlabel("ms")
    legend(figure)
    figure.savefig(path, dpi=130)


def draw_calibration(path: Path, result: dict[str, Any]) -> None:
    """One panel a rank count: seconds of an exchange over its bytes, measured and fitted. Raises OSError as above."""
    from matplotlib.figure import Figure

    links = result["links"]
    counts = sorted({link["ranks"] for link in links})
    figure = Figure(figsize=(max(7.4, 5.2 * len(counts)), 4.2), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, count in zip(panels, counts, strict=True):
        for link, samples in zip(links, result["samples"], strict=True):
            if link["ranks"] != count:
                continue
            colour = COLOURS.get(link["link"], "#8c6d46")
            points = sorted((moved, time) for _, messages, moved, added, crowded, time in samples
                            if messages == 1 and not added and not crowded)
            sizes = [moved for moved, _ in points]
            panel.plot(sizes, [time * 1e6 for _, time in points], "o", markersize=3.5, color=colour)
            panel.plot(sizes, [(link["alpha"] + moved * link["beta"]) * 1e6 for moved in sizes], color=colour,
                       label=link["link"])
        _over_bytes(panel, count, "bytes exchanged")
    panels[0].set_ylabel("µs")
    panels[0].legend(frameon=False)
    figure.suptitle("an exchange: measured (points) and fitted α + nβ (lines)", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=130)


def _over_bytes(panel: Any, ranks: Any, label: str) -> None:
    """Both axes logarithmic, bytes along the lower one."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(f"{ranks} ranks", loc="left")
    panel.set_xlabel(label)
    panel.xaxis.set_major_formatter(lambda value, _: bytes_text(value))
    panel.grid(alpha=0.25)


def bytes_text(value: float) -> str:
    """1024.0 -> "1 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.0f} GiB"
