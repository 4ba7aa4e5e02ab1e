"""Grades exercise 19: formulas, then memory and gradients of real stacks beside a plain
backward."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, Tensor, tensor
from minidist.console import size_text
from minidist.device import account
from minidist.errors import GradientError
from minidist.grading import Result, TaskFailed, expect, judge, variant
from minidist.parallel.memory.activations import plain_recompute

LAYERS = 6
ROWS = 64
WIDTH = 32
SIZES = (1, 2, 3)
STACKS = [(2, 3), *((x, a) for x in (1, 2, 3, 5, 10, 30) for a in (1, 2, 4, 7, 50, 100))]
"""x and a of best sizes; with the first, one block a segment is neither best nor worst."""
Block = Callable[[Tensor], Tensor]

CUT_FROM = (plain_recompute,)
ANSWERS = {
    1: "(segments - 1) * x + size * a",
    2: "min(sizes, key=lambda size: peak(layers, size, x, a))",
    7: "np.floor(x / scale + chance)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check the formula, the best size, real stacks, and the rounding to 8 bits.

    Of real stacks, memory and gradients are checked.
    """
    yield from _formula(exercise)
    for size in SIZES:
        yield from _memory(exercise, size)
    for size in SIZES:
        yield from _gradients(exercise, size)
    yield from _codes(exercise)


