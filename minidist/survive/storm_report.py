"""What came of a storm, fault by fault: when the next step was made that counts, when all ranks
worked again.

    fault ........ broken ........ formed ........ stepped ................ stepped, with all ranks
      |---- until the next useful step, `seconds` ----|                        |
      |---- until full strength, `full_seconds` --------------------------------|

Of a stop the time counts from its detection ("broken"). Steps that were made, and are made again
after the fault, are `again`. All of it is from the two logs alone (storm.py).
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Event = dict[str, Any]

CALM = 3.0  # seconds after a fault in which its effects are over
BREAKING = ("kill", "stop", "torn", "flip", "launcher")  # no rank can go on past them


def outcomes(told: Sequence[Event], faults: Sequence[Event], size: int) -> list[Event]:
    """The faults in order, each with what came of it.

    Args:    told: events of the job; faults: of the storm; size: ranks that the job wants.
    Returns: each fault with `noticed`: whether the job broke off a generation; `seconds` and
             `full_seconds`: see above, None if it was not noticed, or the job had nothing left to
             do; again: steps made again; recovered.
    """
    timed = sorted((event for event in told if "time" in event), key=lambda event: event["time"])
    ends = [*(fault["time"] for fault in faults), float("inf")][1:]
    return [
        fault | _outcome(timed, fault, end, size) for fault, end in zip(faults, ends, strict=True)
    ]


def _outcome(timed: Sequence[Event], fault: Event, end: float, size: int) -> Event:
    kind = fault["kind"]
    when = fault["time"]
    end = float("inf") if kind in BREAKING else end
    noticed = (
        event["time"]
        for event in timed
        if event["event"] == "broken" and when <= event["time"] < end
    )
    broken = when if kind == "launcher" else next(noticed, None)
    finished = next((event["time"] for event in timed if event["event"] == "trained"), None)
    done = any(event["event"] == "done" for event in timed)
    # nothing was to be made after it
    if broken is None or (finished is not None and broken >= finished):
        return {
            "noticed": False,
            "seconds": None,
            "full_seconds": None,
            "again": 0,
            "recovered": done if kind in BREAKING else True,
        }
    since = broken if kind == "stop" else when
    working = 0
    here = 0
    # so many steps were surely made
    saved = int(fault.get("checkpoint", "step-0").removeprefix("step-"))
    # the step that it went on from; times of steps
    formed = None
    after = None
    full = None
    for event in timed:
        step = int(event.get("step", 0))
        if event["event"] == "forming":
            working = len(event["processes"])
        elif event["time"] <= broken:
            here = step if event["event"] == "formed" else max(here, step)
        elif event["event"] == "reached" and formed is None:
            here = max(here, step)
        elif event["event"] == "formed" and formed is None:
            formed = step
            here = max(here, saved)
        elif event["event"] == "stepped":
            after = after or event["time"]
            full = full or (event["time"] if working == size else None)
    damaged = saved > 0 and formed == saved  # and yet it was taken
    return {
        "noticed": True,
        "seconds": after and after - since,
        "full_seconds": full and full - since,
        "again": 0 if formed is None else max(0, here - formed),
        "recovered": (after is not None or (done and formed is not None)) and not damaged,
    }


def summary(told: Sequence[Event], faults: Sequence[Event], size: int) -> dict[str, Any]:
    """The figures of a storm.

    Returns: happened: `outcomes`; faults, recovered: how many; seconds, full_seconds: of each, by
    kind; median_seconds,
             median_full_seconds; steps_made, steps_again; kept: of all steps that were made, the
             part that was not made again; participation: ranks that took part over `size`, on
             average over the time from the first state to the last step, without the time in which
             there was no launcher; work_seconds: that time, all of it;
             calm_rate: as below; sizes: of the generations.
    """
    found = outcomes(told, faults, size)
    again = _made_again(told)
    made = (
        max(
            (
                int(event["step"])
                for event in told
                if event["event"] in ("stepped", "at", "trained")
            ),
            default=0,
        )
        + again
    )
    works = spans(told, faults)
    figures: dict[str, Any] = {
        "faults": len(found),
        "recovered": sum(fault["recovered"] for fault in found),
        "happened": found,
        "steps_made": made,
        "steps_again": again,
        "kept": 1 - again / made if made else None,
        "participation": _participation(works, faults, size),
        "work_seconds": works[-1][1] - works[0][0] if works else None,
        "calm_rate": calm_rate(told, faults),
        "sizes": [len(event["processes"]) for event in told if event["event"] == "forming"],
    }
    for key in ("seconds", "full_seconds"):
        by_kind: dict[str, list[float]] = {}
        for fault in found:
            if fault[key] is not None:
                by_kind.setdefault(fault["kind"], []).append(fault[key])
        every = [value for values in by_kind.values() for value in values]
        figures |= {key: by_kind, f"median_{key}": statistics.median(every) if every else None}
    return figures


def _made_again(told: Sequence[Event]) -> int:
    """Steps that were made and then made again: how far the ranks were, over where they went on,
    summed."""
    again = here = 0
    for event in told:
        if event["event"] == "formed":
            again += max(0, here - int(event["step"]))
            here = int(event["step"])
        elif event["event"] in ("stepped", "at", "reached", "trained"):
            here = max(here, int(event["step"]))
    return again


def spans(
    told: Sequence[Event], faults: Sequence[Event] = ()
) -> list[tuple[float, float, int, int]]:
    """(begin, end, ranks, number) of each generation's work, from its state to its end or its last
    step, on the clock.

    Numbers count from 1 over all launchers of the job. A launcher that was killed ended its
    generation.
    """
    ends = [
        {"event": "broken", "time": fault["time"]}
        for fault in faults
        if fault["kind"] == "launcher"
    ]
    timed = sorted(
        [*(event for event in told if "time" in event), *ends], key=lambda event: event["time"]
    )
    found = list[tuple[float, float, int, int]]()
    begun = None
    ranks = 0
    number = 0
    for event in timed:
        match event["event"]:
            case "forming":
                ranks = len(event["processes"])
                number = number + 1
            case "formed":
                begun = event["time"]
            case "broken" | "left" | "trained" if begun is not None:
                found.append((begun, event["time"], ranks, number))
                begun = None
        if event["event"] == "trained":
            break
    return found


def calm_rate(told: Sequence[Event], faults: Sequence[Event]) -> float | None:
    """Steps that were made and kept, over those that the same time would have had at the speed of
    its calm parts.

    Each stretch from fault to fault is held against its own second half: what else the machine does
    then slows both. One whose second half has no step is held against the stretch before it. None
    if nothing was calm.
    """
    steps = sorted(
        (event["time"], int(event["step"]))
        for event in told
        if event["event"] in ("formed", "stepped", "at", "trained")
    )
    made = 0
    possible = 0.0
    speed = 0.0
    for begin, end in pairwise(fault["time"] for fault in faults):
        calm = [
            (time, step)
            for time, step in steps
            if max(begin + CALM, (begin + end) / 2) <= time < end
        ]
        if calm and calm[-1][1] > calm[0][1]:
            speed = (calm[-1][1] - calm[0][1]) / (calm[-1][0] - calm[0][0])
        at_begin, at_end = (
            max((each for each in steps if each[0] < moment), default=(0.0, 0))[1]
            for moment in (begin, end)
        )
        if speed:
            made += at_end - at_begin
            possible += (end - begin) * speed
    return made / possible if possible else None


def _participation(
    works: Sequence[tuple[float, float, int, int]], faults: Sequence[Event], size: int
) -> float | None:
    if not works:
        return None
    killed = [fault["time"] for fault in faults if fault["kind"] == "launcher"]
    down = sum(later[0] - earlier[1] for earlier, later in pairwise(works) if earlier[1] in killed)
    time = works[-1][1] - works[0][0] - down
    return sum((end - begin) * ranks for begin, end, ranks, _ in works) / (time * size)
