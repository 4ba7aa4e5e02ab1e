"""The outcome of each fault of a storm: when the next step that counts was made, and when all ranks
worked again.

    fault ........ broken ........ formed ........ stepped ................ stepped, with all ranks
      |---- until the next useful step, `seconds` ----|                        |
      |---- until full strength, `full_seconds` --------------------------------|

For the fault "stop", the time counts from its detection ("broken"). `again` counts the steps that
were made before the fault and made again after it. The two logs are the only input (storm.py).
"""

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Event = dict[str, Any]

CALM = 3.0  # seconds after a fault until its effects are over
BREAKING = ("kill", "stop", "torn", "flip", "launcher")  # each ends a generation


def outcomes(told: Sequence[Event], faults: Sequence[Event], size: int) -> list[Event]:
    """Return the faults in order, each with its outcome.

    Args:    told: events of the job; faults: of the storm; size: number of ranks that the job
             wants.
    Returns: each fault with `noticed`: whether a generation of the job broke; `seconds` and
             `full_seconds`: see above, None if it was not noticed, or the job had no steps left to
             make; again: number of steps made again; recovered.
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
    # no step was left to be made after it
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
    # at least this number of steps was made
    saved = int(fault.get("checkpoint", "step-0").removeprefix("step-"))
    # the step from which the job continued; times of steps
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
    damaged = saved > 0 and formed == saved  # the damaged checkpoint was loaded
    return {
        "noticed": True,
        "seconds": after and after - since,
        "full_seconds": full and full - since,
        "again": 0 if formed is None else max(0, here - formed),
        "recovered": (after is not None or (done and formed is not None)) and not damaged,
    }


def summary(told: Sequence[Event], faults: Sequence[Event], size: int) -> dict[str, Any]:
    """Return the figures of a storm.

    Returns: happened: `outcomes`; faults, recovered: their numbers; seconds, full_seconds: of each
             fault, by kind; median_seconds, median_full_seconds; steps_made, steps_again; kept: the
             part of all steps made that was not made again; participation: ranks that took part
             over `size`, on average over the time from the first state to the last step, without
             the time in which there was no launcher; work_seconds: all of that time, including the
             time without a launcher; calm_rate: as below; sizes: of the generations.
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
    """Return the number of steps made again: how far the ranks were minus where they continued,
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
    """Return (begin, end, ranks, number) of each generation's work, from its state to its end or
    its last step, in clock time.

    Numbers count from 1 over all launchers of the job. The kill of a launcher ends its generation.
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
    """Return the number of kept steps, divided by the number that the calm speed would have given
    in the same time.

    Each span between two faults is compared with the speed of its own second half, because other
    load on the machine slows both halves. A span whose second half has no step is compared with the
    previous speed. None if no span was calm.
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
