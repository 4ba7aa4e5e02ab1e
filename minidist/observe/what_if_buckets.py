"""Chapter 23 · A recorded step with other buckets, or with the same in another order.

Between two buckets that were recorded, gradients become final evenly, byte by byte, as backward
goes on; weights are needed evenly as forward goes on. So a bucket of any size has a moment at which
its last byte is final:

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

    Args:    bucket_bytes: of an array, the largest. message_seconds: what of a call's time is not
             in its bytes, for each message.
    """
    for stream in (*(sums_of(job, verb) for verb in SUMS), weights_of(job)):
        if stream:
            _cut_again(job, stream, bucket_bytes, message_seconds)


def sums_of(job: StepLines, verb: str) -> list[int]:
    """Calls that sum buckets of gradients, in their order."""
    return [number for number in job.in_background(verb) if "bucket" in job.calls[number].name]


def weights_of(job: StepLines) -> list[int]:
    """Calls that gather buckets of weights for this step's forward, in their order."""
    waited = {number for line in job.lines for number in line.awaits()}
    return [
        number
        for number in job.in_background(WEIGHTS)
        if "bucket" in job.calls[number].name and number in waited
    ]


def _cut_again(
    job: StepLines, stream: Sequence[int], bucket_bytes: int, message_seconds: float
) -> None:
    """Put calls of other buckets in the place of those of a stream."""
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
        if first.verb == WEIGHTS:  # needed when the first of its bytes is
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
    """Where each bucket is waited for when the next sets out (ZeRO-2), so are the new ones."""
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
    """Let buckets of gradients travel in the order of forward: each waits for those before it in
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
