"""Chapter 11 · The checker: the properties of a pipeline schedule that can be proved without
running it.

    schedule = make_schedule("1f1b", ranks=4, microbatches=8)
    check(schedule)                    # raises ScheduleError unless the schedule is right and ends
    clock = clock_of(schedule, Times(forward=1.0, backward=2.0))
    clock.length, clock.bubble         # 33.0, 3/11
    peak_held(schedule)                # [4, 3, 2, 1] microbatches
    check_spans(clock.spans)           # also for spans of a drawn chart, or of a measured timeline

A schedule is right if each microbatch goes once forward and once backward through every stage, and
nothing is used before it has arrived. It ends if no ranks wait for each other. Sends never wait, so
one simulated run of the lists decides that (clock_of): each rank continues while it can, until all
have ended or none can continue.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minidist.errors import ScheduleError
from minidist.parallel.pipeline.instructions import (
    COMPUTES,
    RECEIVES,
    SENDS,
    Backward,
    BackwardInput,
    BackwardWeights,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
    SendGradient,
    received_as,
    sent_as,
)


def check(schedule: Schedule) -> Schedule:
    """Prove that a schedule computes the same as one process, and ends; return it, marked as
    checked.

    Raises:  ScheduleError: an instruction of a foreign stage, missing or twice, before what it
             needs, sent without a receive or the reverse, received in another order than sent; or
             the ranks that wait for each other.
    """
    for rank in range(schedule.ranks):
        _check_list(schedule, rank)
    _check_complete(schedule)
    _check_links(schedule)
    clock_of(schedule)
    return replace(schedule, checked=True)


# ------------------------------------------------------------------------------------- list by list


def needs(instruction: Instruction, schedule: Schedule) -> Iterator[Instruction]:
    """Return the instructions that the same rank must run before `instruction`."""
    stage = instruction.stage
    microbatch = instruction.microbatch
    if isinstance(instruction, SendActivation):
        yield Forward(stage, microbatch)
    elif isinstance(instruction, SendGradient):
        yield _backward_of(stage, microbatch, schedule)
    for compute in _computes_before(instruction, schedule.stages - 1):
        if schedule.rank_of(compute.stage) == schedule.rank_of(stage):
            backward = isinstance(compute, (Backward, BackwardInput)) and compute.stage != stage
            yield _backward_of(compute.stage, microbatch, schedule) if backward else compute
        else:
            yield (
                RecvActivation(stage, microbatch)
                if compute.stage < stage
                else RecvGradient(stage, microbatch)
            )


def _backward_of(stage: int, microbatch: int, schedule: Schedule) -> Instruction:
    """Return the backward that computes the gradient of a stage's input: whole, or the first
    half."""
    whole = Backward(stage, microbatch)
    return whole if whole in schedule.instructions else BackwardInput(stage, microbatch)


def _computes_before(instruction: Instruction, last: int) -> Iterator[Instruction]:
    """Return the computes, of any rank, whose results a compute needs; `last`: the last stage."""
    stage = instruction.stage
    microbatch = instruction.microbatch
    if isinstance(instruction, Forward) and stage > 0:
        yield Forward(stage - 1, microbatch)
    elif isinstance(instruction, (Backward, BackwardInput)):
        yield Forward(stage, microbatch)
        if stage < last:
            yield type(instruction)(stage + 1, microbatch)
    elif isinstance(instruction, BackwardWeights):
        yield BackwardInput(stage, microbatch)


def _check_list(schedule: Schedule, rank: int) -> None:
    """Check that each instruction of a rank's list has an own stage, is in the list once, and
    follows the instructions it needs."""
    done: set[Instruction] = set()
    mine = schedule.lists[rank]
    for instruction in mine:
        if (
            not 0 <= instruction.stage < schedule.stages
            or schedule.rank_of(instruction.stage) != rank
        ):
            raise ScheduleError(
                f"{schedule.name}: rank {rank} does the {instruction}, a stage of another rank"
            )
        if instruction in done:
            raise ScheduleError(f"{schedule.name}: rank {rank} does the {instruction} twice")
        for needed in needs(instruction, schedule):
            if needed not in done:
                when = "is later in its list" if needed in mine else "is missing in its list"
                raise ScheduleError(
                    f"{schedule.name}: rank {rank} does the {instruction} before its input is "
                    f"there: the {needed} {when}"
                )
        done.add(instruction)


def _check_complete(schedule: Schedule) -> None:
    """Check that each microbatch goes forward and backward through each stage; backward is whole or
    in two halves."""
    lists = [set(instructions) for instructions in schedule.lists]
    for stage, microbatch in itertools.product(
        range(schedule.stages), range(schedule.microbatches)
    ):
        rank = schedule.rank_of(stage)
        forward, whole, *halves = (kind(stage, microbatch) for kind in COMPUTES)
        in_parts = any(half in lists[rank] for half in halves)
        if in_parts and whole in lists[rank]:
            raise ScheduleError(f"{schedule.name}: rank {rank} does the {whole} whole and in parts")
        for instruction in (forward, *(halves if in_parts else [whole])):
            if instruction not in lists[rank]:
                raise ScheduleError(f"{schedule.name}: rank {rank} never does the {instruction}")


def _check_links(schedule: Schedule) -> None:
    """Check that each rank receives exactly the messages that another rank sends it, in the same
    order."""
    for source, target in itertools.product(range(schedule.ranks), repeat=2):
        sent = [
            received_as(i)
            for i in schedule.lists[source]
            if isinstance(i, SENDS) and schedule.rank_of(received_as(i).stage) == target
        ]
        taken = [
            i
            for i in schedule.lists[target]
            if isinstance(i, RECEIVES) and schedule.rank_of(sent_as(i).stage) == source
        ]
        leaving = set(sent)
        arriving = set(taken)
        for receive in (receive for receive in sent if receive not in arriving):
            raise ScheduleError(
                f"{schedule.name}: rank {source} does the {sent_as(receive)}, but rank {target} "
                "never receives it"
            )
        for receive in (receive for receive in taken if receive not in leaving):
            raise ScheduleError(
                f"{schedule.name}: rank {target} does the {receive}, but rank {source} never "
                "sends it"
            )
        for first, expected in (
            pair for pair in zip(sent, taken, strict=True) if pair[0] != pair[1]
        ):
            raise ScheduleError(
                f"{schedule.name}: messages from rank {source} to rank {target} are received in "
                f"another order than sent: the {first} arrives first, but rank {target} expects "
                "the "
                f"{expected}"
            )


# ---------------------------------------------------------------------------------------- the clock


@dataclass(frozen=True)
class Times:
    """The times of instructions per microbatch and stage, in any unit.

    Attributes: message: from the send to its arrival; shares: factors of these times for each stage
    (default: 1).
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weights: float = 1.0
    message: float = 0.0
    shares: Sequence[float] | None = None

    def of(self, instruction: Instruction) -> float:
        """Return the time of a compute."""
        whole = {
            Forward: self.forward,
            Backward: self.backward,
            BackwardInput: self.backward_input,
            BackwardWeights: self.backward_weights,
        }[type(instruction)]
        return whole if self.shares is None else whole * self.shares[instruction.stage]


