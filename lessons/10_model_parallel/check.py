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
from minidist.autograd.tensor import Parameter, Tensor, tensor
from minidist.comm.group import Group
from minidist.console import plural
from minidist.grading import Result, expect, sent_since, totals
from minidist.lessons.checking import backward_mistake, on_ranks
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
    """Check which layers a rank has, then a step on 1, 2 and 4 ranks, then the formulas.

    Of a step the result, the gradients and the bytes are checked.
    """
    for ranks, layers in ((2, 4), (3, 5), (4, 7)):
        target = [np.array_split(np.arange(layers), ranks)[rank].tolist() for rank in range(ranks)]
        measured = [list(exercise.layers_of(rank, ranks, layers)) for rank in range(ranks)]
        flat = [layer for part in measured for layer in part]
        yield expect(
            f"layers of {ranks} ranks",
            target,
            measured,
            "another order",
            "count the layers of all ranks before; some of these ranks have one more (hole 1)",
            signs={
                f"layer {min(flat, key=lambda layer: -flat.count(layer))} has two ranks": len(
                    set(flat)
                )
                < len(flat),
                f"a layer has no rank: {sorted(set(range(layers)) - set(flat))[:1]}": set(flat)
                != set(range(layers)),
            },
        )
    for size in (1, 2, 4):
        yield from _step(exercise, size)
    yield from _formulas(exercise)


# ---------------------------------------------------------------------------------- a step on ranks


def _stack() -> tuple[list[Parameter], list[Any], np.ndarray]:
    """Return weights, blocks of one weight each, and the batch."""
    draw = np.random.default_rng(7)
    weights = [
        Parameter(draw.normal(size=(WIDTH, WIDTH)) / 2, name=f"w{layer}") for layer in range(LAYERS)
    ]
    return (
        weights,
        [lambda x, w=weight: ops.gelu(ops.linear(x, w)) for weight in weights],
        draw.normal(size=(ROWS, WIDTH)),
    )


class Watched:
    """A group that notes what a rank sends, and what its layers get.

    All else is the group's own.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.sent = list[tuple[Any, int]]()
        self.inputs = list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, x: Any, dst: int) -> None:
        """Note x, and send it."""
        self.sent.append((x, dst))
        self.group.send(x, dst=dst)

    def mistakes(self) -> Iterator[str]:
        """Yield what is wrong with the rank's own input, and with what it sent."""
        rank = self.group.rank
        for x in self.inputs if rank else ():
            if not isinstance(x, Tensor):
                yield f"rank {rank}'s layers get an array, which has no tape: backward ends nowhere"
            elif not x.requires_grad:
                yield f"rank {rank}'s layers get a tensor that takes no gradient"
        for x, dst in self.sent:
            if x is None:
                yield f"rank {rank} sends None to rank {dst}: that tensor has no gradient"
            elif isinstance(x, Tensor):
                yield (
                    f"rank {rank} sends a tensor to rank {dst}; arrays travel, tapes stay: y.data is "
                    "the array of y"
                )


def _job(group: Group, exercise: ModuleType, watched: dict[int, Watched]) -> dict[str, Any]:
    """Run a step on one rank; return the gradients of its weights, the loss, and the bytes sent.

    Only the last rank has a loss.
    """
    watched[group.rank] = Watched(group)
    weights, blocks, batch = _stack()
    mine = exercise.layers_of(group.rank, group.size, LAYERS)
    chosen = [blocks[layer] for layer in mine]
    before = totals(group.ledger)
    losses: list[float] = []

    def layers(x: Any, *_: Any) -> Any:
        watched[group.rank].inputs.append(x)
        for block in chosen:
            x = block(x)
        if group.rank < group.size - 1:
            return x
        loss = ops.sum(x * x)
        losses.append(loss.item())
        return loss

    exercise.plain_model_parallel(layers, watched[group.rank], tensor(batch), None, 1)
    return {
        "loss": losses[0] if losses else None,
        "bytes": sent_since(group.ledger, before)[1],
        "gradients": [
            [layer, weights[layer].grad] for layer in mine if weights[layer].grad is not None
        ],
    }


