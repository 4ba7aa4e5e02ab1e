"""Grades exercise 05: your steps on a small GPT, compared with one process; your traffic, compared
with the library's ledger."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.errors import MinidistError
from minidist.grading import Known, Mistake, Result, expect, judge, variant
from minidist.lessons.checking import pair, parity
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
        yield from _traffic(exercise, replicas, rows)


class Device:
    """A replica that remembers the rows that it was given, and whether it then had device 0's
    weights."""

    def __init__(self, model: GPT, first: GPT) -> None:
        self.model = model
        self.first = first
        self.begin = weights(model)
        self.parts: list[Any] = []
        self.stale: list[int] = []  # the steps in which it computed with other weights
        self.kept = False  # whether it began to compute with the weights that it was made with

    def __call__(self, inputs: Any) -> Any:
        """Forward."""
        own = weights(self.model)
        if not np.array_equal(own, weights(self.first)):
            self.stale.append(len(self.parts))
        if not self.parts:
            self.kept = np.array_equal(own, self.begin)
        self.parts.append(np.asarray(inputs))
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
    task = f"{replicas} device{'s' * (replicas > 1)}, {rows} rows, {STEPS} steps"
    batches = [random_batch(CONFIG, step, rows) for step in range(STEPS)]
    target = [part.tolist() for part in np.array_split(np.arange(rows), replicas)]
    whole = batches[0][0]
    try:
        exercise.plain_data_parallel(devices, optimizer, batches)
    except Exception:
        if not any(device.parts for device in devices) or _dealt(devices, whole) == target:
            raise
    yield _rows(task, target, _dealt(devices, whole), devices[0].parts[0].shape[1:])
    yield _copies(task, models, devices)
    yield parity(
        f"{task}, weights",
        _serial(rows),
        [weights(models[0])],
        "the wrong gradients",
        "each device begins backward with the gradient of the loss for its own outputs, and device 0 "
        "needs the gradients of all devices, itself included: sections 1 and 4 (holes 3, 4)",
        known=_known(replicas, rows),
    )


def _dealt(devices: list[Device], whole: np.ndarray) -> list[list[int]]:
    """Return the numbers of the rows that each device had in the first step; -1: no row of the
    batch."""
    dealt = []
    for device in devices:
        mine = []
        for row in device.parts[0] if device.parts else ():
            same = [number for number, other in enumerate(whole) if np.array_equal(row, other)]
            mine.append(same[0] if same else -1)
        dealt.append(mine)
    return dealt


def _rows(
    task: str, target: list[list[int]], mine: list[list[int]], shape: tuple[int, ...]
) -> Result:
    """Check which rows of the first batch each device had, in order."""
    had = [row for part in mine for row in part]
    every = [row for part in target for row in part]
    sizes = [len(part) for part in mine]
    wanted = [len(part) for part in target]
    return expect(
        f"{task}, numbers of each device's rows",
        target,
        mine,
        "other rows than the batch's",
        "R devices: the first rows % R get one row more, and the rows stay in their order: section 1, "
        "DP 1 (hole 1)",
        signs={
            "each part is one row, not an array of rows": not shape,
            "the tokens of each row are cut, not the rows": shape != (CONFIG.context,),
            "each device has the whole batch": len(mine) > 1
            and all(part == every for part in mine),
            "rows are left out": set(every) - set(had),
            "a row is on two devices": len(had) > len(set(had)),
            "the smaller part comes before a larger one": (
                sizes != wanted and sorted(sizes) == sorted(wanted)
            ),
            "not as even as it goes": sizes != wanted,
            "the rows are in another order": sorted(had) == every,
        },
    )


def _copies(task: str, models: list[GPT], devices: list[Device]) -> Result:
    """Check that each replica computed with device 0's weights, and has its own arrays."""
    shared = any(
        np.shares_memory(p.data, q.data)
        for model in models[1:]
        for p, q in zip(models[0].parameters(), model.parameters(), strict=True)
    )
    stale = [(step, number) for number, device in enumerate(devices) for step in device.stale]
    step, number = min(stale, default=(0, 0))
    changed = not devices[0].kept
    measured = "so"
    if changed:
        measured = "device 0 has other weights before its first forward"
    elif shared:
        measured = f"after {STEPS} steps a replica's array is device 0's own array"
    elif stale:
        measured = f"device {number} computes step {step} with other weights than device 0"
    return judge(
        f"{task}, weights of the replicas",
        not stale and not shared and not changed,
        "in every step the same numbers as device 0's, in arrays of their own",
        measured,
        "other numbers than device 0's were copied",
        "from device 0 to the replica, number by number, in every step: section 1, DP 2 (hole 2)",
        signs={
            "device 0 was overwritten": changed,
            "one array for both": shared,
            "the model did not travel": devices[number].kept,
            "only the first step's model travelled": step > 0,
        },
    )


