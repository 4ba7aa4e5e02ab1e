"""Grades exercise 05: your steps on a small GPT beside one process, and your traffic beside the library's ledger."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from minidist.grading import Result, expect
from minidist.nn import GPT, GPTConfig
from minidist.optim import SGD
from minidist.parallel.data.data_parallel import DataParallel
from minidist.parallel.step.single import Single

CONFIG = GPTConfig(vocabulary=11, context=4, layers=1, width=8, heads=2, dtype="float64")
STEPS, RATE = 3, 0.5

ANSWERS = {
    1: "[(r * (rows // replicas) + min(r, rows % replicas), rows // replicas + (r < rows % replicas)) "
       "for r in range(replicas)]",
    2: "copied.data[...] = wire.copy(0, number, original.data)",
    3: "wire.copy(0, number, gathered.grad[first:first + rows])",
    4: """
        for number, other in enumerate(others, start=1):
            own.grad += wire.copy(number, 0, other.grad)
       """,
    5: "((replicas - 1) * model_bytes + others * (row_bytes + output_bytes), "
       "(replicas - 1) * model_bytes + others * output_bytes)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Parts, steps on 2 and 3 devices with uneven parts, traffic."""
    for rows, replicas in ((6, 3), (7, 3), (5, 4), (2, 3)):
        yield _parts(exercise, rows, replicas)
    for replicas, rows in ((2, 4), (3, 5)):
        yield from _steps(exercise, replicas, rows)
    for replicas, rows in ((2, 4), (4, 10)):
        yield _traffic(exercise, replicas, rows)


class Wire:
    """Copies between devices, counted by direction."""

    def __init__(self) -> None:
        self.sent = self.received = self.models = 0

    def copy(self, src: int, dst: int, array: Any) -> Any:
        """A copy on device `dst`."""
        if src != dst:
            self.sent += array.nbytes * (src == 0)
            self.received += array.nbytes * (dst == 0)
            self.models += src == 0 and array.dtype == np.float64 and array.ndim < 3
        return np.array(array)


