"""Pictures of `minidist bench kernels`: fractions of a copy's bandwidth, and rungs under a measured
roofline; or, without a GPU, the needed share of the bytes that each rung fetches. matplotlib is
loaded on first use."""

from pathlib import Path
from typing import Any

from minidist.bench.plots import new_figure
from minidist.observe.plots import save_picture

INK = "#1f2933"
SOFT = "#616e7c"
RUNGS = ("#c44e52", "#e08e3c", "#d9b64a", "#5b9a68", "#3b6fb6")  # from naive to fast
PEERS = {"PyTorch eager": ("#9aa5b1", "D"), "torch.compile": ("#8172b3", "s")}
AIM = 0.85


def draw_kernels(path: Path, result: dict[str, Any]) -> None:
    """Draw the times, or the counts if nothing was timed. Raises: OSError if `path` cannot be
    written."""
    (_draw_counts if result["counts"] else _draw_times)(path, result)


def _draw_times(path: Path, result: dict[str, Any]) -> None:
    """Draw the contenders of kernels that move bytes, if any, as fractions of a copy, and all
    contenders under the roofs."""
    rows = [row for row in result["rows"] if row["seconds"]]
    moving = [row for row in rows if row["held"] == "copy"]
    kernels = list(dict.fromkeys(row["kernel"] for row in moving))
    figure = new_figure(15.0 if moving else 9.0, max(5.4, 1.6 + 0.27 * len(kernels)))
    panels = figure.subplots(1, 2, width_ratios=(1, 1.25)) if moving else [figure.subplots()]
    if moving:
        _fractions(panels[0], moving, kernels, rows)
    _roofs(panels[-1], rows, result["ceilings"])
    _legend(panels[-1])
    figure.suptitle(
        f"{result['gpu']['name']}: kernels at the sizes of a step of GPT-2 124M",
        x=0.01,
        ha="left",
        fontweight="bold",
    )
    save_picture(figure, path, dpi=130)


def _fractions(
    ax: Any, moving: list[dict[str, Any]], kernels: list[str], rows: list[dict[str, Any]]
) -> None:
    """Draw one line per kernel, with its contenders by their fraction of a copy's bandwidth."""
    for row in moving:
        colour, marker = _look(row, rows)
        ax.plot(row["fraction"], kernels.index(row["kernel"]), marker, color=colour, markersize=7)
    ax.axvline(AIM, color=INK, linewidth=1, linestyle=":")
    ax.annotate(
        "85 %", (AIM, 1.005), xycoords=("data", "axes fraction"), ha="center", fontsize=9, color=INK
    )
    ax.set_yticks(range(len(kernels)), kernels)
    ax.set_ylim(len(kernels) - 0.4, -0.6)
    ax.set_xlim(left=0)
    ax.set_title("fraction of a copy's bandwidth", loc="left", pad=16)
    ax.grid(alpha=0.25)


