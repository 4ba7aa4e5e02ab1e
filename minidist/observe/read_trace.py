"""Chapter 25 · Reads trace.json: the timelines that `timeline.write_perfetto` wrote, with times
from the trace's begin."""

from pathlib import Path
from typing import Any

import msgspec

from minidist.errors import ConfigError
from minidist.observe.timeline import ROWS, Span, Timeline
from minidist.reading import Count, Finite, Rank, Seconds, read_json, require


class _SpanDetails(msgspec.Struct):
    """The details of a span that readers use."""

    step: Count | None = None
    axis: str | None = None
    verb: str | None = None
    algorithm: str | None = None
    where: str = ""
    nbytes: Count | None = None
    src: Rank | None = None
    dst: Rank | None = None
    message: str | None = None
    group: str | None = None
    sequence: Count | None = None
    messages: Count | None = None
    queued: Seconds | None = None
    blocking: bool | None = None
    microbatch: Count | None = None


class _SpanEvent(msgspec.Struct):
    pid: Rank
    name: str
    cat: str
    ts: Finite
    dur: Seconds
    args: _SpanDetails


class _MemoryEvent(msgspec.Struct):
    pid: Rank
    ts: Finite
    args: dict[str, Count]


class _TraceFile(msgspec.Struct):
    traceEvents: list[dict[str, Any]]  # noqa: N815 - the name that Perfetto wants


def read_trace(file: str | Path) -> list[Timeline]:
    """Return the timelines of a trace, in rank order.

    Raises:  OSError if the file cannot be read; ConfigError, one line, if it is not a trace of
             minidist.
    """
    try:
        events = read_json(file, _TraceFile, member=True)["traceEvents"]
        spans = [event for event in events if event.get("ph") == "X"]
        memory = [
            event for event in events if event.get("ph") == "C" and event.get("name") == "memory"
        ]
        require(spans, list[_SpanEvent])
        require(memory, list[_MemoryEvent])
        timelines: dict[int, Timeline] = {}
        for event in events:
            if isinstance(rank := event.get("pid"), int):
                timelines.setdefault(rank, Timeline(rank, limit=1 << 40))
    except ConfigError as error:
        raise ConfigError(f"{file} is not a trace of minidist train ({error})") from error
    for event in (*spans, *memory):
        _add(timelines[event["pid"]], event)
    return [timelines[rank] for rank in sorted(timelines)]


def _add(timeline: Timeline, event: dict[str, Any]) -> None:
    """Add a span, or a memory sample, to its rank's timeline."""
    if event["ph"] == "X" and event["cat"] in ROWS:
        start = event["ts"] / 1e6
        timeline.add(
            Span(event["name"], event["cat"], start, start + event["dur"] / 1e6, event["args"])
        )
    elif event["ph"] == "C":
        timeline.memory.append((event["ts"] / 1e6, event["args"]))
