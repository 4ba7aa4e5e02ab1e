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
from minidist.lessons.lab import difference, new_model, random_batch, weights
from minidist.nn import GPT, GPTConfig
from minidist.optim import SGD, Optimizer
from minidist.parallel.compress.compress import plain_compressed_ddp
from minidist.parallel.compress.local_steps import plain_diloco
from minidist.parallel.step.step import Batch

EXERCISE = Path(__file__).with_name("exercise.py")
CONFIG = GPTConfig(vocabulary=61, context=4, layers=1, width=8, heads=2, dtype="float64")
SEQUENCES = 7  # rows of every batch: three ranks have 3, 2 and 2
STEPS = 4
EVERY = 2
DENSITY = 0.1

CUT_FROM = (plain_compressed_ddp, plain_diloco)
ANSWERS = {11: "2 * itemsize / (ranks * (4 + itemsize))"}
"""The right code of the hole beyond the plain versions."""
TOP_K_MISTAKES = {
    "no error feedback": (
        1,
        "residual[...] = gradient.reshape(-1)",
        "what is not sent stays in the residual, and the "
        "next gradient is added to it: section 1, steps 1 and 4 (holes 1, 4). Add in place, by +=: "
        "`residual = residual + ...` makes a new array, and the next step does not find it",
    ),
    "a mean": (
        5,
        "np.add.at(gradient.reshape(-1), places, values / group.size)",
        "losses are divided by targets.size, so gradients are added: section 1 (holes 1, 3, 5)",
    ),
    "this gradient's number is sent, without what the residual had kept": (
        3,
        "gradient.reshape(-1)[chosen]",
        "the residual holds both: section 1, step 3 (hole 3)",
    ),
    "sent twice": (
        4,
        "pass",
        "what was sent is still in the residual: set it to 0 there: section 1, step 4 (hole 4)",
    ),
    "places are cleared that only other ranks have sent": (
        4,
        "residual[places] = 0",
        "this rank's number at another rank's place was not sent: clear only your own `chosen` "
        "places: section 1, step 4 (hole 4)",
    ),
    "what was not sent is cleared, and what was sent is kept": (
        4,
        "residual[np.delete(np.arange(residual.size), chosen)] = 0",
        "it is the other way round: section 1, step 4 (hole 4)",
    ),
    "the first k numbers are cleared, not the k that were sent": (
        4,
        "residual[:k] = 0",
        "clear the `chosen` places: section 1, step 4 (hole 4)",
    ),
    "only this rank's own values are applied": (
        5,
        "np.add.at(gradient.reshape(-1), chosen, values[group.rank * k : (group.rank + 1) * k])",
        "`places` has the positions of all ranks, `values` their numbers: add all of them: "
        "section 1, step 5 (hole 5)",
    ),
    "only this step's gradient is taken out, though more was sent": (
        4,
        "residual[chosen] -= gradient.reshape(-1)[chosen]",
        "all that the residual held at these positions was sent: section 1, step 4 (hole 4)",
    ),
    "one rank's value at each place": (
        5,
        "gradient.reshape(-1)[places] = values",
        "several ranks may send one place, "
        "and x[places] += values keeps one of them: numpy.add.at (hole 5)",
    ),
    "nothing of what was gathered is applied": (
        5,
        "pass",
        "the gradient was set to 0: add the gathered values: section 1, step 5 (hole 5)",
    ),
    "the sum is subtracted": (
        5,
        "np.subtract.at(gradient.reshape(-1), places, values)",
        "the optimizer itself goes against the gradient (hole 5)",
    ),
}
DILOCO_MISTAKES = {
    "meets one step early or late": (
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
        "an outer gradient points back, from this rank's weights to the common ones, and the exercise "
        "subtracts the step: section 5, step 3 (holes 8, 9)",
    ),
    "the weights themselves are sent, not their change": (
        8,
        "share * p.data",
        "an outer gradient is a difference from the common weights: section 5, step 3 (hole 8)",
    ),
    "momentum without the look ahead": (
        9,
        "lr * speed",
        "that is heavy-ball momentum; Nesterov's adds the gradient once more: section 5, step 4 "
        "(hole 9)",
    ),
    "no momentum": (
        9,
        "lr * gradient",
        "that is local SGD; DiLoCo's step uses the speed too: section 5, step 4 (hole 9)",
    ),
    "the outer rate is missing": (
        9,
        "gradient + momentum * speed",
        "the whole step is multiplied by lr: section 5, step 4 (hole 9)",
    ),
    "the speed counts in full": (
        9,
        "lr * (gradient + speed)",
        "the new speed is multiplied by the momentum once more: section 5, step 4 (hole 9)",
    ),
    "gradient and speed are exchanged": (
        9,
        "lr * (speed + momentum * gradient)",
        "the momentum multiplies the speed: section 5, step 4 (hole 9)",
    ),
    "the common weights and this rank's are one array": (
        10,
        "p.data = weights",
        "the next steps then move the common weights too: copy the numbers: section 5, step 5 "
        "(hole 10)",
    ),
    "the common weights begin at 0": (
        6,
        "np.zeros_like(p.data)",
        "all ranks begin with the same weights, and these are the first common weights: section 5, "
        "step 1 (hole 6)",
    ),
}
"""Name -> (hole, wrong code, advice): how weights that are wrong are recognized."""

