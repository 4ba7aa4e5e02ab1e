"""The figures of lesson 24: a straggler on the clock of 64 ranks, five plans; what bandwidth, size
and hardware give.

python lessons/24_simulate/figure.py [--out DIR]      # figure.png and hardware.png; takes a minute
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.simulate.results import Simulation
from minidist.simulate.timelines import timelines

HERE = Path(__file__).resolve().parent
lesson = load_module(HERE / "lesson.py", "24")
lab = lesson.lab
SHOWN = (2, 3, 4)  # ranks of 64; rank 3 is the straggler
COLORS = {
    "computing": look.PHASES["forward"],
    "waits for bytes": look.PHASES["all_reduce"],
    "waits for others": look.PHASES["wait"],
}
PASSES = (1, 8)


def record(group: Group) -> dict[str, Any]:
    """Return the spans of three ranks with and without a straggler, the parts of five plans,
    efficiencies, and hardware gains."""
    runs = {
        name: lesson.simulated("dp=64", "h100:8x8", 256, zero=1, stragglers=slow)
        for name, slow in (("all alike", {}), ("rank 3 computes at half speed", {3: 2.0}))
    }
    return {
        "runs": {name: (found.step_seconds, spans(found)) for name, found in runs.items()},
        "plans": [
            (name(plan, options), parts(lesson.simulated(plan, "h100:2x8", 64, **options)))
            for plan, options in lesson.PLANS
        ],
        "efficiency": {
            (size, passes): lab.efficiencies(lab.sized(*size), passes=passes)
            for size in lab.SIZES
            for passes in PASSES
        },
        "worth": lab.worth(),
    }


def name(plan: str, options: dict[str, int]) -> str:
    """Return a plan in a few words."""
    return ", ".join([plan, *(f"{key} {value}" for key, value in options.items())])


def spans(found: Simulation) -> dict[int, list[tuple[str, float, float]]]:
    """Return {rank: (row, start, stop)} of computing and calls."""
    return {
        line.rank: [(span.row, span.start, span.stop) for span in line.spans]
        for line in timelines(found, SHOWN)
    }


def parts(found: Simulation) -> dict[str, float]:
    """Return the seconds of a step by what a rank does."""
    return {
        "computing": sum(found.parts["busy"].values()),
        "waits for bytes": sum(found.parts["exposed"].values()),
        "waits for others": sum(found.parts["idle"].values()),
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png and hardware.png."""
    figure = look.new_figure(
        13.5,
        5.6,
        "A step on virtual H100s: who waits, and for what",
        "Left: three of 64 ranks; dp=64, ZeRO-1, 256 sequences. Right: the five plans of section "
        "2 on 16 devices. Two billion weights, replayed events.",
    )
    last = max(seconds for seconds, _ in recorded["runs"].values())
    for number, (title, (seconds, lanes)) in enumerate(recorded["runs"].items()):
        ax = figure.add_axes((0.06, 0.55 - 0.36 * number, 0.46, 0.22))
        draw_ranks(ax, lanes, last)
        look.caption(ax, f"{title}: {seconds:.3f} s")
        ax.tick_params(labelbottom=number == 1)
    ax.set_xlabel("seconds since the step began", fontsize=10.5, color=look.SOFT)
    draw_plans(figure.add_axes((0.70, 0.19, 0.28, 0.58)), recorded["plans"])
    figure.legend(
        [
            look.patch(color)
            for color in (
                COLORS["computing"],
                look.PHASES["backward"],
                COLORS["waits for bytes"],
                COLORS["waits for others"],
            )
        ],
        ["computing", "a call runs", *list(COLORS)[1:]],
        frameon=False,
        fontsize=10,
        labelcolor=look.INK,
        loc="lower left",
        ncols=4,
        bbox_to_anchor=(0.05, 0.0),
        handlelength=1.2,
    )
    look.save(figure, folder)
    draw_hardware(recorded, folder)


