"""The figure of lesson 25: a slow rank in the records of a job that really ran; what a power cap
costs and saves.

python lessons/25_observe/figure.py [--out DIR]      # figure.png; takes ten seconds
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.files import scratch
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.observe.power_cap import best_frequency, step_joules, step_seconds

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "25")
RANKS = 4
STEPS = 28
VICTIM = 2
FROM = 4
# as in lesson.py
STATIC = 30.0
DYNAMIC = 100.0
COMPUTE = 0.8
REST = 0.2


def record(group: Group) -> dict[str, Any]:
    """Return the steps of a job whose rank VICTIM computes 1.5 times as long from step FROM on."""
    with scratch() as folder:
        lab.real_job(folder, size=RANKS, steps=STEPS, victim=VICTIM)
        _, ranks = lab.told(folder)
    return {
        "steps": {rank: each.steps[1:] for rank, each in ranks.items()},
        "clock": lab.sick_job("slow rank", size=RANKS, seed=1),
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from the recorded steps."""
    figure = look.new_figure(
        13.5,
        5.4,
        "A slow rank: it computes longest and waits least",
        f"{RANKS} processes; from step {FROM} on rank {VICTIM} computes 1.5 times as long. "
        "Left: recorded by each rank. Middle: the same on a clock without other programs. "
        "Right: section 6.",
    )
    _processor(figure.add_axes((0.05, 0.14, 0.31, 0.60)), recorded["steps"])
    _shares(figure.add_axes((0.42, 0.14, 0.22, 0.60)), recorded["clock"])
    _caps(figure.add_axes((0.72, 0.14, 0.25, 0.60)))
    look.save(figure, folder)


def _processor(ax: Any, steps: dict[int, list[dict[str, Any]]]) -> None:
    """Draw own processor time over the steps."""
    look.quiet(ax, grid="y")
    for rank, lines in steps.items():
        ax.plot(
            [line["step"] for line in lines],
            [1e3 * line["cpu"] for line in lines],
            color=look.RANKS[rank],
            linewidth=2.2 if rank == VICTIM else 1.4,
            label=f"rank {rank}",
        )
    ax.axvline(FROM, color=look.SOFT, linewidth=1.0, linestyle=":")
    ax.set_ylim(0)
    ax.set_xlabel("step", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("ms of own processor time", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10, labelcolor=look.INK, loc="lower right", ncols=2)
    look.caption(ax, "Processor time of a step")


def _shares(ax: Any, job: Any) -> None:
    """Draw the mean step of each rank of a job on a simulated clock: its work, and its wait in the
    call."""
    look.quiet(ax)
    ends = job.arrivals + job.waits
    work = 1e3 * (job.arrivals[1:] - ends[:-1]).mean(axis=0)
    waits = 1e3 * job.waits[1:].mean(axis=0)
    ranks = range(len(work))
    ax.barh(ranks, work, color=look.PHASES["backward"], height=0.62)
    ax.barh(ranks, waits, left=work, color=look.PHASES["wait"], height=0.62)
    ax.invert_yaxis()
    ax.set_yticks(list(ranks), [f"rank {rank}" for rank in ranks])
    ax.set_xlabel("ms a step", fontsize=10.5, color=look.SOFT)
    ax.legend(
        [look.patch(look.PHASES["backward"]), look.patch(look.PHASES["wait"])],
        ["computes", "in its call"],
        frameon=False,
        fontsize=9.5,
        labelcolor=look.INK,
        ncols=2,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        handlelength=1.0,
        columnspacing=1.0,
    )
    look.caption(ax, f"Rank {job.culprit} waits least")


def _caps(ax: Any) -> None:
    """Draw for each frequency the joules of a step (y) over its seconds (x)."""
    look.quiet(ax, grid="y")
    ax.set_ylim(68, 116)
    given = {"work": COMPUTE, "rest": REST}
    power = {"static": STATIC, "dynamic": DYNAMIC}
    steps = [
        (step_seconds(f, **given), step_joules(f, **given, **power))
        for f in np.linspace(0.3, 1.0, 71).tolist()
    ]
    ax.plot(*zip(*steps, strict=True), color=look.PHASES["backward"], linewidth=2)
    best = best_frequency(**power)
    least = f"least energy: {STATIC + DYNAMIC * best**3:.0f} W"
    for frequency, word in ((1.0, "no cap"), (0.79, "80 W"), (best, least)):
        place = step_seconds(frequency, **given), step_joules(frequency, **given, **power)
        ax.plot(*place, "o", color=look.PHASES["all_reduce"], markersize=6)
        ax.annotate(
            word,
            place,
            xytext=(8, 6 if frequency > best else -14),
            textcoords="offset points",
            fontsize=10,
            color=look.INK,
        )
    ax.set_xlabel("seconds of a step", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("joules of a step", fontsize=10.5, color=look.SOFT)
    look.caption(ax, "A power cap saves energy")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=1)
