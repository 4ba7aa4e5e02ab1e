"""Pipelines in tests: training a tiny GPT under a schedule, and stages that sleep."""

from typing import Any

import numpy as np
from training import global_batch, tiny

from minidist.nn import GPT
from minidist.nn.layers import DropoutKey
from minidist.optim import AdamW
from minidist.parallel.pipeline.model_parallel import ModelParallel
from minidist.parallel.pipeline.pipeline import Pipeline
from minidist.parallel.pipeline.schedules import make_schedule
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Part

STAGED = {"layers": 6, "tied": True, "dropout": 0.2}  # what most can go wrong in


def train_stages(
    world: Any,
    name: str,
    changes: dict[str, Any],
    *,
    microbatches: int = 4,
    chunks: int | None = None,
    layers: list[int] | None = None,
    sequences: int = 5,
    steps: int = 2,
    accumulate: int = 1,
    clip: float | None = 0.5,
) -> dict[str, Any]:
    """Return what a rank holds after `steps` steps under the schedule `name`, or "model parallel";
    "single": one process."""
    config = tiny(**changes)
    step = 0

    def key(part: Part) -> DropoutKey | None:
        return (
            DropoutKey.of_sequences(3, step, part.first, *part.inputs.shape)
            if config.dropout
            else None
        )

    model = GPT(config)
    if name == "single":
        model.initialize(3)
        strategy: Any = Single(
            model,
            loss=lambda part, divisor: model.loss(
                part.inputs, part.targets, divisor, key=key(part)
            ),
        )
    elif name == "model parallel":
        strategy = ModelParallel(model, world, seed=3, layers=layers, key=key)
    else:
        schedule = make_schedule(name, world.size, microbatches, chunks=chunks)
        strategy = Pipeline(model, world, schedule, seed=3, layers=layers, key=key)
    optimizer = AdamW(strategy.parameters, 1e-2)
    losses = []
    for step in range(steps):  # noqa: B007 - key reads it
        with world.ledger.during("step"):
            losses.append(
                strategy.step(
                    global_batch(step, sequences, config),
                    optimizer,
                    clip=clip,
                    accumulate=accumulate,
                )
            )
    return {
        "weights": strategy.state_dict(),
        "losses": losses,
        "sent": world.ledger.sent_bytes("step"),
        "own": sorted(strategy.model.state_dict()),
    }


def differ(ours: dict[str, Any], serial: dict[str, Any]) -> float:
    """The larger of the differences of weights and of losses."""
    from training import difference  # noqa: PLC0415

    return max(
        difference(ours["weights"], serial["weights"]),
        float(np.max(np.abs(np.subtract(ours["losses"], serial["losses"])))),
    )


def replay_updates(
    config: Any, ranks: list[dict[str, Any]], steps: list[list[Any]]
) -> dict[str, Any]:
    """PipeDream in one process: each microbatch goes forward and backward with every stage's
    weights as late as its rank recorded; weights and mean losses.

    Args:    ranks: of each stage, "names" of its weights and "updates": of each step its
             (microbatch, version).
             steps: of each step its microbatches, each (inputs, targets).
    """
    model = GPT(config)
    model.initialize(3)
    stages = [[dict(model.named_parameters())[name] for name in rank["names"]] for rank in ranks]
    optimizers = [AdamW(stage, 1e-2) for stage in stages]
    losses = []
    for step, microbatches in enumerate(steps):
        total = 0.0
        count = 0
        versions = [[[p.data.copy() for p in stage]] for stage in stages]
        for microbatch, (inputs, targets) in enumerate(microbatches):
            if not len(inputs):
                continue
            for stage, rank, kept in zip(stages, ranks, versions, strict=True):
                write(stage, kept[dict(rank["updates"][step])[microbatch]])
            loss = model.loss(inputs, targets)
            loss.backward()
            total = total + loss.item() * targets.size
            count = count + targets.size
            for stage, optimizer, kept in zip(stages, optimizers, versions, strict=True):
                write(stage, kept[-1])
                optimizer.step()
                optimizer.zero_grad()
                kept.append([p.data.copy() for p in stage])
        losses.append(total / count)
    return {"weights": model.state_dict(), "losses": losses}


def write(parameters: list[Any], arrays: list[Any]) -> None:
    """Put numbers into parameters."""
    for parameter, array in zip(parameters, arrays, strict=True):
        parameter.data[...] = array
