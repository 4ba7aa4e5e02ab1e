"""Grades exercise 09: the scaler's parts on planted gradients, then whole steps on two ranks beside
the library."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.grading import Mistake, Result, Signs, expect, judge
from minidist.launch import run
from minidist.lessons.lab import new_model
from minidist.nn import GPTConfig
from minidist.optim import SGD, clip_scale
from minidist.parallel.precision.mixed_precision import LossScale, plain_mixed_precision

CONFIG = GPTConfig(vocabulary=11, context=4, layers=1, width=8, heads=2, dtype="float16")
STEPS = 3
CLIP = 0.5
SCALE = 2.0**12
LIMIT = 60.0

CUT_FROM = (plain_mixed_precision,)
ANSWERS = {
    6: "not all(np.isfinite(gradient).all() for gradient in gradients)",
    7: "group.all_gather(np.array([float(mine)])).any()",
    8: """
        if overflow:
            self.scale, self.good = self.scale / 2, 0
        else:
            self.good += 1
            if self.good == self.patience:
                self.scale, self.good = self.scale * 2, 0
       """,
    9: "length(gradients, group) / scale",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Whole steps on one process, finding overflows, the scale's way, clipping."""
    yield from _plain(exercise)
    yield from _few_numbers(exercise)
    yield from _overflowed(exercise)
    yield _scale(exercise)
    small = exercise.Scaler(1.0, 3)
    small.update(True)
    yield expect(
        "the scale after an overflow, from 1",
        0.5,
        small.scale,
        "another way",
        "half of 1 is 0.5: section 4 (hole 8)",
        known={"rounded down to zero": 0.0},
    )
    yield from _clipped(exercise)


def _trained(loop: Any, scale: float) -> tuple[np.ndarray, np.ndarray, str]:
    """(the masters, the weights, the weights' dtype) after STEPS steps of SGD."""
    model = new_model(CONFIG, 3)
    masters = [Parameter(p.data.astype("float32"), name=p.name) for p in model.parameters()]
    batches = []
    for step in range(STEPS):
        ids = np.random.default_rng(step).integers(0, CONFIG.vocabulary, (3, CONFIG.context + 1))
        batches.append((ids[:, :-1], ids[:, 1:]))
    with np.errstate(all="ignore"):
        loop(model, masters, SGD(masters, 0.5), batches, scale)
    return (
        np.concatenate([np.ravel(p.data) for p in masters]),
        np.concatenate([np.ravel(np.asarray(p.data, "float32")) for p in model.parameters()]),
        str(next(iter(model.parameters())).data.dtype),
    )


def _plain(exercise: ModuleType) -> Iterator[Result]:
    """Masters and weights beside the plain version's, where gradients fit and where they
    overflow."""
    start, drawn, half = _trained(lambda *_: None, SCALE)
    for scale, what in ((SCALE, "gradients that fit"), (2.0**40, "gradients that overflow")):
        (target, rounded, _), (found, weights, dtype) = (
            _trained(loop, scale)
            for loop in (plain_mixed_precision, exercise.plain_mixed_precision)
        )
        right = bool(np.allclose(found, target, rtol=1e-6, atol=0))

        def unscaled(found: np.ndarray = found) -> bool:
            """Return whether there was no scale at all."""
            alone, _, _ = _trained(plain_mixed_precision, 1.0)
            return bool(np.allclose(found, alone, rtol=1e-6, atol=0))

        yield judge(
            f"{what}: masters after {STEPS} steps",
            right,
            *_apart(target, found, "master"),
            "another update",
            "what is multiplied, converted, divided, and in which order? sections 2 and 3 (holes 1 "
            "to 4)",
            signs={
                f"the model computes with {dtype}": Mistake(
                    dtype != half, f"its weights were {half}, and must stay so: section 2 (hole 1)"
                ),
                "backward began with 1: no loss scale": Mistake(
                    unscaled, "small gradients become zero on the way: section 3 (holes 2, 4)"
                ),
                **_signs(found - start, target - start, stale=np.array_equal(weights, drawn)),
            },
        )
        yield Result(
            f"{what}: weights",
            np.array_equal(weights, rounded),
            *_apart(rounded, weights, "weight"),
            "not this step's masters, rounded",
            "the model must compute with the masters of this step: section 2 (hole 1)",
        )


