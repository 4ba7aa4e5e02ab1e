"""Run what lesson 12 and its figure share: a small GPT, whole and cut, its batches, a block's
memory."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.device import account
from minidist.lessons.lab import random_batch
from minidist.nn import GPT, GPTConfig
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.parallelize import compose
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.memory.activations import checkpoint_blocks
from minidist.parallel.step.strategy import Strategy
from minidist.parallel.tensor.tensor_parallel import TensorParallel, tensor_parallel

CONFIG = GPTConfig(vocabulary=103, context=16, layers=2, width=48, heads=6, dtype="float64")
BATCH = 4
ITEM = 8


def cut_model(group: Group, config: GPTConfig = CONFIG, *, seed: int = 0) -> GPT:
    """Return this rank's part of a model."""
    model = tensor_parallel(GPT(config), group)
    model.initialize(seed)
    return model


def cut_strategy(
    group: Group,
    config: GPTConfig = CONFIG,
    *,
    checkpoint: str = "none",
    axis: Any = TensorParallel,
) -> Strategy:
    """Return the strategy that a Trainer with the plan tp=P makes for this rank's part of a model.

    Args:    checkpoint: the blocks to compute again; axis: the class that cuts the model.
    """
    mesh = Mesh(group, tp=group.size)
    model = GPT(config)
    checkpoint_blocks(model, checkpoint)
    return compose(model, mesh, Plan(tp=group.size), [axis(model, mesh["tp"])], seed=0)


def batch_of(config: GPTConfig, step: int, sequences: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a step, the same on every rank."""
    return random_batch(config, step, sequences)


def alive(make: Callable[[], GPT], config: GPTConfig) -> tuple[int, int]:
    """Return (parameter bytes, activation bytes at the end of forward)."""
    with account.use(account.MemoryAccount()) as memory:
        model = make()
        loss = model.loss(*batch_of(config, 0))
        assert loss.requires_grad
        return memory.now["parameters"], memory.now["activations"]


def block_bytes(config: GPTConfig, make: Callable[[GPTConfig], GPT]) -> tuple[int, int]:
    """Return what one more block adds: (parameter bytes, activation bytes).

    The median of three measurements: on a busy machine a single one was once wrong.
    """
    measured = []
    for _ in range(3):
        more, fewer = (alive(partial(make, c), c) for c in (replace(config, layers=3), config))
        measured.append((more[0] - fewer[0], more[1] - fewer[1]))
    return sorted(measured)[1]
