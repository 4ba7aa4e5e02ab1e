"""Overlap: the share of communication time that is hidden by computation.

    communication       | all_gather 2 |   | reduce_scatter 2 |
    compute         | forward      |wait| backward        |wait|
    hidden              |==========|        |=============|            the share: ==== of all communication

Computation is forward, backward and optimizer of a step, without the waits inside them.
Communication is every collective from start to end, on any thread, except collectives of the axis
`control` (scalars). A collective that waits for a slower rank counts as running.

    timelines = timeline.collect(world)                 # rank 0
    measure(timelines[0]).share                         # 0.93: 93 % of communication is hidden

notes: N2 §11.1, N4 §7
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from minidist.observe.timeline import Span, Timeline

Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds of one rank in which a collective runs (communication), it computes (computation),
    both happen at once (hidden), or it waits for a collective (waited)."""

    communication: float
    computation: float
    hidden: float
    waited: float

    @property
    def share(self) -> float:
        """The share of communication that is hidden by computation; 1 without communication."""
        return self.hidden / self.communication if self.communication else 1.0


def measure(
    timeline: Timeline,
    *,
    steps: Iterable[int] | None = None,
    of: Callable[[Timeline], list[Span]] | None = None,
) -> Overlap:
    """Return the overlap on one rank's timeline.

    Args:    steps: measured from the start of the first of these steps to the end of the last
             (default: all spans). A collective that crosses an edge counts with its part inside.
             of: returns the spans to hide: `collectives` (default), or `moves` for a strategy that
             offloads.
    """
    window = [(-float("inf"), float("inf"))]
    if steps is not None:
        chosen = set(steps)
        inside = [
            span
            for span in timeline.spans
            if span.name == "step" and span.details.get("step") in chosen
        ]
        window = (
            [(min(span.start for span in inside), max(span.stop for span in inside))]
            if inside
            else []
        )

    def of_window(spans: Iterable[Span]) -> list[Interval]:
        return intersect(union((span.start, span.stop) for span in spans), window)

    waits = of_window(waiting(timeline))
    computing = subtract(of_window(working(timeline)), waits)
    communicating = of_window((of or collectives)(timeline))
    return Overlap(
        length(communicating),
        length(computing),
        length(intersect(communicating, computing)),
        length(waits),
    )


def together(parts: Sequence[Overlap]) -> Overlap:
    """Return the sums over ranks; their share is the share of the whole job."""
    return Overlap(
        *(sum(getattr(part, name) for part in parts) for name in Overlap.__dataclass_fields__)
    )


# ----------------------------------------------------------------------------------- kinds of spans


def collectives(timeline: Timeline) -> list[Span]:
    """Return the collectives that moved arrays: neither barriers nor scalars."""
    return [
        span
        for span in timeline.spans
        if span.row == "communication"
        and "verb" in span.details
        and span.details.get("axis") != "control"
        and span.details["verb"] != "barrier"
    ]


def moves(timeline: Timeline) -> list[Span]:
    """Return the copies between device, host and disk."""
    return [span for span in timeline.spans if span.row == "moves"]


def waiting(timeline: Timeline) -> list[Span]:
    """Return the spans in which the rank waited for a collective; their names begin with "wait"."""
    return [
        span for span in timeline.spans if span.row == "compute" and span.name.startswith("wait")
    ]


def working(timeline: Timeline) -> list[Span]:
    """Return the spans of forward, backward, optimizer and other work, including the waits inside
    them, but not the span "step" around them."""
    return [
        span
        for span in timeline.spans
        if span.row == "compute" and span.name != "step" and not span.name.startswith("wait")
    ]


# ---------------------------------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points as sorted intervals that do not touch; empty intervals are removed."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        elif stop > start:
            merged.append((start, stop))
    return merged


def intersect(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the points in both; each argument as `union` returns it."""
    common = []
    i = 0
    j = 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        stop = min(one[i][1], other[j][1])
        if start < stop:
            common.append((start, stop))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the points of `one` that are not in `other`; each argument as `union` returns it."""
    edges = [-float("inf"), *(edge for interval in other for edge in interval), float("inf")]
    return intersect(one, list(zip(edges[::2], edges[1::2], strict=True)))


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the intervals' lengths, in seconds."""
    return sum(stop - start for start, stop in intervals)
