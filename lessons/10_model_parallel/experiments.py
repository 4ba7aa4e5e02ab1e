"""Run and record what lesson 10 and its figure share: a small GPT, its layers divided over
ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.lessons.lab import hashed_batch
from minidist.nn import GPT, GPTConfig
from minidist.observe.timeline import Timeline
from minidist.optim import AdamW
from minidist.parallel.pipeline.model_parallel import ModelParallel

WORK = ("forward", "backward")


def config_for(ranks: int, **changes: Any) -> GPTConfig:
    """Return a small GPT with at least one layer per rank, and one table for both ends."""
    sizes = {
        "vocabulary": 64,
        "context": 16,
        "layers": max(4, ranks),
        "width": 32,
        "heads": 2,
        "tied": True,
        "dtype": "float64",
    }
    return GPTConfig(**{**sizes, **changes})


def global_batch(config: GPTConfig, step: int, sequences: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a step, the same on every rank."""
    return hashed_batch(f"lesson 10, step {step}", config, sequences)


def recorded_step(
    group: Group,
    config: GPTConfig,
    *,
    steps: int = 3,
    sequences: int = 4,
    layers: Sequence[int] | None = None,
) -> list[list[tuple[str, float, float]]]:
    """Return on rank 0 each rank's spans (name, start, stop) of the quickest step, in seconds from
    its begin."""
    timeline = Timeline(group.rank)
    strategy = ModelParallel(GPT(config), group, seed=0, layers=layers, recorder=timeline)
    optimizer = AdamW(strategy.parameters, 1e-2)
    for step in range(steps):
        group.barrier()
        with timeline.span("step", step=step):
            strategy.step(global_batch(config, step, sequences), optimizer)
    timelines = timeline.collect(group)
    if timelines is None:
        return []
    return quickest(
        [
            [
                (span.name, span.start, span.stop, span.details["step"])
                for span in one.spans
                if span.row == "compute"
            ]
            for one in timelines
        ],
        steps,
    )


def quickest(
    ranks: list[list[tuple[str, float, float, int]]], steps: int
) -> list[list[tuple[str, float, float]]]:
    """Return the spans of the step that took least time from the first begin to the last end."""

    def edges(step: int) -> tuple[float, float]:
        spans = [span for spans in ranks for span in spans if span[3] == step and span[0] in WORK]
        return min(span[1] for span in spans), max(span[2] for span in spans)

    best = min(range(steps), key=lambda step: edges(step)[1] - edges(step)[0])
    begin = edges(best)[0]
    return [
        [
            (name, start - begin, stop - begin)
            for name, start, stop, step in spans
            if step == best and name != "step"
        ]
        for spans in ranks
    ]


def length(ranks: list[list[tuple[str, float, float]]]) -> float:
    """Return the seconds from the first forward to the last backward."""
    return max((stop for spans in ranks for name, _, stop in spans if name in WORK), default=0.0)


def idle(ranks: list[list[tuple[str, float, float]]]) -> float:
    """Return the share of the ranks' time, from the first forward to the last backward, in which
    they do not compute."""
    busy = sum(stop - start for spans in ranks for name, start, stop in spans if name in WORK)
    return 1.0 - busy / (len(ranks) * length(ranks))
