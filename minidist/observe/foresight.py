"""Chapter 23 · What predicting transfers could gain (N2's "learned prediction of transfers").

A scheduler that knows which call comes next, how large it is and when it is waited for could give
the link to the most urgent one. A predictor would learn just that. But a step makes the calls of
the step before it, in the same order and of the same sizes, so that the second step is known
without learning anything:

    known    calls that the step before has made at the same place        of all calls of the step
    gain     seconds that a scheduler would save that knows the whole step beforehand (what_if.py,
             priority)

What is left is what nothing in the recorded order can tell: a slower rank, a link that others use.

notes: N2 §11.1
"""

from collections.abc import Sequence
from typing import Any

from minidist.observe.step_record import StepRecord, record_step
from minidist.observe.timeline import Timeline
from minidist.observe.what_if import Change, predict


def foresight(timelines: Sequence[Timeline], step: int) -> dict[str, Any]:
    """What the step before tells of this one, and what knowing everything would save.

    Returns: {"known": calls, or None for a first step, "calls", "gain": seconds}
    """
    record = record_step(timelines, step)
    calls = asked_in(record)
    recorded = {
        span.details.get("step")
        for timeline in timelines
        for span in timeline.spans
        if span.name == "step"
    }
    known = None
    if step - 1 in recorded and not any(step - 1 in timeline.cut_steps() for timeline in timelines):
        before = asked_in(record_step(timelines, step - 1))
        known = sum(one == other for one, other in zip(calls, before, strict=False))
    return {
        "known": known,
        "calls": len(calls),
        "gain": max(0.0, predict(record, Change()) - predict(record, Change(priority=True))),
    }


def asked_in(record: StepRecord) -> list[tuple[str, str, int]]:
    """(name, group, bytes) of the calls that the first rank has asked for in the step, in its
    order."""
    start, stop = record.windows[0]
    calls = [
        (call.ranks[0].asked, (call.name, call.group, call.nbytes))
        for call in record.calls
        if 0 in call.ranks and start <= call.ranks[0].asked < stop
    ]
    return [told for _, told in sorted(calls)]
