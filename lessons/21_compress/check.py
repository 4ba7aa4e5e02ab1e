"""Grades exercise 21: ranks as threads train by your functions; the library's plain versions are
the answer key."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import isclose
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidist import holes
from minidist.comm.group import Group
from minidist.grading import Mistake, Result, answer_key, expect, run_module
from minidist.launch import run
from minidist.lessons.checking import LIMIT, parity
from minidist.lessons.lab import new_model, random_batch, weights
from minidist.nn import GPT, GPTConfig
from minidist.optim import SGD, Optimizer
from minidist.parallel.compress.compress import plain_compressed_ddp
from minidist.parallel.compress.local_steps import plain_diloco
from minidist.parallel.step.step import Batch

EXERCISE = Path(__file__).with_name("exercise.py")
CONFIG = GPTConfig(vocabulary=11, context=4, layers=1, width=8, heads=2, dtype="float64")
SEQUENCES = 7  # rows of every batch: three ranks have 3, 2 and 2
STEPS = 6
EVERY = 3
DENSITY = 0.1

CUT_FROM = (plain_compressed_ddp, plain_diloco)
ANSWERS = {11: "2 * itemsize / (ranks * (4 + itemsize))"}
"""The right code of the hole beyond the plain versions."""
TOP_K_MISTAKES = {
    "no error feedback": (
        1,
        "residual[...] = gradient.reshape(-1)",
        "what is not sent stays in the residual, and the "
        "next gradient is added to it: section 1 (holes 1, 4)",
    ),
    "sent twice": (
        4,
        "pass",
        "what was sent is still in the residual: set it to 0 there: section 1 (hole 4)",
    ),
    "one rank's value at each place": (
        5,
        "gradient.reshape(-1)[places] = values",
        "several ranks may send one place, "
        "and x[places] += values keeps one of them: numpy.add.at (hole 5)",
    ),
    "a mean": (
        5,
        "np.add.at(gradient.reshape(-1), places, values / group.size)",
        "losses are divided by targets.size, so gradients are added (hole 5)",
    ),
}
DILOCO_MISTAKES = {
    # both leave each rank with its own training
    "this rank never has the common weights": (
        6,
        "p.data",
        "without a copy (hole 6) the common weights are this rank's own array, so it never moved "
        "from them; and after a meeting every rank continues from them (hole 10)",
    ),
    "meets one step early": (
        7,
        "(step + 1) % every",
        "they meet after step H, 2H, …: section 5 (hole 7)",
    ),
    "no share": (
        8,
        "weights - p.data",
        "the ranks' ways are added up: weigh each by its share of the rows (hole 8)",
    ),
    "equal shares": (
        8,
        "(weights - p.data) / group.size",
        "the ranks have different numbers of rows: weigh by `share` (hole 8)",
    ),
    "the sign": (
        8,
        "share * (p.data - weights)",
        "an outer gradient points back: the common weights minus this rank's (hole 8)",
    ),
    "momentum without the look ahead": (
        9,
        "lr * speed",
        "that is heavy-ball momentum; Nesterov's is gradient + momentum × speed (hole 9)",
    ),
    "no momentum": (
        9,
        "lr * gradient",
        "that is local SGD; DiLoCo's step is gradient + momentum × speed (hole 9)",
    ),
}
"""Name -> (hole, wrong code, advice): how weights that are wrong are recognized."""

NOTHING = "zeros: nothing was added up, or it was set to 0 before it was sent"

Train = Callable[[GPT, Optimizer, Any, Iterable[Batch]], None]


def grade(exercise: ModuleType) -> Iterator[Result]:
    """What travels and what is trained by top-k; then DiLoCo; then the break-even."""

    def top_k(module: Any, density: float = DENSITY) -> Train:
        return lambda *given: module.plain_compressed_ddp(*given, density)

    def diloco(module: Any) -> Train:
        return lambda *given: module.plain_diloco(*given, EVERY)

    answer = sys.modules[__name__]
    yield from _sent(top_k(exercise), top_k(answer))
    for density in (1.0, DENSITY):
        yield _weights(
            f"top-k, density {density:g}", exercise, partial(top_k, density=density), TOP_K_MISTAKES
        )
    yield _meetings(diloco(exercise))
    yield _weights(f"DiLoCo, H={EVERY}", exercise, diloco, DILOCO_MISTAKES)
    for ranks, itemsize in ((2, 4), (4, 4), (8, 8)):
        yield _break_even(exercise, ranks, itemsize)


# -------------------------------------------------------------------------------- what the ranks do


class Watched:
    """A group that notes what its collectives get."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.gathered: list[np.ndarray] = []
        self.summed = 0

    def all_gather(self, x: Any, **options: Any) -> Any:
        """As the group's own."""
        self.gathered.append(np.array(x))
        return self.group.all_gather(x, **options)

    def all_reduce(self, x: Any, **options: Any) -> Any:
        """As the group's own."""
        self.summed += 1
        return self.group.all_reduce(x, **options)


def _train(group: Group, train: Train, alone: bool = False) -> dict[str, Any]:
    """A rank's weights, and what it sent; `alone`: up to an error, if there is one."""
    model = new_model(CONFIG)
    watched = Watched(group)
    batches = [random_batch(CONFIG, step, SEQUENCES) for step in range(STEPS)]
    error = None
    try:
        train(model, SGD(list(model.parameters()), lr=0.5), watched, batches)
    except (ArithmeticError, IndexError, TypeError, ValueError) as raised:
        if not alone:
            raise
        error = raised
    return {
        "error": error,
        "weights": weights(model),
        "gathered": watched.gathered,
        "summed": watched.summed,
        "parameters": len(list(model.parameters())),
    }


