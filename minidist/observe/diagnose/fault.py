"""Fault, a finding of `minidist diagnose`, and functions for the texts of findings."""

from collections.abc import Iterable
from dataclasses import dataclass

from minidist.comm.flight.slots import CALL, Entry
from minidist.device.cores import in_words

CERTAIN = "certain"
LIKELY = "likely"
POSSIBLE = "possible"


@dataclass(frozen=True)
class Fault:
    """A finding: a problem, its cause and its culprits.

    Attributes: cause     one word or two: killed, exception, stopped, wrong shape, left out,
                          behind, stuck, slow, …
                ranks     the culprits, world ranks; none: no rank is the cause
                where     "file:line" of the program, or ""
                what      a sentence
                evidence  facts from the recorders, one line per fact
                sure      CERTAIN, LIKELY or POSSIBLE
                advice    what to do
                steps     the first and the last step in which it is visible, from 0; None: it does
                          not belong to steps
    """

    cause: str
    ranks: tuple[int, ...]
    where: str
    what: str
    evidence: tuple[str, ...]
    sure: str
    advice: str
    steps: tuple[int, int] | None = None


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2,5"."""
    listed = sorted(ranks)
    return f"rank{'s' * (len(listed) != 1)} {in_words(listed)}"


def span(seconds: float) -> str:
    """Return a duration as text: 0.25 -> "0.25 s", 90 -> "90 s", 1860 -> "31 min"."""
    if seconds < 10:
        return f"{max(0.0, seconds):.2g} s"
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def call_text(entry: Entry) -> str:
    """Return a call as text: "all_reduce(<f4 [3, 4], op=sum), call 640, at train.py:40"."""
    shape = "" if entry["shape"] is None else str(entry["shape"]).replace("None", "?")
    parts = [f"{entry['dtype'] or ''} {shape}".strip()]
    parts += [f"{name}={entry[name]}" for name in ("op", "root") if entry.get(name) is not None]
    number = f"{'call' if entry['kind'] == CALL else 'message'} {entry['sequence']}"
    return f"{entry['verb']}({', '.join(filter(None, parts))}), {number}, at {entry['where']}"
