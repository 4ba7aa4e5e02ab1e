"""Draw the figures of lesson 06: bytes at the server and in a ring; a straggler, staleness and loss
on the clock.

python lessons/06_parameter_server/figure.py [--out DIR]      # figure.png and straggler.png
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "06")
MOST = 7
STEPS = 40
SECONDS = [1.0, 1.0, 4.0]  # of a worker's step on the clock
SLOW = 2  # the number of the slow worker
BOUNDS: dict[str, int | None] = {"staleness 2": 2, "no bound": None}
COLORS = {
    "synchronous": look.RANKS[0],
    "staleness 2": look.RANKS[2],
    "no bound": look.RANKS[3],
}
SHOWN = 24.0  # seconds of the timelines
POINTS = 20  # of each loss curve

Span = tuple[int, float, float]  # worker, begin and end of a step


def record(_: Group) -> dict[str, Any]:
    """Return the bytes for 1 to MOST workers; by mode, the steps and the held-out loss on the clock;
    by bound, how late each update is."""
    every = [step * max(SECONDS) for step in range(STEPS)]
    spans: dict[str, list[Span]] = {
        "synchronous": [
            (worker, begin, begin + taken)
            for begin in every
            for worker, taken in enumerate(SECONDS)
        ]
    }
    losses = {"synchronous": synchronous_losses()}
    late = {}
    for mode, bound in BOUNDS.items():
        updates, ends = lab.on_a_clock(STEPS, SECONDS, bound)
        made = list(zip(updates, ends, strict=True))
        spans[mode] = [(each.worker, end - SECONDS[each.worker], end) for each, end in made]
        late[mode] = [
            (each.worker, number - each.versions[0]) for number, each in enumerate(updates)
        ]
        counts = np.linspace(0, len(updates), POINTS + 1).astype(int)[1:]
        losses[mode] = [
            (ends[count - 1], lab.loss_after(updates[:count], len(SECONDS))) for count in counts
        ]
    return {
        "traffic": [lab.traffic(workers) for workers in range(1, MOST + 1)],
        "spans": spans,
        "late": late,
        "losses": losses,
    }


def synchronous_losses() -> list[tuple[float, float]]:
    """Return (seconds, held-out loss) of synchronous training: a step takes as long as the slow
    worker's."""
    counts = np.linspace(0, STEPS, POINTS + 1).astype(int)[1:]
    return [(float(count * max(SECONDS)), lab.serial_loss(int(count))) for count in counts]


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png and straggler.png from what was recorded."""
    figure = look.new_figure(8.0, 4.4, "The parameter server: its link")
    _traffic(figure.add_axes((0.1, 0.13, 0.86, 0.64)), recorded["traffic"])
    look.save(figure, folder)
    look.save(draw_straggler(recorded), folder, "straggler.png")


def draw_straggler(recorded: dict[str, Any]) -> Any:
    """Draw what three workers do on the clock, how late their updates are, and the loss."""
    figure = look.new_figure(
        13.5,
        7.4,
        "A straggler: three workers on a virtual clock, and how late their updates are",
        f"A step takes {SECONDS[0]:g} s on workers 0 and 1, and {SECONDS[SLOW]:g} s on worker {SLOW}; "
        f"{STEPS} steps each. Dark: the worker computes. Light: it waits.",
    )
    for place, (mode, spans) in enumerate(recorded["spans"].items()):
        _lanes(
            figure.add_axes((0.065 + 0.318 * place, 0.6, 0.28, 0.2)), spans, mode, named=not place
        )
    _late(figure.add_axes((0.065, 0.09, 0.42, 0.32)), recorded["late"])
    _loss(figure.add_axes((0.56, 0.09, 0.42, 0.32)), recorded["losses"])
    return figure


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
    ax.plot(counts, 2 * counts * nbytes / 2**10, color=look.RANKS[1], label="one server: 2N models")
    ax.plot(
        counts, [2 * run["ring"] / 2**10 for run in runs], "o", color=look.RANKS[0], markersize=7
    )
    ax.plot(
        counts,
        4 * (counts - 1) / counts * nbytes / 2**10,
        color=look.RANKS[0],
        label="a rank of a ring: 4(N-1)/N models",
    )
    ax.legend(frameon=False, fontsize=10, labelcolor=look.INK, loc="upper left")
    ax.set_xlabel("workers", color=look.SOFT, fontsize=10.5)
    ax.set_ylabel("KiB in and out a step", color=look.SOFT, fontsize=10.5)
    ax.set_ylim(0, None)
    look.caption(ax, f"Bytes through one link; a model has {nbytes / 2**10:.0f} KiB; dots: counted")


def _lanes(ax: Any, spans: list[Span], mode: str, *, named: bool) -> None:
    """Draw when each worker computes in the first SHOWN seconds."""
    look.quiet(ax, grid="x")
    for worker in range(len(SECONDS)):
        ax.barh(worker, SHOWN, 0.7, 0, color=look.PHASES["wait"])
    for worker, begin, end in spans:
        if begin < SHOWN:
            ax.barh(
                worker,
                end - begin,
                0.7,
                begin,
                color=look.PHASES["backward"],
                edgecolor="white",
                linewidth=0.8,
            )
    workers = range(len(SECONDS))
    names = [f"worker {worker}" if named else "" for worker in workers]
    ax.set_yticks(workers, names, fontsize=10)
    ax.set_ylim(len(SECONDS) - 0.4, -0.6)
    ax.set_xlim(0, SHOWN)
    ax.set_xticks(range(0, int(SHOWN) + 1, 4))
    ax.set_xlabel("seconds", color=look.SOFT, fontsize=10.5)
    done = sum(worker == 0 and end <= SHOWN for worker, _, end in spans)
    look.caption(ax, f"{mode}: worker 0 has done {done} steps")


def _late(ax: Any, late: dict[str, list[tuple[int, int]]]) -> None:
    """Draw how late each update of the server is; open dots are the slow worker's."""
    look.quiet(ax, grid="y")
    for mode, updates in late.items():
        for slow in (False, True):
            chosen = [
                (number, count)
                for number, (worker, count) in enumerate(updates)
                if (worker == SLOW) == slow
            ]
            ax.plot(
                [number for number, _ in chosen],
                [count for _, count in chosen],
                "o" if slow else ".",
                color=COLORS[mode],
                markerfacecolor="white" if slow else COLORS[mode],
                markersize=6 if slow else 5,
                linestyle="",
                label=mode + (", the slow worker" if slow else ", workers 0 and 1"),
            )
    ax.legend(frameon=False, fontsize=9.5, labelcolor=look.INK, loc="upper right")
    ax.set_xlabel("updates of the server, in their order", color=look.SOFT, fontsize=10.5)
    ax.set_ylim(-0.6, 1.7 * max(count for updates in late.values() for _, count in updates))
    look.caption(ax, "By how many updates each is late")


def _loss(ax: Any, losses: dict[str, list[tuple[float, float]]]) -> None:
    """Draw the held-out loss over time."""
    look.quiet(ax, grid="y")
    for mode, points in losses.items():
        updates = STEPS if mode == "synchronous" else STEPS * len(SECONDS)
        ax.plot(
            [seconds for seconds, _ in points],
            [loss for _, loss in points],
            color=COLORS[mode],
            linewidth=1.8,
            label=f"{mode}: {updates} updates, {points[-1][1]:.2f} in the end",
        )
    ax.set_xlim(0, None)
    ax.set_ylim(0, None)
    ax.legend(frameon=False, fontsize=9.5, labelcolor=look.INK, loc="upper right")
    ax.set_xlabel("seconds", color=look.SOFT, fontsize=10.5)
    look.caption(ax, "Held-out loss")


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=1)
