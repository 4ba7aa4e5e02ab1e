"""Draw the figure of lesson 06: bytes at the server and in a ring, a straggler, staleness, loss.

python lessons/06_parameter_server/figure.py [--out DIR]
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.parallel.data.async_parameter_server import AsyncParameterServer

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "06")
# Three workers and a server. The last worker naps.
RANKS = 4
MOST = 7
STEPS = 40
NAP = 0.02
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous, staleness 2": {"strategy": AsyncParameterServer, "staleness": 2},
    "asynchronous, any staleness": {"strategy": AsyncParameterServer, "staleness": None},
}
COLORS = {
    "asleep": look.GRID,
    "forward": look.PHASES["forward"],
    "backward": look.PHASES["backward"],
    "push": look.PHASES["all_reduce"],
    "pull": look.PHASES["wait"],
    "loss": look.PHASES["wait"],
}
SHOWN = 0.16  # seconds of the timelines


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 the bytes for 1 to MOST workers, and every rank's part of a run in each
    mode."""
    found: dict[str, Any] = {}
    if group.rank == 0:
        found["traffic"] = [lab.traffic(workers) for workers in range(1, MOST + 1)]
    group.barrier()
    for mode, options in MODES.items():
        found[mode] = gather_records(
            group, lab.train(group, steps=STEPS, slow={RANKS - 2: NAP}, servers=1, **options)
        )
    return found


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded."""
    what = (
        f"{RANKS - 1} workers and a server, as recorded; worker {RANKS - 2} naps {1e3 * NAP:.0f} "
        f"ms before each of its {STEPS} steps."
    )
    figure = look.new_figure(
        13.5, 8.0, "The parameter server: its link, a straggler, and how stale is stale", what
    )
    _traffic(figure.add_axes((0.06, 0.53, 0.30, 0.31)), recorded["traffic"])
    names = ("synchronous", "asynchronous, any staleness")
    for row, mode in enumerate(names):
        axes = figure.add_axes((0.46, 0.695 - 0.195 * row, 0.52, 0.11))
        _lanes(axes, recorded[mode], mode, last=row == len(names) - 1)
    _legend(figure)
    _stale(figure.add_axes((0.06, 0.09, 0.42, 0.28)), recorded)
    _loss(figure.add_axes((0.58, 0.09, 0.40, 0.28)), recorded)
    look.save(figure, folder)


def _traffic(ax: Any, runs: list[dict[str, int]]) -> None:
    """Draw the bytes in and out in one step: counted as dots, the formulas as lines."""
    look.quiet(ax, grid="y")
    counts = np.arange(1, len(runs) + 1)
    nbytes = runs[0]["model"]
    ax.plot(
        counts,
        [(run["sent"] + run["pushed"]) / 2**10 for run in runs],
        "o",
        color=look.RANKS[1],
        markersize=7,
    )
    ax.plot(counts, 2 * counts * nbytes / 2**10, color=look.RANKS[1], label="one server: 2NΨ")
    ax.plot(
        counts, [2 * run["ring"] / 2**10 for run in runs], "o", color=look.RANKS[0], markersize=7
    )
    ax.plot(
        counts,
        4 * (counts - 1) / counts * nbytes / 2**10,
        color=look.RANKS[0],
        label="a rank of a ring: 4(N-1)/N Ψ",
    )
    ax.legend(frameon=False, fontsize=10, labelcolor=look.INK, loc="upper left")
    ax.set_xlabel("workers", color=look.SOFT, fontsize=10.5)
    ax.set_ylabel("KiB in and out a step", color=look.SOFT, fontsize=10.5)
    ax.set_ylim(0, None)
    look.caption(ax, f"Bytes through one link, Ψ = {nbytes / 2**10:.0f} KiB; dots: counted")


def _lanes(ax: Any, ranks: list[dict[str, Any]], mode: str, *, last: bool) -> None:
    """Draw what each worker does in the first SHOWN seconds."""
    look.quiet(ax, grid="x")
    workers = [rank for rank in ranks if not rank["serves"]]
    for lane, rank in enumerate(workers):
        for name, start, stop, *_ in rank["spans"]:
            if name in COLORS and start < SHOWN:
                ax.barh(
                    lane, 1e3 * (min(stop, SHOWN) - start), 0.7, 1e3 * start, color=COLORS[name]
                )
    ax.set_yticks(
        range(len(workers)), [f"worker {lane}" for lane in range(len(workers))], fontsize=10
    )
    ax.set_ylim(len(workers) - 0.4, -0.6)
    ax.set_xlim(0, 1e3 * SHOWN)
    if last:
        ax.set_xlabel("milliseconds", color=look.SOFT, fontsize=10.5)
    done = sum(end < SHOWN for end in workers[0]["ends"])
    look.caption(ax, f"{mode}: worker 0 has done {done} steps")


def _legend(figure: Any) -> None:
    names = {
        "asleep": "naps",
        "forward": "forward",
        "backward": "backward",
        "push": "push",
        "pull": "pull, and wait",
    }
    figure.legend(
        [look.patch(COLORS[name]) for name in names],
        list(names.values()),
        frameon=False,
        fontsize=10,
        ncols=len(names),
        loc="upper left",
        bbox_to_anchor=(0.45, 0.9),
        labelcolor=look.INK,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _stale(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw the staleness of each update of the server; open dots are the slow worker's."""
    look.quiet(ax, grid="y")
    for mode, color in zip(list(MODES)[1:], (look.RANKS[2], look.RANKS[3]), strict=True):
        updates = lab.staleness(recorded[mode][RANKS - 1])
        for slow in (False, True):
            chosen = [
                (number, late)
                for number, (worker, late) in enumerate(updates)
                if (worker == RANKS - 2) == slow
            ]
            ax.plot(
                [number for number, _ in chosen],
                [late for _, late in chosen],
                "o" if slow else ".",
                color=color,
                markerfacecolor="white" if slow else color,
                markersize=6 if slow else 5,
                linestyle="",
                label=mode.split(", ")[1] + (", of the slow worker" if slow else ""),
            )
    ax.legend(frameon=False, fontsize=9.5, labelcolor=look.INK, loc="upper right")
    ax.set_xlabel("updates of the server, in their order", color=look.SOFT, fontsize=10.5)
    ax.set_ylim(
        -0.6, 2.0 * max(late for _, late in lab.staleness(recorded[list(MODES)[-1]][RANKS - 1]))
    )
    look.caption(ax, "Updates by others since the weights were read")


def _loss(ax: Any, recorded: dict[str, Any]) -> None:
    """Draw worker 0's loss over time, the mean of five steps."""
    look.quiet(ax, grid="y")
    for mode, color in zip(MODES, (look.RANKS[0], look.RANKS[2], look.RANKS[3]), strict=True):
        losses = np.array(recorded[mode][0]["losses"])
        ends = np.array(recorded[mode][0]["ends"])
        smooth = np.convolve(losses, np.ones(5) / 5, mode="valid")
        ax.plot(
            ends[4:],
            smooth,
            color=color,
            linewidth=1.8,
            label=f"{mode}: held out {recorded[mode][0]['held_out']:.2f} in the end",
        )
    ax.set_ylim(-0.1, 1.4 * max(recorded[next(iter(MODES))][0]["losses"]))
    ax.legend(frameon=False, fontsize=9.5, labelcolor=look.INK, loc="upper right")
    ax.set_xlabel("seconds", color=look.SOFT, fontsize=10.5)
    look.caption(ax, f"Worker 0's loss over its {STEPS} steps")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS, transport="auto")
