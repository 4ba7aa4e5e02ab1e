"""Pictures of `minidist bench step`, one per way of measuring. matplotlib is loaded on first
use."""

from pathlib import Path
from typing import Any

from minidist.bench.plots import new_figure
from minidist.bench.step.plan import plan_label
from minidist.bench.step.ranks import STAGES
from minidist.observe.plots import MEMORY, save_picture

COLOURS = {
    "minidist": "#3b6fb6",
    "minidist, one graph": "#2a9d8f",
    "separate": "#9aa5b1",
    "PyTorch": "#e08e3c",
    "PyTorch eager": "#e08e3c",
    "torch.compile": "#8172b3",
}
INK = "#1f2933"


def draw_device(path: Path, result: dict[str, Any]) -> None:
    """Draw three panels: ms per step with the floor, the floor's parts, our memory by category.
    Raises: OSError if `path` cannot be written."""
    rows = result["rows"]
    figure = new_figure(14.0, 4.0)
    speed, parts, memory = figure.subplots(1, 3)
    least = sum(part["seconds"] for part in result["parts"]) * 1e3
    bars = speed.barh(
        [row["name"] for row in rows],
        [row["step_seconds"] * 1e3 for row in rows],
        color=[COLOURS[row["name"]] for row in rows],
    )
    speed.bar_label(
        bars,
        [
            f"{row['step_seconds'] * 1e3:,.2f}  ({row['utilisation']:.0%} of products' rate)"
            for row in rows
        ],
        padding=3,
        fontsize=9,
    )
    speed.axvline(least, color=INK, linestyle=":", linewidth=1.2)
    speed.annotate(
        f"floor {least:,.2f}",
        (least, 1.01),
        xycoords=("data", "axes fraction"),
        fontsize=9,
        color=INK,
    )
    speed.set_title("ms a step", loc="left", pad=16)
    _bars(
        parts,
        {part["name"]: part["seconds"] * 1e3 for part in result["parts"]},
        "the floor's parts, ms",
        "#9aa5b1",
    )
    held = next(row["memory"] for row in rows if row["memory"])
    _bars(
        memory,
        {name: nbytes / 2**20 for name, nbytes in held.items() if nbytes and name != "total"},
        f"minidist's peak, MiB; total {held['total'] / 2**20:,.0f}",
        MEMORY,
    )
    for panel in (speed, parts, memory):
        panel.invert_yaxis()
        panel.margins(x=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    speed.margins(x=0.75)
    save_picture(figure, path, dpi=130)


def _bars(panel: Any, values: dict[str, float], title: str, colours: Any) -> None:
    """Draw one bar per name."""
    bars = panel.barh(
        list(values),
        list(values.values()),
        color=[colours[name] for name in values] if isinstance(colours, dict) else colours,
    )
    panel.bar_label(bars, [f"{value:,.3g}" for value in values.values()], padding=3, fontsize=9)
    panel.set_title(title, loc="left", pad=16)


def draw_steps(path: Path, result: dict[str, Any]) -> None:
    """Draw two panels: tokens/s and peak memory of each contender, by rank count. Raises OSError as
    above."""
    figure = new_figure(9.0, 3.8)
    speed, memory = figure.subplots(1, 2)
    rows = result["rows"]
    labels = [
        f"{row['name']}\n{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}" for row in rows
    ]
    colours = [COLOURS[row["name"]] for row in rows]
    speeds = [row["tokens_per_second"] for row in rows]
    peaks = [row["peak_bytes"] / 2**20 for row in rows]
    for panel, values, title in (
        (speed, speeds, "tokens/s"),
        (memory, peaks, "peak MiB above import, a rank"),
    ):
        bars = panel.bar(labels, values, color=colours)
        panel.bar_label(bars, fmt="{:,.0f}", padding=2)
        panel.set_title(title, loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(y=0.12)
    save_picture(figure, path, dpi=130)


def draw_stages(path: Path, result: dict[str, Any]) -> None:
    """Draw one panel per rank count: ms per step of each of our ZeRO stages and of its peers.
    Raises OSError as above."""
    rows = result["rows"]
    counts = sorted({row["ranks"] for row in rows})
    figure = new_figure(1.0 + 6.0 * len(counts), 4.4)
    for panel, count in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        shown = [row for row in rows if row["ranks"] == count]
        places: list[float] = []
        place = 0.0
        for row in shown:
            # a gap before the next stage
            place += 1.0 if row["name"] != "minidist" or not places else 1.7
            places.append(place)
            ours = next(
                other
                for other in shown
                if other["name"] == "minidist" and other["zero"] == row["zero"]
            )
            mine = row is ours
            bar = panel.barh(
                place,
                row["step_seconds"] * 1e3,
                0.86,
                color=COLOURS["minidist" if mine else "PyTorch"],
            )
            ratio = "" if mine else f"  ({row['step_seconds'] / ours['step_seconds']:.2f}× ours)"
            panel.bar_label(
                bar, [f"{row['step_seconds'] * 1e3:,.0f}{ratio}"], padding=3, fontsize=9
            )
        panel.set_yticks(
            places,
            [
                f"minidist {STAGES[row['zero']]}"
                if row["name"] == "minidist"
                else f"PyTorch {row['name']}"
                for row in shown
            ],
            fontsize=9,
        )
        panel.invert_yaxis()
        panel.set_title(f"{count} ranks, ms a step", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.28)
    save_picture(figure, path, dpi=130)


def draw_plans(path: Path, result: dict[str, Any]) -> None:
    """Draw one panel per plan: tokens/s of our ranks, of those that train separately, and of
    PyTorch's. Raises OSError as above."""
    rows = result["rows"]
    plans = [*dict.fromkeys(row["plan"] for row in rows)]
    across = min(2, len(plans))
    down = -(-len(plans) // across)
    figure = new_figure(6.4 * across, 0.4 + 2.2 * down)
    panels = figure.subplots(down, across, squeeze=False, sharex=True).flat
    for panel in panels[len(plans) :]:
        panel.remove()
    for panel, plan in zip(panels, plans, strict=False):
        shown = [row for row in rows if row["plan"] == plan]
        ours = shown[0]["tokens_per_second"]
        bars = panel.barh(
            [f"{plan_label(row)}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in shown],
            [row["tokens_per_second"] for row in shown],
            color=[
                COLOURS[
                    "minidist"
                    if row["cut"] and row["name"] == "minidist"
                    else "PyTorch"
                    if row["name"] == "PyTorch"
                    else "separate"
                ]
                for row in shown
            ],
        )
        panel.bar_label(
            bars,
            [
                f"{row['tokens_per_second']:,.0f}"
                + ("" if row is shown[0] else f"  (ours {ours / row['tokens_per_second']:.2f}×)")
                for row in shown
            ],
            padding=3,
        )
        panel.invert_yaxis()
        panel.set_title(f"{plan}: tokens/s", loc="left")
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.5)
    save_picture(figure, path, dpi=130)
