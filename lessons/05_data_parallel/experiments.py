"""Provide the models, batches and watched devices that lesson 05's tables, figure and break-its
share."""

import os
import threading
import time
from collections import deque
from heapq import heappop, heappush
from typing import Any, cast

import numpy as np

from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.device import account
from minidist.lessons.lab import new_model, rule_batch
from minidist.nn import GPT, GPTConfig
from minidist.observe.events import Busy
from minidist.optim import Adam
from minidist.parallel.data.data_parallel import DataParallel, ReplicaDevice
from minidist.parallel.data.ddp import DDP
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.step.single import Single
from minidist.simulate.one_rank import run_rank

# to compare weights
SMALL = GPTConfig(vocabulary=31, context=8, layers=2, width=16, heads=2, dtype="float64")
TALL = GPTConfig(vocabulary=256, context=64, layers=2, width=64, heads=4)  # to see its memory
# Small products: most of the time goes to Python.
PYTHON = GPTConfig(vocabulary=16, context=4, layers=12, width=8, heads=2)
BLAS = GPTConfig(vocabulary=128, context=128, layers=1, width=256, heads=4)  # large ones: BLAS does

PRODUCT = 4  # ticks of one product on one thread, on the clock of products_on_a_clock
# Of the clock. HOLD: seconds of Python per call. FLOPS, BYTES: a processor's speed without the
# lock, per second.
HOLD = 10e-6
FLOPS = 40e9
BYTES = 4e9
LINK = 1e9  # of the clock: bytes per second of a device's link, in each direction
PARTS = ("dp passes", "dp link", "ddp passes", "ddp link")  # of a step on the clock


def train(
    replicas: int,
    *,
    steps: int = 5,
    sequences: int = 6,
    optimizer: Any = Adam,
    lr: float = 1e-2,
    strategy: Any = None,
    config: GPTConfig = SMALL,
) -> tuple[GPT, list[float]]:
    """Return the model and the losses after some steps on `replicas` replicas; 0: one process
    without replicas. `strategy`: used instead of DP."""
    model = new_model(config)
    trainer = (strategy or DataParallel)(model, replicas) if replicas else Single(model)
    rule = optimizer(list(model.parameters()), lr)
    return model, [trainer.step(rule_batch(config, step, sequences), rule) for step in range(steps)]


# --------------------------------------------------------------------------------- watching devices


