"""Draw the figure of lesson 16: weights gathered and freed, and the hidden share, with and without
prefetch.

python lessons/16_zero3/figure.py [--out DIR]
"""

from pathlib import Path
from typing import Any

from minidist.bench import overlap_plots
from minidist.comm.group import Group
from minidist.comm.transports.throttled import delayed
from minidist.grading import load_module
from minidist.lessons import figures as look
from minidist.lessons import zero_lab as lab
from minidist.lessons.lab import new_model
from minidist.lessons.running import draw_figure
from minidist.observe.overlap import measure
from minidist.observe.samples import stairs
from minidist.observe.timeline import Span, Timeline

HERE = Path(__file__).resolve().parent
lesson = load_module(HERE / "lesson.py", "16")
RANKS = 2
AHEAD = {0: "prefetch off (ahead = 0)", 1: "prefetch on (ahead = 1)"}


def record(group: Group) -> dict[str, Any]:
    """Return on rank 0 its quickest step over delayed links, for each `ahead`."""
    steps = []
    for ahead in AHEAD:
        with delayed(group, alpha=lesson.ALPHA, beta=1 / lesson.BANDWIDTH) as slow:
            ranks = lab.recorded(slow, 3, config=lesson.TIMED, steps=20, ahead=ahead)
        steps += [[ahead, rank] for rank in ranks[:1]]
    model = new_model(lesson.TIMED)
    return {
        "steps": steps,
        "bytes": sum(p.data.nbytes for p in model.parameters()),
        "unit": sum(p.data.nbytes for p in model.blocks[0].parameters()),
    }


def draw(recorded: dict[str, Any], folder: Path) -> None:
    """Draw figure.png from what was recorded."""
    figure = look.new_figure(
        13.5,
        7.4,
        "ZeRO-3: a unit's weights come before its turn and go after it",
        f"Rank 0 of {RANKS}, the quickest of 19 recorded steps; {lesson.TIMED.layers} layers of "
        f"width {lesson.TIMED.width}; a message takes {lesson.ALPHA * 1e6:.0f} µs + bytes / "
        f"({lesson.BANDWIDTH / 1e6:.0f} MB/s). Numbers: the notes' steps (N0:368).",
    )
    longest = max(step["stop"] - step["start"] for _, step in recorded["steps"])
    for place, (ahead, step) in enumerate(recorded["steps"]):
        top = 0.55 - 0.425 * place
        share = _timeline(figure.add_axes((0.085, top + 0.005, 0.905, 0.10)), step, longest)
        ax = figure.add_axes((0.085, top + 0.135, 0.905, 0.145))
        _sawtooth(ax, step, recorded, ahead, longest)
        look.caption(
            ax,
            f"{AHEAD[ahead]}: {1e3 * (step['stop'] - step['start']):.0f} ms a step, {share:.0%} of "
            f"communication hidden. Parameters in memory, MiB, from just below the shard:",
        )
    overlap_plots.legend(figure, loc="lower center", bbox_to_anchor=(0.53, 0.0), fontsize=10)
    look.save(figure, folder)


def _sawtooth(
    ax: Any, step: dict[str, Any], recorded: dict[str, Any], ahead: int, longest: float
) -> None:
    """Draw the bytes of parameters over time: between the shard, and the shard plus the units in
    memory."""
    samples = [(moment, now) for moment, now in step["samples"]]
    times, values = stairs(samples, "parameters", start=step["start"], stop=step["stop"])
    shard = recorded["bytes"] / RANKS / 2**20
    unit = recorded["unit"] / 2**20
    look.quiet(ax)
    ax.fill_between(
        times,
        [value / 2**20 for value in values],
        step="post",
        color=look.MEMORY["parameters"],
        linewidth=0,
    )
    for height, name, style in (
        (shard, "shard", ":"),
        (shard + (1 + ahead) * unit, f"+ {1 + ahead} unit{'s' * ahead}", "--"),
    ):
        ax.axhline(height, color=look.INK, linewidth=1, linestyle=style)
        ax.text(
            1e3 * longest,
            height + 0.06 * unit,
            name,
            ha="right",
            va="bottom",
            fontsize=9.5,
            color=look.INK,
        )
    ax.set_xlim(0, 1e3 * longest)
    # The axis begins just below the shard, because the teeth matter.
    ax.set_ylim(shard - 0.4 * unit, shard + 2.7 * unit)
    ax.set_xticks([])


def _timeline(ax: Any, step: dict[str, Any], longest: float) -> float:
    """Draw computing and collectives; return the hidden share of this step."""
    spans = overlap_plots.spans_of(step["spans"])
    overlap_plots.draw_step(
        ax, [span for span in spans if span.name != "step" or span.start == step["start"]]
    )
    _steps(ax, [span for span in spans if span.start >= step["start"]], step["start"])
    ax.set_xlim(0, 1e3 * longest)
    ax.tick_params(colors=look.SOFT)
    ax.spines["bottom"].set_color("#9aa5b1")
    ax.set_xlabel("milliseconds", color=look.SOFT, fontsize=10, labelpad=1)
    timeline = Timeline(0)
    timeline.spans = [span for span in spans if span.start >= step["start"]]
    return measure(timeline).share


def _steps(ax: Any, spans: list[Span], begin: float) -> None:
    """Write the notes' numbers (N0:368) where their first spans were recorded; 2 and 4 also
    gather."""
    backward = min(span.start for span in spans if span.name == "backward")
    for number, height, what in (
        ("2, 3", 1.0, "forward"),
        ("4", 1.0, "backward"),
        ("6, 7", 1.0, "optimizer"),
        ("2", 0.0, "all_gather"),
        ("4", 0.0, "all_gather"),
        ("5", 0.0, "reduce_scatter"),
    ):
        after = backward if number == "4" else begin
        starts = [
            span.start
            for span in spans
            if what in (span.name, span.details.get("verb")) and span.start >= after
        ]
        if starts:
            ax.text(
                1e3 * (min(starts) - begin),
                height + 0.33,
                number,
                fontsize=9,
                va="bottom",
                color=look.INK,
            )


if __name__ == "__main__":
    draw_figure(record, draw, HERE, size=RANKS, transport="auto")
