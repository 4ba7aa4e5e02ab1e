"""The section on one step's timeline: the recorded steps that the page keeps, with spans, arrows
and memory.

The page of a long run cannot hold all steps of trace.json. It keeps the step of median length, the
first three (they have memory samples), the last and the slowest, then others at even distances,
until MOST_SPANS spans or MOST_STEPS steps.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import median_low
from typing import Any

from minidist.device.account import CATEGORIES
from minidist.observe.report.run_files import TRACE, RunFiles
from minidist.observe.report.section import Chart, Section
from minidist.observe.timeline import MEMORY_SAMPLES, Span, Timeline
from minidist.observe.why_report import place

MOST_STEPS = 40
MOST_SPANS = 30_000
# limits of the memory samples that the page keeps
MEMORY_STEPS = 5
MEMORY_RANKS = 32
MEMORY_NUMBERS = 120_000
LANES = ("compute", "communication", "messages", "receives", "moves")
HELP = (
    "Zoom: the buttons, Ctrl and the wheel, or the keys + and - on the chart; move: drag, or ← "
    "and →; 0 shows the whole step. An arrow leads from the start of a send to the end of its "
    "receive. Steps are numbered from 0 here, as in the trace; the first line of metrics.jsonl "
    "is that of step 0."
)
REMEDY = "minidist train writes it when a run ends well"


@dataclass
class RecordedStep:
    """A step that all ranks have recorded.

    Attributes: windows: (begin, end) in seconds of the step on each timeline; spans: the spans of
                each timeline in the step.
    """

    step: int
    windows: list[tuple[float, float]]
    spans: list[list[Span]]

    @cached_property
    def begin(self) -> float:
        return min(start for start, _ in self.windows)

    @cached_property
    def end(self) -> float:
        return max(stop for _, stop in self.windows)


def recorded_steps(timelines: Sequence[Timeline]) -> list[RecordedStep]:
    """Return the steps that every rank has recorded, in order of time, with their spans."""
    windows: list[dict[int, tuple[float, float]]] = [
        {
            span.details["step"]: (span.start, span.stop)
            for span in timeline.spans
            if span.name == "step"
        }
        for timeline in timelines
    ]
    common = sorted(set.intersection(*map(set, windows))) if windows else []
    steps = [
        RecordedStep(step, [each[step] for each in windows], [[] for _ in windows])
        for step in common
    ]
    steps.sort(key=lambda step: step.begin)
    ends = [step.end for step in steps]
    for place_of, timeline in enumerate(timelines):
        for span in timeline.spans:
            at = bisect_right(ends, span.start)
            while at < len(steps) and steps[at].begin < span.stop:
                steps[at].spans[place_of].append(span)
                at += 1
    return steps


def kept(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Return the steps that the page keeps, in order; the step of median length is always one."""
    if not steps:
        return []
    slowest = max(steps, key=lambda step: step.end - step.begin)
    stride = max(1, len(steps) // MOST_STEPS)
    wanted = [middle(steps), *steps[:3], steps[-1], slowest, *steps[::stride]]
    chosen = dict[int, RecordedStep]()
    spans = 0
    for step in wanted:
        count = sum(map(len, step.spans))
        if step.step not in chosen and (
            not chosen or (len(chosen) < MOST_STEPS and spans + count <= MOST_SPANS)
        ):
            chosen[step.step] = step
            spans = spans + count
    return sorted(chosen.values(), key=lambda step: step.step)


def middle(steps: Sequence[RecordedStep]) -> RecordedStep:
    """Return the step of median length, without the first step if there are others."""
    later = list(steps[1:]) or list(steps)
    length = median_low([step.end - step.begin for step in later])
    return next(step for step in later if step.end - step.begin == length)


def section(
    run: RunFiles, recorded: Sequence[RecordedStep], steps: Sequence[RecordedStep]
) -> Section:
    """Return the section: the timeline of a chosen step, one band per rank with a lane each for
    compute, communication, messages, receives and moves."""
    found = Section("timeline", "Timeline of a step")
    if not steps:
        found.missing.append(no_step(run, "timeline"))
        return found
    kinds: dict[tuple[Any, ...], int] = {}
    ranks = _ranks_with_room(middle(recorded))
    data = [_packed(step, ranks, kinds) for step in steps]
    _add_memory(data, steps, run.timelines[:ranks])
    total = len(run.steps) or len(run.metrics.get("losses", []))
    found.lines += [
        f"{TRACE} holds {len(recorded)} of {max(total, len(recorded))} steps; this page has "
        f"{len(steps)} of them: the one of the middle length (chosen at first), the first ones, "
        "the last, the slowest and others between.",
        HELP,
    ]
    if ranks < len(run.timelines):
        found.lines.append(
            f"Of {len(run.timelines)} ranks the page has room for the spans of the first {ranks}."
        )
    found.charts.append(
        Chart(
            "timeline",
            "spans of each rank in the chosen step; the table below has the same",
            {
                "ranks": [timeline.rank for timeline in run.timelines[:ranks]],
                "lanes": LANES,
                "middle": middle(recorded).step,
                "kinds": [
                    dict(
                        zip(
                            ("name", "row", "axis", "bytes", "peer", "where", "micro"),
                            kind,
                            strict=True,
                        )
                    )
                    for kind in kinds
                ],
                "steps": data,
            },
        )
    )
    return found


def no_step(run: RunFiles, what: str) -> str:
    """Return one line: a part of the report is missing because no step was recorded whole. Args:
    what: the part."""
    return (
        run.lacks(TRACE, what, REMEDY)
        if TRACE in run.missing
        else f"No {what}: {TRACE} has no step that all ranks recorded whole."
    )


def _ranks_with_room(step: RecordedStep) -> int:
    """Return the number of ranks whose spans of one step fit on the page."""
    sums = list(accumulate(map(len, step.spans)))
    return max(1, sum(spans <= MOST_SPANS for spans in sums))


def _packed(step: RecordedStep, places: int, kinds: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    """Return a step as numbers: per rank, flat triples (kind, µs from the step's begin, length in
    µs), by begin, longer spans first.

    Args:    places: the number of ranks.
    """
    ranks = []
    for spans in step.spans[:places]:
        flat = list[int]()
        for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
            if span.row in LANES and span.name != "step":
                flat += [
                    kinds.setdefault(_kind(span), len(kinds)),
                    *_inside(step, span.start, span.stop),
                ]
        ranks.append(flat)
    return {
        "step": step.step,
        "us": round(1e6 * (step.end - step.begin)),
        "spans": ranks,
        "arrows": list(_arrows(step, places)),
        "memory": [],
    }


def _add_memory(
    data: Sequence[dict[str, Any]], steps: Sequence[RecordedStep], timelines: Sequence[Timeline]
) -> None:
    """Add each rank's memory to the first steps that have it, with as many samples as fit on the
    page."""
    whole = steps_with_memory(steps, timelines)
    moments = MEMORY_NUMBERS // max(
        1, len(whole) * min(len(timelines), MEMORY_RANKS) * len(CATEGORIES)
    )
    for step, packed in zip(steps, data, strict=True):
        if step in whole:
            packed["memory"] = [
                _memory(step, timeline, min(300, moments)) for timeline in timelines[:MEMORY_RANKS]
            ]


def steps_with_memory(
    steps: Sequence[RecordedStep], timelines: Sequence[Timeline]
) -> list[RecordedStep]:
    """Return the steps for which the page shows the memory."""
    return [
        step
        for step in steps
        if any(_has_memory(timeline, step) for timeline in timelines[:MEMORY_RANKS])
    ][:MEMORY_STEPS]


def _inside(step: RecordedStep, start: float, stop: float) -> tuple[int, int]:
    """Return begin and length in µs of the part of an interval inside the step."""
    begin = max(start, step.begin)
    return round(1e6 * (begin - step.begin)), round(1e6 * (min(stop, step.end) - begin))


def _kind(span: Span) -> tuple[Any, ...]:
    """Return all values of a span that the page shows, except its time."""
    about = span.details
    peer = (
        about.get("dst")
        if span.row == "messages"
        else about.get("src")
        if span.row == "receives"
        else None
    )
    return (
        span.name,
        span.row,
        about.get("axis"),
        about.get("nbytes"),
        peer,
        place(about["where"]) if "where" in about else None,
        about.get("microbatch"),
    )


def _arrows(step: RecordedStep, places: int) -> Iterator[list[int]]:
    """Yield [place of the sender, µs of the send's start, place of the receiver, µs of the
    receive's end] per message."""
    sent = {
        (span.details["src"], span.details["dst"], span.details["message"]): (place_of, span)
        for place_of, spans in enumerate(step.spans[:places])
        for span in spans
        if span.row == "messages" and "message" in span.details
    }
    for place_of, spans in enumerate(step.spans[:places]):
        for span in spans:
            key = span.details.get("src"), span.details.get("dst"), span.details.get("message")
            if (
                span.row == "receives"
                and key in sent
                and span.stop <= step.end
                and sent[key][1].start >= step.begin
            ):
                sender, send = sent[key]
                yield [
                    sender,
                    round(1e6 * (send.start - step.begin)),
                    place_of,
                    round(1e6 * (span.stop - step.begin)),
                ]


def _has_memory(timeline: Timeline, step: RecordedStep) -> bool:
    """Return whether the rank's memory was recorded over the whole step."""
    inside = any(step.begin <= moment < step.end for moment, _ in timeline.memory)
    return inside and (len(timeline.memory) < MEMORY_SAMPLES or timeline.memory[-1][0] >= step.end)


def _memory(step: RecordedStep, timeline: Timeline, most: int) -> dict[str, Any] | None:
    """Return a rank's live bytes over the step, thinned to the highest sample of each of `most`
    intervals."""
    if not _has_memory(timeline, step):
        return None
    length = (step.end - step.begin) / most
    highest: dict[int, tuple[float, dict[str, int]]] = {}
    for moment, now in timeline.memory:
        if step.begin <= moment < step.end:
            at = int((moment - step.begin) / length)
            if at not in highest or sum(now.values()) >= sum(highest[at][1].values()):
                highest[at] = moment, now
    before = [now for moment, now in timeline.memory if moment < step.begin]
    samples = [(step.begin, before[-1])] if before else []
    samples += [highest[at] for at in sorted(highest)]
    samples.append((step.end, samples[-1][1]))
    names = sorted(
        {name for _, now in samples for name, nbytes in now.items() if nbytes and name != "total"}
    )
    return {
        "us": [round(1e6 * (moment - step.begin)) for moment, _ in samples],
        "bytes": {name: [now.get(name, 0) for _, now in samples] for name in names},
    }
