"""Draw the figure of lesson 11: each schedule as run by stages that sleep, its measured and ideal
bubble.

python lessons/11_pipeline/figure.py [--out DIR]      # figure.png and figure.mmd
"""

from pathlib import Path
from typing import Any

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons.running import draw_figure
from minidist.parallel.pipeline.schedule_checker import Clock, Times, broken, clock_of, peak_held
from minidist.parallel.pipeline.schedules import of_orders

HERE = Path(__file__).resolve().parent
lab = load_module(HERE / "experiments.py", "11")
RANKS = 4
MICROBATCHES = 8
UNIT = 0.05
ROUNDS = 4
COLORS = {
    "forward": look.PHASES["forward"],
    "backward": look.PHASES["backward"],
    "backward for the input": look.PHASES["backward"],
    "backward for the weights": look.PHASES["optimizer"],
}
SECOND = {
    "forward": "#b5d1ec",
    "backward": "#5a83b8",
    "backward for the input": "#5a83b8",
    "backward for the weights": "#a3cda6",
}  # of the second stage of a rank
LIGHT = (COLORS["forward"], SECOND["forward"], SECOND["backward for the weights"])
TWO = ("interleaved", "zb-v", "dualpipe-v")


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 the recorded spans of each schedule, the quickest of some rounds."""
    return {
        name: lab.slept(group, name, MICROBATCHES, UNIT, rounds=2 if name == "naive" else ROUNDS)
        for name in lab.NAMES
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded, and figure.mmd."""
    figure = look.new_figure(
        13.5,
        15.0,
        f"Seven schedules of one batch: {RANKS} stages, {MICROBATCHES} microbatches, as recorded",
        f"Stages sleep {1e3 * UNIT:g} ms for a forward and twice that for a "
        "backward; where a rank has two stages, half as long. The number is the microbatch; white "
        "is idle time: the bubble.",
    )
    kinds = {
        "forward": "forward",
        "backward": "backward, or its part for the input",
        "backward for the weights": "backward for the weights",
    }
    figure.legend(
        [look.patch(colors[kind]) for kind in kinds for colors in (COLORS, SECOND)],
        [word for kind in kinds.values() for word in (kind, "second stage's")],
        frameon=False,
        fontsize=10,
        ncols=6,
        loc="upper left",
        bbox_to_anchor=(0.02, 0.947),
        labelcolor=look.INK,
        handlelength=1.3,
    )
    longest = max(_length(spans) for name, spans in recorded.items() if name != "naive")
    for number, name in enumerate(lab.NAMES):
        _timeline(
            figure.add_axes((0.06, 0.812 - 0.1283 * number, 0.92, 0.085)),
            name,
            recorded[name],
            max(36.0, 1.01 * longest) if name != "naive" else 1.01 * _length(recorded[name]),
        )
    look.save(figure, folder)
    look.save_mermaid(gantt(), folder)


def _length(spans: list[Any]) -> float:
    """Return how long a schedule took, in forwards."""
    return Clock(RANKS, tuple(spans)).length / UNIT


def _timeline(ax: Any, name: str, spans: list[Any], shown: float) -> None:
    """Draw one schedule: a row per rank, in units of a forward, the first `shown` units."""
    assert not broken(spans)
    clock = Clock(RANKS, tuple(spans))
    begin = min(span.start for span in spans)
    for span in spans:
        left = (span.start - begin) / UNIT
        width = (span.stop - span.start) / UNIT
        color = (SECOND if span.instruction.stage >= RANKS else COLORS)[span.instruction.word]
        ax.barh(span.rank, width, 0.86, left, color=color, edgecolor="white", linewidth=0.7)
        if name != "naive" or width > 1.5:
            ax.text(
                left + width / 2,
                span.rank,
                str(span.instruction.microbatch),
                ha="center",
                va="center_baseline",
                fontsize=8,
                color=look.INK if color in LIGHT else "white",
            )
    for number, span in enumerate(_notes_steps(spans) if name == "gpipe" else (), 1):
        # The number is above the first rank's span, and before the span of another rank.
        left = (span.start - begin) / UNIT
        first = span.rank == 0
        look.step_number(
            ax,
            left + 0.5 if first else left - 0.1,
            span.rank - (0.68 if first else 0.0),
            number,
            ha="center" if first else "right",
            clip_on=False,
        )
    look.quiet(ax)
    ax.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(RANKS - 0.45, -0.55)
    ax.set_xlim(0, shown)
    formula, ideal = lab.ideal_bubble(name, RANKS, MICROBATCHES)
    held = peak_held(lab.schedule_of(name, RANKS, MICROBATCHES))
    unit = "half-size " if name in TWO else ""
    look.caption(
        ax,
        f"{lab.TITLES[name]}: idle {clock.bubble:.1%} measured, {ideal:.1%} = {formula} ideal; "
        f"ranks hold {', '.join(map(str, held))} {unit}microbatches"
        + {
            "naive": "; this row has its own, longer scale",
            "gpipe": "; circled: the notes' steps (N0:240)",
        }.get(name, ""),
    )
    if name == lab.NAMES[-1]:
        ax.set_xlabel(
            "time, in forwards of a microbatch through a rank's layers",
            color=look.SOFT,
            fontsize=10.5,
        )


def _notes_steps(spans: list[Any]) -> list[Any]:
    """Return the spans in which the notes' steps 1 to 4 (N0:240) begin, as recorded.

    1: the first microbatch of the cut batch is sent; 2: the second rank receives it; 3: the first
    rank continues with the second microbatch; 4: for the first time all ranks compute.
    """
    forwards = {
        (span.rank, span.instruction.microbatch): span
        for span in spans
        if span.instruction.word == "forward"
    }
    all_busy = min(
        (
            span
            for span in spans
            if len({other.rank for other in spans if other.start <= span.start < other.stop})
            == RANKS
        ),
        key=lambda span: span.start,
    )
    return [forwards[0, 0], forwards[1, 0], forwards[0, 1], all_busy]


def gantt() -> str:
    """Return the chart of N2:201 in its own form; the checker's clock puts each backward after what
    it needs."""
    clock = clock_of(
        of_orders("the notes' order", lab.orders_of(lab.notes_spans())), Times(2.0, 2.0)
    )
    lines = [
        "gantt",
        "    title GPipe, 4 stages, 4 microbatches",
        "    dateFormat X",
        "    axisFormat %s",
    ]
    for rank in range(clock.ranks):
        lines.append(f"    section GPU {rank}")
        lines += [
            f"    {lab.LETTERS[span.instruction.word]}{span.instruction.microbatch + 1} "
            f":{span.start:g}, {span.stop:g}"
            for span in sorted(clock.spans, key=lambda span: span.start)
            if span.rank == rank
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS)
