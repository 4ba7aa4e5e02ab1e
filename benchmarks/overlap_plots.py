"""The picture of a recorded step in two rows: computation with its waits, and the collectives."""

from collections.abc import Sequence
from typing import Any

from minidist.observe.overlap import collectives, intersect, subtract, union, waiting, working
from minidist.observe.timeline import Span, Timeline

COLOURS = {
    "forward": "#7fb0de",
    "backward": "#2f5d9b",
    "optimizer": "#5b9a68",
    "wait": "#f3d3a8",
    "reduce_scatter": "#c44e52",
    "all_reduce": "#c44e52",
    "all_gather": "#e08e3c",
}
"""Colours of spans by name, and of collectives by verb."""


def spans_of(records: Sequence[dict[str, Any]]) -> list[Span]:
    """Return spans from their dicts in JSON."""
    return [Span(**record) for record in records]


def draw_step(
    ax: Any, spans: Sequence[Span], *, computing: float = 1.0, communicating: float = 0.0
) -> float:
    """Draw the last step among one rank's spans.

    Args:    ax: matplotlib axes, from 0 ms at the start of the span "step".
             spans: of the step, with its span "step"; parts outside that span are cut off.
             computing, communicating: the height of each row's middle.
    Returns: the step's length in ms.
    """
    timeline = Timeline(0)
    timeline.spans = list(spans)
    step = max((span for span in spans if span.name == "step"), key=lambda span: span.start)
    window = [(step.start, step.stop)]

    def bars(intervals: Any, height: float, colour: str) -> None:
        for start, stop in intersect(union(intervals), window):
            ax.barh(
                height,
                1e3 * (stop - start),
                0.62,
                1e3 * (start - step.start),
                color=colour,
                edgecolor="white",
                linewidth=0.4,
            )

    waits = union((span.start, span.stop) for span in waiting(timeline))
    for span in working(timeline):
        if span.name in COLOURS:
            bars(subtract([(span.start, span.stop)], waits), computing, COLOURS[span.name])
    bars(waits, computing, COLOURS["wait"])
    for span in collectives(timeline):
        bars([(span.start, span.stop)], communicating, COLOURS.get(span.details["verb"], "#9aa5b1"))
    ax.set_yticks([computing, communicating], ["compute", "communicate"], fontsize=8.5)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return 1e3 * (step.stop - step.start)


def legend(figure: Any, **options: Any) -> None:
    """Add a legend of the colours below the figure. `options` are those of matplotlib's legend."""
    from matplotlib.patches import Patch

    names = {
        "forward": "forward",
        "backward": "backward",
        "optimizer": "optimizer",
        "wait": "waiting",
        "all_gather": "all-gather",
        "reduce_scatter": "reduce-scatter, all-reduce",
    }
    figure.legend(
        [Patch(facecolor=COLOURS[name]) for name in names],
        list(names.values()),
        **{
            "loc": "outside lower center",
            "ncols": len(names),
            "frameon": False,
            "fontsize": 9,
            **options,
        },
    )
