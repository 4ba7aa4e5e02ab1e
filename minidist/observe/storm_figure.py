"""The picture of a storm, drawn from its events: when each rank took part, the faults, and the
number of steps that counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.observe.plots import GRID, INK, PAPER, RANKS, SOFT, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Event = dict[str, Any]
Work = tuple[float, float, int, int]

LIVES = "#dfe3e8"  # a process that lives and waits
AGAIN = "#c44e52"  # steps that are made again
MARKS = {"kill": "X", "stop": "s", "cut": "D"}  # of faults that hit one rank
SHADES = {
    "torn": "#8172b3",
    "flip": "#c44e52",
    "full": "#e08e3c",
    "slow": "#937860",
    "launcher": "#1f2933",
}
ON_STEPS = ("formed", "stepped", "at", "reached", "left", "trained")


def draw_storm(
    path: str | Path,
    told: Sequence[Event],
    works: Sequence[Work],
    faults: Sequence[Event],
    *,
    ranks: int,
) -> None:
    """Write a picture of a storm: one lane per rank, the faults, and the steps that count over
    time.

    Args:    told: events of the job; works: (begin, end, ranks, number) of each generation's work;
             faults: with their kind, time and rank; ranks: the number that the job asks for.
    Raises:  OSError if `path` cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start = works[0][0] if works else 0.0
    end = works[-1][1] if works else 1.0
    height = 3.2 + 0.28 * ranks
    figure = Figure(figsize=(13.5, height), facecolor=PAPER)
    FigureCanvasAgg(figure)
    figure.text(
        0.35 / 13.5,
        1 - 0.28 / height,
        "A storm: who took part, what counted",
        fontsize=15,
        fontweight="bold",
        color=INK,
        va="top",
    )
    figure.text(
        0.35 / 13.5,
        1 - 0.66 / height,
        f"{ranks} ranks, {end - start:.0f} s, {len(faults)} faults. Another "
        "colour in a rank's lane: another process. Grey: it lives, and waits for the others.",
        fontsize=10.5,
        color=SOFT,
        va="top",
    )
    lanes = figure.add_axes((0.06, 2.1 / height, 0.92, 0.28 * ranks / height))
    steps = figure.add_axes((0.06, 0.55 / height, 0.92, 1.3 / height), sharex=lanes)
    _lanes(lanes, told, works, start, ranks)
    _faults(lanes, steps, faults, start, ranks)
    _steps(steps, told, faults, start)
    lanes.set_xlim(-0.01 * (end - start), 1.01 * (end - start))
    handles, labels = lanes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        frameon=False,
        fontsize=10,
        labelcolor=INK,
        loc="upper right",
        ncols=len(labels) or 1,
        bbox_to_anchor=(0.985, 1 - 0.2 / height),
        handletextpad=0.4,
    )
    save_picture(figure, path, dpi=150, facecolor=PAPER)


def _quiet(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#9aa5b1")
    axes.tick_params(colors=SOFT, labelsize=10, length=3)
    axes.set_axisbelow(True)


def _lanes(
    axes: "Axes", told: Sequence[Event], works: Sequence[Work], start: float, ranks: int
) -> None:
    """Draw one lane per rank: in its process's colour while it took part, grey while it only
    waited."""
    _quiet(axes)
    forming = [event for event in told if event["event"] == "forming"]
    by_number = {number: (begin, end) for begin, end, _, number in works}
    colours: dict[int, str] = {}
    for number, (event, following) in enumerate(zip(forming, [*forming[1:], None], strict=True), 1):
        begin, end = by_number.get(number, (event["time"], event["time"]))
        for rank, pid in enumerate(event["pids"]):
            colours.setdefault(pid, RANKS[len(colours) % len(RANKS)])
            until: float = (
                end if following is None or pid not in following["pids"] else following["time"]
            )
            axes.broken_barh(
                [(event["time"] - start, until - event["time"])],
                (rank - 0.32, 0.64),
                color=LIVES,
                linewidth=0,
            )
            axes.broken_barh(
                [(begin - start, end - begin)],
                (rank - 0.32, 0.64),
                color=colours[pid],
                linewidth=0,
            )
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(labelbottom=False)


def _faults(
    lanes: "Axes", steps: "Axes", faults: Sequence[Event], start: float, ranks: int
) -> None:
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        hits = [fault for fault in faults if fault["kind"] == kind]
        if kind in MARKS:
            lanes.plot(
                [fault["time"] - start for fault in hits],
                [fault["rank"] for fault in hits],
                MARKS[kind],
                color=INK,
                markersize=7,
                markeredgecolor=PAPER,
                label=kind,
                clip_on=False,
            )
            continue
        for number, fault in enumerate(hits):
            begin, end = (
                fault[key] - start for key in ("time", "until" if "until" in fault else "time")
            )
            for axes in (lanes, steps):
                axes.axvspan(
                    begin,
                    end,
                    color=SHADES[kind],
                    alpha=0.35,
                    linewidth=1.4,
                    label=kind if number == 0 and axes is lanes else None,
                )


def _steps(axes: "Axes", told: Sequence[Event], faults: Sequence[Event], start: float) -> None:
    """Draw the number of steps made over time; it falls, in red, where steps were lost."""
    _quiet(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    known: list[tuple[float, int]] = []
    for event in sorted(
        (event for event in told if event["event"] in ON_STEPS), key=lambda event: event["time"]
    ):
        # only a new generation ("formed") can lower the number
        before = known[-1][1] if known and event["event"] != "formed" else 0
        known.append((event["time"] - start, max(before, int(event["step"]))))
    for (begin, first), (end, last) in zip(known, known[1:], strict=False):
        axes.plot(
            [begin, end],
            [first, last],
            color=AGAIN if last < first else RANKS[0],
            linewidth=1.8,
            solid_capstyle="round",
        )
    axes.set_ylabel("steps made", fontsize=10.5, color=SOFT)
    axes.set_xlabel("seconds", fontsize=10.5, color=SOFT)
