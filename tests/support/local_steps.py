"""Provide what the tests of local steps share: DiLoCo in one process, from its published formulas,
on whole vectors."""

from typing import Any

import numpy as np
from training import global_batch, tiny

from minidist.nn import GPT, GPTConfig
from minidist.optim import SGD, AdamW, clip_scale, global_norm
from minidist.parallel.step.step import part_of


def vector_of(model: GPT) -> np.ndarray:
    """A copy of all weights, one after another."""
    return np.concatenate([np.ravel(p.data) for p in model.parameters()])


def write_vector(model: GPT, vector: np.ndarray) -> None:
    """Give a model the weights of a vector."""
    start = 0
    for p in model.parameters():
        p.data[...] = vector[start : start + p.size].reshape(p.shape)
        start += p.size


def new_model(config: GPTConfig | None = None) -> GPT:
    """The same weights as a Trainer's of seed 3."""
    model = GPT(config or tiny())
    model.initialize(seed=3)
    return model


def alone(
    model: GPT, optimizer: Any, batch: Any, size: int, rank: int, clip: float | None
) -> tuple[float, float]:
    """A step of one rank on its rows; (their mean loss, their share of the batch)."""
    part = part_of(batch, size=size, rank=rank)
    loss = model.loss(part.inputs, part.targets, divisor=part.targets.size)
    loss.backward()
    scale = (
        1.0 if clip is None else clip_scale(global_norm(p.grad for p in model.parameters()), clip)
    )
    optimizer.step(None, scale)
    optimizer.zero_grad()
    return float(loss.item()), len(part.inputs) / len(batch[0])


def reference(
    size: int,
    *,
    steps: int,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    lr: float = 0.7,
    momentum: float = 0.9,
    nesterov: bool = True,
    sequences: int = 5,
    inner: str = "adamw",
    clip: float | None = 0.5,
) -> dict[str, Any]:
    """Streaming DiLoCo on `size` models in one process: the common and the ranks' own weights, and
    the losses."""
    models = [new_model() for _ in range(size)]
    rule = {"adamw": AdamW, "sgd": SGD}[inner]
    optimizers = [rule(model.parameters(), 1e-2) for model in models]
    common = vector_of(models[0])
    losses = list[float]()
    speed = np.zeros_like(common)
    due = list[tuple[int, slice]]()
    edges = np.cumsum([0, *(len(part) for part in np.array_split(common, fragments))])
    for step in range(1, steps + 1):
        batch = global_batch(step - 1, sequences, tiny())
        told = [
            alone(model, optimizer, batch, size, rank, clip)
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
        ]
        losses.append(sum(loss * share for loss, share in told))
        own = [vector_of(model) for model in models]
        for number in range(fragments):
            turn = (number + 1) * every // fragments
            if step >= turn and (step - turn) % every == 0:  # step = H·k + (f+1)·H/F
                place = slice(edges[number], edges[number + 1])
                gradient = sum(
                    share * (common[place] - vector[place])
                    for (_, share), vector in zip(told, own, strict=True)
                )
                speed[place] = momentum * speed[place] + gradient
                common[place] -= lr * (
                    gradient + momentum * speed[place] if nesterov else speed[place]
                )
                due.append((step + delay, place))
        for _, place in [each for each in due if each[0] == step]:
            for vector in own:
                vector[place] = mix * vector[place] + (1 - mix) * common[place]
        for model, vector in zip(models, own, strict=True):
            write_vector(model, vector)
    return {"common": common, "own": own, "losses": losses}