def _known(replicas: int, rows: int) -> Known:
    """Return the weights of device 0 after each known mistake of steps DP 4 and DP 5."""
    cut = "np.array_split(np.asarray(gathered.grad), len(replicas))"
    sums = "sum(p.grad for p in same)"
    both = "section 1, DP 4 (hole 3)"

    def trained(old: str, new: str) -> Any:
        return lambda: _other_way(replicas, rows, old, new)

    one = "the loss is one number; each output needs the gradient of the loss for it (N0:137): "
    mean = "the loss is the mean of the whole batch already: section 4 (holes 3, 4)"
    return {
        "divided by the number of devices": Mistake(lambda: _serial(rows, 1 / replicas), mean),
        "multiplied by the number of devices": Mistake(lambda: _serial(rows, replicas), mean),
        "the opposite sign": Mistake(
            lambda: _serial(rows, -1.0), "the optimizer subtracts: section 1 (holes 3, 4)"
        ),
        "the loss went out": Mistake(
            trained(cut, "[np.full_like(y.data, loss.item()) for y in outputs]"), one + both
        ),
        "ones went out": Mistake(
            trained(cut, "[np.ones_like(y.data) for y in outputs]"),
            one + both,
        ),
        "the outputs went out": Mistake(
            trained(cut, cut.replace("grad", "data")),
            "not the outputs, their gradients: " + both,
        ),
        "another device's gradients": Mistake(
            trained(cut, cut + "[::-1]"), "in the order of the devices: " + both
        ),
        "the others' gradients are missing": Mistake(
            trained(sums, "same[0].grad"),
            "device 0 has the gradient of its own rows only: section 1, DP 5 (hole 4)",
        ),
        "device 0's own gradients are missing": Mistake(
            trained(sums, "sum(p.grad for p in same[1:])"),
            "device 0 has rows, too: section 1, DP 5 (hole 4)",
        ),
    }


def _other_way(replicas: int, rows: int, old: str, new: str) -> np.ndarray:
    """Return device 0's weights if the plain loop has `new` in place of `old`; NaN if it then
    cannot run."""
    models = [new_model(CONFIG) for _ in range(replicas)]
    batches = [random_batch(CONFIG, step, rows) for step in range(STEPS)]
    try:
        variant(plain_data_parallel, old, new)(
            models, SGD(list(models[0].parameters()), RATE), batches
        )
    except (MinidistError, AttributeError, TypeError):  # of parts that do not fit, or no gradient
        return np.full_like(weights(models[0]), np.nan)
    return weights(models[0])


def _traffic(exercise: ModuleType, replicas: int, rows: int) -> Iterator[Result]:
    """Check the formulas by the ledger of one step."""
    model = new_model(CONFIG)
    strategy = DataParallel(model, replicas)
    inputs, targets = random_batch(CONFIG, 0, rows)
    strategy.step((inputs, targets), SGD(strategy.parameters, RATE))
    sent = [sum(device.group.ledger.sent_bytes()["dp"].values()) for device in strategy.devices]
    nbytes = sum(p.data.nbytes for p in model.parameters())
    row = inputs[0].nbytes
    output = 8 * CONFIG.context * CONFIG.vocabulary
    answer = exercise.through_device_0(nbytes, row, output, rows, replicas)
    task = f"{replicas} devices, {rows} rows, bytes that device 0"
    yield pair(
        f"{task} sends and receives",
        answer,
        "(bytes that device 0 sends, bytes that it receives) (hole 5)",
    )
    sends, receives = answer
    others = rows - len(np.array_split(inputs, replicas)[0])
    models = (replicas - 1) * nbytes
    both = row + output
    ring = 2 * (replicas - 1) / replicas * nbytes
    yield expect(
        f"{task} sends",
        sent[0],
        sends,
        "wrong bytes",
        "the model to each other device; and of the others' rows the inputs, and the gradients of "
        "their outputs: section 3.1 (hole 5)",
        known={
            "sent and received are swapped": sum(sent[1:]),
            "one model for all the others": nbytes + others * both,
            "a model for device 0, too": replicas * nbytes + others * both,
            "device 0's own rows are counted, too": models + rows * both,
            "the others' rows are counted once for each of them": models
            + (replicas - 1) * others * both,
            "the outputs' gradients are missing": models + others * row,
            "the inputs are missing": models + others * output,
            "inputs and outputs' gradients are missing": models,
            "these are the bytes of a rank of DDP's ring": ring,
        },
        same=_close,
    )
    yield expect(
        f"{task} receives",
        sum(sent[1:]),
        receives,
        "wrong bytes",
        "gradients of a whole model from each other device; and the outputs of the others' rows: "
        "section 3.1 (hole 5)",
        known={
            "that is what it sends": sent[0],
            "the gradients of one device only": nbytes + others * output,
            "gradients of device 0, too": replicas * nbytes + others * output,
            "device 0's own rows are counted, too": models + rows * output,
            "the outputs are missing": models,
            "these are the bytes of a rank of DDP's ring": ring,
        },
        same=_close,
    )


def _close(mine: Any, value: float) -> bool:
    """Return whether two counts of bytes are equal up to the rounding of a division."""
    return bool(np.isclose(mine, value, rtol=1e-9, atol=0))


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "05", *sys.argv[1:]]))