def _batch(step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(step).integers(0, CONFIG.vocabulary, (rows, CONFIG.context + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def _model(seed: int = 0) -> GPT:
    model = GPT(CONFIG)
    model.initialize(seed)
    return model


def _weights(model: GPT) -> np.ndarray:
    return np.concatenate([np.asarray(parameter.data).ravel() for parameter in model.parameters()])


def _parts(exercise: ModuleType, rows: int, replicas: int) -> Result:
    """As numpy.array_split."""
    pieces = np.array_split(np.arange(rows), replicas)
    starts = np.cumsum([0, *map(len, pieces)])
    target = [(int(start), len(piece)) for start, piece in zip(starts, pieces, strict=False)]
    mine = [tuple(int(number) for number in pair) for pair in exercise.parts(rows, replicas)]
    mistake = "rows are left out" if sum(pair[1] for pair in mine) < rows else "not as even as it goes"
    return expect(f"{rows} rows on {replicas} devices", target, mine, mistake,
                  "the first rows % replicas devices get one row more: section 2 (hole 1)")


def _serial(rows: int, scale: float = 1.0) -> np.ndarray:
    """One process; `scale` on every gradient."""
    model = _model()
    single, optimizer = Single(model), SGD(list(model.parameters()), RATE * scale)
    for step in range(STEPS):
        single.step(_batch(step, rows), optimizer)
    return _weights(model)


def _steps(exercise: ModuleType, replicas: int, rows: int) -> Iterator[Result]:
    """Weights after some steps; replicas begin with other weights, so that a missing copy shows."""
    models = [_model(seed) for seed in range(replicas)]
    devices, wire = [SimpleNamespace(model=model) for model in models], Wire()
    optimizer = SGD(list(models[0].parameters()), RATE)
    task = f"{replicas} devices, {rows} rows, {STEPS} steps"
    for step in range(STEPS):
        inputs, targets = _batch(step, rows)
        exercise.train_step(devices, optimizer, inputs, targets, wire)
    mine = _weights(models[0])
    tensors = STEPS * (replicas - 1) * len(list(models[0].parameters()))
    mistake = "the model does not travel in every step" if wire.models else "the model did not travel"
    yield Result(f"{task}, the model's copies", wire.models >= tensors, f"{tensors} tensors", f"{wire.models} tensors",
                 mistake, "a replica's weights are a copy of device 0's, made by the wire in every step: section 2, "
                 "DP 2 (hole 2)")
    error = _apart(mine, _serial(rows))
    if not error < 1e-10:
        mistake, advice = _name(mine, replicas, rows)
        yield Result(f"{task}, weights", False, "those of one process", f"off by {error:.1e}", mistake, advice)
        return
    yield Result(f"{task}, weights", True, "those of one process, to 1e-10", "those of one process, to 1e-10")
    library = _model()
    strategy = DataParallel(library, replicas)
    rule = SGD(strategy.parameters, RATE)
    for step in range(STEPS):
        strategy.step(_batch(step, rows), rule)
    sent = [sum(device.group.ledger.sent_bytes()["dp"].values()) for device in strategy.devices]
    yield expect(f"{task}, bytes through device 0", (sent[0], sum(sent[1:])), (wire.sent, wire.received),
                 "wrong traffic", "rows go out and outputs come in, models go out and gradients come in: section 3")


def _name(mine: np.ndarray, replicas: int, rows: int) -> tuple[str, str]:
    """Which known mistake leads to these weights."""
    if _apart(mine, _serial(rows, 1 / replicas)) < 1e-9:
        return "averaged", ("the loss is the mean of the whole batch already, so its gradients are summed: section 4 "
                            "(hole 4)")
    first = np.array_split(np.arange(rows), replicas)[0]
    model = _model()
    optimizer = SGD(list(model.parameters()), RATE)
    for step in range(STEPS):
        inputs, targets = _batch(step, rows)
        model.loss(inputs[first], targets[first], targets.size).backward()
        optimizer.step()
        optimizer.zero_grad()
    if _apart(mine, _weights(model)) < 1e-9:
        return "the others' gradients are missing", "own.grad is device 0's part alone: section 2, DP 5 (hole 4)"
    return "the wrong gradients", ("each device begins backward with its rows of gathered.grad; the loss is one number "
                                   "(N0:137): section 2, DP 4 (hole 3); and the sums of all devices' follow (hole 4)")


def _apart(mine: np.ndarray, target: np.ndarray) -> float:
    return float(np.abs(mine - target).max() / np.abs(target).max()) if mine.shape == target.shape else float("inf")


def _traffic(exercise: ModuleType, replicas: int, rows: int) -> Result:
    """The formula beside the ledger of one step."""
    model = _model()
    strategy = DataParallel(model, replicas)
    inputs, targets = _batch(0, rows)
    strategy.step((inputs, targets), SGD(strategy.parameters, RATE))
    sent = [sum(device.group.ledger.sent_bytes()["dp"].values()) for device in strategy.devices]
    nbytes, row, output = (sum(p.data.nbytes for p in model.parameters()), inputs[0].nbytes,
                           8 * CONFIG.context * CONFIG.vocabulary)
    target = (sent[0], sum(sent[1:]))
    sends, receives = exercise.through_device_0(nbytes, row, output, rows, replicas)
    mine = int(sends), int(receives)
    others = rows - len(np.array_split(inputs, replicas)[0])
    known = {(nbytes + others * (row + output), nbytes + others * output): "one model for all the others",
             ((replicas - 1) * nbytes + others * row, target[1]): "the outputs' gradients are missing",
             (target[1], target[0]): "sent and received are swapped"}
    return expect(f"bytes through device 0, {replicas} devices", target, mine, known.get(mine, "wrong bytes"),
                  "out: models, rows, outputs' gradients; in: outputs, gradients; of every other device: section 3 "
                  "(hole 5)")


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "05", *sys.argv[1:]]))
