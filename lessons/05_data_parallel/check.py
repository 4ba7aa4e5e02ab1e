"""Grades exercise 05: your steps on a small GPT beside one process, and your traffic beside the
library's ledger."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.grading import Mistake, Result, expect, judge
from minidist.lessons.checking import parity
from minidist.lessons.lab import alone, new_model, random_batch, weights
from minidist.nn import GPT, GPTConfig
from minidist.optim import SGD
from minidist.parallel.data.data_parallel import DataParallel, plain_data_parallel

CONFIG = GPTConfig(vocabulary=11, context=4, layers=1, width=8, heads=2, dtype="float64")
STEPS = 3
RATE = 0.5

CUT_FROM = (plain_data_parallel,)
ANSWERS = {
    5: "((replicas - 1) * model_bytes + others * (row_bytes + output_bytes), "
    "(replicas - 1) * model_bytes + others * output_bytes)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Steps on 1 to 4 devices with uneven parts, traffic."""
    for replicas, rows in ((2, 4), (3, 6), (3, 5), (4, 5), (1, 2)):
        yield from _steps(exercise, replicas, rows)
    for replicas, rows in ((2, 4), (4, 10)):
        yield _traffic(exercise, replicas, rows)


class Device:
    """A replica that remembers how many rows it was given, and whether it had device 0's weights
    then."""

    def __init__(self, model: GPT, first: GPT) -> None:
        self.model = model
        self.first = first
        self.rows: list[int] = []
        self.stale: list[int] = []  # the steps in which it computed with other weights

    def __call__(self, inputs: Any) -> Any:
        """Forward."""
        self.stale += (
            [] if np.array_equal(weights(self.model), weights(self.first)) else [len(self.rows)]
        )
        self.rows.append(len(inputs))
        return self.model(inputs)

    def parameters(self) -> Any:
        """The model's."""
        return self.model.parameters()

    def zero_grad(self) -> None:
        """The model's."""
        self.model.zero_grad()


def _serial(rows: int, scale: float = 1.0) -> np.ndarray:
    """Return the weights of one process; `scale` on every gradient."""
    batches = [random_batch(CONFIG, step, rows) for step in range(STEPS)]
    return alone(new_model(CONFIG), partial(SGD, lr=RATE), batches, scale)


def _steps(exercise: ModuleType, replicas: int, rows: int) -> Iterator[Result]:
    """Weights after some steps; replicas begin with other weights, so that a missing copy shows."""
    models = [new_model(CONFIG, seed) for seed in range(replicas)]
    devices = [Device(model, models[0]) for model in models]
    optimizer = SGD(list(models[0].parameters()), RATE)
    task = f"{replicas} devices, {rows} rows, {STEPS} steps"
    target = [len(part) for part in np.array_split(np.arange(rows), replicas)]
    try:
        exercise.plain_data_parallel(
            devices, optimizer, [random_batch(CONFIG, step, rows) for step in range(STEPS)]
        )
    except Exception:
        mine = [device.rows[0] for device in devices if device.rows]
        if mine in ([], target):
            raise
    mine = [device.rows[0] for device in devices if device.rows]
    yield expect(
        f"{task}, rows of each device",
        target,
        mine,
        "not as even as it goes",
        "the first rows % replicas devices get one row more: section 2 (hole 1)",
        signs={"rows are left out": sum(mine) < rows},
    )
    shared = any(
        np.shares_memory(p.data, q.data)
        for model in models[1:]
        for p, q in zip(models[0].parameters(), model.parameters(), strict=True)
    )
    stale = [step for device in devices for step in device.stale]
    yield judge(
        f"{task}, the model's copies",
        not stale and not shared,
        "every replica as device 0, in every step",
        "a replica shares device 0's array"
        if shared
        else f"others in step {stale[0]}"
        if stale
        else "so",
        "the model does not travel in every step",
        "a replica's weights are a copy of device 0's present ones, made in every step: section 2, "
        "DP 2 (hole 2)",
        signs={"the model did not travel": shared or not _copied(devices)},
    )
    yield parity(
        f"{task}, weights",
        _serial(rows),
        [weights(models[0])],
        "the wrong gradients",
        "each device begins backward with its rows of gathered.grad; the loss is one number "
        "(N0:137): section 2, DP 4 (hole 3); and the sums of all devices' follow (hole 4)",
        known={
            "averaged": Mistake(
                lambda: _serial(rows, 1 / replicas),
                "the loss is the mean of the whole batch already, so its gradients are summed: "
                "section 4 (hole 4)",
            ),
            "the others' gradients are missing": Mistake(
                lambda: _device_0_alone(replicas, rows),
                "own.grad is device 0's part alone: section 2, DP 5 (hole 4)",
            ),
        },
    )


def _copied(devices: list[Device]) -> bool:
    """Whether a replica other than the first ever had the first one's weights."""
    return any(len(device.stale) < len(device.rows) for device in devices[1:])


def _device_0_alone(replicas: int, rows: int) -> np.ndarray:
    """The weights if the gradients are those of device 0's rows."""
    first = np.array_split(np.arange(rows), replicas)[0]
    model = new_model(CONFIG)
    optimizer = SGD(list(model.parameters()), RATE)
    for step in range(STEPS):
        inputs, targets = random_batch(CONFIG, step, rows)
        model.loss(inputs[first], targets[first], targets.size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def _traffic(exercise: ModuleType, replicas: int, rows: int) -> Result:
    """The formula beside the ledger of one step."""
    model = new_model(CONFIG)
    strategy = DataParallel(model, replicas)
    inputs, targets = random_batch(CONFIG, 0, rows)
    strategy.step((inputs, targets), SGD(strategy.parameters, RATE))
    sent = [sum(device.group.ledger.sent_bytes()["dp"].values()) for device in strategy.devices]
    nbytes = sum(p.data.nbytes for p in model.parameters())
    row = inputs[0].nbytes
    output = 8 * CONFIG.context * CONFIG.vocabulary
    target = (sent[0], sum(sent[1:]))
    sends, receives = exercise.through_device_0(nbytes, row, output, rows, replicas)
    others = rows - len(np.array_split(inputs, replicas)[0])
    models = (replicas - 1) * nbytes
    return expect(
        f"bytes through device 0, {replicas} devices",
        target,
        (int(sends), int(receives)),
        "wrong bytes",
        "out: models, rows, outputs' gradients; in: outputs, gradients; of every other device: "
        "section 3 (hole 5)",
        known={
            "one model for all the others": (
                nbytes + others * (row + output),
                nbytes + others * output,
            ),
            "the outputs' gradients are missing": (models + others * row, target[1]),
            "sent and received are swapped": (target[1], target[0]),
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "05", *sys.argv[1:]]))
