"""Provide what the tests of checkpoints share: jobs that save and go on, and a checkpoint's
tensors, put together by hand."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from training import global_batch, tiny

from minidist.parallel.hybrid.hybrid import Plan, Trainer

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


def make(
    world: Any, plan: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]
) -> Trainer:
    """A Trainer of a tiny GPT. `options`: the Trainer's, and loss_scale: (first value, good steps
    until it grows)."""
    options = {"optimizer": "adamw", "lr": 1e-2, "clip": 0.5, "seed": 3, **options}
    scale = options.pop("loss_scale", None)
    trainer = Trainer(Plan(**{"bucket_bytes": 2048, **plan}), tiny(**changes), world, **options)
    if scale is not None:
        of: Any = trainer.precision
        of.loss_scale.value, of.loss_scale.patience = scale
    return trainer


def steps(trainer: Trainer, count: int, sequences: int = 5) -> list[float]:
    """The losses of so many further steps."""
    first = trainer.steps_done
    return [
        trainer.step(global_batch(step, sequences, trainer.config))
        for step in range(first, first + count)
    ]


def saved(
    world: Any,
    folder: str,
    plan: dict[str, Any],
    changes: dict[str, Any],
    options: dict[str, Any],
    count: int = 2,
) -> dict[str, Any]:
    """Train some steps and save; what a rank holds then."""
    trainer = make(world, plan, changes, options)
    losses = steps(trainer, count)
    trainer.save(folder)
    return ended(trainer, losses)


def resumed(
    world: Any,
    folder: str,
    plan: dict[str, Any],
    changes: dict[str, Any],
    options: dict[str, Any],
    count: int = 2,
    again: str | None = None,
) -> dict[str, Any]:
    """Load into a Trainer that began otherwise, save what came (`again`), go on; what a rank holds
    then."""
    trainer = make(world, plan, changes, {**options, "seed": 99})
    trainer.load(folder)
    if again is not None:
        trainer.save(again)
    return ended(trainer, steps(trainer, count))


def ended(trainer: Trainer, losses: list[float]) -> dict[str, Any]:
    """Return what a rank holds, and the end of its Trainer."""
    trainer.check_replicas()
    result = {
        "losses": losses,
        "digest": trainer.weights_sha256(),
        "precision": trainer.precision.state(),
        "steps": trainer.steps_done,
        "updates": trainer.updates_done,
    }
    trainer.close()
    return result


def whole_state(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(whole tensors by key, updates and precision) of a checkpoint, read number by number, without
    the library."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    times: dict[str, np.ndarray] = {}
    for shard in manifest["shards"]:
        content = (folder / shard["file"]).read_bytes()
        for array in shard["arrays"]:
            kind = np.dtype(DTYPES[array["dtype"]])
            size = int(np.prod(array["shape"], dtype=np.int64))
            numbers = np.frombuffer(
                content, kind, array["nbytes"] // kind.itemsize, array["offset"]
            )
            at = [
                start + step * i + j
                for start, length, step, count in array["stripes"]
                for i in range(count)
                for j in range(length)
            ]
            whole = tensors.setdefault(array["key"], np.zeros(size, kind))
            seen = times.setdefault(array["key"], np.zeros(size, np.int64))
            # copies are equal
            assert np.array_equal(whole[at][seen[at] > 0], numbers[seen[at] > 0]), array["key"]
            whole[at] = numbers
            seen[at] = seen[at] + 1
    for key, count in times.items():
        assert count.all(), f"{key} is not complete"
    return tensors, manifest["about"]["state"]


def same_state(first: Path, second: Path) -> bool:
    """Return whether two checkpoints hold the same bits, whatever plans wrote them."""
    (ours, state) = whole_state(first)
    (theirs, other) = whole_state(second)
    return (
        state == other
        and ours.keys() == theirs.keys()
        and all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)
    )
