"""Run what lesson 09 and its figure share: a small GPT in a given dtype, its gradients, a loss
scale."""

from dataclasses import replace
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.data import text
from minidist.device import backend
from minidist.lessons.lab import new_model
from minidist.nn import GPT, GPTConfig
from minidist.optim import AdamW
from minidist.parallel.precision.mixed_precision import LossScale, MixedPrecision
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Part, micro_parts

FORMATS = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "e5m2": "float8_e5m2",
    "e4m3": "float8_e4m3fn",
}
TEXT = text.load("python")
CONFIG = GPTConfig(
    vocabulary=len(TEXT.symbols), context=32, layers=2, width=32, heads=2, positions="rotary"
)
BATCH = 16
STEPS = 4
SCALE = 2.0**16
# tokens: this process's, and of a large job's batch
MINE = BATCH * CONFIG.context
MANY = 2**21


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the global batch of a step; it depends only on the step's number."""
    return text.batch(TEXT.train, step, batch=BATCH, context=CONFIG.context, seed=0)


def model_in(dtype: str) -> GPT:
    """Return the model in one dtype; its weights are equal in all dtypes but for rounding."""
    return new_model(replace(CONFIG, dtype=dtype))


def gradients_of(dtype: str, scale: float, tokens: int) -> np.ndarray:
    """Return every weight's gradient of this process's sequences, times `scale`, as one float32
    vector.

    Args:    tokens: of the whole job's batch, by which the loss is divided; this process has BATCH
             × context of them.
    """
    model = model_in(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        model.loss(*batch_of(0), divisor=tokens).backward(np.asarray(scale, "float32"))
    return np.concatenate([backend.widen(p.grad).reshape(-1) for p in model.parameters()])


def accumulated(dtype: str, passes: int, rows: int = BATCH) -> float:
    """Return the error of the passes' gradients when they are summed in place, relative to the
    length of their exact sum."""
    inputs, targets = text.batch(TEXT.train, 0, batch=rows, context=CONFIG.context, seed=0)
    summed = model_in(dtype)
    each = model_in(dtype)
    exact: Any = 0.0
    for part in micro_parts(Part(inputs, targets, first=0), passes):
        for model in (summed, each):
            model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        exact = exact + vector(each)
        for p in each.parameters():
            p.zero_grad()
    return float(np.linalg.norm(vector(summed) - exact) / np.linalg.norm(exact))


def vector(model: GPT) -> np.ndarray:
    """Return all gradients as one float64 vector."""
    return np.concatenate(
        [np.ravel(np.asarray(p.grad)).astype(np.float64) for p in model.parameters()]
    )


def scale_run(steps: int = 48, start: float = 2.0**28, patience: int = 8) -> dict[str, list[Any]]:
    """Train in fp16 from a scale that is far too large; return each step's scale, whether it was
    skipped, and its loss."""
    precision = MixedPrecision("fp16", loss_scale=LossScale(start, patience=patience))
    single = Single(model_in("float16"), precision=precision)
    seen = []
    optimizer = AdamW(single.parameters, 4e-3)
    assert precision.loss_scale is not None
    for step in range(steps):
        scale = precision.loss_scale.value
        skipped = precision.skipped
        loss = single.step(batch_of(step), optimizer, clip=1.0)
        seen.append((scale, precision.skipped > skipped, loss))
    return {
        "scale": [s for s, _, _ in seen],
        "skipped": [s for _, s, _ in seen],
        "loss": [s for _, _, s in seen],
    }


def record(group: Group) -> dict[str, Any]:
    """Return what the figure shows: gradients in float32, in float16 with two scales, and the scale
    by step."""
    return {
        "full": gradients_of("float32", 1.0, MANY),
        "plain": gradients_of("float16", 1.0, MANY),
        "scaled": gradients_of("float16", SCALE, MANY),
        "run": scale_run(),
    }
