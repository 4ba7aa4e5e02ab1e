"""Chapter 23 · Possible gain of predicting transfers (N2's "learned prediction of transfers").

A scheduler that knows the next call, its size and when a rank will wait for it could give the link
to the most urgent call. A predictor would learn this. But each step makes the same calls as the
previous step, in the same order and sizes, so the second step is known without learning:

    known    calls that the previous step made at the same place, of all calls of the step
    gain     seconds saved by a scheduler that knows the whole step before (what_if.py, priority)

The recorded order cannot predict the rest: a slower rank, or a link that others use.

notes: N2 §11.1
"""

from collections.abc import Sequence
from typing import Any

from minidist.observe.step_record import StepRecord, record_step
from minidist.observe.timeline import Timeline
from minidist.observe.what_if import Change, predict


def foresight(timelines: Sequence[Timeline], step: int) -> dict[str, Any]:
    """Return how many calls of a step the previous step predicts, and the gain of knowing all.

    Returns: {"known": calls, or None if the previous step is not recorded whole, "calls": number of
             calls, "gain": seconds}
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
    """Return (name, group, bytes) of the calls that the first rank has started in the step, in
    order."""
    start, stop = record.windows[0]
    calls = [
        (call.ranks[0].asked, (call.name, call.group, call.nbytes))
        for call in record.calls
        if 0 in call.ranks and start <= call.ranks[0].asked < stop
    ]
    return [told for _, told in sorted(calls)]