def _apart(target: np.ndarray, found: np.ndarray, name: str) -> tuple[str, str]:
    """Return the two numbers that differ most, with as many digits as it takes."""
    if found.shape != target.shape:
        return f"{target.size} numbers", f"{found.size} numbers"
    with np.errstate(invalid="ignore"):
        gap = np.abs(found - target)
    place = int(np.argmax(np.where(np.isnan(gap), np.inf, gap)))
    return f"{name} {place} is {target[place]:.9g}", f"{name} {place} is {found[place]:.9g}"


def _signs(moved: np.ndarray, right: np.ndarray, *, stale: bool) -> Signs:
    """Return the mistakes that the change of the masters can show."""
    far = float(np.linalg.norm(moved))
    due = float(np.linalg.norm(right))
    turned = float(moved @ right) < 0
    return {
        "updated by an infinite gradient": Mistake(
            not np.isfinite(moved).all(),
            "a step with an infinity or NaN is skipped: section 4 (hole 5)",
        ),
        "the masters did not move": Mistake(
            due and not far,
            "every step was skipped, or every gradient was 0: what is too large, or taken for "
            "infinite? sections 3 and 4 (holes 1 to 5)",
        ),
        "the masters moved the wrong way": Mistake(
            turned, "a sign is lost or turned: section 3 (holes 1 to 4)"
        ),
        "divided by a scale that was not there, or divided twice": Mistake(
            far < 0.01 * due,
            f"the masters moved {far / due if due else 0:.1g} times as far as they should, and the "
            f"scale is {SCALE:.0f}: where does it come in, where does it go out? section 3 (holes "
            "1 to 4)",
        ),
        "still scaled": Mistake(
            far > 100 * due,
            f"the masters moved {far / due if due else 0:.1g} times as far as they should, and the "
            f"scale is {SCALE:.0f}: section 3 (holes 2 to 4)",
        ),
        "not this step's masters, rounded": Mistake(
            stale, "the model must compute with the masters of this step: section 2 (hole 1)"
        ),
        "nearly right: small numbers are lost, or rounded on the way": Mistake(
            np.linalg.norm(moved - right) < 0.01 * due,
            "in which order are they widened and divided? section 3 (holes 1 to 4)",
        ),
    }


class _Half(np.ndarray):
    """A float16 gradient that notes whether it is divided before it is widened."""

    divided = False

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """As an array's own."""
        halves = [one for one in inputs if isinstance(one, _Half) and one.dtype == np.float16]
        if ufunc is np.true_divide and halves:
            _Half.divided = True
        bare = [np.asarray(one) if isinstance(one, _Half) else one for one in inputs]
        options = {
            name: tuple(np.asarray(one) for one in value) if name == "out" else value
            for name, value in options.items()
        }
        found = getattr(ufunc, method)(*bare, **options)
        # what is still of two bytes is still watched
        return found.view(_Half) if isinstance(found, np.ndarray) else found


class _Given:
    """A model of three weights whose true gradients are given; backward leaves them in float16,
    scaled."""

    def __init__(self, true: list[list[float]]) -> None:
        self.true = [np.array(gradient) for gradient in true]
        self.weights = [Parameter(np.zeros(3, np.float16), name=f"w{i}") for i in range(3)]

    def parameters(self) -> list[Parameter]:
        """The weights."""
        return self.weights

    def loss(self, inputs: Any, targets: Any, divisor: int) -> "_Given":
        """Something that has a backward."""
        return self

    def backward(self, dy: Any) -> None:
        """Leave the gradients, times `dy`."""
        for p, gradient in zip(self.weights, self.true, strict=True):
            p.grad = (gradient * float(dy)).astype(np.float16).view(_Half)

    def item(self) -> float:
        """No loss."""
        return 0.0


