"""A recorded step as two bars: what the rank computes and where it waits, and the collectives under way meanwhile.

matplotlib is loaded by whoever passes the axes.
"""

from collections.abc import Sequence
from typing import Any

from minidist.observe.overlap import collectives, intersect, subtract, union, waiting, working
from minidist.observe.timeline import Span, Timeline

COLOURS = {"forward": "#7fb0de", "backward": "#2f5d9b", "optimizer": "#5b9a68", "wait": "#f3d3a8",
           "reduce_scatter": "#c44e52", "all_reduce": "#c44e52", "all_gather": "#e08e3c"}
"""Of spans by their name, of collectives by their verb."""


def spans_of(records: Sequence[dict[str, Any]]) -> list[Span]:
    """Spans that travelled as dicts."""
    return [Span(**record) for record in records]


def draw_step(ax: Any, spans: Sequence[Span], *, computing: float = 1.0, communicating: float = 0.0) -> float:
    """Draw one rank's step, from the begin of its `step` span; returns its length in ms.

    Args:    spans: of one step, its "step" span among them; what sticks out of it is cut off.
             computing, communicating: the height of each bar's middle.
    """
    timeline = Timeline(0)
    timeline.spans = list(spans)
    step = max((span for span in spans if span.name == "step"), key=lambda span: span.start)
    window = [(step.start, step.stop)]

    def bars(intervals: Any, height: float, colour: str) -> None:
        for start, stop in intersect(union(intervals), window):
            ax.barh(height, 1e3 * (stop - start), 0.62, 1e3 * (start - step.start), color=colour, edgecolor="white",
                    linewidth=0.4)

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
    """What the colours mean, under the figure."""
    from matplotlib.patches import Patch

    names = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "wait": "waiting",
             "all_gather": "all-gather", "reduce_scatter": "reduce-scatter, all-reduce"}
    figure.legend([Patch(facecolor=COLOURS[name]) for name in names], list(names.values()),
                  **{"loc": "outside lower center", "ncols": len(names), "frameon": False, "fontsize": 9, **options})
