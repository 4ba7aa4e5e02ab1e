"""Chapter 23 · A recorded step with other buckets, or with the same buckets in another order.

Between two recorded buckets, gradients become final at a constant rate during backward; weights are
needed at a constant rate during forward. So for a bucket of any size there is a moment at which its
last byte is final:

    bytes sent    0 ......... bucket 0 ......... bucket 1 ......... bucket 2
    work          backward    start 0            start 1            start 2
"""

import math
from collections.abc import Sequence

import numpy as np

from minidist.observe.events import Await, Start
from minidist.observe.rank_line import RankLine, StepLines

SUMS = ("all_reduce", "reduce_scatter")
WEIGHTS = "all_gather"


def new_buckets(job: StepLines, bucket_bytes: int, message_seconds: float) -> None:
    """Cut gradients and gathered weights into other buckets.

    Args:    bucket_bytes: largest bytes of a bucket's array. message_seconds: the part of a call's
             time that does not depend on its bytes, per message.
    """
    for stream in (*(sums_of(job, verb) for verb in SUMS), weights_of(job)):
        if stream:
            _cut_again(job, stream, bucket_bytes, message_seconds)


def sums_of(job: StepLines, verb: str) -> list[int]:
    """Return the calls that sum buckets of gradients, in order."""
    return [number for number in job.in_background(verb) if "bucket" in job.calls[number].name]


def weights_of(job: StepLines) -> list[int]:
    """Return the calls that gather buckets of weights for this step's forward, in order."""
    waited = {number for line in job.lines for number in line.awaits()}
    return [
        number
        for number in job.in_background(WEIGHTS)
        if "bucket" in job.calls[number].name and number in waited
    ]


def _cut_again(
    job: StepLines, stream: Sequence[int], bucket_bytes: int, message_seconds: float
) -> None:
    """Replace the calls of a stream by calls of other buckets."""
    first = job.calls[stream[0]]
    size = len(first.ranks)
    # bytes sent for each byte of the array
    sent = (2 if first.verb == "all_reduce" else 1) * (size - 1) / size
    edges = np.cumsum([0, *(job.calls[number].nbytes for number in stream)])
    count = max(1, math.ceil(float(edges[-1]) / (bucket_bytes * sent) - 1e-9))
    cuts = np.linspace(0, float(edges[-1]), count + 1)
    fixed = np.array([job.calls[number].messages * message_seconds for number in stream])
    moving = np.cumsum([0.0, *np.maximum(0.0, [job.seconds[number] for number in stream] - fixed)])
    seconds = np.diff(np.interp(cuts, edges, moving)) + first.messages * message_seconds
    new = [
        job.add(
            first,
            f"{first.name.rpartition(' ')[0]} {place}",
            int(cuts[place + 1] - cuts[place]),
            float(alone),
        )
        for place, alone in enumerate(seconds)
    ]
    for line in job.lines:
        starts = line.starts()
        awaits = line.awaits()
        end = line.begin_of("backward")
        if first.verb == WEIGHTS:  # a bucket is needed when its first byte is needed
            begun = [starts[stream[0]]] * count
            needed = np.interp(
                cuts[:-1],
                edges,
                [*(awaits[number] for number in stream), max(end, awaits[stream[-1]])],
            ).tolist()
        else:
            begun = np.interp(
                cuts[1:], edges, [min(end, starts[stream[0]]), *(starts[one] for one in stream)]
            ).tolist()
            needed = (
                [line.total] * count
                if any(one not in awaits for one in stream)
                else np.interp(
                    cuts[1:], edges, [awaits[stream[0]], *(awaits[number] for number in stream)]
                ).tolist()
            )
            needed = _chained(begun, needed, stream, starts, awaits)
        line.drop(stream)
        _put(line, job, new, begun, needed)


def _chained(
    begun: list[float],
    needed: list[float],
    stream: Sequence[int],
    starts: dict[int, float],
    awaits: dict[int, float],
) -> list[float]:
    """Return where each new bucket is waited for: at the start of the next bucket, if the recorded
    buckets were (ZeRO-2); else as given in `needed`."""
    if (
        len(stream) > 1
        and all(awaits[one] < awaits[stream[-1]] for one in stream[:-2])
        and all(
            abs(awaits[one] - starts[other]) < 1e-3
            for one, other in zip(stream[:-1], stream[1:], strict=True)
        )
    ):
        return [*begun[1:], max(needed[-1], begun[-1])]
    return needed


def _put(
    line: RankLine,
    job: StepLines,
    new: Sequence[int],
    begun: Sequence[float],
    needed: Sequence[float],
) -> None:
    """Add the calls of a stream to a rank's line."""
    line.marks += [
        (place, Start(number, job.event(number))) for number, place in zip(new, begun, strict=True)
    ]
    line.marks += [(max(begun[at], place), Await(new[at])) for at, place in enumerate(needed)]
    line.marks.sort(key=lambda each: each[0])


def forward_order(job: StepLines) -> None:
    """Send buckets of gradients in the order of forward: each waits for the buckets before it in
    the model."""
    for stream in (sums_of(job, verb) for verb in SUMS):
        order = list(reversed(stream))
        for line in job.lines:
            starts = line.starts()
            awaits = line.awaits()
            begun = (
                np.maximum.accumulate([starts[number] for number in order]).tolist()
                if order
                else []
            )
            needed = [max(awaits.get(number, line.total), begun[-1]) for number in order]
            line.drop(order)
            _put(line, job, order, begun, needed)
