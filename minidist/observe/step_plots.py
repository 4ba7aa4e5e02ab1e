"""The picture of `minidist bench step --device`: speed under the floor, memory by category. matplotlib on first use."""

from pathlib import Path
from typing import Any

from minidist.observe.lesson_figures import MEMORY

COLOURS = {"minidist": "#3b6fb6", "PyTorch eager": "#e08e3c", "torch.compile": "#8172b3"}
INK = "#1f2933"


def draw_device(path: Path, result: dict[str, Any]) -> None:
    """Three panels: ms a step beside the floor, the floor's parts, ours by category. Raises: OSError on writing."""
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(14.0, 4.0), layout="constrained")
    speed, parts, memory = figure.subplots(1, 3)
    least = sum(part["seconds"] for part in result["parts"]) * 1e3
    bars = speed.barh([row["name"] for row in rows], [row["step_seconds"] * 1e3 for row in rows],
                      color=[COLOURS[row["name"]] for row in rows])
    speed.bar_label(bars, [f"{row['step_seconds'] * 1e3:,.2f}  ({row['utilisation']:.0%} of products' rate)"
                           for row in rows], padding=3, fontsize=9)
    speed.axvline(least, color=INK, linestyle=":", linewidth=1.2)
    speed.annotate(f"floor {least:,.2f}", (least, 1.01), xycoords=("data", "axes fraction"), fontsize=9, color=INK)
    speed.set_title("ms a step", loc="left", pad=16)
    _bars(parts, {part["name"]: part["seconds"] * 1e3 for part in result["parts"]}, "the floor's parts, ms", "#9aa5b1")
    held = next(row["memory"] for row in rows if row["memory"])
    _bars(memory, {name: nbytes / 2 ** 20 for name, nbytes in held.items() if nbytes and name != "total"},
          f"minidist's peak by category, MiB (total {held['total'] / 2 ** 20:,.0f})", MEMORY)
    for panel in (speed, parts, memory):
        panel.invert_yaxis()
        panel.margins(x=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    speed.margins(x=0.75)
    figure.savefig(path, dpi=130)


def _bars(panel: Any, values: dict[str, float], title: str, colours: Any) -> None:
    """A bar a name."""
    bars = panel.barh(list(values), list(values.values()),
                      color=[colours[name] for name in values] if isinstance(colours, dict) else colours)
    panel.bar_label(bars, [f"{value:,.3g}" for value in values.values()], padding=3, fontsize=9)
    panel.set_title(title, loc="left", pad=16)
