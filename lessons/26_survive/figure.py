"""The figures of lesson 26: three runs through the same interruptions, what the interval between
saves costs; a storm.

python lessons/26_survive/figure.py [--out DIR]      # figure.png and storm.png; takes a minute
"""

import itertools
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.launch.own_python import module_command
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.observe.storm_figure import AGAIN, LIVES, ON_STEPS
from minidist.survive import storm_report
from minidist.survive.interval import best_interval, goodput
from minidist.survive.storm import LOG, events

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "26")
# seconds
SAVE = 20.0
BETWEEN = 7200.0
RESTART = 60.0
HOURS = 6
DAYS = 300
RANKS = 4  # of the storm
STORM = (f"-n{RANKS}", "--minutes=0.5", "--every=6", "--kinds=kill,torn", "--no-compare")
SHOWN = {"kill": "rank {rank} is killed", "torn": "all ranks are killed"}
BEFORE = 1.2
AFTER = 1.8
COLORS = {"work": "#2f5d9b", "save": "#e2a33b", "lost": "#c8553d", "restart": "#9aa0a6"}
WORDS = {
    "work": "work that is kept",
    "save": "saving",
    "lost": "work done in vain",
    "restart": "restarting",
}


def record(group: Group) -> dict[str, Any]:
    """Return the spans of three runs, the kept share for many intervals, and a storm's events and
    faults."""
    best = best_interval(SAVE, BETWEEN)
    seconds = DAYS * 86_400.0
    moments = lab.interruptions(BETWEEN, seconds, seed=4)

    def run(interval: float, seconds: float) -> list[Any]:
        return lab.replay(interval, moments, save=SAVE, restart=RESTART, seconds=seconds)

    tried = best * np.geomspace(1 / 16, 16, 17)
    return {
        "best": best,
        "runs": {factor: run(best * factor, HOURS * 3600.0) for factor in (1 / 8, 1, 8)},
        "kept": [(interval, lab.kept(run(interval, seconds))) for interval in tried.tolist()],
        "storm": _storm(),
    }


def _storm() -> dict[str, Any]:
    """Return a storm's events, and its faults with their results."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            module_command("minidist", "storm", *STORM, f"--out={folder}/run"),
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        run = Path(folder, "run")
        return {
            "told": events(run / LOG),
            "faults": json.loads((run / "storm.json").read_text())["happened"],
        }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from the recorded spans, and storm.png from two faults of the storm."""
    draw_faults(recorded["storm"], folder)
    figure = look.new_figure(
        13.5,
        6.0,
        "The same interruptions, saved too often, well, and too seldom",
        f"A save takes {SAVE:g} s, an interruption comes every {BETWEEN / 3600:g} hours on "
        f"average, a restart takes {RESTART:g} s. Left: {HOURS} hours, event by event. "
        f"Right: {DAYS} days.",
    )
    for row, (factor, spans) in enumerate(recorded["runs"].items()):
        _lane(
            figure.add_axes((0.05, 0.60 - 0.21 * row, 0.52, 0.13)),
            factor * recorded["best"],
            spans,
            last=row == len(recorded["runs"]) - 1,
        )
    figure.legend(
        [look.patch(color) for color in COLORS.values()],
        list(WORDS.values()),
        frameon=False,
        fontsize=10,
        labelcolor=look.INK,
        loc="lower left",
        ncols=4,
        bbox_to_anchor=(0.045, 0.0),
        handlelength=1.2,
    )
    _kept(figure.add_axes((0.65, 0.18, 0.33, 0.55)), recorded)
    look.save(figure, folder)


def draw_faults(storm: dict[str, Any], folder: Path) -> None:
    """Draw storm.png: a panel for the first fault of each kind."""
    figure = look.new_figure(
        13.5,
        5.6,
        "Two faults of a storm, and what each costs",
        f"{RANKS} ranks and a spare. Above: each rank's process; another colour is another process, "
        "grey or white is waiting. Below: the steps that are made.",
    )
    works = storm_report.spans(storm["told"], storm["faults"])
    titles = {
        "kill": "A rank is killed; its partner has its state",
        "torn": "The newest checkpoint is torn, all ranks are killed",
    }
    for panel, (kind, title) in enumerate(titles.items()):
        fault = next(fault for fault in storm["faults"] if fault["kind"] == kind)
        left = 0.065 + 0.49 * panel
        lanes = figure.add_axes((left, 0.48, 0.43, 0.25))
        steps = figure.add_axes((left, 0.12, 0.43, 0.27))
        _processes(lanes, storm["told"], works, fault)
        _steps(steps, storm["told"], fault)
        look.caption(lanes, title)
        for ax in (lanes, steps):
            ax.set_xlim(-BEFORE, AFTER)
            ax.axvline(0, color=look.INK, linewidth=1.2, linestyle=":")
    look.save(figure, folder, "storm.png")


