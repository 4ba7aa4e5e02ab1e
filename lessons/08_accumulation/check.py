"""Grades exercise 08: ranks as threads take your passes; one process that takes none is the answer
key."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.console import plural
from minidist.errors import GradientError
from minidist.grading import Mistake, Result, expect
from minidist.launch import run
from minidist.lessons.checking import parity
from minidist.lessons.lab import new_model, random_batch, weights
from minidist.nn import GPTConfig
from minidist.optim import SGD
from minidist.parallel.data.accumulation import elements_sent, plain_accumulation
from minidist.parallel.step.step import micro_parts, part_of

CONFIG = GPTConfig(vocabulary=11, context=4, layers=1, width=8, heads=2, dtype="float64")
SEQUENCES = 11  # rows of every batch: three ranks have 4, 4 and 3
# (ranks, passes)
CASES = ((1, 2), (3, 2), (3, 3))
STEPS = 2
LIMIT = 60.0

CUT_FROM = (plain_accumulation,)
ANSWERS = {
    1: "begin + each + (number < more)",
    5: "[2 * psi, 2 * psi, (a + 1) * psi, 3 * a * psi][stage]",
}
"""The right code of the holes beyond the plain version."""
MISTAKES = {
    "mean of means": "a pass with few rows counts as much as one with many: divide every pass by the "
    "same number of tokens: section 2 (holes 2 to 4)",
    "mean of the passes' means": "a pass with few rows counts as much as one with many: divide every "
    "pass by the same number of tokens, and by nothing else: section 2 (holes 2 to 4)",
    "mean of the means of passes and ranks": "a pass with few rows counts as much as one with many: "
    "divide every pass by the same number of tokens, and by nothing else: section 2 (holes 2 to 4)",
    "divided by rows, not tokens": "a row has several tokens, and the loss is a sum over tokens: "
    "section 2 (holes 2 to 4)",
    "this rank's tokens times the ranks": "ranks have different numbers of rows: divide on every rank "
    "by the tokens of the whole batch: section 2 (holes 2 to 4)",
    "this rank's tokens": "ranks have different numbers of rows: divide on every rank by the same "
    "number of tokens: section 2 (holes 2 to 4)",
    "averaged twice": "the gradient is {passes} times too small: what the loss was divided by counts "
    "all passes already: section 2 (holes 2 to 4)",
    "averaged over the ranks too": "the gradient is {size} times too small: what the loss was divided "
    "by counts all ranks already: section 2 (holes 2 to 4)",
    "only the last pass counts": "the gradients of the passes before it are gone: section 1 "
    "(holes 3 and 4)",
    "forgot to zero": "the next batch's gradients are added to this one's: section 8 "
    "(holes 3 and 4)",
    "nothing was learned": "the weights are those before the first step: in which order are the "
    "gradients used and removed? section 1 (holes 3 and 4)",
}
"""{name: advice} of wrong weights; `_serial` makes each of these mistakes in one process."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check the cut, then whole steps on one and three ranks, then the traffic of every stage."""
    for rows, passes in ((7, 3), (8, 4), (2, 3)):
        yield _cut(exercise, rows, passes)
    for size, passes in CASES:
        ranks = run(_train, exercise, passes, size=size, limit=LIMIT)
        yield _counts(size, passes, ranks)
        yield _weights(size, passes, ranks)
    for stage in range(4):
        for passes in (1, 4):
            yield _traffic(exercise, stage, passes)


# -------------------------------------------------------------------------------- what the ranks do


class CountedGroup:
    """A group that counts its all-reduces."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.calls = 0

    def all_reduce(self, *args: Any, **options: Any) -> Any:
        """Count the call, then do what the group's method does.

        Raises: GradientError if there is no gradient.
        """
        if args and args[0] is None:
            raise GradientError(
                "there is no gradient to sum: no pass has made one, or it was removed before the sum"
            )
        self.calls += 1
        return self.group.all_reduce(*args, **options)


class CountedSGD(SGD):
    """SGD that counts its steps."""

    steps = 0

    def step(self, *args: Any, **options: Any) -> None:
        """Count the step, then do what SGD's method does."""
        self.steps += 1
        super().step(*args, **options)


def _train(group: Group, exercise: ModuleType, passes: int) -> dict[str, Any]:
    """Run the student's steps; return the weights, and how often ranks reduced and stepped."""
    model = new_model(CONFIG)
    counted = CountedGroup(group)
    optimizer = CountedSGD(list(model.parameters()), lr=0.1)
    batches = [random_batch(CONFIG, step, SEQUENCES) for step in range(STEPS)]
    with np.errstate(all="ignore"):
        exercise.plain_accumulation(model, optimizer, counted, batches, passes)
    return {
        "weights": weights(model),
        "reduced": counted.calls,
        "steps": optimizer.steps,
        "parameters": len(list(model.parameters())),
    }


# --------------------------------------------------------------------------- against the answer key