NOTHING = "zeros: nothing was added up, or it was set to 0 before it was sent"

Train = Callable[[GPT, Optimizer, Any, Iterable[Batch]], None]
TOP_K = ("plain_compressed_ddp", DENSITY)
DILOCO = ("plain_diloco", EVERY)
Kind = tuple[str, float]  # the function's name, and its last argument


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check what top-k sends and trains, then DiLoCo, then the break-even."""
    yield from _sent(exercise)
    yield _weights(f"top-k, density {DENSITY:g}", exercise, TOP_K, TOP_K_MISTAKES)
    yield _meetings(exercise)
    yield _weights(f"DiLoCo, H={EVERY}", exercise, DILOCO, DILOCO_MISTAKES)
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
        self.summed = list[float]()

    def all_gather(self, x: Any, **options: Any) -> Any:
        """Note x, then do what the group's method does."""
        self.gathered.append(np.array(x))
        return self.group.all_gather(x, **options)

    def all_reduce(self, x: Any, **options: Any) -> Any:
        """Note the largest |x|, then do what the group's method does."""
        self.summed.append(float(np.abs(x).max()))
        return self.group.all_reduce(x, **options)


def _train(group: Group, train: Train, alone: bool = False) -> dict[str, Any]:
    """Train on one rank; return the weights, and what the rank sent.

    With `alone`, an error ends the training and is returned with the rest.
    """
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


_KNOWN: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
"""What was trained already, by the code that trained it. Each hole is graded with right code in the
others, so most functions are met again unchanged."""


def _ranks(module: Any, kind: Kind, size: int = 3) -> list[dict[str, Any]]:
    """Return what each of `size` ranks has after training by the module's function."""
    name, last = kind
    function = getattr(module, name)
    key = (getattr(function, "__code__", function), last, size)
    if key not in _KNOWN:
        train: Train = lambda *given: function(*given, last)  # noqa: E731
        _KNOWN[key] = run(_train, train, size == 1, size=size, limit=LIMIT)
    return _KNOWN[key]


# -------------------------------------------------------------------------------------------- top-k


def _sent(exercise: ModuleType) -> Iterator[Result]:
    """Check the places and values of the first step on one rank, parameter by parameter."""
    target = _ranks(sys.modules[__name__], TOP_K, 1)[0]
    found = _ranks(exercise, TOP_K, 1)[0]
    first = slice(0, 2 * target["parameters"])
    pairs = list(zip(target["gathered"][first], found["gathered"][first], strict=False))
    if found["error"] is not None and all(np.array_equal(a, b) for a, b in pairs):
        raise found["error"]
    nothing = not any(values.any() for _, values in pairs[1::2])
    positions = all(places.dtype.kind in "iu" for _, places in pairs[::2])
    # After an error only the places that were sent before it can be compared.
    whole = len(pairs[::2]) if found["error"] is not None else target["parameters"]
    for task, wanted, mistake, advice in (
        (
            "places",
            pairs[::2],
            (lambda target, found: NOTHING) if nothing and positions else _wrong_places,
            "the positions of the k largest |number| of the residual, rising: "
            "section 1, step 2 (holes 1, 2)",
        ),
        (
            "values",
            pairs[1::2],
            _wrong_values,
            "what the residual holds at the chosen positions, after this gradient was added: "
            "section 1, steps 1 and 3 (holes 1, 3)",
        ),
    ):
        wrong = [number for number, (a, b) in enumerate(wanted) if not np.array_equal(a, b)]
        number = wrong[0] if wrong else 0
        enough = len(wanted) >= (whole if task == "places" else target["parameters"])
        yield Result(
            f"{task} that are sent in the first step",
            enough and not wrong,
            f"parameter {number}: {_short(wanted[number][0])}" if wrong else "each parameter's",
            f"parameter {number}: {_short(wanted[number][1])}" if wrong else "each parameter's",
            mistake(*wanted[number]) if wrong else "",
            advice,
        )


