"""Grades exercise 10: ranks as threads run your functions on a stack of layers; one process is the
answer key."""

import sys
from collections.abc import Iterator
from functools import partial
from math import isclose
from types import ModuleType
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, tensor
from minidist.comm.group import Group
from minidist.console import plural
from minidist.grading import Result, expect, sent_since, totals
from minidist.lessons.checking import on_ranks
from minidist.parallel.pipeline.model_parallel import ModelParallel, plain_model_parallel

LAYERS = 5
ROWS = 3
WIDTH = 4

CUT_FROM = (plain_model_parallel,)
ANSWERS = {
    1: "rank * each + min(rank, more)",
    6: "2 * (ranks - 1) * sequences * tokens * width * itemsize",
    7: "1 - sum(times) / (len(times) * sum(times))",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Which layers; then a step on 1 to 4 ranks: result, gradients, bytes; then the formulas."""
    for ranks, layers in ((2, 4), (3, 5), (4, 7)):
        target = [np.array_split(np.arange(layers), ranks)[rank].tolist() for rank in range(ranks)]
        measured = [list(exercise.layers_of(rank, ranks, layers)) for rank in range(ranks)]
        flat = [layer for part in measured for layer in part]
        yield expect(
            f"layers of {ranks} ranks",
            target,
            measured,
            "another order",
            "rank × each, and one more for each larger rank before: section 2 (hole 1)",
            signs={
                "a layer has two ranks": len(set(flat)) < len(flat),
                "a layer has no rank": set(flat) != set(range(layers)),
            },
        )
    for size in (1, 2, 4):
        yield from _step(exercise, size)
    yield from _formulas(exercise)


# ---------------------------------------------------------------------------------- a step on ranks


def _stack() -> tuple[list[Parameter], list[Any], np.ndarray]:
    """Weights, blocks of one weight each, the batch."""
    draw = np.random.default_rng(7)
    weights = [
        Parameter(draw.normal(size=(WIDTH, WIDTH)) / 2, name=f"w{layer}") for layer in range(LAYERS)
    ]
    return (
        weights,
        [lambda x, w=weight: ops.gelu(ops.linear(x, w)) for weight in weights],
        draw.normal(size=(ROWS, WIDTH)),
    )


def _job(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """What a rank finds: its weights' gradients, the loss on the last, and what it sent."""
    weights, blocks, batch = _stack()
    mine = exercise.layers_of(group.rank, group.size, LAYERS)
    chosen = [blocks[layer] for layer in mine]
    before = totals(group.ledger)
    losses: list[float] = []

    def layers(x: Any, *_: Any) -> Any:
        for block in chosen:
            x = block(x)
        if group.rank < group.size - 1:
            return x
        loss = ops.sum(x * x)
        losses.append(loss.item())
        return loss

    exercise.plain_model_parallel(layers, group, tensor(batch), None, 1)
    return {
        "loss": losses[0] if losses else None,
        "bytes": sent_since(group.ledger, before)[1],
        "gradients": [
            [layer, weights[layer].grad] for layer in mine if weights[layer].grad is not None
        ],
    }


def _step(exercise: ModuleType, size: int) -> Iterator[Result]:
    weights, blocks, batch = _stack()
    y = tensor(batch)
    for block in blocks:
        y = block(y)
    loss = ops.sum(y * y)
    loss.backward()
    ranks = on_ranks(
        _job,
        exercise,
        size=size,
        task=f"a step on {plural(size, 'rank')} ends",
        target="every rank returns",
        mistake="the ranks wait for each other",
        advice="activations forth, gradients back: section 1",
    )
    yield Result(
        f"loss, {plural(size, 'rank')}",
        abs(ranks[-1]["loss"] - loss.item()) < 1e-12,
        f"{loss.item():.6f}",
        f"{ranks[-1]['loss']:.6f}",
        "another loss",
        "what came is this rank's input (holes 2, 3)",
    )
    found = dict(pair for rank in ranks for pair in rank["gradients"])
    right = sum(
        layer in found and np.allclose(found[layer], np.asarray(weights[layer].grad), rtol=1e-10)
        for layer in range(LAYERS)
    )
    yield expect(
        f"layers with the right gradient, {plural(size, 'rank')}",
        LAYERS,
        right,
        "the first ranks got no right gradient: it must be handed back",
        "y.backward(what came), then send x.grad: section 1 (holes 4, 5)",
        known={"no gradient is right": 0},
    )
    yield expect(
        f"bytes sent, {plural(size, 'rank')}",
        2 * (size - 1) * ROWS * WIDTH * 8,
        sum(rank["bytes"] for rank in ranks),
        "more or less than each cut needs",
        "one activation forth and one gradient back (holes 3, 5)",
    )


# ------------------------------------------------------------------------------------- the formulas


def _formulas(exercise: ModuleType) -> Iterator[Result]:
    assert "2 × B × T × width" in (sys.modules[ModelParallel.__module__].__doc__ or "")
    for ranks, sequences in ((1, 3), (4, 8)):
        target = 2 * (ranks - 1) * sequences * 16 * 32 * 4
        measured = exercise.bytes_sent(ranks, sequences, 16, 32, 4)
        yield expect(
            f"bytes of {ranks} ranks",
            target,
            measured,
            "another number",
            "2 B T h (p-1) elements: section 4 (hole 6)",
            known={
                "p ranks have p - 1 cuts": 2 * ranks * sequences * 16 * 32 * 4,
                "there and back": target // 2,
                "elements are not bytes": target // 4,
            },
        )
    for times in ([1.0, 1.0, 1.0, 1.0], [1.0, 3.0], [2.0]):
        yield expect(
            f"idle, {times}",
            1 - 1 / len(times),
            exercise.idle(times),
            "another number",
            "computing sum(times), of p × sum(times): section 3 (hole 7)",
            known={"that is how long the slowest waits": 1 - max(times) / sum(times)},
            same=partial(isclose, abs_tol=1e-9),
            show="{:.3f}".format,
        )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "10", *sys.argv[1:]]))
