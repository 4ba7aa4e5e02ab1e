"""Jobs that really train, on processes of this machine, with one fault in each: for the tests of
diagnosis.

fault = Fault("slow compute", victim=2, size=4, at=6, seed=0)
run = sick_job(tmp_path, fault)         # run.found: what minidist diagnose finds; run.seconds:
                                        after which time
judge(fault, run.found)                 # (culprit is right, cause is right)
"""

import os
import platform
import random
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.autograd import tape
from minidist.comm.flight.slots import read_ring
from minidist.comm.transports.throttled import Delayed
from minidist.launch.flight import ring_file
from minidist.nn import GPTConfig
from minidist.observe.diagnose.flights import read_flights
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.rank_records import RankRecords
from minidist.observe.rank_steps import read_rank_steps
from minidist.observe.timeline import Timeline
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.step import Part

CONFIG = GPTConfig(vocabulary=32, context=32, layers=2, width=48, heads=2, dtype="float32")
ROWS = 8  # sequences of a rank: steps of 20 ms or so
STUCK = 2.0  # seconds: the limit from which a call is a hang
LINK = 0.004  # seconds that every message of a delayed job takes
# A rank that makes two calls in the other order fails in the first of them: as if it had left that
# call out.
CAUSES = {
    "slow compute": {"slow compute"},
    "slow link": {"slow link"},
    "late reader": {"late reader"},
    "uneven data": {"uneven data"},
    "leak": {"leak"},
    "hog": {"hogs the interpreter"},
    "wrong shape": {"wrong shape"},
    "wrong dtype": {"wrong dtype"},
    "wrong order": {"wrong order", "left out"},
    "left out": {"left out", "wrong order"},
    "behind": {"behind"},
    "stopped": {"stopped"},
    "killed": {"killed"},
    "not finite": {"not finite"},
    "bad weight": {"not finite"},
    "loss jumps": {"loss jumps"},
    "drift": {"replicas differ"},
    "skew": {"clock skew"},
    "none": set(),
}
KINDS = [kind for kind in CAUSES if kind != "none"]
LIVE = ("behind", "stopped")  # found while the job runs: it would not end


@dataclass(frozen=True)
class Fault:
    """One fault: of which kind, on which rank of how many, from which step on."""

    kind: str
    victim: int
    size: int
    at: int = 8
    seed: int = 0
    steps: int = 24
    rows: int = ROWS

    @property
    def culprits(self) -> set[int]:
        return (
            {self.victim, (self.victim + 1) % self.size}
            if self.kind == "slow link"
            else {self.victim}
        )


@dataclass(frozen=True)
class SickRun:
    """What was found, and how many seconds a live fault lasted when it was first told."""

    found: list[Any]
    seconds: float = 0.0


def judge(fault: Fault, found: list[Any]) -> tuple[bool, bool]:
    """(whether the first finding names the culprit, whether it names the cause too)."""
    if fault.kind == "none":
        return not found, not found
    if not found:
        return False, False
    culprit = set(found[0].ranks) == fault.culprits
    return culprit, culprit and found[0].cause in CAUSES[fault.kind]


def sick_job(folder: Path, fault: Fault) -> SickRun:
    """Run a job with the fault; what diagnosis finds: of a live fault once it finds something, else
    at its end."""
    child = os.fork()
    if not child:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        status = 1
        with suppress(BaseException):
            md.run(
                _rank,
                str(folder),
                fault,
                size=fault.size,
                transport="tcp",
                limit=60 + fault.steps,
                patience=30,
            )
            status = 0
        os._exit(status)
    try:
        if fault.kind in LIVE:
            return _watch(folder, fault)
        os.waitpid(child, 0)
        child = 0
        return SickRun(found(folder))
    finally:
        if child:
            _end(folder, fault, child)


def found(folder: Path, *, before: int | None = None) -> list[Any]:
    """Return what diagnosis finds; of the records of the steps `before` one alone."""
    steps = read_rank_steps(folder)
    if before is not None:
        for each in steps.values():
            each.steps[:] = [line for line in each.steps if line["step"] < before]
    return diagnose(read_flights(folder), steps, stuck=STUCK).findings