def _all_mistakes(watched: dict[int, Watched]) -> Iterator[str]:
    """Yield the mistakes that the ranks show, from rank 0."""
    for _, rank in sorted(watched.items()):
        yield from rank.mistakes()


def _how_wrong(found: dict[int, np.ndarray], weights: list[Parameter]) -> str:
    """Return how the last layer whose gradient is wrong differs, in words."""
    for layer in reversed(range(LAYERS)):
        right = np.asarray(weights[layer].grad)
        if layer not in found:
            return f"layer {layer} has no gradient"
        if np.allclose(found[layer], right, rtol=1e-10):
            continue
        factor = float((found[layer] * right).sum() / (right * right).sum())
        if np.allclose(found[layer], factor * right, rtol=1e-8):
            return f"layer {layer}'s gradient is {factor:.3g} times the right one"
        return f"layer {layer}'s gradient is another one; the last rank's are right"
    return ""


def _step(exercise: ModuleType, size: int) -> Iterator[Result]:
    weights, blocks, batch = _stack()
    y = tensor(batch)
    for block in blocks:
        y = block(y)
    loss = ops.sum(y * y)
    loss.backward()
    watched = dict[int, Watched]()
    try:
        ranks = on_ranks(
            _job,
            exercise,
            watched,
            size=size,
            task=f"a step on {plural(size, 'rank')} ends",
            target="every rank returns",
            mistake="the ranks wait for each other",
            advice="each send needs its recv, on the rank it goes to: section 1",
        )
    # The student's code may raise anything. The ranks still show what they sent and got.
    except Exception as error:
        advice = "which tensor begins this rank's tape, and what has it after backward? section 1"
        if (wrong := next(_all_mistakes(watched), None)) is None:
            wrong, advice = backward_mistake(error)
        if not wrong:
            raise
        yield Result(
            f"a step on {plural(size, 'rank')} ends",
            False,
            "every rank returns",
            type(error.__cause__ or error).__name__,
            wrong,
            advice,
        )
        return
    yield Result(
        f"loss, {plural(size, 'rank')}",
        abs(ranks[-1]["loss"] - loss.item()) < 1e-12,
        f"{loss.item():.6f}",
        f"{ranks[-1]['loss']:.6f}",
        next(
            _all_mistakes(watched), "the last rank's layers did not get the output of those before"
        ),
        "what does a rank send, and what do the next rank's layers get? section 1 (holes 2, 3)",
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
        _how_wrong(found, weights),
        "the gradient of one rank's input is the gradient of the output of the rank before: section "
        "1 (holes 4, 5)",
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
            f"bytes of {plural(ranks, 'rank')}",
            target,
            measured,
            "another number",
            "count: cuts × arrays that cross a cut × numbers in an array × bytes of a number: section "
            "4 (hole 6)",
            known={
                f"{plural(ranks, 'rank')}, {plural(ranks - 1, 'cut')}": 2
                * ranks
                * sequences
                * 16
                * 32
                * 4,
                "one direction only; activations go there, gradients come back": target // 2,
                "elements, not bytes": target // 4,
                "one sequence, not the batch": target // sequences,
                "one cut, not all": target // max(1, ranks - 1),
                "one token, not all": target // 16,
            },
        )
    for times in ([1.0, 1.0, 1.0, 1.0], [1.0, 3.0], [2.0]):
        yield expect(
            f"idle, {times}",
            1 - 1 / len(times),
            exercise.idle(times),
            "another number",
            "one rank computes at a time: how long is the step, and what part of it does a rank "
            "compute, on average? section 3 (hole 7)",
            known={
                "that is what the slowest rank waits": 1 - max(times) / sum(times),
                "that is the share in which they compute": 1 / len(times),
                "the step is longer than its slowest rank": 1
                - sum(times) / (len(times) * max(times)),
                "seconds, not a share": (len(times) - 1) * sum(times),
            },
            same=partial(isclose, abs_tol=1e-9),
            show="{:.3f}".format,
        )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "10", *sys.argv[1:]]))
