"""The figure of lesson 23: the critical path, in colour, of three recorded steps.

python lessons/23_overlap/figure.py [--out DIR]
"""

from pathlib import Path
from typing import Any

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.observe.step_record import record_step
from minidist.observe.why import why
from minidist.observe.why_report import draw_path, legend

HERE = Path(__file__).resolve().parent
lesson = load_module(HERE / "lesson.py", "23")
STEPS: dict[str, dict[str, Any]] = {
    "As it should be: a bucket a block, from the last block on": {},
    "Buckets in forward order: the first one is complete when backward ends": {
        "model": lesson.lab.BackToFront
    },
    "Bucket 2 leaves 30 ms late": {"hold": 0.030},
}

TRIES = 20  # steps of each kind; the shortest is drawn: other programs made the others longer


def record(group: Group) -> dict[str, Any]:
    """Return the reports of the steps, on rank 0."""
    reports = {}
    for title, broken in STEPS.items():
        timelines = lesson.lab.recorded(group, broken, steps=TRIES)
        if timelines:
            steps = [record_step(timelines, step) for step in range(1, TRIES)]
            reports[title] = why(min(steps, key=lambda step: step.seconds))
    return reports


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png."""
    figure = look.new_figure(
        12.0,
        8.2,
        "Three steps of DDP on two ranks, as recorded",
        f"Full colour: the critical path. Pale: work and calls beside it. The shortest of "
        f"{TRIES - 1} steps of each kind.",
    )
    longest = 1.01e3 * max(report["seconds"] for report in recorded.values())
    for place, (title, report) in enumerate(recorded.items()):
        ax = figure.add_axes((0.07, 0.675 - 0.265 * place, 0.91, 0.165))
        draw_path(ax, report)
        number_buckets(ax, report)
        look.caption(ax, f"{title}: {1e3 * report['seconds']:.0f} ms")
        ax.set_xlim(0, longest)
    ax.set_xlabel("milliseconds", fontsize=10.5, color=look.SOFT)
    legend(figure)
    look.save(figure, folder)


def number_buckets(ax: Any, report: dict[str, Any]) -> None:
    """Draw the edges between calls, and write in each all-reduce the number of its bucket."""
    row = len(report["work"])
    for call in report["calls"]:
        if call["end"] > 0 and call["begin"] < report["seconds"]:
            ax.vlines(1e3 * call["begin"], row - 0.34, row + 0.34, color="white", linewidth=1.2)
            if call["end"] - call["begin"] > 0.012 * report["seconds"] and "bucket" in call["name"]:
                ax.text(
                    5e2 * (call["begin"] + call["end"]),
                    row,
                    call["name"].split()[-1],
                    ha="center",
                    va="center_baseline",
                    fontsize=9,
                    color=look.INK,
                )


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=2)
