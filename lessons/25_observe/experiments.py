"""Run the sick jobs of lesson 25: on a simulated clock, and one in real time."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.comm.health.wait_state import spent_in_calls
from minidist.launch.flight import ring_file
from minidist.nn import GPTConfig
from minidist.observe.diagnose.flights import read_flights
from minidist.observe.diagnose.rules import Diagnosis, diagnose
from minidist.observe.rank_records import RankRecords
from minidist.observe.rank_steps import RankSteps, read_rank_steps
from minidist.observe.timeline import Timeline

MIB = 1 << 20
# Seconds of a rank's computation in a step, and of a message.
WORK = 0.1
LINK = 0.004
KINDS = (
    "hang",
    "slow rank",
    "slow link",
    "leak",
    "not finite",
    "healthy",
    "two slow ranks",
    "busy receiver",
)
CONFIG = GPTConfig(vocabulary=32, context=32, layers=2, width=48, heads=2, dtype="float32")
ROWS = 8  # sequences of a rank, in the job that really runs


@dataclass
class SickJob:
    """Records of the ranks of a job.

    Attributes: calls     {rank: the number of its last call}
                arrivals  (steps, ranks): when each rank arrived at the call of the step, in seconds
                waits     (steps, ranks): seconds that each rank then waited in it
                links     {(src, dst): seconds of its messages}
                memory    (steps, ranks): bytes after each step
                bad       (step, moment, rank, layer) of numbers that are not finite
    """

    kind: str
    culprit: Any
    calls: dict[int, int]
    arrivals: np.ndarray
    waits: np.ndarray
    links: dict[tuple[int, int], list[float]]
    memory: np.ndarray
    bad: list[tuple[int, float, int, str]] = field(default_factory=list)


def sick_job(kind: str, *, size: int = 4, steps: int = 30, seed: int = 0) -> SickJob:
    """Return a job of `size` ranks with one fault, on a simulated clock; other programs use cores
    at random, on every rank.

    The last three kinds have no culprit. Two slow ranks: neither of them is the only one that
    delays the others. A busy receiver: most messages of a link are late, and the link is as quick
    as any.
    """
    chance = np.random.default_rng([seed, KINDS.index(kind)])
    victim = int(chance.integers(size))
    work = WORK * (1 + 0.02 * chance.random((steps, size)))
    work[chance.random((steps, size)) < 0.05] += 0.08  # another program had the core
    links = {
        (rank, (rank + 1) % size): (LINK * (1 + 0.1 * chance.random(steps))) for rank in range(size)
    }
    memory = 300 * MIB + np.cumsum(chance.integers(-MIB // 4, MIB // 4, (steps, size)), axis=0)
    memory[steps // 3 :, (victim + 1) % size] += 64 * MIB  # a large array, once: no leak
    calls = {rank: steps for rank in range(size)}
    bad = list[tuple[int, float, int, str]]()
    culprit: Any = None
    if kind == "hang":
        stuck = {
            victim,
            *(
                rank
                for rank in range(size)
                if rank != (victim + 1) % size and chance.random() < 0.7
            ),
        }
        calls = {rank: steps - (rank in stuck) for rank in range(size)}
        culprit = sorted(stuck)
    if kind == "slow rank":
        work[:, victim] *= 1.5
        culprit = victim
    if kind == "two slow ranks":
        work[:, victim] *= 1.5
        work[:, (victim + 1) % size] *= 1.55
    if kind == "slow link":
        culprit = victim, (victim + 1) % size
        links[culprit] = links[culprit] * 3
    if kind == "leak":
        memory[:, victim] += 2 * MIB * np.arange(steps)
        culprit = victim
    if kind == "not finite":
        step = int(chance.integers(5, steps - 2))
        layer = f"blocks.{chance.integers(4)}"
        bad = [(step, 0.5, victim, layer)] + [
            (step + 1, 0.6 + 0.01 * rank, rank, "blocks.0")
            for rank in range(size)
            if rank != victim
        ]
        chance.shuffle(bad)
        culprit = victim, layer
    for link, some in links.items():
        late = chance.random(steps) < 0.2  # the receiver had no core
        if kind == "busy receiver" and link == (victim, (victim + 1) % size):
            late = np.arange(steps) % 5 > 1  # in three steps of five
        some[late] += 0.02
    arrivals, waits = _clock(work, max(float(np.median(some)) for some in links.values()))
    return SickJob(
        kind,
        culprit,
        calls,
        arrivals,
        waits,
        {link: some.tolist() for link, some in links.items()},
        memory,
        bad,
    )


def _clock(work: np.ndarray, link: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (when each rank arrives at its call, how long it waits there): the call ends for all
    when the last has arrived."""
    arrivals = np.empty_like(work)
    now = 0.0
    ends = []
    for step, seconds in enumerate(work):
        arrivals[step] = now + seconds
        now = arrivals[step].max() + link
        ends.append(now)
    return arrivals, np.array(ends)[:, None] - arrivals


# --------------------------------------------------------------------------- a job that really runs


def real_job(
    folder: Path, *, size: int = 3, steps: int = 14, victim: int | None = None, times: float = 1.5
) -> None:
    """Run DDP on processes; from step 4 on the victim computes `times` as long. The records are
    written to `folder`."""
    md.run(
        _rank,
        str(folder),
        steps,
        -1 if victim is None else victim,
        times,
        size=size,
        transport="tcp",
        limit=120.0,
    )


def _rank(world: Group, folder: str, steps: int, victim: int, times: float) -> None:
    world.ledger.flight.keep_in(ring_file(Path(folder) / "flight", world.rank), size=world.size)
    timeline = Timeline(world.world_rank, limit=10)
    trainer = md.Trainer(md.Plan(dp=world.size), CONFIG, world, lr=0.01, recorder=timeline)
    records = RankRecords(trainer, folder, batch=ROWS * world.size, context=CONFIG.context)
    for step in range(steps):
        with records.input():
            batch = batch_of(step, ROWS * world.size)
        begun = own_seconds()
        trainer.step(batch)
        end = begun + times * (own_seconds() - begun)
        while step >= 4 and world.rank == victim and own_seconds() < end:
            sum(range(100))
        records.step_done(step + 1)
    records.close()
    trainer.close()


def own_seconds() -> float:
    """Return the processor seconds of this thread outside of calls."""
    return time.thread_time() - spent_in_calls()[1]


def batch_of(step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences that count upwards."""
    start = np.random.default_rng(step).integers(0, CONFIG.vocabulary, (rows, 1))
    ids = (start + np.arange(CONFIG.context + 1)) % CONFIG.vocabulary
    return ids[:, :-1], ids[:, 1:]


def told(folder: Path) -> tuple[Diagnosis, dict[int, RankSteps]]:
    """Return what minidist diagnose says of a folder, and the records that it read."""
    steps = read_rank_steps(folder)
    return diagnose(read_flights(folder), steps), steps
