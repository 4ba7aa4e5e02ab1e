"""Chapter 23 · What if: the predicted time of a recorded step with another link, other buckets, or
another order, by the replay.

    predict(record, Change(bandwidth=250e6, bucket=1 << 20))       # seconds

The work stays as recorded. The change concerns the calls: their moments, number and seconds:

    alpha, bandwidth    a call takes as long as recorded + messages x (new alpha - old) + bytes x
                        (new beta - old); the old ones are fitted to the step's own calls
    bucket              gradients become final evenly between two recorded buckets
                        (what_if_buckets.py)
    ahead               for ZeRO-3: the gather of a unit starts `ahead` units before its turn
                        (rank_line.py)
    order=forward       buckets of gradients are sent first layer first
    priority=on         of the calls in a queue, the call that is waited for first goes first
    without             each kind of work of this rank takes at most the median of the other ranks:
                        no straggler

The processor work of a call itself (packing, the tape's hooks) is not predicted, nor is another
number of ranks. If no core was free after a wait (NO_CORE), the prediction lets the rank continue
at once. A transfer that other programs slowed down while it was hidden keeps its recorded length,
and counts if it is no longer hidden: record a step on a quiet machine.

notes: N2 §10, §11.1    Source: Peng et al. 2019, "A Generic Communication Scheduler"
                        (ByteScheduler), for priority.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from minidist.comm.cost.link_model import LinkCost, LinkWork, Sample, fit
from minidist.observe.events import GroupCall, Start
from minidist.observe.rank_line import StepLines, prefetch, without_straggler
from minidist.observe.replay import Replayed
from minidist.observe.step_record import StepRecord
from minidist.observe.tracks import CALL, WAIT
from minidist.observe.what_if_buckets import forward_order, new_buckets

ORDERS = ("backward", "forward")
TURNS = 4
"""Number of times that priorities are computed again, from the times that the last ones gave."""


@dataclass(frozen=True)
class Change:
    """A change of the recorded step; None: unchanged. bucket: bytes; alpha: seconds; bandwidth:
    bytes/s; without: a rank."""

    bucket: int | None = None
    alpha: float | None = None
    bandwidth: float | None = None
    ahead: int | None = None
    order: str | None = None
    priority: bool | None = None
    without: int | None = None


def predict(record: StepRecord, change: Change, link: LinkCost | None = None) -> float:
    """Return the seconds of the step with a change.

    Args:    link: cost of the recorded step's link, if it is known (default: fitted to the step's
             calls).
    """
    job = StepLines(record)
    cost = link or fitted_link(record)
    alpha = cost.alpha if change.alpha is None else change.alpha
    beta = cost.beta if change.bandwidth is None else 1 / change.bandwidth
    for number, call in job.calls.items():
        longer = call.messages * (alpha - cost.alpha) + call.nbytes * (beta - cost.beta)
        job.seconds[number] = max(0.0, job.seconds[number] + longer)
    if change.without is not None:
        without_straggler(job, change.without)
    if change.bucket is not None:
        new_buckets(job, change.bucket, alpha)
    if change.ahead is not None:
        prefetch(job, change.ahead)
    if change.order == "forward":
        forward_order(job)
    replayed = _replay(job)
    seconds = _end(replayed)
    for _ in range(TURNS if change.priority else 0):
        _most_urgent_first(job, replayed)
        replayed = _replay(job)
        seconds = min(seconds, _end(replayed))
    return seconds


def fitted_link(record: StepRecord) -> LinkCost:
    """Return alpha and beta of the link, fitted to the calls of the step; both 0 without calls."""
    samples = [
        Sample(LinkWork(call.messages, call.messages, call.nbytes, 0.0), call.alone)
        for call in record.calls
        if call.alone > 0 and call.messages
    ]
    return (
        fit("recorded", len(record.windows), samples)
        if samples
        else LinkCost("recorded", 0, *[0.0] * 5)
    )


def _replay(job: StepLines) -> Replayed:
    return job.record.replay(job.traces(), job.seconds_by_name())


def _end(replayed: Replayed) -> float:
    return max(stops[-1] for stops in replayed.stops)


def _most_urgent_first(job: StepLines, replayed: Replayed) -> None:
    """Order the calls that are in a group's queue together by the moments when they are waited
    for."""
    needed, came = _moments(replayed)
    for group in dict.fromkeys(call.group for call in job.calls.values()):
        left = {
            number: job.event(number).name
            for number, call in job.calls.items()
            if call.group == group and job.event(number).name in came
        }
        order = list[int]()
        now = 0.0
        while left:
            now = max(now, min(came[name] for name in left.values()))
            number = min(
                (one for one, name in left.items() if came[name] <= now),
                key=lambda one: (needed.get(left[one], float("inf")), came[left[one]]),
            )
            now += job.seconds[number]
            order.append(number)
            del left[number]
        _reorder(job, order)


def _moments(replayed: Replayed) -> tuple[dict[str, float], dict[str, float]]:
    """Return two dicts by the names of calls: when the first rank waits for the call, and when all
    ranks have asked for it."""
    needed = dict[str, float]()
    came = dict[str, float]()
    for rank in range(len(replayed.role_of)):
        stations = replayed.stations_of(rank)
        times = replayed.times(rank)
        names = [
            [job.name for job in station.jobs if isinstance(job, GroupCall)] for station in stations
        ]
        for place, (kind, slot, number) in enumerate(replayed.track(rank).ops):
            if kind in (WAIT, CALL):
                name = names[slot][number]
                needed[name] = min(needed.get(name, float("inf")), times[place])
        for mine, station in zip(names, stations, strict=True):
            came.update(zip(mine, station.late, strict=True))
    return needed, came


def _reorder(job: StepLines, order: list[int]) -> None:
    """Start the calls of a group in this order on all ranks: none before an earlier call of the
    order."""
    turn: Mapping[int, int] = {number: place for place, number in enumerate(order)}
    for line in job.lines:
        starts = line.starts()
        latest = 0.0
        begun = dict[int, float]()
        for number in order:
            latest = max(latest, starts.get(number, latest))
            begun[number] = latest
        mine = sorted(
            (
                (begun[number], turn[number], Start(number, job.event(number)))
                for number in order
                if number in starts
            ),
            key=lambda each: each[:2],
        )
        rest = [
            (place, mark)
            for place, mark in line.marks
            if not (isinstance(mark, Start) and mark.id in turn)
        ]
        line.marks = sorted(
            [*((place, start) for place, _, start in mine), *rest], key=lambda each: each[0]
        )
