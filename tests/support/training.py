"""Provide what the tests of training share: a model that trains in milliseconds, its batches, and
the measure of equality."""

from dataclasses import fields
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter
from minidist.device.backend import random_bits
from minidist.nn import GPTConfig, Module
from minidist.parallel.hybrid.hybrid import Plan, Trainer

SMALL_BUCKETS = 2048  # bytes: several buckets even in a tiny model


def tiny(**changes: Any) -> GPTConfig:
    """A GPT of about 2,000 parameters."""
    sizes = {
        "vocabulary": 11,
        "context": 6,
        "layers": 2,
        "width": 8,
        "heads": 2,
        "dtype": "float64",
    }
    return GPTConfig(**{**sizes, **changes})


def global_batch(step: int, sequences: int, config: GPTConfig) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), each (sequences, context): by step alone."""
    bits = random_bits(f"batch {step}", 0, range(sequences * (config.context + 1)))
    ids = (
        (bits % np.uint64(config.vocabulary))
        .astype(np.int64)
        .reshape(sequences, config.context + 1)
    )
    return ids[:, :-1], ids[:, 1:]


def train(
    world: Any,
    *,
    config: GPTConfig | None = None,
    steps: int = 2,
    sequences: int = 5,
    bucket_bytes: int = SMALL_BUCKETS,
    **options: Any,
) -> dict[str, Any]:
    """Return what a rank of `world` holds after `steps` steps on the data axis: weights, losses,
    digest, ledger, memory.

    `options` are the plan's, by its fields' names, and the Trainer's.
    """
    config = config or tiny()
    options = {"optimizer": "adamw", "lr": 1e-2, "clip": 0.5, "seed": 3, **options}
    of_plan = {
        field.name: options.pop(field.name) for field in fields(Plan) if field.name in options
    }
    plan = Plan(dp=world.size, bucket_bytes=bucket_bytes, **of_plan)
    trainer = Trainer(plan, config, world, **options)
    losses = [trainer.step(global_batch(step, sequences, config)) for step in range(steps)]
    result = {
        "weights": {name: array.copy() for name, array in trainer.state_dict().items()},
        "losses": losses,
        "digest": trainer.weights_sha256(),
        "sent": world.ledger.sent_bytes("step"),
        "messages": world.ledger.messages("step"),
        "memory": trainer.account.snapshot(),
    }
    trainer.close()
    return result


def train_tiny(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """`train` of `tiny(**changes)`: with arguments that can travel to ranks of a new mpirun."""
    return train(world, config=tiny(**changes), **options)


def difference(ours: dict[str, np.ndarray], serial: dict[str, np.ndarray]) -> float:
    """The largest |a - b| over the largest |b| of the whole model; NaN if anything is NaN, so
    compare with `<`."""
    assert ours.keys() == serial.keys()
    gaps = [np.max(np.abs(ours[name] - serial[name])) for name in serial]
    return float(np.max(gaps) / max(np.max(np.abs(array)) for array in serial.values()))


class Chooser(Module):
    """w0 is used always, w1 to w3 where their numbers stand in the rank's rows: ranks use different
    parameters."""

    def __init__(self) -> None:
        self.weights = [Parameter(np.arange(1.0, 4.0) + i) for i in range(5)]
        self.assign_names()

    def forward(self, inputs: np.ndarray) -> Any:
        total = ops.sum(self.weights[0] * float(inputs.sum()))
        for choice in sorted(set(inputs.reshape(-1).tolist())):
            total = total + ops.sum(
                self.weights[choice] * self.weights[choice] * float((inputs == choice).sum())
            )
        return total

    def loss(self, inputs: np.ndarray, targets: np.ndarray, divisor: int) -> Any:
        return self(inputs) * (1.0 / divisor)


# w4 is never used
CHOICES = [np.array([[1], [2], [3]]), np.array([[3], [3], [1]]), np.array([[2], [2], [2]])]
