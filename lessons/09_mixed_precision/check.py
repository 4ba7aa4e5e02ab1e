"""Grades exercise 09: the scaler's parts on planted gradients, then whole steps on two ranks beside the library."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import Result, expect
from minidist.launch import run
from minidist.optim import SGD, clip_scale
from minidist.parallel.precision.mixed_precision import LossScale

LR, CLIP, SCALE, LIMIT = 0.0625, 0.5, 2.0 ** 12, 60.0

ANSWERS = {
    1: "gradient.astype(np.float32) / np.float32(self.scale)",
    2: "not all(np.isfinite(gradient).all() for gradient in gradients)",
    3: "group.all_gather(np.array([float(mine)])).any()",
    4: """
if overflow:
    self.scale, self.good = self.scale / 2, 0
else:
    self.good += 1
    if self.good == self.patience:
        self.scale, self.good = self.scale * 2, 0
""",
    5: "overflow",
    6: "true",
    7: """
master -= lr * factor * gradient
weight[...] = master
""",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Unscaling, finding overflows, the scale's way, whole steps."""
    yield _unscaled(exercise)
    yield from _overflowed(exercise)
    yield _scale(exercise)
    yield from _steps(exercise)


def _unscaled(exercise: ModuleType) -> Result:
    """A gradient that float16 holds only while it is scaled."""
    gradient = np.array([1.0, 2.0 ** -10, 3.0], np.float16)
    found = np.asarray(exercise.Scaler(2.0 ** 20, 10).unscaled(gradient))
    target = gradient.astype(np.float32) / np.float32(2.0 ** 20)
    mistake = "another value"
    if found.dtype != np.float32:
        mistake = "not float32"
    elif np.array_equal(found, (gradient / np.float16(2.0 ** 10) / np.float16(2.0 ** 10)).astype(np.float32)) or (
            np.count_nonzero(found) < 3):
        mistake = "divided in float16, where it becomes zero"
    elif np.array_equal(found, gradient.astype(np.float32)):
        mistake = "still scaled"
    right = found.dtype == np.float32 and np.array_equal(found, target)
    return Result("unscale 2^-10 at a scale of 2^20", right, f"{target[1]:.2e} float32",
                  f"{found[1]:.2e} {found.dtype}", mistake, "first to float32, then divide: section 3 (hole 1)")


def _overflowed(exercise: ModuleType) -> Iterator[Result]:
    """Infinities and NaN in any place, on either rank or none."""
    fine = [np.ones(3, np.float16), np.full((2, 2), -2, np.float16)]

    def ask(group: Group, rank: int, value: float) -> tuple[bool, Any]:
        gradients = [gradient.copy() for gradient in fine]
        if group.rank == rank:
            gradients[-1][0, 1] = value
        answer = exercise.Scaler(1.0, 1).overflowed(gradients, group)
        return bool(answer), answer

    for rank, value, name in ((2, 0.0, "no rank"), (0, np.inf, "rank 0, inf"), (0, -np.inf, "rank 0, -inf"),
                              (0, np.nan, "rank 0, NaN"), (1, np.inf, "rank 1, inf"), (1, np.nan, "rank 1, NaN")):
        answers = [answer for answer, _ in run(ask, rank, value, size=2, limit=LIMIT)]
        target = [rank < 2, rank < 2]
        mistake, hole = "it was not seen", 2
        if answers == [rank == 0, rank == 1] and rank < 2:
            mistake, hole = "only the rank that overflowed knows: the other goes on alone", 3
        elif not target[0]:
            mistake = "an overflow where there is none"
        yield expect(f"overflow on: {name}", target, answers, mistake,
                     f"not finite covers all three; and every rank must hear of it: sections 4, 6 (hole {hole})")


def _scale(exercise: ModuleType) -> Result:
    """Beside the library's LossScale."""
    ours, theirs = LossScale(SCALE, patience=3), exercise.Scaler(SCALE, 3)
    target, found = [], []
    for overflow in (False, False, True, False, False, False, False, True, False, False, False):
        ours.grow_or_halve(overflow=overflow)
        theirs.update(overflow)
        target.append(int(np.log2(ours.value)))
        found.append(int(np.log2(theirs.scale)) if theirs.scale > 0 else 0)
    mistake = "another way"
    if found[2] > target[2]:
        mistake = "no halving at an overflow"
    elif found[3] > target[3]:
        mistake = "good steps before the overflow still count"
    elif found[6] > target[6]:
        mistake = "it doubles again at once: good steps are not counted anew"
    return Result("the scale's exponent over 11 steps", found == target, str(target), str(found), mistake,
                  "good steps in a row: back to 0 after an overflow and after a doubling: section 4 (hole 4)")


