"""Provide what the lessons train and compare: small models, batches, one process's training,
differences.

All of it follows from seeds, so every rank makes the same.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from minidist.autograd.tensor import no_grad
from minidist.comm.group import Group
from minidist.device.backend import random_bits
from minidist.nn import GPT, GPTConfig
from minidist.optim import Optimizer

Batch = tuple[np.ndarray, np.ndarray]
"""Inputs and targets, (sequences, context) each."""

# ------------------------------------------------------------------------------ models and batches


def new_model(config: GPTConfig, seed: int = 0) -> GPT:
    """Return a model whose weights follow from the seed."""
    model = GPT(config)
    model.initialize(seed)
    return model


def weights(model: GPT) -> np.ndarray:
    """Return all parameters end to end."""
    return np.concatenate([np.array(parameter.data).ravel() for parameter in model.parameters()])


def gradients(model: GPT) -> np.ndarray:
    """Return all gradients end to end."""
    return np.concatenate([np.array(parameter.grad).ravel() for parameter in model.parameters()])


def random_batch(config: GPTConfig, step: int, sequences: int) -> Batch:
    """Return inputs and targets of random tokens."""
    shape = (sequences, config.context + 1)
    ids = np.random.default_rng(step).integers(0, config.vocabulary, shape)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def hashed_batch(name: str, config: GPTConfig, sequences: int) -> Batch:
    """Return inputs and targets of random tokens, which follow from `name` by the counter hash.

    They are two views of one array.
    """
    bits = random_bits(name, 0, range(sequences * (config.context + 1)))
    ids = (bits % np.uint64(config.vocabulary)).astype(np.int64).reshape(sequences, -1)
    return ids[:, :-1], ids[:, 1:]


def counting_batch(config: GPTConfig, step: int, sequences: int) -> Batch:
    """Return inputs and targets in which token t is followed by t + 5, modulo the vocabulary."""
    first = np.random.default_rng(step).integers(0, config.vocabulary, (sequences, 1))
    ids = (first + 5 * np.arange(config.context + 1)) % config.vocabulary
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def rule_batch(config: GPTConfig, step: int, sequences: int) -> Batch:
    """Return random inputs, and for each token t the target 5 t + 3, modulo the vocabulary."""
    ids = np.random.default_rng(step).integers(0, config.vocabulary, (sequences, config.context))
    return ids, (5 * ids + 3) % config.vocabulary


# --------------------------------------------------------------------------------- trained, compared


def alone(
    model: GPT,
    optimizer: Callable[[list[Any]], Optimizer],
    batches: Iterable[Batch],
    scale: float = 1.0,
) -> np.ndarray:
    """Train `model` in one process and return its weights.

    Args:    optimizer: optimizer(parameters). scale: a factor for every gradient.
    """
    rule = optimizer(list(model.parameters()))
    for inputs, targets in batches:
        model.loss(inputs, targets, divisor=targets.size).backward()
        rule.step(None, scale)
        rule.zero_grad()
    return weights(model)


def held_out_loss(model: GPT, batch: Batch) -> float:
    """Return the mean loss on a batch that is not trained on."""
    inputs, targets = batch
    with no_grad():
        return float(model.loss(inputs, targets, divisor=targets.size).item())


def difference(mine: np.ndarray, target: np.ndarray) -> float:
    """Return the largest difference, divided by the largest number of `target`.

    It is infinite if the shapes differ.
    """
    if mine.shape != target.shape:
        return float("inf")
    return float(np.abs(mine - target).max() / np.abs(target).max())


def state_difference(mine: Mapping[str, np.ndarray], target: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference in any array, divided by the largest number of all."""
    gap = max(np.abs(mine[name] - target[name]).max() for name in target)
    return float(gap / max(np.abs(array).max() for array in target.values()))


def spread(group: Group, mine: np.ndarray) -> float:
    """Return the largest difference from rank 0's array, divided by its largest number.

    All ranks call it, and each gets the result for all ranks.
    """
    with group.ledger.control():
        first = group.broadcast(mine)
        gap = group.all_reduce(np.abs(mine - first).max(keepdims=True), op="max")
        return float(gap[0] / np.abs(first).max())


def median_seconds(group: Group, work: Callable[[], object], calls: int) -> float:
    """Return the median time of `calls` calls of `work`, each of which all ranks begin together."""
    times = []
    for _ in range(calls):
        group.barrier()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
