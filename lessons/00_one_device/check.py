"""Grades exercise 00: the student's formulas, compared with the memory account of real steps of
several models."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from minidist.autograd.tensor import no_grad
from minidist.console import plural, size_text
from minidist.device import account
from minidist.grading import Mistake, Result, expect, judge, variant
from minidist.lessons.lab import difference, new_model, random_batch
from minidist.nn import GPT, GPTConfig
from minidist.optim import SGD, Adam
from minidist.parallel.step.single import plain_single

CONFIGS = (
    GPTConfig(vocabulary=50, context=8, layers=1, width=16, heads=2),
    GPTConfig(vocabulary=31, context=12, layers=3, width=24, heads=4),
    GPTConfig(vocabulary=80, context=32, layers=2, width=32, heads=8),
)
# So long a context that attention keeps no probabilities.
LONG = GPTConfig(vocabulary=20, context=264, layers=1, width=16, heads=2)
BATCH = 3

CUT_FROM = (plain_single,)
ANSWERS = {
    3: "12 * width * width + 13 * width",
    4: "2 * parameters",
    5: "(4 + 4 + 4) * parameters",
    6: "(4 + 4) * parameters",
    7: "16 * width + heads + 2",
    8: """
        with no_grad():
            total += model.loss(inputs, targets, divisor=targets.size).item()
       """,
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check the loop, the parameters, the bytes by category, the activations and the evaluation."""
    yield from _loop(exercise, CONFIGS[0])
    for config in CONFIGS:
        yield _parameters(exercise, config)
    for config in CONFIGS:
        yield from _float32(exercise, config)
    yield from _mixed(exercise)
    for config in (LONG, replace(LONG, width=32, heads=8, layers=2)):
        yield _activations(exercise, config)
    yield from _evaluation(exercise, CONFIGS[-1])


def _bytes(count: Any) -> str:
    """Return a number of bytes, all digits."""
    return f"{count:,} bytes"


def _name(config: GPTConfig) -> str:
    return f"{plural(config.layers, 'layer')} of width {config.width}"


def _loop(exercise: ModuleType, config: GPTConfig) -> Iterator[Result]:
    """Check the loss and the weights after three batches against the plain version's.

    The batches have different sizes.
    """
    inputs, targets = random_batch(config, 0, BATCH)
    batches = [(inputs, targets), (inputs[:2], targets[:2]), (inputs[1:], targets[1:])]

    def trained(loop: Callable[..., Any]) -> tuple[Any, np.ndarray]:
        model = new_model(config)
        loss = loop(model, SGD(list(model.parameters()), 0.5), batches)
        return loss, np.concatenate([np.ravel(parameter.data) for parameter in model.parameters()])

    def other(old: str, new: str) -> Callable[[], bool]:
        changed = variant(plain_single, old, new)
        return lambda: difference(found, trained(changed)[1]) < 1e-5

    divided = "the mean over all targets, B times T of them: section 1 (hole 1)"
    (loss, weights) = trained(plain_single)
    (mine, found) = trained(exercise.plain_single)
    error = difference(found, weights)
    yield judge(
        "weights after 3 batches",
        error < 1e-5,
        "the plain version's",
        "equal" if error < 1e-5 else f"off by {error:.1e} of the largest",
        "another step",
        "divide the loss by the number of its targets, update once a batch, forget the gradients: "
        "section 1 (holes 1, 2)",
        signs={
            "the weights did not move": Mistake(
                np.array_equal(found, trained(lambda *_: 0.0)[1]),
                "the optimizer makes a step in every batch, while the gradients are there (hole 2)",
            ),
            "the gradients of the batches before are still there": Mistake(
                other("        optimizer.zero_grad()\n", ""),
                "they are forgotten after each update: section 1 (hole 2)",
            ),
            "two updates a batch": Mistake(
                other("optimizer.step()", "optimizer.step(), optimizer.step()"),
                "one update for each batch: section 1 (hole 2)",
            ),
            "divided by the number of sequences": Mistake(
                other("targets.size", "len(targets)"), divided
            ),
            "divided by the number of tokens of one sequence": Mistake(
                other("targets.size", "targets.shape[1]"), divided
            ),
            "the sum, not the mean": Mistake(other("targets.size", "1"), divided),
            "the opposite sign": Mistake(other("targets.size", "-targets.size"), divided),
        },
    )
    yield Result(
        "the last loss",
        bool(np.isclose(mine, loss)),
        f"{loss:.5f}",
        f"{mine:.5f}",
        "not the mean",
        "the mean over the targets (hole 1)",
    )


def _parameters(exercise: ModuleType, config: GPTConfig) -> Result:
    """Check the number of parameters against the model's own count."""
    h = config.width
    layers = config.layers
    target = sum(parameter.size for parameter in GPT(config).parameters())
    measured = exercise.parameter_count(config.vocabulary, config.context, layers, h)
    blocks = {
        "biases and norms forgotten": 12 * h * h,
        "the norms forgotten": 12 * h * h + 9 * h,
        "the biases forgotten": 12 * h * h + 4 * h,
        "only one norm a block": 12 * h * h + 11 * h,
        "q, k and v are three": 9 * h * h + 11 * h,
    }
    right_block = 12 * h * h + 13 * h
    return expect(
        f"numbers in a GPT, {_name(config)}",
        target,
        measured,
        "a block has another size",
        "a linear from m to n holds m n weights and n biases, a norm 2 width: hole 3",
        known={name: target + layers * (block - right_block) for name, block in blocks.items()},
    )


