"""The figure of lesson 01: from the launcher's start to the first barrier, recorded by 2 x 4
processes.

python lessons/01_launching/figure.py [--out DIR]      # figure.png
"""

import time

BEGAN = time.time()  # before anything is imported: the interpreter has just started

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import psutil  # noqa: E402

import minidist as md  # noqa: E402
from minidist.comm.records import gather_records  # noqa: E402
from minidist.files import scratch  # noqa: E402
from minidist.grading import load_module  # noqa: E402

HERE = Path(__file__).resolve().parent
STAGES = {
    "interpreter starts": "#c9ced6",
    "imports": "#7fb0de",
    "md.init: meet the others": "#e08e3c",
    "wait in the barrier": "#f3d3a8",
}


def started() -> float:
    """Return when this process was made, to a hundredth of a second where the system gives that
    precision."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return (
            time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
        )
    except (OSError, AttributeError):
        return psutil.Process().create_time()


def record(file: Path) -> None:
    """Run one rank: gather the moments of each rank's start to rank 0, which writes them to `file`.

    Moments are in seconds since the epoch.
    """
    imported = time.time()
    world = md.init()
    met = time.time()
    world.barrier()
    moments = [min(started(), BEGAN), BEGAN, imported, met, time.time()]
    mine = {
        "rank": world.rank,
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "node_rank": int(os.environ["NODE_RANK"]),
        "moments": moments,
    }
    ranks = gather_records(world, mine)
    if ranks:
        file.write_text(json.dumps({"size": world.size, "ranks": ranks}))


def record_two_machines() -> dict[str, Any]:
    """Run this file as 2 x 4 ranks and read what they wrote; `began` is when the launchers were
    started."""
    lesson = load_module(HERE / "lesson.py", "01")
    with scratch(prefix="minidist-lesson-") as folder:
        file = folder / "moments.json"
        began = time.time()
        status = lesson.two_machines(
            [sys.executable, str(Path(__file__).resolve()), "--record", str(file)]
        )
        if status:
            raise SystemExit(status)
        return {"began": began, **json.loads(file.read_text())}


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from the recorded moments."""
    from minidist.lessons import figures as look

    figure = look.new_figure(
        13.5,
        6.2,
        "One program, started eight times: from the launcher to the first barrier",
        "Eight processes under two launchers on one small machine, as recorded; WORLD_SIZE is 8.",
    )
    ax = look.quiet(figure.add_axes((0.315, 0.12, 0.655, 0.62)), grid="x")
    end = 0.0
    for rank in recorded["ranks"]:
        row = rank["rank"] + 0.5 * rank["node_rank"]
        moments = [moment - recorded["began"] for moment in rank["moments"]]
        for color, start, stop in zip(STAGES.values(), moments[:-1], moments[1:], strict=True):
            ax.barh(row, stop - start, 0.66, start, color=color, edgecolor="white", linewidth=0.8)
        end = max(end, moments[-1])
    ax.axvline(end, color=look.MEMORY["activations"], linewidth=1.6)
    ax.text(
        end,
        -0.72,
        "all leave the barrier ",
        ha="right",
        fontsize=10.5,
        color=look.MEMORY["activations"],
    )
    _labels(ax, recorded["ranks"])
    ax.legend(
        [look.patch(color) for color in STAGES.values()],
        list(STAGES),
        frameon=False,
        fontsize=10.5,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.45, 1.135),
        labelcolor=look.INK,
    )
    ax.set_xlim(0, 1.02 * end)
    ax.set_ylim(recorded["size"] + 0.1, -1.0)
    ax.set_xlabel("seconds after the launchers were started", color=look.SOFT, fontsize=10.5)
    look.save(figure, folder)


def _labels(ax: Any, ranks: list[dict[str, Any]]) -> None:
    """Write each row's numbers as a table left of the axes: machine, RANK, LOCAL_RANK,
    NODE_RANK."""
    from minidist.lessons import figures as look

    ax.set_yticks([])
    places = {"RANK": -0.275, "LOCAL_RANK": -0.18, "NODE_RANK": -0.07}
    for title, x in places.items():
        ax.text(
            x,
            -0.72,
            title,
            transform=ax.get_yaxis_transform(),
            ha="center",
            fontsize=9.5,
            color=look.SOFT,
        )
    for rank in ranks:
        row = rank["rank"] + 0.5 * rank["node_rank"]
        values = (rank["rank"], rank["local_rank"], rank["node_rank"])
        for x, value in zip(places.values(), values, strict=True):
            ax.text(
                x,
                row,
                str(value),
                transform=ax.get_yaxis_transform(),
                ha="center",
                va="center",
                fontsize=12,
                color=look.RANKS[rank["node_rank"]],
                fontweight="bold",
            )
        if rank["local_rank"] == 0:
            ax.text(
                -0.385,
                row + 1.5,
                f"node{rank['node_rank']}",
                transform=ax.get_yaxis_transform(),
                ha="center",
                va="center",
                fontsize=13,
                fontweight="bold",
                color=look.RANKS[rank["node_rank"]],
            )


def main() -> None:
    """Draw the figure; with --record, be one of the ranks that it shows."""
    from minidist.lessons.figures import also_in_chinese
    from minidist.lessons.phrases import figure_phrases
    from minidist.lessons.running import add_out

    parser = argparse.ArgumentParser(description="Record a start of eight processes and draw it.")
    add_out(parser, HERE)
    parser.add_argument("--record", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(options.record)
        return
    recorded = record_two_machines()
    phrases = figure_phrases(HERE)
    with also_in_chinese(phrases.say if phrases else None):
        draw(recorded, options.out)
    print(f"{options.out / 'figure.png'}: drawn from a run on 8 ranks")


if __name__ == "__main__":
    main()