def _processes(
    ax: Any, told: list[Any], works: list[tuple[float, float, int, int]], fault: dict[str, Any]
) -> None:
    """Draw one lane per rank around a fault: coloured while its process takes part in steps."""
    look.quiet(ax)
    zero = fault["time"]
    forming = [event for event in told if event["event"] == "forming"]
    by_number = {number: (begin, end) for begin, end, _, number in works}
    seen: dict[int, str] = {}
    for number, event in enumerate(forming, 1):
        begin, end = by_number.get(number, (event["time"], event["time"]))
        near = event["time"] < zero + AFTER and end > zero - BEFORE
        for rank, pid in enumerate(event["pids"]):
            if near:
                seen.setdefault(pid, look.RANKS[len(seen) % len(look.RANKS)])
                ax.broken_barh(
                    [(event["time"] - zero, begin - event["time"])],
                    (rank - 0.32, 0.64),
                    color=LIVES,
                    linewidth=0,
                )
                ax.broken_barh(
                    [(begin - zero, end - begin)], (rank - 0.32, 0.64), color=seen[pid], linewidth=0
                )
    ax.set_ylim(RANKS - 0.4, -0.6)
    ax.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    ax.tick_params(labelbottom=False)


def _steps(ax: Any, told: list[Any], fault: dict[str, Any]) -> None:
    """Draw the number of steps around a fault; red where steps are lost."""
    look.quiet(ax, grid="y")
    known: list[tuple[float, int]] = []
    for event in sorted(
        (event for event in told if event["event"] in ON_STEPS), key=lambda event: event["time"]
    ):
        before = known[-1][1] if known and event["event"] != "formed" else 0
        known.append((event["time"] - fault["time"], max(before, int(event["step"]))))
    shown = []
    for (begin, first), (end, last) in itertools.pairwise(known):
        if end > -BEFORE and begin < AFTER:
            ax.plot(
                [begin, end],
                [first, last],
                color=AGAIN if last < first else look.RANKS[0],
                linewidth=1.8,
                solid_capstyle="round",
            )
            shown += [first, last]
    ax.set_ylim(min(shown) - 1, max(shown) + 1)
    ax.annotate(
        SHOWN[fault["kind"]].format(rank=fault.get("rank")),
        (0, 0.06),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        fontsize=10,
        color=look.INK,
    )
    if fault["again"]:
        ax.annotate(
            f"{fault['again']} steps are made again",
            (1, 0.06),  # below the line, which rises to the right
            xycoords="axes fraction",
            fontsize=10,
            color=AGAIN,
            ha="right",
        )
    ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.set_xlabel("seconds from the fault", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("steps made", fontsize=10.5, color=look.SOFT)


def _lane(ax: Any, interval: float, spans: list[Any], *, last: bool) -> None:
    """Draw one run's clock from left to right."""
    look.quiet(ax)
    for kind, color in COLORS.items():
        chosen = [
            (span.start / 3600, (span.stop - span.start) / 3600)
            for span in spans
            if span.kind == kind
        ]
        ax.broken_barh(chosen, (0, 1), facecolors=color, linewidth=0)
    ax.set_xlim(0, HOURS)
    ax.set_yticks([])
    ax.tick_params(labelbottom=last)
    if last:
        ax.set_xlabel("hours", fontsize=10.5, color=look.SOFT)
    share = {
        kind: sum(span.stop - span.start for span in spans if span.kind == kind) / spans[-1].stop
        for kind in COLORS
    }
    look.caption(
        ax,
        f"saved every {interval:,.0f} s: {share['work']:.0%} kept, {share['save']:.0%} saving, "
        f"{share['lost']:.0%} in vain",
    )


def _kept(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw the kept share of the time over the interval."""
    look.quiet(ax, grid="y")
    line = recorded["best"] * np.geomspace(1 / 16, 16, 200)
    ax.plot(
        line,
        [goodput(t, save=SAVE, between=BETWEEN, restart=RESTART) for t in line],
        color=look.SOFT,
        linewidth=1.5,
        label="Daly's formula",
    )
    ax.plot(
        *zip(*recorded["kept"], strict=True),
        "o",
        color=COLORS["work"],
        markersize=5,
        label="event by event",
    )
    ax.axvline(recorded["best"], color=COLORS["save"], linewidth=1.2)
    ax.annotate(
        f"√(2 δ M) = {recorded['best']:,.0f} s",
        (recorded["best"], 0.08),
        xytext=(6, 0),
        textcoords="offset points",
        fontsize=10,
        color=look.INK,
    )
    ax.set_xscale("log")
    ax.set_ylim(0, 1)
    ax.set_xlabel("seconds of work between two saves", fontsize=10.5, color=look.SOFT)
    ax.set_ylabel("part of the time that is kept", fontsize=10.5, color=look.SOFT)
    ax.legend(frameon=False, fontsize=10, labelcolor=look.INK, loc="lower left")
    look.caption(ax, "What the interval costs")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=1)