@dataclass(frozen=True)
class ComputeSpan:
    """A compute of a rank with its start and stop: by the clock, as drawn, or as measured."""

    rank: int
    instruction: Instruction
    start: float
    stop: float


@dataclass(frozen=True)
class Clock:
    """The computes of all ranks in time."""

    ranks: int
    spans: tuple[ComputeSpan, ...]

    @property
    def length(self) -> float:
        """The time from the first start to the last stop."""
        return max(span.stop for span in self.spans) - min(span.start for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they are idle."""
        return 1.0 - sum(span.stop - span.start for span in self.spans) / (self.ranks * self.length)


def clock_of(schedule: Schedule, times: Times | None = None) -> Clock:
    """Return the computes of all ranks in time, if each continues as soon as it can. Raises
    ScheduleError in a deadlock."""
    lasting = times or Times()
    spans = list[ComputeSpan]()
    arrives: dict[Instruction, float] = {}  # send -> when its message arrives

    def play(rank: int) -> Iterator[Instruction]:
        """Run a rank's list; yield a receive whenever its message was not sent yet."""
        now = 0.0
        for instruction in schedule.lists[rank]:
            if isinstance(instruction, COMPUTES):
                start = now
                now = now + lasting.of(instruction)
                spans.append(ComputeSpan(rank, instruction, start, now))
            elif isinstance(instruction, SENDS):
                arrives[instruction] = now + lasting.message
            else:
                while sent_as(instruction) not in arrives:
                    yield instruction
                now = max(now, arrives[sent_as(instruction)])

    ranks = [play(rank) for rank in range(schedule.ranks)]
    before: dict[int, Instruction] = {}
    while (
        waiting := {rank: at for rank, playing in enumerate(ranks) if (at := next(playing, None))}
    ) != before:
        before = waiting
    if waiting:  # no rank has moved
        raise ScheduleError(_deadlock(schedule, waiting))
    return Clock(schedule.ranks, tuple(spans))


def _deadlock(schedule: Schedule, at: dict[int, Instruction]) -> str:
    """Return a text that names the ring of ranks that wait for each other, or the rank whose list
    has ended."""
    path = list[int]()
    rank = min(at)
    while rank in at and rank not in path:
        path.append(rank)
        rank = schedule.rank_of(sent_as(at[rank]).stage)
    ring = path[path.index(rank) :] if rank in path else path
    waits = [
        f"rank {one} at the {at[one]} for rank {schedule.rank_of(sent_as(at[one]).stage)}"
        for one in ring
    ]
    return f"{schedule.name}: deadlock, these ranks wait: {'; '.join(waits)}" + (
        "" if rank in path else f"; and rank {rank} has come to its list's end"
    )


def peak_held(schedule: Schedule) -> list[int]:
    """Return for each rank the most microbatches, counted for each of its stages, that are between
    forward and backward."""
    return [schedule.held(rank) for rank in range(schedule.ranks)]


# ------------------------------------------------------------------------------------- drawn charts


def broken(spans: Sequence[ComputeSpan]) -> list[tuple[ComputeSpan, ComputeSpan]]:
    """Return the broken dependencies of spans from any source, in order of start: (the early span,
    the one it needed)."""
    by_instruction = {span.instruction: span for span in spans}
    last = max(span.instruction.stage for span in spans)
    pairs = []
    for span in sorted(spans, key=lambda span: (span.start, span.rank)):
        for needed in _computes_before(span.instruction, last):
            for kind in (Forward,) if isinstance(needed, Forward) else (Backward, BackwardInput):
                other = by_instruction.get(kind(needed.stage, needed.microbatch))
                if other is not None and span.start < other.stop:
                    pairs.append((span, other))
    return pairs


def check_spans(spans: Sequence[ComputeSpan]) -> None:
    """Raise ScheduleError if a compute starts before one that it needs has stopped; the error names
    the first, counts all."""
    pairs = broken(spans)
    if pairs:
        early, needed = pairs[0]
        raise ScheduleError(
            f"the {early.instruction} begins at {early.start:g} on rank {early.rank}, but needs "
            f"the {needed.instruction}, which rank {needed.rank} ends at {needed.stop:g}; "
            f"{len(pairs)} dependencies are broken"
        )


def computes_of(timelines: Iterable[Any]) -> list[ComputeSpan]:
    """Return the computes that ranks recorded (`observe.Timeline`s), to check and draw as those of
    a clock."""
    kinds = {kind.word: kind for kind in COMPUTES}
    return [
        ComputeSpan(
            timeline.rank,
            kinds[span.name](span.details["stage"], span.details["microbatch"]),
            span.start,
            span.stop,
        )
        for timeline in timelines
        for span in timeline.spans
        if span.name in kinds and "microbatch" in span.details
    ]
