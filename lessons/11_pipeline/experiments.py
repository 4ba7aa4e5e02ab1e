"""Run what lesson 11 and its figure share: small GPTs in stages, stages that sleep, the chart of
N2:201."""

import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.device import account
from minidist.lessons.lab import hashed_batch
from minidist.nn import GPT, GPTConfig
from minidist.observe.timeline import Timeline
from minidist.optim import SGD
from minidist.parallel.pipeline.executor import Executor
from minidist.parallel.pipeline.instructions import (
    SENDS,
    Backward,
    Forward,
    Schedule,
    received_as,
    sent_as,
)
from minidist.parallel.pipeline.pipeline import Pipeline
from minidist.parallel.pipeline.schedule_checker import Clock, ComputeSpan, Times, computes_of
from minidist.parallel.pipeline.schedules import make_schedule, stages_a_rank

CHUNKS = 2  # stages a rank of the interleaved schedule
NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
TITLES = {
    "naive": "naive",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-v": "ZB-V",
    "dualpipe-v": "DualPipe-V",
}


def config_for(ranks: int) -> GPTConfig:
    """Return a small GPT with enough layers for two stages per rank, and one table for both
    ends."""
    return GPTConfig(
        vocabulary=32,
        context=8,
        layers=max(8, 2 * ranks),
        width=16,
        heads=2,
        tied=True,
        dtype="float64",
    )


