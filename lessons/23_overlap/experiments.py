"""Run what lesson 23's tables, figure and break-its share.

run(Job(...))                   a step of two ranks on a simulated clock, as a record: exact, and
                                the same every time
soonest_needed_first(...)       a link that serves the most urgent call first
recorded(group, ...)            steps of DDP that really run, over delayed links
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.transports.throttled import delayed
from minidist.nn import GPT, GPTConfig
from minidist.observe.events import Await, Busy, Event, GroupCall, Start
from minidist.observe.step_record import Asked, StepCall, StepRecord, StepWait
from minidist.observe.timeline import Timeline
from minidist.optim import SGD
from minidist.parallel.data.ddp import DDP
from minidist.parallel.data.sliced_ddp import SlicedDDP

RANKS = 2
TENSORS = 4
"""Ranks of a simulated step; tensors of a layer, whose gradients become final one after another."""


# ------------------------------------------------------------------------- steps on a simulated clock


@dataclass(frozen=True)
class Job:
    """A step on the simulated clock; seconds and bytes, forward and backward are per layer.

    Attributes: order: in which buckets travel. ahead: layers that ZeRO-3 gathers before their turn.
    slow: rank 1
                computes this many times as long. late: place of a call -> seconds that it takes
                longer.
    """

    strategy: str = "ddp"
    layers: int = 8
    forward: float = 0.003
    backward: float = 0.006
    update: float = 0.004
    layer_bytes: int = 4_000_000
    bucket: int = 4_000_000
    alpha: float = 50e-6
    bandwidth: float = 1e9
    order: str = "backward"
    ahead: int = 1
    slow: float = 1.0
    late: Mapping[int, float] = field(default_factory=dict)

    def buckets(self) -> list[range]:
        """Return the tensors of each bucket, numbered in the order of backward."""
        each = max(1, self.bucket * TENSORS // self.layer_bytes)
        count = self.layers * TENSORS
        return [range(first, min(first + each, count)) for first in range(0, count, each)]


class Program:
    """The events of one rank, in its order."""

    def __init__(self, job: Job, slow: float) -> None:
        self.job = job
        self.slow = slow
        self.events = list[Event]()
        self.ids = dict[str, int]()

    def busy(self, seconds: float, name: str) -> None:
        """Add a computation."""
        self.events.append(Busy(self.slow * seconds, name))

    def start(self, verb: str, what: str, tensors: int) -> None:
        """Add the start of a call; the rank continues."""
        number = self.ids[f"{verb} {what}"] = len(self.ids)
        nbytes = tensors * self.job.layer_bytes // TENSORS
        self.events.append(
            Start(number, GroupCall("dp", verb, "ring", nbytes, name=f"{verb} {what}"))
        )

    def wait(self, verb: str, what: str) -> None:
        """Add a wait until that call has ended."""
        self.events.append(Await(self.ids[f"{verb} {what}"]))

    def backward(self, verb: str) -> None:
        """Make each tensor's gradient; start a bucket when it is complete and all earlier buckets
        have started."""
        numbered = list(enumerate(self.job.buckets()))
        queue = numbered if self.job.order == "backward" else numbered[::-1]
        left = list(queue)
        for tensor in range(self.job.layers * TENSORS):
            self.busy(self.job.backward / TENSORS, "backward")
            while left and left[0][1][-1] <= tensor:
                number, bucket = left.pop(0)
                self.start(verb, f"bucket {number}", len(bucket))
        for number, _ in queue:
            self.wait(verb, f"bucket {number}")
        self.busy(self.job.update, "optimizer")


def ddp(program: Program) -> None:
    """Run all-reduces behind backward."""
    program.busy(program.job.layers * program.job.forward, "forward")
    program.backward("all_reduce")


def zero1(program: Program) -> None:
    """Run all-gathers of the new weights behind forward, the first layers first, and
    reduce-scatters behind backward."""
    job = program.job
    waited = set[int]()
    buckets = job.buckets()
    for number in reversed(range(len(buckets))):
        program.start("all_gather", f"bucket {number}", len(buckets[number]))
    for layer in range(job.layers):
        first = (job.layers - 1 - layer) * TENSORS
        for number in reversed(range(len(buckets))):
            if number not in waited and set(buckets[number]) & set(range(first, first + TENSORS)):
                waited.add(number)
                program.wait("all_gather", f"bucket {number}")
        program.busy(job.forward, "forward")
    program.backward("reduce_scatter")


def zero3(program: Program) -> None:
    """Gather each layer's weights for forward, and again for backward; send its gradients behind
    backward."""
    job = program.job
    for name, seconds, order in (
        ("forward", job.forward, range(job.layers)),
        ("backward", job.backward, range(job.layers - 1, -1, -1)),
    ):
        begun = 0
        for place, layer in enumerate(order):
            while begun < min(job.layers, place + 1 + job.ahead):
                program.start("all_gather", f"layer {order[begun]} {name}", TENSORS)
                begun += 1
            program.wait("all_gather", f"layer {layer} {name}")
            program.busy(seconds, name)
            if name == "backward":
                program.start("reduce_scatter", f"layer {layer}", TENSORS)
    for layer in range(job.layers - 1, -1, -1):
        program.wait("reduce_scatter", f"layer {layer}")
    program.busy(job.update, "optimizer")


STRATEGIES: Mapping[str, Callable[[Program], None]] = {"ddp": ddp, "zero1": zero1, "zero3": zero3}


def run(job: Job) -> StepRecord:
    """Return the record of a step; both ranks begin at 0."""
    programs = [Program(job, 1.0), Program(job, job.slow)]
    for program in programs:
        STRATEGIES[job.strategy](program)
    return play([program.events for program in programs], job)


def play(traces: Sequence[Sequence[Event]], job: Job) -> StepRecord:
    """Replay ranks on one clock: a call begins when all have asked for it and the link is free;
    calls keep their order."""
    calls = dict[int, StepCall]()
    free = 0.0
    now = [0.0] * len(traces)
    place = [0] * len(traces)
    record = StepRecord([], [], [[] for _ in traces], [[] for _ in traces])
    while any(at < len(trace) for at, trace in zip(place, traces, strict=True)):
        for rank, trace in enumerate(traces):
            while place[rank] < len(trace):
                event = trace[place[rank]]
                if isinstance(event, Busy):
                    record.work[rank].append(
                        (event.name, now[rank], now[rank] + float(str(event.work)))
                    )
                    now[rank] = record.work[rank][-1][2]
                elif isinstance(event, Start):
                    call = calls.setdefault(event.id, new_call(event))
                    call.ranks[rank] = Asked(now[rank], now[rank], now[rank], False)
                    if len(call.ranks) == len(traces):
                        call.begin = max(free, call.came)
                        free = call.end = (
                            call.begin + transfer(job, call) + job.late.get(event.id, 0.0)
                        )
                elif isinstance(event, Await):
                    call = calls[event.id]
                    if len(call.ranks) < len(traces):
                        break  # until the others have asked for it
                    record.waits[rank].append(
                        StepWait(call.name, now[rank], max(now[rank], call.end), call)
                    )
                    now[rank] = record.waits[rank][-1].stop
                place[rank] += 1
    record.windows = [(0.0, end) for end in now]
    record.calls = list(calls.values())
    return record


def new_call(event: Start) -> StepCall:
    """Return a call of two ranks: an all-reduce has two messages and sends as many bytes as the
    array has, other verbs half."""
    both = event.call.verb == "all_reduce"
    return StepCall(
        "dp",
        event.id,
        event.call.name,
        "dp",
        event.call.verb,
        "ring",
        f"{event.call.verb}.py:1",
        event.call.nbytes if both else event.call.nbytes // 2,
        2 if both else 1,
    )


def transfer(job: Job, call: StepCall) -> float:
    """Return the seconds of a call on an idle link."""
    return call.messages * job.alpha + call.nbytes / job.bandwidth


# --------------------------------------------------------------------------------------- priorities


def soonest_needed_first(
    came: Sequence[float], seconds: Sequence[float], urgency: Sequence[float]
) -> list[float]:
    """Return when each call has ended on a link that takes the most urgent of the waiting calls,
    and interrupts none."""
    ends = [0.0] * len(came)
    left = set(range(len(came)))
    now = 0.0
    while left:
        now = max(now, min(came[call] for call in left))
        chosen = min((call for call in left if came[call] <= now), key=lambda call: urgency[call])
        ends[chosen] = now = now + seconds[chosen]
        left.remove(chosen)
    return ends


Serve = Callable[[Sequence[float], Sequence[float], Sequence[float]], Sequence[float]]


def scheduled(
    job: Job, slices: int, *, priority: bool, serve: Serve = soonest_needed_first
) -> float:
    """Return the seconds of a backward and the next forward, whose layers each wait only for their
    own gradients.

    Args:    serve: the link.
    """
    layers = [layer for layer in reversed(range(job.layers)) for _ in range(slices)]
    came = [(job.layers - layer) * job.backward for layer in layers]
    alone = 2 * job.alpha + job.layer_bytes / slices / job.bandwidth
    ends = serve(came, [alone] * len(layers), list(map(float, layers)) if priority else came)
    now = job.layers * job.backward
    for layer in range(job.layers):
        now = (
            max([now, *(end for end, one in zip(ends, layers, strict=True) if one == layer)])
            + job.forward
        )
    return now


def first_come(job: Job, slices: int) -> StepRecord:
    """Return the same without priorities, as a record."""
    program = Program(job, 1.0)
    for layer in reversed(range(job.layers)):
        program.busy(job.backward, "backward")
        for part in range(slices):
            program.start("all_reduce", f"layer {layer} slice {part}", TENSORS)
    for layer in range(job.layers):
        for part in range(slices):
            program.wait("all_reduce", f"layer {layer} slice {part}")
        program.busy(job.forward, "forward")
    events = [
        event._replace(call=event.call._replace(nbytes=job.layer_bytes // slices))
        if isinstance(event, Start)
        else event
        for event in program.events
    ]
    return play([events, events], job)


# ---------------------------------------------------------------------------- steps that really run

CONFIG = GPTConfig(vocabulary=11, context=6, layers=5, width=16, heads=2, dtype="float64")
BLOCK = 8 * (12 * 16 * 16 + 13 * 16)  # bytes of a block's gradients: a bucket each
# Seconds that a block sleeps, and seconds of its all-reduce on two ranks.
FORWARD = 0.010
BACKWARD = 0.020
REDUCE = 0.012
HELD = 2  # the bucket that is held back


class BackToFront(GPT):
    """A GPT that declares its parameters in reverse order: buckets fill from the first layer on."""

    def parameters(self) -> Any:
        return reversed(list(super().parameters()))


def recorded(
    group: Group, broken: Mapping[str, Any] | None = None, *, steps: int = 4
) -> list[Timeline]:
    """Return on rank 0 every rank's steps of DDP; else an empty list. Each block sleeps, so that
    ranks need no cores.

    Args:    broken: "model": its class. "hold": seconds for which rank 0 keeps the first message of
             bucket HELD back, in every step.
    """
    options: dict[str, Any] = {"model": GPT, "hold": 0.0, **(broken or {})}
    network = options["model"](CONFIG)
    timeline = Timeline(group.rank)
    network.initialize(seed=0)
    ids = np.arange(group.size * (CONFIG.context + 1)).reshape(group.size, -1) % CONFIG.vocabulary
    with delayed(group, alpha=50e-6, beta=REDUCE / BLOCK) as slow:
        timeline.follow(slow.ledger, waits=True)
        strategy = DDP(network, slow, recorder=timeline, bucket_bytes=BLOCK)
        for block in network.blocks:
            block.register_forward_hook(lambda module, args, result: time.sleep(FORWARD))
            block.register_backward_pre_hook(lambda module: time.sleep(BACKWARD))
        optimizer = SGD(strategy.parameters, 0.1)
        sent = itertools.count()
        send = slow.transport.start_send

        def held(*args: Any, **named: Any) -> Any:
            """Send; before the first message of bucket HELD, wait.

            An all-reduce has 2(P-1) messages, and one bucket follows another.
            """
            if next(sent) == 2 * (group.size - 1) * HELD and group.rank == 0:
                time.sleep(options["hold"])
            return send(*args, **named)

        slow.transport.start_send = held  # type: ignore[method-assign]
        for step in range(steps):
            sent = itertools.count()
            with timeline.span("step", step=step):
                strategy.step((ids[:, :-1], ids[:, 1:]), optimizer)
    return timeline.collect(group) or []


# Seconds of a block's all-reduce in section 6: so long that all-reduces queue.
SUM = 0.025
SLICES = 4


WAYS = ("DDP", "in turn, 4 slices", "by urgency, 1 slice", "by urgency, 4 slices")
"""Ways to send the sums of a training step."""


def training_seconds(group: Group, way: str, seconds: float, *, steps: int = 8) -> float:
    """Return the median seconds of training steps, from the batch to the loss, without the first
    two.

    Args:    way: one of WAYS; seconds: of a block's all-reduce.
    """
    network = GPT(CONFIG)
    network.initialize(seed=0)
    ids = np.arange(group.size * (CONFIG.context + 1)).reshape(group.size, -1) % CONFIG.vocabulary
    taken = []
    with delayed(group, alpha=50e-6, beta=seconds / BLOCK) as slow:
        if way == "DDP":
            strategy = DDP(network, slow, bucket_bytes=BLOCK)
        else:
            strategy = SlicedDDP(
                network,
                slow,
                bucket_bytes=BLOCK,
                slice_bytes=BLOCK // (1 if "1 slice" in way else SLICES),
                priority="urgency" in way,
            )
        for block in network.blocks:
            block.register_forward_hook(lambda module, args, result: time.sleep(FORWARD))
            block.register_backward_pre_hook(lambda module: time.sleep(BACKWARD))
        optimizer = SGD(strategy.parameters, 0.1)
        for _ in range(steps):
            start = time.perf_counter()
            strategy.step((ids[:, :-1], ids[:, 1:]), optimizer)
            taken.append(time.perf_counter() - start)
        if isinstance(strategy, SlicedDDP):
            strategy.settle()
    return statistics.median(taken[2:])


def sliced(group: Group, priority: bool, *, times: int = 5) -> list[Timeline]:
    """Return on rank 0 every rank's timeline of `times` backwards, each with the next forward, of
    SlicedDDP; else an empty list."""
    network = GPT(CONFIG)
    timeline = Timeline(group.rank)
    network.initialize(seed=0)
    ids = np.arange(group.size * (CONFIG.context + 1)).reshape(group.size, -1) % CONFIG.vocabulary
    inputs = ids[:, :-1]
    targets = ids[:, 1:]
    with delayed(group, alpha=50e-6, beta=SUM / BLOCK) as slow:
        timeline.follow(slow.ledger, waits=True)
        strategy = SlicedDDP(
            network,
            slow,
            recorder=timeline,
            bucket_bytes=BLOCK,
            slice_bytes=BLOCK // SLICES,
            priority=priority,
        )
        for block in network.blocks:
            block.register_forward_hook(lambda module, args, result: time.sleep(FORWARD))
            block.register_backward_pre_hook(lambda module: time.sleep(BACKWARD))
        optimizer = SGD(strategy.parameters, 0.1)
        part = strategy.part_of((inputs, targets))
        strategy.begin_step()
        share = strategy.forward(part, divisor=targets.size)
        for step in range(times):
            with timeline.span("step", step=step):
                strategy.backward(share)
                strategy.update(optimizer, lr=None, clip=None)
                strategy.begin_step()
                share = strategy.forward(part, divisor=targets.size)
        strategy.settle()
    return timeline.collect(group) or []