def _few_numbers(exercise: ModuleType) -> Iterator[Result]:
    """Gradients that float16 holds only while they are scaled, and a single number that is not
    finite."""
    fits = [1e-4, -2e-4, 3e-4]
    tiny = [1e-7, -2e-7, 3e-8]
    cases = {
        "gradients below 1e-6": ([tiny, fits, tiny], True),
        "an infinity in the first gradient": ([[1e-4, np.inf, 1e-4], fits, fits], False),
        "an infinity in the second gradient": ([fits, [1e-4, 1e-4, -np.inf], fits], False),
        "a NaN in the last gradient": ([fits, fits, [np.nan, 1e-4, 1e-4]], False),
    }
    ids = np.zeros((1, 2), int)
    for name, (true, moves) in cases.items():
        model = _Given(true)
        _Half.divided = False
        masters = [Parameter(np.zeros(3, np.float32), name=p.name) for p in model.weights]
        with np.errstate(all="ignore"):
            exercise.plain_mixed_precision(model, masters, SGD(masters, 1.0), [(ids, ids)], SCALE)
        found = np.concatenate([p.data for p in masters])
        target = -np.concatenate(model.true) if moves else np.zeros(9)
        right = bool(np.allclose(found, target, rtol=2e-3, atol=0))
        if moves:
            mistake = "small numbers are lost"
            advice = "in which order are they widened and divided? section 3 (holes 3, 4)"
        else:
            mistake = "updated by an infinite gradient"
            advice = "one number of one gradient is enough to skip the step: section 4 (hole 5)"
        yield Result(
            f"{name}: masters after a step", right, _few(target), _few(found), mistake, advice
        )
        if moves:
            yield expect(
                "what is divided",
                "float32",
                "float16" if _Half.divided else "float32",
                "divided while it has two bytes",
                "NumPy widens it here because the scale is a float32; divided by a Python number, or "
                "on another library, small numbers would be lost: section 3 (holes 3, 4)",
            )
            yield expect(
                "gradients of the masters",
                "float32",
                str(np.asarray(masters[0].grad).dtype),
                "not the masters' own dtype",
                "masters are float32, and so are the gradients that update them: section 2 (holes "
                "3, 4)",
            )


def _few(values: np.ndarray) -> str:
    return " ".join(f"{float(value):.1e}" for value in values[:3])


def _overflowed(exercise: ModuleType) -> Iterator[Result]:
    """Infinities and NaN in any place, on either rank or none."""
    fine = [np.ones(3, np.float16), np.full((2, 2), -2, np.float16), np.ones(4, np.float16)]

    def ask(group: Group, rank: int, value: float, place: int) -> tuple[bool, Any]:
        gradients = [gradient.copy() for gradient in fine]
        if group.rank == rank:
            gradients[place].flat[1] = value
        answer = exercise.Scaler(1.0, 1).overflowed(gradients, group)
        return bool(answer), answer

    cases = (
        (2, 0.0, 0, "no rank"),
        (0, np.inf, 0, "rank 0, inf"),
        (0, -np.inf, 1, "rank 0, -inf"),
        (0, np.nan, 2, "rank 0, NaN"),
        (1, np.inf, 1, "rank 1, inf"),
        (1, np.nan, 0, "rank 1, NaN"),
    )
    for rank, value, place, name in cases:
        answers = [answer for answer, _ in run(ask, rank, value, place, size=2, limit=LIMIT)]
        target = [rank < 2, rank < 2]
        where = "none" if rank == 2 else ["the first", "the second", "the third"][place]
        seen = (
            f"which values are not finite, and in which gradients? Here {where} has one: section 4 "
            "(hole 6)"
        )
        yield expect(
            f"overflow on: {name}",
            target,
            answers,
            "no rank says so" if target[0] else "an overflow where there is none",
            "what does a rank see of its own gradients, and what do the ranks make of each other's "
            "answers? sections 4 and 6 (holes 6, 7)",
            known={
                "only the rank that overflowed knows: the other continues without it": Mistake(
                    [rank == 0, rank == 1],
                    "both ranks must get the same answer: section 6 (hole 7)",
                )
            },
            signs={
                "it was not seen": Mistake(
                    target[0] and _alone(exercise, fine, value, place) is False, seen
                ),
            },
        )