def global_batch(config: GPTConfig, step: int, sequences: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a step, the same on every rank."""
    inputs, targets = hashed_batch(f"lesson 11, step {step}", config, sequences)
    return inputs.copy(), targets.copy()


def schedule_of(name: str, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule of one of NAMES."""
    return make_schedule(
        name, ranks, microbatches, chunks=CHUNKS if name == "interleaved" else None
    )


def times_of(name: str, unit: float = 1.0) -> Times:
    """Return the times of one stage such that a microbatch takes a rank `unit` forward and 2 `unit`
    backward in every schedule."""
    share = unit / stages_a_rank(name)
    return Times(share, 2 * share, share, share)


def ideal_bubble(name: str, p: int, m: int) -> tuple[str, float]:
    """Return the formula of the bubble and its value, if p divides m and m is at least 2p."""
    return {
        "naive": ("(p-1)/p", (p - 1) / p),
        "gpipe": ("(p-1)/(m+p-1)", (p - 1) / (m + p - 1)),
        "1f1b": ("(p-1)/(m+p-1)", (p - 1) / (m + p - 1)),
        "interleaved": ("(p-1)/(v m+p-1)", (p - 1) / (CHUNKS * m + p - 1)),
        "zb-h1": ("(p-1)/(3m+p-1)", (p - 1) / (3 * m + p - 1)),
        "zb-v": ("(p-1)/(6m+p-1)", (p - 1) / (6 * m + p - 1)),
        "dualpipe-v": ("(p-1)/(6m+p-1)", (p - 1) / (6 * m + p - 1)),
    }[name]


# -------------------------------------------------------------------------------- stages that sleep


class Sleeper:
    """Stages that sleep instead of computing, and send an array of one number: a rank needs no core."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.last = schedule.stages - 1
        self.times = times

    def skips(self, microbatch: int) -> bool:
        """Return False: no microbatch is empty."""
        return False

    def room(self, receive: Any) -> None:
        """Return None: let the executor make a new array."""
        return

    def forward(self, stage: int, microbatch: int, x: Any) -> Any:
        """Sleep as long as a forward takes."""
        time.sleep(self.times.forward)
        return None if stage == self.last else np.zeros(1)

    def backward(self, stage: int, microbatch: int, dy: Any, *, whole: bool) -> Any:
        """Sleep as long as a backward takes; half as long if the weights' part runs later."""
        time.sleep(self.times.backward if whole else self.times.backward_input)
        return None if stage == 0 else np.zeros(1)

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """Sleep as long as the weights' part of a backward takes."""
        time.sleep(self.times.backward_weights)


def slept(
    group: Group, name: str, microbatches: int, unit: float, *, rounds: int = 1
) -> list[ComputeSpan]:
    """Return on rank 0 the ranks' recorded spans in the quickest of some runs; else an empty
    list."""
    schedule = schedule_of(name, group.size, microbatches)
    runs = []
    for _ in range(rounds):
        timeline = Timeline(group.rank)
        executor = Executor(schedule, group, recorder=timeline)
        group.barrier()
        executor.run(Sleeper(schedule, times_of(name, unit)))
        timelines = timeline.collect(group)
        runs.append([] if timelines is None else computes_of(timelines))
    return min(runs, key=lambda spans: Clock(group.size, tuple(spans)).length if spans else 0.0)


# ---------------------------------------------------------------------------------- a GPT in stages


def pipeline_for(group: Group, name: str, microbatches: int) -> Pipeline:
    """Return the lesson's GPT under a schedule."""
    return Pipeline(
        GPT(config_for(group.size)), group, schedule_of(name, group.size, microbatches), seed=0
    )


def peak_activations(group: Group, name: str, microbatches: int) -> int:
    """Return this rank's peak bytes of activations in a step of one sequence per microbatch."""
    pipeline = pipeline_for(group, name, microbatches)
    optimizer = SGD(pipeline.parameters, 1e-2)
    batch = global_batch(config_for(group.size), 0, microbatches)
    # This account is for this step only. Arrays of earlier steps do not count.
    with account.use(account.MemoryAccount()) as memory:
        pipeline.step(batch, optimizer)
        return memory.peak["activations"]


def run_unchecked(group: Group, lists: Sequence[Sequence[Any]]) -> None:
    """Send and receive the messages of a schedule that was not checked, one by one."""
    for instruction in lists[group.rank]:
        if isinstance(instruction, SENDS):
            group.send(np.zeros(1), dst=received_as(instruction).stage % group.size)
        elif not isinstance(instruction, (Forward, Backward)):
            group.recv(src=sent_as(instruction).stage % group.size)


# ------------------------------------------------------------------------------------------- charts

LETTERS = {
    "forward": "F",
    "backward": "B",
    "backward for the input": "I",
    "backward for the weights": "W",
}


def as_text(clock: Clock, *, cell: float = 1.0) -> list[str]:
    """Return each rank's line: F2 is a forward of microbatch 2, B2, I2, W2 are its backwards, in
    small letters on the rank's second stage; one column per `cell` of time."""
    lines = []
    for rank in range(clock.ranks):
        cells = [".."] * round(clock.length / cell)
        for span in clock.spans:
            if span.rank == rank:
                letter = LETTERS[span.instruction.word]
                if span.instruction.stage >= clock.ranks:
                    letter = letter.lower()
                name = f"{letter}{span.instruction.microbatch}"
                first = round(span.start / cell)
                last = round(span.stop / cell)
                cells[first:last] = [name] * (last - first)
        lines.append(" ".join(cells))
    return lines


NOTES_CHART = """
    section GPU 0
    F1    :0, 2
    F2    :2, 4
    F3    :4, 6
    F4    :6, 8
    B4    :8, 10
    B3    :10, 12
    B2    :12, 14
    B1    :14, 16
    section GPU 1
    idle1 :0, 2
    F1    :2, 4
    F2    :4, 6
    F3    :6, 8
    F4    :8, 10
    B4    :10, 12
    B3    :12, 14
    B2    :14, 16
    B1    :16, 18
    section GPU 2
    idle2 :0, 4
    F1    :4, 6
    F2    :6, 8
    F3    :8, 10
    F4    :10, 12
    B4    :12, 14
    B3    :14, 16
    B2    :16, 18
    B1    :18, 20
    section GPU 3
    idle3 :0, 6
    F1    :6, 8
    F2    :8, 10
    F3    :10, 12
    F4    :12, 14
    B4    :14, 16
    B3    :16, 18
    B2    :18, 20
    B1    :20, 22
"""
"""The sections of the Gantt chart of N2:201."""


def notes_spans() -> list[ComputeSpan]:
    """Return the notes' chart as spans; its microbatches 1 to 4 are 0 to 3 here."""
    spans = []
    rank = -1
    for line in NOTES_CHART.strip().splitlines():
        if section := re.search(r"section GPU (\d)", line):
            rank = int(section[1])
        elif drawn := re.search(r"([FB])(\d) +:(\d+), (\d+)", line):
            kind = Forward if drawn[1] == "F" else Backward
            spans.append(
                ComputeSpan(rank, kind(rank, int(drawn[2]) - 1), float(drawn[3]), float(drawn[4]))
            )
    return spans


def orders_of(spans: Sequence[ComputeSpan]) -> list[list[Any]]:
    """Return what each rank computes, in the order of a chart."""
    ranks = range(max(span.rank for span in spans) + 1)
    ordered = sorted(spans, key=lambda span: span.start)
    return [[span.instruction for span in ordered if span.rank == rank] for rank in ranks]