def _serial(size: int, passes: int, mistake: str = "") -> np.ndarray:
    """Return the weights after the same steps in one process.

    With a `mistake`, return the weights that this mistake gives.
    """
    model: Any = new_model(CONFIG)
    optimizer = SGD(list(model.parameters()), lr=0.1)
    for step in range(STEPS):
        for rank in range(size):
            mine = part_of(random_batch(CONFIG, step, SEQUENCES), size=size, rank=rank)
            tokens = SEQUENCES * CONFIG.context
            micros = micro_parts(mine, passes)
            if mistake == "only the last pass counts":
                micros = list(micros)[-1:]
            for micro in micros:
                divisor = {
                    "mean of means": micro.targets.size,
                    "mean of the passes' means": micro.targets.size * passes,
                    "mean of the means of passes and ranks": micro.targets.size * passes * size,
                    "divided by rows, not tokens": SEQUENCES,
                    "this rank's tokens times the ranks": mine.targets.size * size,
                    "this rank's tokens": mine.targets.size,
                    "averaged twice": tokens * passes,
                    "averaged over the ranks too": tokens * size,
                }.get(mistake, tokens)
                model.loss(micro.inputs, micro.targets, divisor=divisor).backward()
        if mistake != "nothing was learned":
            optimizer.step()
        if mistake != "forgot to zero":
            optimizer.zero_grad()
        else:  # what was summed over the ranks is on each of them, and is summed again
            for parameter in model.parameters():
                parameter.grad *= size
    return weights(model)


def _cut(exercise: ModuleType, rows: int, passes: int) -> Result:
    """Check that the passes are those of numpy.array_split."""
    ids = np.arange(rows)
    edges = np.cumsum([0, *(len(part) for part in np.array_split(ids, passes))]).tolist()
    target = list(zip(edges, edges[1:], strict=False))
    pairs = [tuple(map(int, pair)) for pair in exercise.cut(rows, passes)]
    covered = [row for begin, end in pairs for row in range(begin, end)]
    return expect(
        f"{rows} rows in {passes} passes",
        target,
        pairs,
        "uneven passes",
        "each pass has rows // passes rows, the first rows % passes of them one more (hole 1)",
        signs={"rows are lost": len(covered) < rows, "a row twice": len(covered) > rows},
    )


def _counts(size: int, passes: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that a step has one reduction of every gradient, and one update."""
    one = ranks[0]["parameters"] * STEPS
    reduced = ranks[0]["reduced"]
    steps = ranks[0]["steps"]
    later = "the optimizer steps once, after the last pass: section 1 (holes 3 and 4)"
    return expect(
        f"{plural(size, 'rank')}, {STEPS} steps of {passes} passes",
        (one, STEPS),
        (reduced, steps),
        "not reduced once",
        "a rank's own passes add up locally; the sum travels once, "
        "after the last: section 4 (holes 3 and 4)",
        signs={
            "steps after every pass": Mistake(steps == STEPS * passes != STEPS, later),
            "not one update a step": Mistake(steps != STEPS, later),
            "reduced after every pass": reduced == one * passes,
        },
        show=lambda counted: f"{counted[0]} all-reduces, {counted[1]} updates",
    )


def _weights(size: int, passes: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that after the steps every rank has one process's weights."""
    return parity(
        f"{plural(size, 'rank')}, weights after {STEPS} steps of {passes} passes",
        _serial(size, passes),
        [figures["weights"] for figures in ranks],
        "wrong weights",
        "what does each pass leave, and what does the update need? section 1 (holes 2 to 4)",
        known={
            mistake: Mistake(
                partial(_serial, size, passes, mistake), advice.format(passes=passes, size=size)
            )
            for mistake, advice in MISTAKES.items()
        },
        signs={
            "not a number: what is divided by?": Mistake(
                not np.isfinite(ranks[0]["weights"]).all(),
                "how many tokens are that on this rank? section 2 (holes 2 to 4)",
            ),
            "the ranks' weights differ": Mistake(
                any(np.any(one["weights"] != ranks[0]["weights"]) for one in ranks),
                "each rank updated with another gradient: what must come before the update? section "
                "1 (holes 3 and 4)",
            ),
        },
    )


def _traffic(exercise: ModuleType, stage: int, passes: int) -> Result:
    """Check the elements sent against the library's formula.

    The library's tests compare the formula with the ledger.
    """
    target = elements_sent(1000, ranks=4, zero=stage, accumulate=passes)
    measured = exercise.elements_sent(stage, passes, 1000, 4)
    return expect(
        f"{['DDP', 'ZeRO-1', 'ZeRO-2', 'ZeRO-3'][stage]}, {passes} pass{'es' * (passes > 1)}, 4 ranks, 1000 "
        "parameters",
        target,
        measured,
        "wrong traffic",
        "which strategy has room to keep a whole gradient until the last pass? section 4 (hole 5)",
        signs={
            "in one pass the sum is Ψ(P-1), and to bring it to every rank Ψ(P-1) again": passes == 1
            and stage < 3,
            "a whole gradient can wait for the last pass": stage < 2 and measured > target,
            "the sum of a stage cannot wait": stage == 2 and passes > 1 and measured < target,
            "updated weights are sent once a step, not in every pass": stage == 2
            and measured > target,
            "weights and gradients move in every pass": stage == 3
            and passes > 1
            and measured < target,
        },
        show=lambda count: f"{count} elements",
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "08", *sys.argv[1:]]))