def _formula(exercise: ModuleType) -> Iterator[Result]:
    for layers, size, x, a in ((24, 3, 10, 100), (16, 2, 1, 7), (6, 6, 5, 50), (6, 1, 5, 50)):
        target = (layers // size - 1) * x + size * a
        measured = exercise.peak(layers, size, x, a)
        yield expect(
            f"peak of {layers} blocks in segments of {size}",
            target,
            measured,
            "another number",
            "all segments but one keep one input, and all blocks of one segment are alive: section 3 "
            "(hole 1)",
            known={
                "one block is made again, and not one segment": (layers // size - 1) * x + a,
                "that is everything kept": layers * a,
                "that keeps every block's input": layers * x + a,
                "nothing is made again": layers // size * x,
                "the segment's own input counted twice": target + x,
                "the number of segments and their size are exchanged": (size - 1) * x
                + layers // size * a,
                "all blocks' activations are alive, and not one segment's": target
                + (layers - size) * a,
            },
        )
    for layers in (12, 10, 16, 36):
        for x, a in STACKS:
            best = _best_size(exercise, layers, x, a)
            if not best.passed:
                break
        yield best


def _best_size(exercise: ModuleType, layers: int, x: int, a: int) -> Result:
    """Check that a size has the lowest peak; if several have it, each of them is right."""
    peaks = {
        size: exercise.peak(layers, size, x, a)
        for size in range(1, layers + 1)
        if layers % size == 0
    }
    lowest = min(peaks.values())
    best = [size for size, found in peaks.items() if found == lowest]
    measured = exercise.best_size(layers, x, a)
    return judge(
        f"best size for {layers} blocks, x = {x}, a = {a}",
        measured in best,
        " or ".join(map(str, best)),
        str(measured),
        "another size has a lower peak",
        "min(sizes, key=...) of your own peak (hole 2)",
        signs={
            "that is the lowest peak, and not its size": measured == lowest,
            "that is the size with the highest peak": peaks.get(measured) == max(peaks.values()),
            "that is a place in sizes, and not a size": measured
            == list(peaks.values()).index(lowest),
        },
    )


def _stack() -> tuple[list[Parameter], list[Block], Tensor]:
    """Return weights, blocks of one weight each, and an input."""
    draw = np.random.default_rng(3)
    weights = [
        Parameter(draw.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, name=f"w{i}")
        for i in range(LAYERS)
    ]

    def block(weight: Parameter) -> Block:
        return lambda x: ops.gelu(ops.linear(x, weight))

    return weights, [block(weight) for weight in weights], tensor(draw.normal(size=(ROWS, WIDTH)))


def _segments(blocks: list[Block], size: int) -> list[Block]:
    """Return segments, each of which runs `size` blocks."""

    def segment(part: list[Block]) -> Block:
        def run(x: Tensor) -> Tensor:
            for block in part:
                x = block(x)
            return x

        return run

    return [segment(blocks[start : start + size]) for start in range(0, len(blocks), size)]


def _recompute(exercise: ModuleType, task: str, segments: list[Block], x: Tensor, dy: Any) -> Any:
    """Run the student's loop. Raises TaskFailed if a segment gets no gradient for its backward."""
    try:
        return exercise.plain_recompute(segments, x, dy)
    except GradientError as error:
        result = Result(
            task,
            False,
            "a gradient for each segment",
            "None",
            "the gradient that is handed on is None",
            "the new tape's start must ask for its gradient (requires_grad=True): section 1 (holes "
            "5, 6)",
        )
        raise TaskFailed(result) from error


def _memory(exercise: ModuleType, size: int) -> Iterator[Result]:
    """Check that only the inputs are alive when forward is over.

    The bytes are read when the last segment is about to run again.
    """

    def alive(recompute: Callable[..., object]) -> int:
        seen: list[int] = []
        with account.use(account.MemoryAccount()) as memory:
            _, blocks, x = _stack()
            segments = _segments(blocks, size)
            last = segments[-1]

            def watched(x: Tensor) -> Tensor:
                seen.append(memory.now["activations"])
                return last(x)

            recompute([*segments[:-1], watched], x, np.ones((ROWS, WIDTH)))
        return seen[1] if len(seen) > 1 else 0

    target = alive(plain_recompute)
    task = f"alive after forward, segments of {size}"
    found = alive(partial(_recompute, exercise, task))
    yield Result(
        task,
        found <= target,
        size_text(target),
        size_text(found),
        "more than inputs: the tape was kept",
        "run forward in `with no_grad():`, and keep only inputs: section 1 (holes 3, 4)",
    )


def _gradients(exercise: ModuleType, size: int) -> Iterator[Result]:
    """Check that the gradients equal those of a plain backward to the bit."""
    weights, blocks, x = _stack()
    dy = np.random.default_rng(4).normal(size=(ROWS, WIDTH))
    y = start = tensor(x.data, requires_grad=True)
    for block in blocks:
        y = block(y)
    y.backward(dy)
    targets = [np.array(weight.grad) for weight in weights]
    for weight in weights:
        weight.zero_grad()
    task = f"weights with the right gradient, segments of {size}"
    dx = _recompute(exercise, task, _segments(blocks, size), x, dy)
    found = [np.zeros(1) if weight.grad is None else weight.grad for weight in weights]
    equal = [np.array_equal(grad, target) for grad, target in zip(found, targets, strict=True)]
    right = sum(equal)
    turned = all(
        np.array_equal(np.abs(grad), np.abs(target))
        for grad, target in zip(found, targets, strict=True)
    )
    yield expect(
        task,
        LAYERS,
        right,
        "no weight got one",
        "take the last kept input, go back through it, hand on again.grad: section 1 (holes 4, "
        "5, 6)",
        signs={
            "the gradient has the wrong sign": turned,
            "the gradient does not reach the segment before": lambda: _gives(
                found, size, dy, "dy = again.grad", "dy = dy"
            ),
            "every segment starts from the last kept input": lambda: _gives(
                found, size, dy, "kept.pop()", "kept[-1]"
            ),
            "the segment's output is handed on, and not a gradient": lambda: _gives(
                found, size, dy, "dy = again.grad", "dy = again.data"
            ),
            "the gradient that is handed on is another": equal[-1],
            "a segment starts from another's input": weights[LAYERS - size].grad is not None,
        },
    )
    same = isinstance(dx, np.ndarray) and np.array_equal(dx, np.asarray(start.grad))
    yield Result(
        f"gradient of the input, segments of {size}",
        same,
        "that of a plain backward",
        "equal" if same else "another",
        "what is returned is not the first segment's",
        "the last dy (hole 6)",
    )


def _gives(found: list[np.ndarray], size: int, dy: np.ndarray, old: str, new: str) -> bool:
    """Return whether the gradients are those of the plain version with `new` instead of `old`."""
    weights, blocks, x = _stack()
    variant(plain_recompute, old, new)(_segments(blocks, size), x, dy)
    return all(
        np.array_equal(np.asarray(weight.grad), grad)
        for weight, grad in zip(weights, found, strict=True)
    )


def _codes(exercise: ModuleType) -> Iterator[Result]:
    """Check that the mean code over many chances is the number itself, in steps of the scale."""
    x = np.random.default_rng(5).normal(size=16)
    chances = (np.arange(1000)[:, None] / 1000 + np.arange(16) / 16) % 1  # of each number another
    draws = [exercise.codes_of(x, chance) for chance in chances]
    codes = np.mean([np.asarray(code, np.float64) for code, _ in draws], axis=0)
    scale = draws[0][1]
    error = float(np.abs(codes - x / scale).max())

    def above(those: np.ndarray) -> float:
        """Return the largest error of some of the numbers."""
        return float(np.abs(codes - x / scale)[those].max())

    def off_by(steps: float, start: np.ndarray = x / scale) -> bool:
        """Return whether the codes of all but the largest numbers are so many steps above."""
        inner = np.abs(x / scale) < 126
        return np.allclose((codes - start)[inner], steps, atol=0.02)

    same = np.array_equal(draws[0][0], draws[-1][0])
    other = chances[0].copy()
    other[0] = 0.999
    own = np.array_equal(exercise.codes_of(x, other)[0][1:], draws[0][0][1:])
    yield Result(
        "codes of the other numbers, where one chance changes",
        own,
        "the same",
        "the same" if own else "others",
        "a number is rounded by another's chance",
        "each number has a chance of its own: section 5 (hole 7)",
    )
    yield judge(
        "mean code over 1000 chances",
        error < 0.01,
        "x / scale",
        f"off by {error:.2f} of a step",
        "the mean is another number",
        "add the chance, then take the floor: section 5 (hole 7)",
        signs={
            "a number is rounded the same way whatever the chance": same,
            "negative numbers are rounded towards zero": above(x > 0) < 0.01,
            "the mean is a whole step too low": off_by(-1),
            "the mean is a whole step too high": off_by(1),
            "the mean is half a step too high": off_by(0.5),
            "the mean is half a step too low": off_by(-0.5),
            "every number is rounded up in half of the cases, whatever its fraction": off_by(
                0.5, np.floor(x / scale)
            ),
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "19", *sys.argv[1:]]))
