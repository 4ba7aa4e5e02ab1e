"""The pictures of `minidist bench compress`. matplotlib is loaded on first use."""

from pathlib import Path
from typing import Any

from minidist.bench.compress.links import bandwidth_text
from minidist.bench.compress.tables import beside_plain
from minidist.bench.compress.ways import PLAIN
from minidist.bench.plots import new_figure
from minidist.observe.plots import save_picture


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw time to the target over bandwidth, and loss over steps; with --advise speed-ups. Raises
    OSError."""
    if result["advise"]:
        _draw_advice(path, result)
        return
    figure = new_figure(11.0, 4.4)
    times, losses = figure.subplots(1, 2)
    for index, row in enumerate(result["rows"]):
        style = _style(row["way"], index)
        reached = [cell for cell in row["cells"] if cell["seconds"] is not None]
        times.plot(
            [cell["bandwidth"] for cell in reached],
            [cell["seconds"] for cell in reached],
            marker="o",
            markersize=3.5,
            label=f"{row['way']} ({beside_plain(row)})",
            **style,
        )
        losses.plot(*zip(*row["curve"], strict=True), **style)
    for cell in result["through"]:
        if cell["measured"] is not None:
            times.plot([cell["bandwidth"]], [cell["measured"]], "kx", markersize=8)
    _over_bandwidth(times, result["bandwidths"])
    _logarithmic(times, "")
    times.set_ylabel("seconds")
    times.set_title(
        f"until the loss is {result['target']:.3f} (×: run to the end)", loc="left", fontsize=10
    )
    losses.axhline(result["target"], color="#9aa5b1", linewidth=0.8, linestyle=":")
    losses.set_xlabel("steps")
    losses.set_ylabel("validation loss")
    losses.set_title("the curves; in brackets: last loss beside none", loc="left", fontsize=10)
    losses.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *times.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8
    )
    figure.suptitle(
        f"{result['ranks']} ranks, {result['parameters'] / 1e6:.2f} million parameters",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    save_picture(figure, path, dpi=130)


def _draw_advice(path: Path, result: dict[str, Any]) -> None:
    """Draw one panel per number of ranks: speed relative to plain buckets, predicted (lines) and
    measured (points)."""
    figure = new_figure(1.8 + 4.6 * len(result["advice"]), 4.4)
    panels = figure.subplots(1, len(result["advice"]), sharey=True, squeeze=False)[0]
    for panel, each in zip(panels, result["advice"], strict=True):
        for index, row in enumerate(each["rows"], start=1):
            speeds = [cell["bandwidth"] for cell in row["cells"]]
            panel.plot(
                speeds,
                [plain / scheme for plain, scheme in (cell["predicted"] for cell in row["cells"])],
                label=row["way"],
                **_style(row["way"], index),
            )
            seen = [cell for cell in row["cells"] if cell["measured"] is not None]
            panel.plot(
                [cell["bandwidth"] for cell in seen],
                [cell["measured"][0] / cell["measured"][1] for cell in seen],
                "o",
                markersize=3.5,
                color=f"C{index}",
            )
        panel.axhline(1.0, color="black", linewidth=0.8)
        _logarithmic(panel, "×")
        panel.set_title(f"{each['ranks']} ranks", loc="left")
        _over_bandwidth(panel, result["bandwidths"])
    panels[0].set_ylabel("times faster than plain buckets")
    figure.legend(
        *panels[-1].get_legend_handles_labels(),
        loc="outside right center",
        frameon=False,
        fontsize=8,
    )
    figure.suptitle(
        "compress or not: predicted (lines), measured (points)",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    save_picture(figure, path, dpi=130)


def _style(way: str, index: int) -> dict[str, Any]:
    return {"color": "black", "linestyle": "--"} if way == PLAIN else {"color": f"C{index % 10}"}


def _logarithmic(panel: Any, unit: str) -> None:
    """Set a logarithmic vertical axis with readable numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    panel.set_yscale("log")
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}{unit}")


def _over_bandwidth(panel: Any, bandwidths: list[float]) -> None:
    """Set a logarithmic horizontal axis with the bandwidths."""
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log")
    panel.set_xticks(
        bandwidths,
        [bandwidth_text(bandwidth).replace(" ", "\n") for bandwidth in bandwidths],
        fontsize=7,
    )
    panel.xaxis.set_minor_locator(NullLocator())
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)
