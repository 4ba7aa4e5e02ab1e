"""Draw what lessons 14, 15 and 16 recorded: memory through a step, and the step's phases under
it."""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from minidist.lessons import figures as look
from minidist.observe.samples import stairs

STATE = ("parameters", "gradients", "optimizer")
PHASES = {
    "forward": "forward",
    "backward": "backward",
    "wait for gradients": "wait",
    "optimizer": "optimizer",
}
STEPS = {"forward": "2, 3", "backward": "4", "wait for gradients": "5", "optimizer": "6, 7"}
"""The notes' numbers of a recorded phase, the same under every stage (N0:331, 350, 368); 1 is the
batch."""


def memory_over_time(
    ax: Any, record: dict[str, Any], categories: tuple[str, ...], *, top: float | None = None
) -> None:
    """Draw the bytes of the categories, stacked, over one recorded step; the phases as a stripe at
    the bottom.

    Args:    record: as zero_lab.recorded gives it for one rank; top: of the y axis, in MiB.
    """
    start = record["start"]
    stop = record["stop"]
    samples = [(moment, now) for moment, now in record["samples"]]
    times, _ = stairs(samples, categories[0], start=start, stop=stop)
    heights = [
        [value / 2**20 for value in stairs(samples, name, start=start, stop=stop)[1]]
        for name in categories
    ]
    look.quiet(ax, grid="y")
    ax.stackplot(
        times, heights, colors=[look.MEMORY[name] for name in categories], step="post", linewidth=0
    )
    ax.set_xlim(0, times[-1])
    ax.set_ylim(0, top)
    phases(ax, record, lambda moment: 1e3 * (moment - record["start"]))


def changes(record: dict[str, Any], categories: tuple[str, ...]) -> list[tuple[float, list[int]]]:
    """Return (seconds, bytes by category) when the step begins, and after each new or freed array
    of these categories."""
    found: list[tuple[float, list[int]]] = []
    for moment, now in record["samples"]:
        held = [now[name] for name in categories]
        if moment <= record["start"]:
            found = [(record["start"], held)]
        elif not found or held != found[-1][1]:
            found.append((moment, held))
    return found


def memory_by_change(
    ax: Any, record: dict[str, Any], categories: tuple[str, ...], *, top: float | None = None
) -> None:
    """Draw memory as memory_over_time does, but with an equal step to the right for each new or
    freed array.

    So two runs of the same computation look the same, however long they took and waited.
    """
    found = changes(record, categories)
    moments = [moment for moment, _ in found]
    heights = [[held[place] / 2**20 for _, held in found] for place in range(len(categories))]
    look.quiet(ax, grid="y")
    ax.stackplot(
        range(len(found)),
        heights,
        colors=[look.MEMORY[name] for name in categories],
        step="post",
        linewidth=0,
    )
    ax.set_xlim(0, len(found) - 1)
    ax.set_ylim(0, top)
    phases(ax, record, lambda moment: bisect_right(moments, moment) - 1)


def phases(ax: Any, record: dict[str, Any], place: Callable[[float], float]) -> None:
    """Forward, backward and optimizer as a stripe under the axis, on which `place` says where a
    moment is.

    Each recorded phase bears the notes' numbers of its steps.
    """
    ax.set_xticks([])
    for span in record["spans"]:
        if span["name"] in PHASES and span["start"] >= record["start"]:
            left, right = (place(span[edge]) for edge in ("start", "stop"))
            ax.axvspan(
                left,
                right,
                ymin=-0.075,
                ymax=-0.015,
                color=look.PHASES[PHASES[span["name"]]],
                clip_on=False,
            )
            part = (right - left) / ax.get_xlim()[1]
            # else there is no room; behind the last phase there is
            if part > 0.03 or span["name"] == "optimizer":
                ax.annotate(
                    STEPS[span["name"]] + (f"  {span['name'].split()[0]}" if part > 0.15 else ""),
                    ((left + right) / 2 if part > 0.03 else left, 0),
                    (0, -19),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    ha="center" if part > 0.03 else "left",
                    va="top",
                    fontsize=9.5,
                    color=look.SOFT,
                )


def legend(
    figure: Any, categories: tuple[str, ...], at: tuple[float, float], **options: Any
) -> None:
    """Draw the legend of the categories' colours."""
    figure.legend(
        [look.patch(look.MEMORY[name]) for name in categories],
        list(categories),
        loc="upper left",
        bbox_to_anchor=at,
        frameon=False,
        fontsize=10.5,
        labelcolor=look.INK,
        ncols=len(categories),
        handlelength=1.3,
        columnspacing=1.5,
        **options,
    )
