"""Chapter 23 · What if: a recorded step with another link, other buckets, another order; predicted
by the replay.

    predict(record, Change(bandwidth=250e6, bucket=1 << 20))       # seconds

The work stays as it was recorded. What changes is when calls are asked for, how many there are, how
long each takes:

    alpha, bandwidth    a call takes as long as recorded + messages x (new alpha - old) + bytes x
                        (new beta - old); the old ones are fitted to the step's own calls
    bucket              gradients become final evenly between two recorded buckets
                        (what_if_buckets.py)
    ahead               of ZeRO-3: the gather of a unit sets out so many units before its turn
                        (rank_line.py)
    order=forward       buckets of gradients travel first layer first
    priority=on         of the calls in a queue that one goes first that is waited for first
    without             each kind of work of this rank takes as long as the median of the others':
                        no straggler

The work of a call itself (packing, the tape's hooks) is not predicted, and neither is another
number of ranks. Where no core was free after a wait (NO_CORE), a prediction lets the rank continue
at once.
A transfer that other programs held up while it was hidden stays as long as it was recorded, and
counts where it is no longer hidden: record a quiet step.

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
"""How often priorities are found anew, from the times that the last ones gave."""


@dataclass(frozen=True)
class Change:
    """What is to be another; what is None stays. bucket: bytes; alpha: seconds; bandwidth: bytes/s;
    without: a rank."""

    bucket: int | None = None
    alpha: float | None = None
    bandwidth: float | None = None
    ahead: int | None = None
    order: str | None = None
    priority: bool | None = None
    without: int | None = None


def predict(record: StepRecord, change: Change, link: LinkCost | None = None) -> float:
    """Seconds of the step under a change.

    Args:    link: what the recorded step's link costs, where it is known (default: fitted to the
             step's calls).
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
    """alpha and beta of the link, from the calls of the step; without any they cost nothing."""
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
    """Give each group's calls the order in which they are waited for, as far as they stand in its
    queue together."""
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
    """By the names of calls: when the first rank waits for it, and when all ranks have come to
    it."""
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
    """Let the calls of a group start in this order on all ranks: none before one that goes
    first."""
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