def _steps(exercise: ModuleType) -> Iterator[Result]:
    """Three steps on two ranks, each with weights of its own; in the second rank 1 overflows."""
    ours = run(_train, None, size=2, limit=LIMIT)
    theirs = run(_train, exercise, size=2, limit=LIMIT)
    for step, what in enumerate(("an update", "rank 1 overflows", "an update after it")):
        for rank in range(2):
            target, found = ours[rank][step], theirs[rank][step]
            task = f"step {step}, {what}, rank {rank}"
            right = np.allclose(found["masters"], target["masters"], rtol=1e-6, atol=0)
            yield Result(f"{task}: masters", right, _show(target["masters"]), _show(found["masters"]),
                         _name_step(target, found, ours[rank][step - 1] if step else None),
                         "sections 4, 7 (holes 5, 6, 7)")
            rounding = found["masters"].astype(np.float16)
            yield Result(f"{task}: weights", np.array_equal(found["weights"], rounding), _show(rounding),
                         _show(found["weights"]), "not the rounding of the masters",
                         "weight[...] = master, after the master has moved: section 2 (hole 7)")
            yield expect(f"{task}: scale", target["scale"], found["scale"], "the scaler was not told",
                         "self.update once a step, skipped or not: section 4 (hole 5)")


def _name_step(target: dict[str, Any], found: dict[str, Any], before: dict[str, Any] | None) -> str:
    """What is wrong with the masters."""
    if not np.isfinite(found["masters"]).all():
        return "updated by an infinite gradient"
    start = _start(0)[0] if before is None else before["masters"]
    moved, right = found["masters"] - start, target["masters"] - start
    if not moved.any() and right.any():
        return "the masters did not move"
    if moved.any() and not right.any():
        return "a skipped step must leave everything as it was"
    if np.linalg.norm(moved) < 0.01 * np.linalg.norm(right):
        return "clipped while still scaled: the step is the scale times too short"
    if np.allclose(moved, -right, rtol=1e-3):
        return "up the hill instead of down"
    if np.linalg.norm(moved) > 1.05 * np.linalg.norm(right):
        return "not clipped, or not unscaled"
    return "another update"


def _start(rank: int) -> list[np.ndarray]:
    """A rank's masters."""
    return [np.random.default_rng(rank).normal(size=6).astype(np.float16).astype(np.float32)]


def _train(group: Group, exercise: ModuleType | None) -> list[dict[str, Any]]:
    """What a rank holds after each step, by the exercise, or (None) by the library's pieces."""
    masters = _start(0)                     # equal starts, so that the check can tell ranks' mistakes apart
    weights = [master.astype(np.float16) for master in masters]
    scaler = exercise.Scaler(SCALE, 2) if exercise else LossScale(SCALE, patience=2)
    seen = []
    for step in range(3):
        draw = np.random.default_rng(10 * step + group.rank)
        gradients = [draw.normal(size=6).astype(np.float16) * np.float16(SCALE)]
        if step == 1 and group.rank == 1:
            gradients[0][3] = np.inf
        if exercise:
            with np.errstate(all="ignore"):
                exercise.step(masters, weights, gradients, scaler, group, LR, CLIP)
        else:
            _library_step(masters, weights, gradients, scaler, group)
        seen.append({"masters": masters[0].copy(), "weights": weights[0].copy(),
                     "scale": float(getattr(scaler, "scale" if exercise else "value"))})
    return seen


class _Held:
    """One array under optimization."""

    def __init__(self, data: np.ndarray, grad: np.ndarray) -> None:
        self.data, self.grad, self.name = data, grad, "w"


def _library_step(masters: list[np.ndarray], weights: list[np.ndarray], gradients: list[np.ndarray], scale: LossScale,
                  group: Group) -> None:
    """The answer key: LossScale, clip_scale and SGD."""
    mine = sum(float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in gradients)
    norm = float(np.sum(group.all_gather(np.array([mine])))) ** 0.5 / scale.value
    value = scale.value
    scale.grow_or_halve(overflow=not np.isfinite(norm))
    if np.isfinite(norm):
        SGD([_Held(masters[0], gradients[0])], LR).step(scale=clip_scale(norm, CLIP) / value)
        weights[0][...] = masters[0]


def _show(values: np.ndarray) -> str:
    """The first numbers."""
    return " ".join(f"{float(value):.5f}" for value in values[:3])


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "09", *sys.argv[1:]]))
