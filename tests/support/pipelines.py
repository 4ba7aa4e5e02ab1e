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


def train_stages(world: Any, name: str, changes: dict[str, Any], *, microbatches: int = 4, chunks: int | None = None,
                 layers: list[int] | None = None, sequences: int = 5, steps: int = 2, accumulate: int = 1,
                 clip: float | None = 0.5) -> dict[str, Any]:
    """What a rank holds after `steps` steps under the schedule `name`, or "model parallel"; "single": one process."""
    config, step = tiny(**changes), 0

    def key(part: Part) -> DropoutKey | None:
        return DropoutKey.of_sequences(3, step, part.first, *part.inputs.shape) if config.dropout else None

    model = GPT(config)
    if name == "single":
        model.initialize(3)
        strategy: Any = Single(model, loss=lambda part, divisor: model.loss(part.inputs, part.targets, divisor,
                                                                            key=key(part)))
    elif name == "model parallel":
        strategy = ModelParallel(model, world, seed=3, layers=layers, key=key)
    else:
        schedule = make_schedule(name, world.size, microbatches, chunks=chunks)
        strategy = Pipeline(model, world, schedule, seed=3, layers=layers, key=key)
    optimizer, losses = AdamW(strategy.parameters, 1e-2), []
    for step in range(steps):       # noqa: B007 - key reads it
        with world.ledger.during("step"):
            losses.append(strategy.step(global_batch(step, sequences, config), optimizer, clip=clip,
                                        accumulate=accumulate))
    return {"weights": strategy.state_dict(), "losses": losses, "sent": world.ledger.sent_bytes("step"),
            "own": sorted(strategy.model.state_dict())}


def differ(ours: dict[str, Any], serial: dict[str, Any]) -> float:
    """The larger of the differences of weights and of losses."""
    from training import difference  # noqa: PLC0415

    return max(difference(ours["weights"], serial["weights"]),
               float(np.max(np.abs(np.subtract(ours["losses"], serial["losses"])))))