class Watched(DataParallel):
    """DataParallel that notes each device's processor seconds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.busy = [0.0] * len(self.devices)

    def _passes(self, device: ReplicaDevice, *args: Any) -> float:
        before = time.thread_time()
        try:
            return super()._passes(device, *args)
        finally:
            self.busy[device.rank] += time.thread_time() - before

    def step(self, *args: Any, **options: Any) -> float:
        before = time.thread_time()
        passes = self.busy[0]
        loss = super().step(*args, **options)
        self.busy[0] = passes + time.thread_time() - before  # the optimizer, too
        return loss


def traffic(replicas: int, sequences: int, config: GPTConfig = SMALL) -> dict[str, Any]:
    """Return what device 0 sends and receives in one step, by verb, and the parts of it by
    formula."""
    model = new_model(config)
    strategy = DataParallel(model, replicas)
    data = rule_batch(config, 0, sequences)
    strategy.step(data, Adam(strategy.parameters, 1e-3))
    sent = [device.group.ledger.sent_bytes().get("dp", {}) for device in strategy.devices]
    nbytes = sum(p.data.nbytes for p in model.parameters())
    others = sequences - len(np.array_split(data[0], replicas)[0])
    outputs = others * config.context * config.vocabulary * next(model.parameters()).data.itemsize
    received: dict[str, int] = {}
    for table in sent[1:]:
        for verb, count in table.items():
            received[verb] = received.get(verb, 0) + count
    return {
        "sent": sent[0],
        "received": received,
        "model": nbytes,
        "formula_sent": (replicas - 1) * nbytes + outputs + others * data[0][0].nbytes,
        "formula_received": (replicas - 1) * nbytes + outputs,
    }


def smi_of_dp(replicas: int, *, steps: int = 2, sequences: int = 16) -> list[dict[str, Any]]:
    """Return the process, the peak memory and the busy seconds per step of each device of one
    process."""
    with account.use(account.MemoryAccount()):
        model = new_model(TALL)
        strategy = Watched(model, replicas)
        optimizer = Adam(strategy.parameters, 1e-3)
        for step in range(steps):
            strategy.step(rule_batch(TALL, step, sequences), optimizer)
        return [
            {"pid": os.getpid(), "peak": device.account.peak["total"], "busy": busy / steps}
            for device, busy in zip(strategy.devices, strategy.busy, strict=True)
        ]


def smi_of_ddp(group: Group, *, steps: int = 2, sequences: int = 16) -> list[dict[str, Any]] | None:
    """Return the same figures of the ranks of a group that train by DDP, on rank 0."""
    clock = time.thread_time if group.transport.name.startswith("threads") else time.process_time
    with account.use(account.MemoryAccount()) as memory:
        model = new_model(TALL)
        strategy = DDP(model, group)
        optimizer = Adam(strategy.parameters, 1e-3)
        before = clock()
        for step in range(steps):
            strategy.step(rule_batch(TALL, step, sequences), optimizer)
        busy = (clock() - before) / steps
        return gather_records(
            group, {"pid": os.getpid(), "peak": memory.peak["total"], "busy": busy}
        )


# ------------------------------------------------------------------------------------- taking turns


def turns(config: GPTConfig, replicas: int, *, sequences: int, steps: int) -> dict[str, float]:
    """Return the wall seconds of a step, and the number of processors that the replicas keep
    busy."""
    model = new_model(config)
    strategy = Watched(model, replicas)
    optimizer = Adam(strategy.parameters, 1e-3)
    strategy.step(rule_batch(config, 0, sequences), optimizer)  # the first step warms up
    strategy.busy = [0.0] * replicas
    begin = time.perf_counter()
    for step in range(steps):
        strategy.step(rule_batch(config, step, sequences), optimizer)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds / steps, "cores": sum(strategy.busy) / seconds}


def calls_of(config: GPTConfig, sequences: int) -> list[tuple[float, float]]:
    """Return (floating-point operations of products, bytes of all other calls) of each NumPy call
    of one replica's passes.

    They are counted by running the model on arrays without numbers (chapter 24), without the
    optimizer.
    """
    trace = run_rank(Plan(), config, rows=sequences, steps=1, device_kind="cpu")
    passes = [
        event.work
        for event in trace.events
        if isinstance(event, Busy) and event.name in ("forward", "backward")
    ]
    return [
        (kernel.flops if kernel.kind == "matmul" else 0.0, kernel.nbytes)
        for number in passes
        for kernel, times in trace.segments[cast(int, number)]
        if kernel.kind != "python"
        for _ in range(times)
    ]


def calls_on_a_clock(
    config: GPTConfig, replicas: int, *, sequences: int
) -> list[tuple[int, float, float]]:
    """Return (replica, begin, end) of each NumPy call of a step's passes, if each replica's thread
    has its own processor.

    For each call a thread holds the interpreter's lock for HOLD seconds; then it computes without
    the lock, at FLOPS operations and BYTES bytes per second. The lock goes to the thread that asked
    first.
    """
    work = [
        HOLD + max(flops / FLOPS, nbytes / BYTES)
        for flops, nbytes in calls_of(config, sequences // replicas)
    ]
    ready = [(0.0, replica) for replica in range(replicas)]
    made = [0] * replicas
    free = 0.0
    calls = []
    while ready:
        asked, replica = heappop(ready)
        begun = max(asked, free)  # another may hold the lock
        free = begun + HOLD
        done = begun + work[made[replica]]
        calls.append((replica, begun, done))
        made[replica] += 1
        if made[replica] < len(work):
            heappush(ready, (done, replica))
    return calls


def turns_on_a_clock(config: GPTConfig, replicas: int, *, sequences: int) -> tuple[float, float]:
    """Return the seconds of a step's passes, and the number of busy processors, on the clock of
    calls_on_a_clock."""
    calls = calls_on_a_clock(config, replicas, sequences=sequences)
    end = max(done for _, _, done in calls)
    return end, sum(done - begun for _, begun, done in calls) / end


def step_on_a_clock(config: GPTConfig, ranks: int, *, sequences: int) -> dict[str, float]:
    """Return the seconds of a step without its update, DP's and DDP's, on the clock of
    calls_on_a_clock.

    DP: the replicas share an interpreter; what device 0 sends and receives (by its ledger) goes
    over its link, one after the other: the model before forward, the gradients after backward.
    DDP: each rank has an interpreter and a link; what its ring sends (by the formula) travels after
    backward, without overlap, while as much arrives.
    """
    found = traffic(ranks, sequences, config)
    through = sum(found["sent"].values()) + sum(found["received"].values())
    ring = FORMULAS["all_reduce", "ring"].bytes_of(Case(size=ranks, nbytes=found["model"])) / ranks
    return {
        "dp passes": turns_on_a_clock(config, ranks, sequences=sequences)[0],
        "dp link": through / LINK,
        "ddp passes": turns_on_a_clock(config, 1, sequences=sequences // ranks)[0],
        "ddp link": ring / LINK,
    }


def wall_of(strategy: Any, config: GPTConfig, *, sequences: int, steps: int = 3) -> float:
    """Return the seconds of a step on this machine: the median after a first step."""
    optimizer = Adam(strategy.parameters, 1e-3)
    taken = []
    for step in range(steps + 1):
        begin = time.perf_counter()
        strategy.step(rule_batch(config, step, sequences), optimizer)
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[1:]))


def products_on_a_clock(
    replicas: int, threads: int, *, processors: int = 2, count: int = 3, time_slice: int = 8
) -> tuple[int, int]:
    """Return the ticks until each replica has made `count` products, and the processors' ticks
    spent in waiting.

    A product takes four ticks of one BLAS thread; its parts are divided among the replica's
    threads. The system gives the processors to all threads in turn, for a time slice. A thread that
    has made its part waits for the others of its product, and keeps its processor until the slice
    ends: BLAS's threads spin.
    """
    part = PRODUCT // threads
    now = 0
    waited = 0
    left = [[part] * threads for _ in range(replicas)]
    products = [count] * replicas
    queue = deque((replica, thread) for replica in range(replicas) for thread in range(threads))
    running: list[tuple[int, int, int]] = []  # replica, thread, end of its slice
    while any(products):
        queue.extend((replica, thread) for replica, thread, end in running if end == now)
        running = [each for each in running if each[2] > now and products[each[0]]]
        queue = deque(each for each in queue if products[each[0]])
        while queue and len(running) < processors:
            running.append((*queue.popleft(), now + time_slice))
        chosen = {(replica, thread) for replica, thread, _ in running}
        for replica, thread in chosen:
            waited += not left[replica][thread]
            left[replica][thread] = max(0, left[replica][thread] - 1)
        for replica in {replica for replica, _ in chosen if not any(left[replica])}:
            products[replica] -= 1
            left[replica] = [part] * threads
        now += 1
    return now, waited


def products(threads: int, *, size: int = 192, count: int = 3) -> float:
    """Return the seconds until each of `threads` threads has multiplied `count` pairs of
    matrices."""
    pairs = [
        np.random.default_rng(number).normal(size=(2, size, size)) for number in range(threads)
    ]

    def multiply(a: np.ndarray, b: np.ndarray) -> None:
        for _ in range(count):
            a @ b

    workers = [threading.Thread(target=multiply, args=tuple(pair)) for pair in pairs]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin
