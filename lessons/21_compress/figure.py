"""The figures of lesson 21, from recorded runs: bytes and what arrives; loss by step, and over
seconds of three links.

python lessons/21_compress/figure.py [--out DIR]      # figure.png, loss.png
"""

from pathlib import Path
from typing import Any

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "21")
COLOURS = dict(zip(lab.WAYS, (look.INK, *look.RANKS), strict=False))
RANKS = 4
SUMMED = 25


def record(group: Group) -> dict[str, Any]:
    """Return the run of each way, and the share of plain training's gradients that each scheme
    keeps."""
    runs = {name: lab.train(group, way) for name, way in lab.WAYS.items()}
    return {"runs": runs, "kept": lab.kept(group, SUMMED)}


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png and loss.png from what was recorded."""
    runs = recorded["runs"]
    size = lab.numbers()
    figure = look.new_figure(
        13.5,
        5.4,
        "What travels of a gradient, and what arrives, as recorded",
        f"A GPT of {size:,} parameters on {RANKS} ranks learns text; float32, one bucket. Left: "
        f"the ledger's bytes, mean of {lab.STEPS} steps.",
    )
    _bytes(figure.add_axes((0.10, 0.13, 0.33, 0.64)), runs)
    _kept(figure.add_axes((0.60, 0.13, 0.38, 0.64)), recorded["kept"])
    look.save(figure, folder)
    draw_losses(runs, folder)


def _bytes(ax: Any, runs: dict[str, Any]) -> None:
    """Draw the bytes of the busiest rank in a step, logarithmic."""
    look.quiet(ax, grid="x")
    each = {name: run["moments"][-1].sent / lab.STEPS for name, run in runs.items()}
    for place, (name, nbytes) in enumerate(each.items()):
        ax.barh(place, nbytes, color=COLOURS[name], height=0.65)
        ax.text(
            nbytes * 1.08,
            place,
            f"{nbytes:,.0f}   1/{each['none'] / nbytes:.0f}" if place else f"{nbytes:,.0f}",
            va="center",
            fontsize=10,
            color=look.SOFT,
        )
    ax.set_xscale("log")
    ax.set_xlim(1e3, 1.6e6)
    ax.set_yticks(range(len(each)), list(each))
    ax.invert_yaxis()
    look.caption(ax, "Bytes that a rank sends in a step")


def _kept(ax: Any, kept: dict[str, dict[str, float]]) -> None:
    """Draw two bars per scheme: the kept share of one gradient, and of the sum."""
    look.quiet(ax, grid="x")
    for place, found in enumerate(kept.values()):
        for key, shift, colour in (("first", -0.19, "#7fb0de"), ("sum", 0.19, "#2f5d9b")):
            value = 100 * found[key]
            ax.barh(
                place + shift,
                value,
                height=0.36,
                color=colour,
                label={"first": "of one gradient", "sum": f"of the sum of {SUMMED}"}[key]
                if not place
                else None,
            )
            ax.text(
                value + 1, place + shift, f"{value:.1f}", va="center", fontsize=9, color=look.SOFT
            )
    ax.set_yticks(range(len(kept)), list(kept))
    ax.invert_yaxis()
    ax.set_xlim(0, 112)
    ax.set_xlabel("% of the squared length", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10, loc="lower right")
    look.caption(ax, "What arrives, with error feedback")


def draw_losses(runs: dict[str, Any], folder: Path) -> None:
    """Draw loss.png: the held-out loss by step, and over the seconds of each link."""
    figure = look.new_figure(
        13.5,
        8.4,
        "The same runs, over steps and over the seconds of three links",
        "Recorded: losses, messages, bytes, processor time of a step. By the α-β model of a "
        "shaped link: seconds = steps × that time + messages × 50 µs + bytes / bandwidth.",
    )
    panels = [("", None), *((link.name, link) for link in lab.LINKS)]
    for number, (name, link) in enumerate(panels):
        ax = figure.add_axes((0.06 + 0.49 * (number % 2), 0.53 - 0.45 * (number // 2), 0.42, 0.32))
        _losses(ax, runs, link)
        look.caption(ax, name or "By step: what compression costs")
        ax.set_xlabel("seconds" if link else "step", fontsize=10.5, color=look.SOFT)
        if not number:
            ax.legend(frameon=False, fontsize=9.5, ncols=2)
    look.save(figure, folder, "loss.png")


def _losses(ax: Any, runs: dict[str, Any], link: Any) -> None:
    """Draw one line per way; over a link, up to three times the end of the middle one."""
    look.quiet(ax, grid="y")
    ends = []
    for name, run in runs.items():
        times = [
            lab.clock(each, run["seconds"], link) if link else each.step for each in run["moments"]
        ]
        ends.append(times[-1])
        ax.plot(
            times,
            [each.loss for each in run["moments"]],
            color=COLOURS[name],
            linewidth=1.7,
            label=name,
        )
    ax.set_xlim(0, min(max(ends), 3 * sorted(ends)[len(ends) // 2]) if link else lab.STEPS)
    ax.set_ylim(2.3, 4.7)
    ax.set_ylabel("held-out loss, nats", fontsize=10.5, color=look.SOFT)


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
