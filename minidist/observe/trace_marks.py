"""Chapter 25 · Arrows from sends to receives, and counters, in trace.json.

    ph s, f     an arrow: from the start of a message's span on the sender to the end of its span on
                the receiver
    ph C        memory: the live bytes of a rank by category, whenever an array is made
                sent bytes: what a rank sent in a step by axis, at the end of the step

A message has an arrow only if both its spans are recorded: a timeline may have left out one of
them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidist.observe.timeline import Span, Timeline

Event = dict[str, Any]
Key = tuple[int, int, str]
"""Key of a message: sender, receiver, and an id that is unique between the two."""


def arrows(timelines: "Sequence[Timeline]", rows: Sequence[str], origin: float) -> Iterator[Event]:
    """Yield two events for each message with both ends recorded.

    Args:    rows: the rows of the trace, in order. origin: the trace's begin, in seconds.
    """
    starts = dict(_ends(timelines, "messages"))
    for number, (key, (receiver, received)) in enumerate(_ends(timelines, "receives")):
        if key not in starts:
            continue
        sender, sent = starts[key]
        common = {"name": "message", "cat": "message", "id": number}
        begin = _microseconds(sent.start - origin)
        # a slice ends before its last moment
        end = max(begin, _microseconds(received.stop - origin) - 0.001)
        yield {"ph": "s", **common, "pid": sender, "tid": rows.index("messages"), "ts": begin}
        yield {
            "ph": "f",
            "bp": "e",
            **common,
            "pid": receiver,
            "tid": rows.index("receives"),
            "ts": round(end, 3),
        }


def _ends(timelines: "Sequence[Timeline]", row: str) -> "Iterator[tuple[Key, tuple[int, Span]]]":
    for timeline in timelines:
        for span in timeline.spans:
            if span.row == row and "message" in span.details:
                about = span.details
                yield (about["src"], about["dst"], about["message"]), (timeline.rank, span)


def counters(timelines: "Sequence[Timeline]", origin: float) -> Iterator[Event]:
    """Yield counter events: memory, and bytes sent in a step. Categories and axes that stay zero
    are left out. Args: as in arrows."""
    for timeline in timelines:
        used = sorted(
            {
                name
                for _, now in timeline.memory
                for name, nbytes in now.items()
                if nbytes and name != "total"
            }
        )
        for moment, now in timeline.memory:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": timeline.rank,
                "ts": _microseconds(moment - origin),
                "args": {name: now[name] for name in used},
            }
        sent = sent_in_steps(timeline)
        axes = sorted({axis for each in sent.values() for axis in each})
        for span in timeline.spans:
            if span.name == "step" and axes:
                yield {
                    "ph": "C",
                    "name": "sent bytes",
                    "pid": timeline.rank,
                    "ts": _microseconds(span.stop - origin),
                    "args": {axis: sent[span.details["step"]][axis] for axis in axes},
                }


def sent_in_steps(timeline: "Timeline") -> dict[int, Counter[str]]:
    """Return {step: {axis: payload bytes}} that the rank sent, by the spans that its timeline
    kept."""
    sent: defaultdict[int, Counter[str]] = defaultdict(Counter)
    ends = {span.details["step"]: span.stop for span in timeline.spans if span.name == "step"}
    for span in timeline.spans:
        about = span.details
        step = span.details.get("step")
        counts = span.row == "communication" or (
            span.row == "messages"
            and about.get("algorithm") == "direct"
            and about.get("verb") in ("send", "exchange")
        )
        if (
            isinstance(step, int)
            and span.start < ends.get(step, 0.0)
            and counts
            and "nbytes" in about
        ):
            sent[step][about["axis"]] += about["nbytes"]
    return sent


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