def _watch(folder: Path, fault: Fault) -> SickRun:
    """Look at a running job, as `minidist diagnose` would, until it finds something."""
    since = None
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if since is None and (folder / "fault").exists():
            since = time.monotonic()
        if since is not None and (result := found(folder)):
            return SickRun(result, time.monotonic() - since)
    return SickRun([], 40.0)


def _end(folder: Path, fault: Fault, child: int) -> None:
    """End the processes of a job that does not end."""
    for rank in range(fault.size):
        with suppress(Exception):
            os.kill(read_ring(ring_file(folder / "flight", rank))[0]["pid"], signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


# ------------------------------------------------------------------------------------ inside a rank


class OneSlowLink(Delayed):
    """Messages to one peer go over a port of their own, which is slower by a factor."""

    def __init__(self, inner: Any, *, alpha: float, slow: int | None, times: float) -> None:
        super().__init__(inner, alpha=alpha, beta=0.0)
        self.slow = slow
        self.slow_port = Delayed(inner, alpha=alpha * times, beta=0.0)

    def start_send(self, peer: int, tag: Any, view: np.ndarray, meta: bytes = b"") -> Any:
        if peer == self.slow:
            return self.slow_port.start_send(peer, tag, view, meta)
        return super().start_send(peer, tag, view, meta)


class UnevenDDP(DDP):
    """The victim takes half as many rows again as the others."""

    victim = 0

    def part_of(self, batch: Any) -> Part:
        weights = np.array([1.5 if rank == self.victim else 1.0 for rank in range(self.group.size)])
        ends = np.round(np.cumsum(weights) / weights.sum() * len(batch[0])).astype(int)
        begin = 0 if self.group.rank == 0 else int(ends[self.group.rank - 1])
        rows = slice(begin, int(ends[self.group.rank]))
        return Part(batch[0][rows], batch[1][rows], begin)


def batch_of(
    step: int, rows: int, seed: int, noisy: range = range(0)
) -> tuple[np.ndarray, np.ndarray]:
    """Counting sequences, which are learnt in a few steps; of `noisy` rows the targets are
    random."""
    random_numbers = np.random.default_rng([seed, step])
    start = random_numbers.integers(0, CONFIG.vocabulary, (rows, 1))
    ids = (start + np.arange(CONFIG.context + 1)) % CONFIG.vocabulary
    inputs = ids[:, :-1].copy()
    targets = ids[:, 1:].copy()
    for row in noisy:
        targets[row] = random_numbers.integers(0, CONFIG.vocabulary, CONFIG.context)
    return inputs, targets


def _rank(world: Any, folder: str, fault: Fault) -> None:
    """One rank: DDP on a small GPT, recorded as minidist train records it."""
    sick = fault.kind != "none" and world.rank == fault.victim
    warnings.simplefilter("ignore")  # pytest makes errors of them, and numbers are to go wrong here
    if fault.kind == "skew" and sick:
        real, time.time = time.time, lambda: real() + 5.0
        platform.node = lambda: "far"
    world.transport.limit = 60.0
    world.ledger.flight.keep_in(ring_file(Path(folder) / "flight", world.rank), size=world.size)
    if fault.kind == "slow link":
        slow = (fault.victim + 1) % fault.size if sick else None
        _delay(world, slow)
    timeline = Timeline(world.world_rank, limit=10)
    timeline.follow(world.ledger)
    trainer = md.Trainer(
        md.Plan(dp=world.size), CONFIG, world, seed=fault.seed, lr=0.01, recorder=timeline
    )
    if fault.kind == "uneven data":
        trainer.strategy.__class__ = UnevenDDP
        trainer.strategy.victim = fault.victim
    records = RankRecords(
        trainer, folder, batch=fault.rows * world.size, context=CONFIG.context, digest_every=4
    )
    injector = Injector(fault, world, trainer, Path(folder)) if sick else None
    for step in range(fault.steps):
        on = injector is not None and step >= fault.at
        with records.input():
            noisy = (
                range(fault.victim * fault.rows, (fault.victim + 1) * fault.rows)
                if fault.kind == "loss jumps" and step >= fault.at
                else range(0)
            )
            batch = batch_of(step, fault.rows * world.size, fault.seed, noisy)
            if on and fault.kind == "late reader":
                time.sleep(0.6 * injector.usual)
        begun = time.perf_counter()
        with injector.during(step) if on else nullcontext():
            trainer.step(batch)
        if injector is not None:
            injector.measure(time.perf_counter() - begun, on)
        _other_calls(world, injector if on and step == fault.at else None)
        records.step_done(step + 1)
    records.close()
    if fault.kind != "drift":
        trainer.check_replicas()
    trainer.close()


def _delay(world: Any, slow: int | None) -> None:
    """All the group's messages go over delayed links from now on."""
    world.transport = OneSlowLink(world.transport, alpha=LINK, slow=slow, times=3.0)


def _other_calls(world: Any, injector: "Injector | None") -> None:
    """Two more calls of a step, of which the victim may get one wrong."""
    kind = injector.fault.kind if injector is not None else ""
    norms = np.ones(5)
    counts = np.ones(7, np.float32)
    if kind == "wrong shape":
        norms = np.ones(6)
    if kind == "wrong dtype":
        norms = norms.astype(np.float32)
    calls = [lambda: world.all_reduce(norms), lambda: world.all_gather(counts)]
    if kind == "wrong order":
        calls.reverse()
    for call in calls[kind == "left out" :]:
        call()


class Injector:
    """What the victim does from its step on."""

    def __init__(self, fault: Fault, world: Any, trainer: Any, folder: Path) -> None:
        self.fault = fault
        self.world = world
        self.trainer = trainer
        self.folder = folder
        self.kept: list[np.ndarray] = []
        self._seconds: list[float] = []

    @property
    def usual(self) -> float:
        """Return how long a step takes without the fault: the middle one; on a busy machine one is
        five times another."""
        return statistics.median(self._seconds[2:] or [0.02])

    def measure(self, seconds: float, on: bool) -> None:
        """A step has taken so long."""
        if not on:
            self._seconds.append(seconds)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """The fault during one step of the trainer."""
        first = step == self.fault.at
        kind = self.fault.kind.replace(" ", "_")
        act: Callable[[bool], Any] = getattr(self, f"_{kind}", lambda first: None)
        undo = act(first)
        try:
            yield
        finally:
            if undo is not None:
                undo()

    def _slow_compute(self, first: bool) -> Callable[[], None]:
        begun = time.thread_time()

        def longer() -> None:
            end = begun + 1.5 * (time.thread_time() - begun)
            while time.thread_time() < end:
                sum(range(100))

        return longer

    def _leak(self, first: bool) -> None:
        self.kept.append(np.ones(int(1.25 * (1 << 20) / 8)))

    def _hog(self, first: bool) -> None:
        if first:
            threading.Thread(target=_hog_forever, daemon=True).start()

    def _behind(self, first: bool) -> None:
        (self.folder / "fault").touch()
        time.sleep(60)

    def _stopped(self, first: bool) -> None:
        (self.folder / "fault").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _killed(self, first: bool) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _not_finite(self, first: bool) -> Callable[[], None] | None:
        if not first:
            return None
        op = tape.REGISTRY[
            random.Random(self.fault.seed).choice(["gelu", "layer_norm", "causal_attention_packed"])
        ]
        usual = op.forward

        def broken(*args: Any, **options: Any) -> Any:
            result, values = usual(*args, **options)
            result.reshape(-1)[7] = np.nan
            return result, values

        op.forward = broken
        return lambda: setattr(op, "forward", usual)

    def _bad_weight(self, first: bool) -> None:
        if first:
            weights = dict(self.trainer.model.named_parameters())["blocks.1.mlp.up.weight"]
            weights.data[3, 3] = np.inf

    def _drift(self, first: bool) -> None:
        if first:
            weights = dict(self.trainer.model.named_parameters())["blocks.0.mlp.up.weight"]
            weights.data[0, 0] += 1e-3


def _hog_forever() -> None:
    number = 0
    while True:
        number = (number * 31 + 7) % 1000003


def faults(count: int, seed: int = 0) -> list[Fault]:
    """So many faults of all kinds in turn, on 4 and 8 ranks."""
    draw = random.Random(seed)
    made = []
    # of a slow link's messages half tell nothing, on a busy machine two thirds
    for number in range(count):
        size = draw.choice([4, 4, 8])
        kind = KINDS[number % len(KINDS)]
        made.append(
            Fault(
                kind,
                draw.randrange(size),
                size,
                at=draw.randrange(6, 11),
                seed=number,
                steps=100 if kind == "slow link" else 26,
            )
        )
    return made