def _short(sent: np.ndarray) -> str:
    """Return the first numbers of what was sent, as text for a student."""
    flat = np.ravel(sent)
    return f"{', '.join(f'{number:.4g}' for number in flat[:4])}{', …' * (flat.size > 4)}"


def _wrong_places(target: np.ndarray, found: np.ndarray) -> str:
    if found.dtype.kind not in "iu":
        return "numbers where positions are wanted"
    if len(found) != len(target):
        return f"{len(found)} places where k is {len(target)}"
    return "not in rising order" if np.array_equal(np.sort(found), target) else "not the largest"


def _wrong_values(target: np.ndarray, found: np.ndarray) -> str:
    if found.shape != target.shape:
        return f"values of shape {found.shape} where {target.shape} were chosen"
    if not found.any():
        return NOTHING
    if np.array_equal(found, -target):
        return "the other sign: the gradient is added to the residual, not subtracted"
    return (
        "sizes without their signs"
        if np.array_equal(np.abs(found), np.abs(target))
        else "other values than the residual's"
    )


# ------------------------------------------------------------------------------------------- DiLoCo


def _meetings(exercise: ModuleType) -> Result:
    """Check how often the ranks met."""
    found = _ranks(exercise, DILOCO)[0]
    times = len(found["summed"]) / found["parameters"]
    return expect(
        f"meetings in {STEPS} steps, H={EVERY}",
        STEPS // EVERY,
        times,
        "the ranks meet at other steps",
        "they meet after step H, 2H, …: section 5 (hole 7)",
        known={
            "the ranks meet after every step": STEPS,
            "the ranks never meet": 0,
        },
        show="{:g}".format,
    )


# ---------------------------------------------------------------------- compared with the answer key


def _weights(
    task: str, exercise: ModuleType, kind: Kind, mistakes: dict[str, tuple[int, str, str]]
) -> Result:
    """Check that the weights are equal on all ranks, and equal to the plain version's."""
    trained = _ranks(exercise, kind)
    ranks = [rank["weights"] for rank in trained]

    def of(module: Any) -> np.ndarray:
        found: np.ndarray = _ranks(module, kind)[0]["weights"]
        return found

    def alone() -> bool:
        return difference(ranks[0], _with_mistake(of, 10, "pass")) < 1e-9

    diloco = kind == DILOCO
    signs: dict[str, Any] = {
        "this rank is always at the common weights, so nothing is exchanged": Mistake(
            diloco and not any(trained[0]["summed"]),
            "without a copy the common weights are this rank's own array, so it never moved from "
            "them: section 5, step 1 (hole 6)",
        ),
        "after a meeting each rank continues from its own weights": Mistake(
            lambda: diloco and alone(),
            "after a meeting every rank continues from the common weights: section 5, step 5 "
            "(hole 10)",
        ),
        "the ranks' weights differ": any(not np.array_equal(mine, ranks[0]) for mine in ranks),
    }
    return parity(
        f"{task}: weights of 3 ranks after {STEPS} steps",
        of(sys.modules[__name__]),
        ranks,
        "other weights",
        f"compare your lines with the steps of section {'5 (holes 6 to 10)' if diloco else '1 (holes 1 to 5)'}",
        known={
            mistake: Mistake(partial(_with_mistake, of, hole, code), advice)
            for mistake, (hole, code, advice) in mistakes.items()
        },
        signs=signs,
        wanted="those of the plain version",
    )


def _with_mistake(trained: Callable[[Any], np.ndarray], hole: int, code: str) -> np.ndarray:
    return trained(_filled(hole, code))


def _filled(hole: int, code: str) -> ModuleType:
    """Return the exercise with right code in all holes but `hole`, which gets `code`."""
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
            "the ring sends each number twice: once to be added, once to return": itemsize
            / (ranks * (4 + itemsize)),
            "(P-1) stands on both sides": 2 / (ranks - 1),
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