def _ranks(train: Train, size: int = 3) -> list[dict[str, Any]]:
    return run(_train, train, size == 1, size=size, limit=LIMIT)


# -------------------------------------------------------------------------------------------- top-k


def _sent(student: Train, answer: Train) -> Iterator[Result]:
    """Places and values of the first step, parameter by parameter, on one rank."""
    target = _ranks(answer, 1)[0]
    found = _ranks(student, 1)[0]
    first = slice(0, 2 * target["parameters"])
    pairs = list(zip(target["gathered"][first], found["gathered"][first], strict=False))
    if found["error"] is not None and all(np.array_equal(a, b) for a, b in pairs):
        raise found["error"]
    nothing = not any(values.any() for _, values in pairs[1::2])
    # an error came after the places that were sent, if these are right
    whole = len(pairs[::2]) if found["error"] is not None else target["parameters"]
    for task, wanted, mistake, advice in (
        (
            "places",
            pairs[::2],
            (lambda target, found: NOTHING) if nothing else _wrong_places,
            "the positions of the k largest |number| of the residual, rising: "
            "section 1 (holes 1, 2)",
        ),
        (
            "values",
            pairs[1::2],
            _wrong_values,
            "what the residual holds at the chosen positions: section 1 (holes 1, 3)",
        ),
    ):
        right = sum(np.array_equal(a, b) for a, b in wanted)
        said = next((mistake(a, b) for a, b in wanted if not np.array_equal(a, b)), "")
        yield Result(
            f"{task} that are sent in the first step",
            right == (whole if task == "places" else target["parameters"]),
            f"right for {target['parameters']} parameters",
            f"right for {right}",
            said,
            advice,
        )


def _wrong_places(target: np.ndarray, found: np.ndarray) -> str:
    if len(found) != len(target):
        return f"{len(found)} places where k is {len(target)}"
    return "not in rising order" if np.array_equal(np.sort(found), target) else "not the largest"


def _wrong_values(target: np.ndarray, found: np.ndarray) -> str:
    if found.shape != target.shape:
        return f"values of shape {found.shape} where {target.shape} were chosen"
    if not found.any():
        return NOTHING
    return (
        "sizes without their signs"
        if np.array_equal(found, np.abs(target))
        else "other values than the residual's"
    )


# ------------------------------------------------------------------------------------------- DiLoCo


def _meetings(student: Train) -> Result:
    """How often ranks met."""
    found = _ranks(student)[0]
    all_steps = STEPS * found["parameters"]
    target = STEPS // EVERY * found["parameters"]
    return expect(
        f"all-reduces in {STEPS} steps, H={EVERY}",
        target,
        found["summed"],
        "the ranks meet at other steps",
        "they meet after step H, 2H, …: section 5 (hole 7)",
        known={
            "the ranks meet after every step": all_steps,
            "the ranks never meet": 0,
            "the ranks meet when they should not": all_steps - target,
        },
    )


# ---------------------------------------------------------------------------- beside the answer key


def _weights(
    task: str,
    exercise: ModuleType,
    training: Callable[[Any], Train],
    mistakes: dict[str, tuple[int, str, str]],
) -> Result:
    """Alike on all ranks, and those of the plain version."""
    ranks = [rank["weights"] for rank in _ranks(training(exercise))]

    def trained(module: Any) -> Any:
        return _ranks(training(module))[0]["weights"]

    return parity(
        f"{task}: weights of 3 ranks after {STEPS} steps",
        trained(sys.modules[__name__]),
        ranks,
        "other weights",
        f"line by line beside the story (holes {'6 to 10' if 'DiLoCo' in task else '1 to 5'})",
        known={
            mistake: Mistake(partial(_with_mistake, trained, hole, code), advice)
            for mistake, (hole, code, advice) in mistakes.items()
        },
        signs={
            "the ranks' weights differ": any(not np.array_equal(mine, ranks[0]) for mine in ranks)
        },
        wanted="those of the plain version",
    )


def _with_mistake(trained: Callable[[Any], np.ndarray], hole: int, code: str) -> np.ndarray:
    return trained(_filled(hole, code))


def _filled(hole: int, code: str) -> ModuleType:
    """The exercise with right code in its holes, but in one."""
    template = ast.parse(EXERCISE.read_text(encoding="utf-8"))
    key = answer_key(sys.modules[__name__], template) | holes.right_code(template, (), {hole: code})
    return run_module(
        holes.corrected(template, holes.answers_of(template, template, key)), EXERCISE, "21"
    )


def _break_even(exercise: ModuleType, ranks: int, itemsize: int) -> Result:
    target = 2 * itemsize / (ranks * (4 + itemsize))
    return expect(
        f"density at which top-k gains nothing, {ranks} ranks, {itemsize} bytes a number",
        target,
        exercise.largest_density(ranks, itemsize),
        "another density",
        "set both numbers of bytes equal: section 2 (hole 11)",
        known={
            "a position has 4 bytes, whatever a number has": 1 / ranks,
            "an all-gather grows with the ranks": itemsize / (4 + itemsize),
            "the positions travel too": 2 / ranks,
        },
        same=partial(isclose, rel_tol=0, abs_tol=1e-12),
        show="{:.4f}".format,
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "21", *sys.argv[1:]]))