def _roofs(ax: Any, rows: list[dict[str, Any]], ceilings: dict[str, Any]) -> None:
    """Draw operations per second over operations per byte, under the measured roofs."""
    copy = ceilings["copy"]
    intensities = [row["operations"] / row["bytes"] for row in rows]
    reach = [
        min(intensities, default=0.1) / 2,
        max(*intensities, max(ceilings["matrix"].values()) / copy) * 4,
    ]
    for kind, rate in ceilings["matrix"].items():
        ax.plot(
            [reach[0], rate / copy, reach[1]],
            [reach[0] * copy / 1e12, rate / 1e12, rate / 1e12],
            color=INK,
            linewidth=1.3,
        )
        ax.annotate(
            f"cuBLAS {kind}: {rate / 1e12:,.0f} TFLOP/s",
            (reach[1], rate / 1e12),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=INK,
        )
    ax.annotate(
        f"copy: {copy / 1e9:,.0f} GB/s",
        (0.02, 0.96),
        xycoords="axes fraction",
        fontsize=9,
        color=INK,
    )
    lowest: dict[str, tuple[float, float]] = {}
    for row, intensity in zip(rows, intensities, strict=True):
        colour, marker = _look(row, rows)
        at = (intensity, row["operations"] / row["seconds"] / 1e12)
        ax.plot(*at, marker, color=colour, markersize=6)
        if row["held"] != "copy":
            lowest[row["kernel"]] = min(
                lowest.get(row["kernel"], at), at, key=lambda place: place[1]
            )
    for kernel, at in lowest.items():
        ax.annotate(
            kernel,
            at,
            xytext=(0, -8),
            textcoords="offset points",
            fontsize=9,
            color=SOFT,
            rotation=90,
            ha="center",
            va="top",
        )
    ax.margins(y=0.15)
    ax.set_xscale("log")
    ax.set_yscale("log")
    if lowest:  # room for the names
        ax.set_ylim(bottom=ax.get_ylim()[0] / 200)
    ax.set_xlabel("operations a byte (least bytes)")
    ax.set_ylabel("TFLOP/s")
    ax.set_title("under the measured roofs", loc="left", pad=16)
    ax.grid(alpha=0.25)


def _look(row: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return colour and marker: rungs from red (naive) to blue (the last)."""
    if row["contender"] in PEERS:
        return PEERS[row["contender"]]
    rungs = [
        other["contender"]
        for other in rows
        if other["kernel"] == row["kernel"] and other["contender"] not in PEERS
    ]
    return _of_rung(rungs.index(row["contender"]), len(rungs)), "o"


def _of_rung(index: int, count: int) -> str:
    return RUNGS[-1 if count == 1 else round(index * (len(RUNGS) - 1) / (count - 1))]


def _legend(ax: Any) -> None:
    from matplotlib.lines import Line2D

    shown = [
        ("first rung", RUNGS[0], "o"),
        ("last rung", RUNGS[-1], "o"),
        *((name, colour, marker) for name, (colour, marker) in PEERS.items()),
    ]
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="", label=name)
        for name, colour, marker in shown
    ]
    ax.legend(handles=handles, frameon=False, fontsize=9, loc="lower right")


def _draw_counts(path: Path, result: dict[str, Any]) -> None:
    """Draw the needed share of the fetched bytes, for each rung of each kernel."""
    rows = result["counts"]
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    figure = new_figure(9.5, 1.6 + 0.3 * len(kernels))
    ax = figure.subplots()
    for line, kernel in enumerate(kernels):
        rungs = [row for row in rows if row["kernel"] == kernel]
        ax.plot(
            [row["needed"] for row in rungs],
            [line] * len(rungs),
            color="#d5dae0",
            linewidth=2,
            zorder=1,
        )
        for index, row in enumerate(rungs):
            ax.plot(
                row["needed"], line, "o", color=_of_rung(index, len(rungs)), markersize=9, zorder=2
            )
            alike = [
                other["rung"][1:]
                for other in rungs
                if abs(other["needed"] / row["needed"] - 1) < 0.04
            ]
            ax.annotate(
                ",".join(alike),
                (row["needed"], line),
                ha="center",
                va="center",
                color="white",
                zorder=3,
                fontsize=7 if len(alike) == 1 else 5,
            )
    ax.set_yticks(range(len(kernels)), kernels)
    ax.set_ylim(len(kernels) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.set_xticks([0.001, 0.01, 0.1, 1.0], ["0.1 %", "1 %", "10 %", "100 %"])
    ax.grid(alpha=0.25)
    ax.set_xlabel(
        "needed: bytes of inputs and outputs, over those of the sectors fetched (no caches)"
    )
    ax.set_title(
        "kernels counted on the CPU build; numbers are rungs, naive to fast",
        loc="left",
        fontweight="bold",
    )
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    save_picture(figure, path, dpi=130)
