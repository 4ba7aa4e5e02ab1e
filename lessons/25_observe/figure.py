"""The figures of lesson 25: a slow rank in the records of a job that really ran; what a power cap
costs and saves; a small picture of the records that each rule reads.

python lessons/25_observe/figure.py [--out DIR]      # six pictures; takes ten seconds
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
SOME_STEPS = slice(6, 14)  # of the slow rank's picture
LATE = "#c44e52"  # what the rule names
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
        "link": lab.sick_job("slow link", size=RANKS, seed=2),
        "leak": lab.sick_job("leak", size=RANKS, seed=4),
        "nan": lab.sick_job("not finite", size=RANKS, seed=5),
        "hang": lab.sick_job("hang", size=RANKS, seed=3),
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from the recorded steps, and a small picture for each rule."""
    for name, drawing in RULES.items():
        drawing(recorded, folder, name)
    figure = look.new_figure(
        13.5,
        5.4,
        "A slow rank: it computes longest and waits least",
        f"{RANKS} processes; from step {FROM} on rank {VICTIM} computes 1.5 times as long. "
        "Left: recorded by each rank. Middle: a simulated clock, the mean of 30 steps.  "
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


# ------------------------------------------------------------------------ a picture for each rule


def _small(title: str, subtitle: str) -> tuple[Any, Any]:
    """Return a small figure and its axes."""
    figure = look.new_figure(8.0, 3.0, title, subtitle)
    return figure, look.quiet(figure.add_axes((0.11, 0.19, 0.86, 0.47)))


def _by_rank(ax: Any, ranks: int = RANKS) -> None:
    """Give each rank a row, rank 0 at the top."""
    ax.set_ylim(ranks - 0.4, -0.6)
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])


def draw_hang(recorded: dict[str, Any], folder: Path, name: str) -> None:
    """Draw the last calls of each rank of a hang."""
    job = recorded["hang"]
    newest = max(job.calls.values())
    behind = ", ".join(str(rank) for rank in job.culprit)
    figure, ax = _small(
        f"A hang: behind are ranks {behind}"
        if len(job.culprit) > 1
        else f"A hang: behind is rank {behind}",
        "A box is a call that the rank has made; the last one of each rank does not end.",
    )
    for rank, last in job.calls.items():
        for call in range(newest - 4, last + 1):
            color = look.SOFT if call < last else LATE if last < newest else look.PHASES["wait"]
            ax.broken_barh([(call - 0.4, 0.8)], (rank - 0.32, 0.64), color=color, linewidth=0)
        ax.text(
            last + 0.55,
            rank,
            "waits" if last == newest else "rank 0 waits for it",
            va="center",
            fontsize=10,
            color=look.INK,
        )
    _by_rank(ax)
    ax.set_xlim(newest - 4.6, newest + 2.2)
    ax.set_xticks(range(newest - 4, newest + 1))
    ax.set_xlabel("number of the call", fontsize=10.5, color=look.SOFT)
    look.save(figure, folder, name)


def draw_slow_rank(recorded: dict[str, Any], folder: Path, name: str) -> None:
    """Draw when each rank arrives at the call of some steps."""
    job = recorded["clock"]
    arrivals = 1e3 * job.arrivals[SOME_STEPS]
    ends = 1e3 * (job.arrivals + job.waits)[SOME_STEPS]
    figure, ax = _small(
        f"A slow rank: the others wait for rank {job.culprit}",
        "Dot: the rank enters the call of a step. Light: it waits there until the call ends.",
    )
    for rank in range(RANKS):
        color = LATE if rank == job.culprit else look.RANKS[0]
        waits = [
            (begin, end - begin)
            for begin, end in zip(arrivals[:, rank], ends[:, rank], strict=True)
        ]
        ax.broken_barh(waits, (rank - 0.25, 0.5), color=look.PHASES["wait"], linewidth=0)
        ax.plot(arrivals[:, rank], [rank] * len(arrivals), "o", color=color, markersize=6)
    _by_rank(ax)
    ax.set_xlabel("ms", fontsize=10.5, color=look.SOFT)
    look.save(figure, folder, name)


def draw_slow_link(recorded: dict[str, Any], folder: Path, name: str) -> None:
    """Draw the seconds of each message, and the quarter of each link."""
    job = recorded["link"]
    src, dst = job.culprit
    figure, ax = _small(
        f"A slow link: {src} → {dst}",
        "Dot: a message. Line: a quarter of the link's messages are faster.",
    )
    links = sorted(job.links)
    for row, link in enumerate(links):
        color = LATE if link == job.culprit else look.RANKS[0]
        some = 1e3 * np.array(job.links[link])
        ax.plot(some, [row] * len(some), "o", color=color, markersize=4, alpha=0.5, linewidth=0)
        ax.plot([np.quantile(some, 0.25)] * 2, [row - 0.4, row + 0.4], color=look.INK, linewidth=2)
    ax.set_ylim(len(links) - 0.4, -0.6)
    ax.set_yticks(range(len(links)), [f"{one} → {other}" for one, other in links])
    ax.set_xlim(0)
    ax.set_xlabel("ms of a message", fontsize=10.5, color=look.SOFT)
    look.save(figure, folder, name)


def draw_leak(recorded: dict[str, Any], folder: Path, name: str) -> None:
    """Draw the memory of each rank by step."""
    job = recorded["leak"]
    figure, ax = _small(
        f"A leak: rank {job.culprit}",
        "Memory after each step. One rank grows in every step; another made one array.",
    )
    for rank in range(RANKS):
        leaks = rank == job.culprit
        memory = job.memory[:, rank] / lab.MIB
        ax.plot(
            memory,
            color=LATE if leaks else look.RANKS[0],
            linewidth=2.2 if leaks else 1.4,
        )
        if leaks or memory[-1] > 330:
            ax.text(
                len(memory) - 0.5,
                memory[-1],
                f"rank {rank}",
                va="top" if leaks else "bottom",
                fontsize=10,
                color=look.INK,
            )
    ax.set_xlim(0, len(job.memory) + 2)
    ax.set_xlabel("step", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("MiB", fontsize=10.5, color=look.SOFT)
    look.save(figure, folder, name)


def draw_nan(recorded: dict[str, Any], folder: Path, name: str) -> None:
    """Draw the reports of numbers that are not finite."""
    job = recorded["nan"]
    culprit, layer = job.culprit
    figure, ax = _small(
        f"A NaN: rank {culprit} had the first, in {layer}",
        "Cross: a rank reports a number that is not finite. The all-reduce carries it to all.",
    )
    for step, moment, rank, where in job.bad:
        first = (rank, where) == job.culprit
        ax.plot(step + moment, rank, "X", color=LATE if first else look.RANKS[0], markersize=9)
        ax.text(step + moment + 0.06, rank, where, va="center", fontsize=10, color=look.INK)
    _by_rank(ax)
    begin = min(step for step, *_ in job.bad)
    ax.set_xlim(begin - 0.1, begin + 2.2)
    ax.set_xticks(range(begin, begin + 3), [f"step {begin + more}" for more in range(3)])
    for more in range(3):
        ax.axvline(begin + more, color=look.GRID, linewidth=1.0, zorder=0)
    look.save(figure, folder, name)


RULES = {
    "hang.png": draw_hang,
    "slow_rank.png": draw_slow_rank,
    "slow_link.png": draw_slow_link,
    "leak.png": draw_leak,
    "nan.png": draw_nan,
}


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=1)