def _float32(exercise: ModuleType, config: GPTConfig) -> Iterator[Result]:
    """Check the bytes by category against the account after one step."""
    with account.use(account.MemoryAccount()) as memory:
        model = new_model(config)
        optimizer = Adam(list(model.parameters()), 1e-3)
        inputs, targets = random_batch(config, 0, BATCH)
        model.loss(inputs, targets, targets.size).backward()
        optimizer.step()
        held = memory.now
        parameters = sum(parameter.size for parameter in model.parameters())
    mine = exercise.training_bytes(parameters, False)
    for category in ("parameters", "gradients", "optimizer"):
        each = mine[category] // parameters
        adam = category == "optimizer"
        yield expect(
            f"float32, {category}, {_name(config)}",
            held[category],
            mine[category],
            "wrong bytes",
            f"the account counted {held[category] / parameters:g} bytes a parameter: Adam keeps "
            "two moments in the parameters' precision: section 3 (hole 6)",
            signs={
                "one moment forgotten": adam and each == 4,
                "that is mixed precision's": adam and each == 12,
                "weights and gradients are counted, too": adam and each == 16,
            },
            show=_bytes,
        )


def _mixed(exercise: ModuleType) -> Iterator[Result]:
    """Check the bytes of mixed precision for 7 billion parameters.

    The notes name five sources of bytes (N4:241).
    """
    parameters = 7 * 10**9
    mine = exercise.training_bytes(parameters, True)
    yield expect(
        "mixed precision, gradients of 7 billion",
        2 * parameters,
        mine["gradients"],
        "wrong bytes",
        "gradients have the parameters' precision: section 3 (hole 4)",
        known={
            "that is float32's": 4 * parameters,
            "these are the numbers, not their bytes": parameters,
        },
        show=_bytes,
    )
    yield expect(
        "mixed precision, optimizer of 7 billion",
        12 * parameters,
        mine["optimizer"],
        "wrong bytes",
        "fp32 master weights, first and second moment, 4 bytes each (N4:244-246; N2:25 forgets "
        "the first): section 3 (hole 5)",
        known={
            "the master weights are missing": 8 * parameters,
            "master weights and one moment are missing": 4 * parameters,
            "the parameters' bytes are not the optimizer's": 16 * parameters,
            "moments in half precision": 6 * parameters,
            "these are the numbers, not their bytes": 3 * parameters,
        },
        show=_bytes,
    )


def _kept(config: GPTConfig) -> int:
    """Return the activation bytes that are alive at the end of a forward."""
    with account.use(account.MemoryAccount()) as memory:
        model = new_model(config)
        inputs, targets = random_batch(config, 0, BATCH)
        loss = model.loss(inputs, targets, targets.size)
        kept = memory.now["activations"]
        del loss
    return kept


def _activations(exercise: ModuleType, config: GPTConfig) -> Result:
    """Check the activation bytes that the blocks keep.

    The target is what a model with twice the blocks keeps, less what the model keeps. The layers
    before and after the blocks then cancel.
    """
    target = _kept(replace(config, layers=2 * config.layers)) - _kept(config)
    measured = exercise.kept_for_backward(
        config.layers, BATCH, config.context, config.width, config.heads
    )
    return judge(
        f"activations of {_name(config)}",
        measured == target,
        _bytes(target),
        _bytes(measured),
        "too much: attention's scores, or an entry twice",
        "add up the table in section 4: no term grows with the square of the context (hole 7)",
        signs={
            "the norms' two scales, or the scores' logarithms, are miscounted": (
                abs(measured - target) <= 0.05 * target
            ),
            "an entry of the table is missing": measured < target,
        },
    )


def _measure(evaluate: Callable[[Any, Any], Any], config: GPTConfig) -> tuple[Any, int, int]:
    """Return (result of `evaluate`, activation bytes at the peak, activation bytes afterwards).

    The bytes afterwards do not include the batches.
    """
    with account.use(account.MemoryAccount()) as memory:
        model = new_model(config)
        batches = [random_batch(config, seed, BATCH) for seed in range(4)]
        result = evaluate(model, batches)
        # The account has counted the batches only if a tape has seen them.
        inputs = sum(array.nbytes for batch in batches for array in batch)
        return result, memory.peak["activations"], max(0, memory.now["activations"] - inputs)


def _reference(model: GPT, batches: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the mean loss as the Trainer evaluates it.

    No tape is recorded, and only numbers are kept.
    """
    with no_grad():
        return sum(
            float(model.loss(inputs, targets, targets.size).item()) for inputs, targets in batches
        ) / len(batches)


def _evaluation(exercise: ModuleType, config: GPTConfig) -> Iterator[Result]:
    """Check that evaluation returns the right loss and needs no more memory than the reference."""
    target, target_peak, target_after = _measure(_reference, config)
    result, peak, after = _measure(exercise.evaluate, config)
    yield judge(
        "evaluate, memory afterwards",
        after <= target_after,
        size_text(target_after),
        size_text(after),
        "the loss Tensors keep their tapes alive",
        "a Tensor remembers how it was made, and so all activations; keep loss.item(): section "
        "6 (hole 8)",
        signs={"the total is a Tensor with every tape": not isinstance(result, float)},
    )
    yield Result(
        "evaluate, memory at the peak",
        peak <= 1.05 * target_peak,
        size_text(target_peak),
        size_text(peak),
        "no no_grad()",
        "forward kept everything for a backward that never comes; wrap it in `with no_grad():`: "
        "section 6 (hole 8)",
    )
    yield Result(
        "evaluate, value",
        isinstance(result, float) and abs(result - target) < 1e-6,
        f"{target:.6f}",
        f"{float(result):.6f} ({type(result).__name__})",
        "not the mean of the batches' losses",
        "add float(loss.item()) of every batch (hole 8)",
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "00", *sys.argv[1:]]))
