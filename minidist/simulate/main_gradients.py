"""Chapter 24 · Main gradients: gradients that are kept, added and sent in float32 beside weights of
two bytes, as Megatron does.

Training here keeps a gradient in the dtype of its weight, so only the simulator and the planner
answer this question (`--float32-gradients`). A trace of two-byte gradients becomes one of four:

    memory      each gradient takes twice as many bytes
    calls       reductions of gradients along the data axis send twice as many bytes
    kernels     each pass adds its gradients to the main ones: 4 bytes a weight more are read and
                written

Source: Narayanan et al. 2021; Shoeybi et al. 2019 (Megatron-LM).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from minidist.observe.events import Busy, Event, GroupCall, Memory, Start
from minidist.simulate.trace import Kernel, RankTrace

WIDER = 2  # times the bytes of a two-byte gradient
ADDED = 4.0  # bytes a weight and pass
REDUCTIONS = ("all_reduce", "reduce_scatter")


def with_float32_gradients(trace: RankTrace, passes: int) -> RankTrace:
    """Return the trace with gradients in float32. Args: passes: microbatches of a step."""
    events = [_wider(event) for event in trace.events]
    segments = list(trace.segments)
    for begin, end in pairwise([*trace.steps, len(events)]):
        places = _last_of_passes(events, begin, end)
        # a rank of several stages has a place for each, which adds the gradients of its weights
        nbytes = ADDED * trace.parameters * passes / max(1, len(places))
        extra = Kernel("memory", "float32", 0.0, nbytes)
        for place in places:
            event = events[place]
            assert isinstance(event, Busy)
            segments.append((*segments[event.work], (extra, 1)))  # type: ignore[call-overload]
            events[place] = event._replace(work=len(segments) - 1)
    return replace(
        trace,
        events=events,
        segments=segments,
        peak=_with(trace.peak, WIDER * trace.peak["gradients"], _highest(events)),
        now=_with(
            trace.now,
            WIDER * trace.now["gradients"],
            trace.now["total"] + (WIDER - 1) * trace.now["gradients"],
        ),
        last_step=[_wider_row(row) for row in trace.last_step],
    )


def reduces_gradients(axis: str, verb: str) -> bool:
    """Return True if a call of two-byte numbers reduces gradients."""
    return verb in REDUCTIONS and ("dp" in axis.split(",") or axis.startswith(("dp", "pp.ends")))


def _wider(event: Event) -> Event:
    if isinstance(event, Memory) and event.category == "gradients":
        return event._replace(nbytes=WIDER * event.nbytes)
    if isinstance(event, Start) and _of_gradients(event.call):
        call = event.call
        blocks = tuple(WIDER * nbytes for nbytes in call.blocks)
        wide = call._replace(
            nbytes=WIDER * call.nbytes, blocks=blocks, itemsize=WIDER * call.itemsize
        )
        return event._replace(call=wide)
    return event


def _of_gradients(call: GroupCall) -> bool:
    return call.itemsize == 2 and reduces_gradients(call.axis, call.verb)


def _wider_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the ledger; what is sent along the data axis but gradients are numbers of few
    bytes."""
    if row["phase"] == "step" and reduces_gradients(row["axis"], row["verb"]):
        return row | {"nbytes": WIDER * row["nbytes"]}
    return row


def _last_of_passes(events: Sequence[Event], begin: int, end: int) -> list[int]:
    """Return the places, from `begin` to `end`, of the last work of each microbatch's backward: of
    each of its stages on this rank."""
    busy = [
        (place, event)
        for place, event in enumerate(events[begin:end], begin)
        if isinstance(event, Busy)
    ]
    return [
        place
        for number, (place, event) in enumerate(busy)
        if event.name == "backward"
        and (
            number + 1 == len(busy)
            or (busy[number + 1][1].name, busy[number + 1][1].micro) != (event.name, event.micro)
        )
    ]


def _with(held: Mapping[str, int], gradients: int, total: int) -> dict[str, int]:
    return {**held, "gradients": gradients, "total": total}


def _highest(events: Sequence[Event]) -> int:
    """Return the largest sum of all categories."""
    now = most = 0
    for event in events:
        if isinstance(event, Memory):
            now += event.nbytes
        else:  # the changes of memory before a segment are all counted
            most = max(most, now)
    return max(most, now)