def _alone(exercise: ModuleType, fine: list[np.ndarray], value: float, place: int) -> bool:
    """Return what one rank alone says of gradients with one such value."""

    def ask(group: Group) -> bool:
        gradients = [gradient.copy() for gradient in fine]
        gradients[place].flat[1] = value
        return bool(exercise.Scaler(1.0, 1).overflowed(gradients, group))

    return run(ask, size=1, limit=LIMIT)[0]


def _scale(exercise: ModuleType) -> Result:
    """Compare the scale with the library's LossScale, step by step."""
    ours = LossScale(SCALE, patience=3)
    theirs = exercise.Scaler(SCALE, 3)
    target = []
    found = []
    overflows = [False] * 15
    overflows[2] = True
    overflows[7] = True
    for overflow in overflows:
        ours.grow_or_halve(overflow=overflow)
        theirs.update(overflow)
        target.append(int(np.log2(ours.value)))
        found.append(int(np.log2(theirs.scale)) if theirs.scale > 0 else 0)
    return expect(
        "the scale's exponent over 15 steps",
        target,
        found,
        "another way",
        "overflows are in steps 2 and 7 (from 0), patience is 3: follow the count of good steps: "
        "section 4 (hole 8)",
        signs={
            "no halving at an overflow": found[2] > target[2],
            "more than halved at an overflow": found[2] < target[2],
            "good steps before the overflow still count": found[3] > target[3],
            "the skipped step counts as a good one": found[4] > target[4],
            "more than doubled after 3 good steps": found[5] > target[5],
            "no doubling after 3 good steps": max(found[5:7]) < target[5],
            "doubled only after more than 3 good steps": found[5] < target[5],
            "good steps are not counted anew after a doubling": found[6] > target[6]
            or found[13] < target[13],
        },
    )


def _clipped(exercise: ModuleType) -> Iterator[Result]:
    """Compare the factor on two ranks with the library's, for a long and for a short gradient."""
    for clip, what in ((CLIP, "long"), (100.0, "short")):

        def factors(group: Group, clip: float = clip) -> dict[str, float]:
            """Return the factor of the student, of the library, and of four mistakes."""
            draw = np.random.default_rng(group.rank)
            gradients = [draw.normal(size=6).astype(np.float16) * np.float16(SCALE)]
            squares = float(np.sum(np.square(gradients[0], dtype=np.float64)))
            norm = float(np.sum(group.all_gather(np.array([squares])))) ** 0.5
            lengths = {
                "right": norm / SCALE,
                "scaled": norm,
                "own": squares**0.5 / SCALE,
                "squared": (norm / SCALE) ** 2,
                "twice": norm * SCALE,
            }
            mine = exercise.clip_factor(gradients, SCALE, group, clip)
            return {
                "mine": float(mine),
                **{name: clip_scale(length, clip) for name, length in lengths.items()},
            }

        found = run(factors, size=2, limit=LIMIT)[0]
        yield expect(
            f"clip factor of a {what} gradient",
            found["right"],
            found["mine"],
            "another factor",
            "clip bounds the true gradient: section 7 (hole 9)",
            known={
                "clipped while still scaled: the step is the scale times too short": found[
                    "scaled"
                ],
                "this rank's gradients only": found["own"],
                "the square of the norm": found["squared"],
                "scaled once more, not unscaled": found["twice"],
                "not clipped": 1.0,
            },
            same=partial(np.isclose, rtol=1e-4),
            show="{:.5f}".format,
        )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "09", *sys.argv[1:]]))