def draw_ranks(ax: Any, lanes: dict[int, list[tuple[str, float, float]]], last: float) -> None:
    """Draw one row per rank: computing above, calls in a strip below."""
    look.quiet(ax)
    for row, found in enumerate(lanes.values()):
        for kind, where, color in (
            ("compute", (row - 0.35, 0.45), COLORS["computing"]),
            ("communication", (row + 0.14, 0.22), look.PHASES["backward"]),
        ):
            ax.broken_barh(
                [(start, stop - start) for what, start, stop in found if what == kind],
                where,
                facecolors=color,
                linewidth=0,
            )
    ax.set_yticks(range(len(lanes)), [f"rank {rank}" for rank in lanes])
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, last)


def draw_plans(ax: Any, plans: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Draw one bar per plan, divided by what its ranks do."""
    look.quiet(ax, grid="x")
    left = [0.0] * len(plans)
    for part, color in COLORS.items():
        widths = [found[part] for _, found in plans]
        ax.barh(range(len(plans)), widths, left=left, color=color, height=0.6)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for row, seconds in enumerate(left):
        ax.text(seconds, row, f" {seconds:.3f} s", va="center", fontsize=10, color=look.INK)
    ax.set_yticks(range(len(plans)), [title for title, _ in plans])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(left))
    ax.set_xlabel("seconds a step, mean of all ranks", fontsize=10.5, color=look.SOFT)
    look.caption(ax, "Five plans")


def draw_hardware(recorded: dict[str, Any], folder: Path) -> None:
    """Draw hardware.png: N1:100 and N2 §10.6, computed."""
    figure = look.new_figure(
        13.5,
        5.4,
        "What bandwidth, model size and hardware give",
        "Left: 64 H100s, dp=64, ZeRO-1, 2,048 tokens a device and pass. Right: the best plan on "
        "H200s with twice of one thing, over today's best.",
    )
    draw_efficiency(figure.add_axes((0.07, 0.24, 0.38, 0.52)), recorded["efficiency"])
    ax = figure.add_axes((0.55, 0.24, 0.43, 0.52))
    look.quiet(ax, grid="y")
    jobs = recorded["worth"]
    for number, (job, found) in enumerate(jobs.items()):
        ax.bar(
            [place + 0.27 * (number - 1) for place in range(len(found))],
            [share - 1 for share in found.values()],
            width=0.25,
            color=look.RANKS[number],
            label=job,
        )
    ax.set_xticks(range(len(found)), [thing.replace(" ", "\n") for thing in found])
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:+.0%}")
    ax.set_ylabel("steps a second", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10, labelcolor=look.INK)
    look.caption(ax, "Twice of one thing (N2 §10.6)")
    look.save(figure, folder, "hardware.png")


def draw_efficiency(ax: Any, found: dict[Any, list[float]]) -> None:
    """Draw one line per model size; dashed: eight passes before each reduction."""
    look.quiet(ax, grid="y")
    for number, size in enumerate(lab.SIZES):
        billions = lab.sized(*size).numbers / 1e9
        for passes, style in zip(PASSES, ("-", "--"), strict=True):
            ax.plot(
                lab.GBPS,
                found[size, passes],
                style,
                marker="o",
                markersize=4,
                color=look.RANKS[number],
                label=f"{billions:.1f} billion weights" if passes == 1 else None,
            )
    ax.set_xscale("log", base=2)
    ax.set_xticks(lab.GBPS, [str(gbps) for gbps in lab.GBPS])
    ax.set_ylim(0, 1.05)
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.set_xlabel("GB/s of a network card", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("tokens a second and device, of one node's", fontsize=10.5, color=look.SOFT)
    ax.legend(
        frameon=False,
        fontsize=10,
        labelcolor=look.INK,
        loc="upper center",
        ncols=3,
        bbox_to_anchor=(0.5, -0.22),
    )
    look.caption(ax, f"Eight nodes instead of one; dashed: {PASSES[-1]} passes (N1:100)")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=1)
