"""Run what lesson 26's tables, figure and break-its share: killed runs, damaged files, a simulated
clock."""

import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.lessons.lab import hashed_batch
from minidist.nn import GPTConfig
from minidist.parallel.state.manifest import checkpoints, step_folder

CONFIG = GPTConfig(
    vocabulary=11, context=8, layers=2, width=16, heads=2, dtype="float64", dropout=0.1
)
STEPS = 12
EVERY = 4


def global_batch(step: int, sequences: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a step: a run that continues sees what the first would see."""
    return hashed_batch(f"batch {step}", CONFIG, sequences)


def train(
    group: Group, run: str, plan: dict[str, Any], killed: int | None, resume: bool
) -> dict[str, Any]:
    """Train STEPS steps with a checkpoint every EVERY; the last rank kills itself after step
    `killed`."""
    trainer = md.Trainer(md.Plan(**plan), CONFIG, group, seed=1, lr=0.01)
    if resume:
        trainer.load(checkpoints(Path(run))[-1])
    first = trainer.steps_done
    losses = {}
    while trainer.steps_done < STEPS:
        step = trainer.steps_done
        losses[step] = trainer.step(global_batch(step))
        if trainer.steps_done == killed and group.rank == group.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.steps_done % EVERY == 0:
            trainer.save(step_folder(Path(run), trainer.steps_done))
    result = {"first": first, "losses": losses, "sha256": trainer.weights_sha256()}
    trainer.close()
    return result


def on_ranks(
    run: Path,
    plan: dict[str, Any],
    size: int,
    *,
    processes: bool = False,
    killed: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run `train` on new ranks: threads, or processes that can be killed."""
    return md.run(
        train,
        str(run),
        plan,
        killed,
        resume,
        size=size,
        transport="auto" if processes else "threads",
    )[0]


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file; `bit` counts from the file's first bit."""
    with file.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


# ------------------------------------------------------------------------------ a simulated clock


class Span(NamedTuple):
    """One interval of a run's clock, in seconds.

    kind: "work", "save", "lost" (work that was lost) or "restart".
    """

    kind: str
    start: float
    stop: float


def interruptions(between: float, seconds: float, seed: int) -> list[float]:
    """Return random moments with `between` seconds between them on average, the same for each
    interval that is tried."""
    chance = random.Random(seed)
    moments = []
    clock = 0.0
    while clock < seconds:
        clock += chance.expovariate(1 / between)
        moments.append(clock)
    return moments


def replay(
    interval: float, moments: Sequence[float], *, save: float, restart: float, seconds: float
) -> list[Span]:
    """Return the spans of a run that works `interval` seconds, saves, and so on, with the
    interruptions, for `seconds`."""
    spans = []
    clock = 0.0
    coming = iter(moments)
    next_moment = next(coming)
    while clock < seconds:
        if next_moment >= clock + interval + save:
            spans += [
                Span("work", clock, clock + interval),
                Span("save", clock + interval, clock + interval + save),
            ]
            clock += interval + save
            continue
        spans += [
            Span("lost", clock, next_moment),
            Span("restart", next_moment, next_moment + restart),
        ]
        clock = next_moment + restart
        while next_moment < clock:  # an interruption of a restart changes nothing here
            next_moment = next(coming, seconds + interval + save + restart)
    return spans


def kept(spans: Sequence[Span]) -> float:
    """Return the share of the clock that is work and is not lost."""
    return sum(span.stop - span.start for span in spans if span.kind == "work") / spans[-1].stop
