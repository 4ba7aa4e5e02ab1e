"""Chapter 25 · trace.json read again: the timelines that `timeline.write_perfetto` wrote, with times from its begin."""

import json
from pathlib import Path
from typing import Any

from minidist.errors import ConfigError
from minidist.observe.timeline import ROWS, Span, Timeline


def read_trace(file: str | Path) -> list[Timeline]:
    """The timelines of a trace, by rank.

    Raises:  OSError if the file cannot be read; ConfigError, one line, if it is not a trace of minidist.
    """
    try:
        events = json.loads(Path(file).read_bytes())["traceEvents"]
        timelines: dict[int, Timeline] = {}
        for event in events:
            _add(timelines.setdefault(int(event["pid"]), Timeline(int(event["pid"]), limit=1 << 40)), event)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a trace of minidist train ({type(error).__name__}: {error})") from error
    return [timelines[rank] for rank in sorted(timelines)]


def _add(timeline: Timeline, event: dict[str, Any]) -> None:
    """Put an event to its rank's timeline; arrows and names are left out."""
    if event["ph"] == "X" and event["cat"] in ROWS:
        start = event["ts"] / 1e6
        timeline.add(Span(event["name"], event["cat"], start, start + event["dur"] / 1e6, event["args"]))
    elif event["ph"] == "C" and event["name"] == "memory":
        timeline.memory.append((event["ts"] / 1e6, event["args"]))
