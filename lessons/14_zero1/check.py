"""Grades exercise 14: ranks as threads train a small GPT with your ZeRO-1; one process is the answer key."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
from minidist.lessons import zero_lab as lab

from minidist.comm.group import Group
from minidist.console import size_text
from minidist.errors import CommError
from minidist.grading import Result, sent_since, totals
from minidist.launch import run
from minidist.nn import GPTConfig
from minidist.optim import Adam
from minidist.parallel.step.flat import Flat, Piece

CONFIG = GPTConfig(vocabulary=13, context=5, layers=1, width=8, heads=2, dtype="float64")
SIZES, STEPS, LIMIT = (3, 5), 3, 60.0      # ranks that do not divide the number of parameters

ANSWERS = {
    1: "slice(*(group.rank * (len(weights) // group.size) + min(group.rank, len(weights) % group.size) + more "
       "for more in (0, len(weights) // group.size + (group.rank < len(weights) % group.size))))",
    2: "self.weights[self.own]",
    3: "self.group.reduce_scatter(gradient, out=self.mine)",
    4: "self.group.all_gather(self.weights[self.own].copy(), out=self.weights)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Which rank owns what, what a step sends, then whole runs."""
    for size in SIZES:
        try:
            ranks = run(_train, exercise, size=size, limit=LIMIT)
        except CommError as error:
            yield Result(f"{STEPS} steps on {size} ranks", False, "an end", type(error).__name__,
                         "the ranks do not fit together", f"every rank calls the same collectives: section 1; {error}")
            return
        yield _owners(size, ranks)
        yield _divided(size, ranks)
        yield _replicas(size, ranks)
        yield _weights(size, ranks)
        yield _traffic(size, ranks)


# ---------------------------------------------------------------------------------------------- what the ranks do

def _train(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """The student's ZeRO-1 for some steps."""
    model = lab.new_model(CONFIG)
    flat = Flat(list(model.parameters()), group)
    weights = flat.join()
    given: list[tuple[int, int, bool]] = []

    def new_optimizer(part: np.ndarray, gradients: np.ndarray) -> Any:
        given.append((part.size, gradients.size, np.shares_memory(part, weights)))
        return Adam([Piece(flat.parameters[0], part[:gradients.size], gradients)], 0.01)

    strategy = exercise.MyZero1(group, model, weights, new_optimizer)
    before = totals(group.ledger)
    for inputs, targets, tokens in lab.parts(group, CONFIG, STEPS):
        strategy.step(inputs, targets, tokens)
    return {"own": (strategy.own.start, strategy.own.stop), "right": (flat.chunk.start, flat.chunk.stop),
            "n": flat.size, "given": given[-1], "weights": weights.copy(), "sent": sent_since(group.ledger, before)}


def _alone(scale: float = 1.0) -> np.ndarray:
    """The weights of one process on the global batches, with gradients times `scale`, in the flat vector's order."""
    model = lab.new_model(CONFIG)
    optimizer = Adam(list(model.parameters()), 0.01)
    for step in range(STEPS):
        inputs, targets = lab.global_batch(CONFIG, step)
        model.loss(inputs, targets, divisor=targets.size).backward()
        optimizer.step(None, scale)
        optimizer.zero_grad()
    return np.concatenate([parameter.data.ravel() for parameter in model.parameters()])


# ------------------------------------------------------------------------------------------- beside the answer key

def _owners(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Together the slices are every weight once."""
    task, right = f"{size} ranks, what each owns", [rank["right"] for rank in ranks]
    mine, n = [rank["own"] for rank in ranks], ranks[0]["n"]
    owned = sum(stop - start for start, stop in mine)
    mistake = "weights without an owner" if owned < n else "wrong slices"
    return Result(task, mine == right, f"{n} weights as {right}", f"{owned} of {n} as {mine}", mistake,
                  "the first n % P ranks take one more, as numpy.array_split does: section 1 (hole 1)")


def _divided(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Each optimizer was given the own slice."""
    given, right = [rank["given"][0] for rank in ranks], [stop - start for start, stop in (r["right"] for r in ranks)]
    mistake = "the optimizer is not divided" if given == [ranks[0]["n"]] * size else "the wrong part"
    if given == right and not all(rank["given"][2] for rank in ranks):
        return Result(f"{size} ranks, weights of each optimizer", False, "part of self.weights", "a copy",
                      "the optimizer changes a copy", "which is never read: give it the slice itself: (hole 2)")
    return Result(f"{size} ranks, weights of each optimizer", given == right, str(right), str(given), mistake,
                  "its state is what ZeRO-1 divides; give it self.weights[self.own]: section 2 (hole 2)")


def _replicas(size: int, ranks: list[dict[str, Any]]) -> Result:
    """After a step all have the same weights."""
    first = ranks[0]["weights"]
    apart = max(lab.off(rank["weights"], first) for rank in ranks)
    return Result(f"{size} ranks, replicas after {STEPS} steps", apart < 1e-12, "equal", f"apart by {apart:.1e}",
                  "the all-gather is missing", "each rank knows its own new weights alone until they are shared: "
                  "section 1, step 4 (hole 4)")


def _weights(size: int, ranks: list[dict[str, Any]]) -> Result:
    """And they are those of one process."""
    task, mine = f"{size} ranks, weights", ranks[0]["weights"]
    error = lab.off(mine, _alone())
    if error < 1e-10:
        return Result(task, True, "those of one process, to 1e-10", "those of one process, to 1e-10")
    mistake, advice = "wrong gradients", "self.mine holds the sum over the ranks, no more: section 1, step 2 (hole 3)"
    if lab.off(mine, _alone(1 / size)) < 1e-9:
        mistake = "averaged twice"
        advice = (f"the gradients are {size} times too small, which Adam nearly hides; the loss is divided by all "
                  "ranks' tokens already: section 1, step 2 (hole 3)")
    return Result(task, False, "those of one process", f"off by {error:.1e}", mistake, advice)


def _traffic(size: int, ranks: list[dict[str, Any]]) -> Result:
    """2(P-1) n a step over all ranks."""
    n = 8 * ranks[0]["n"]
    measured, target = sum(rank["sent"][1] for rank in ranks) / STEPS, 2 * (size - 1) * n
    mistake = "an all-reduce where a reduce-scatter is enough" if measured >= 1.4 * target else "wrong traffic"
    return Result(f"{size} ranks, bytes a step", measured == target, size_text(target), size_text(measured), mistake,
                  "a rank needs the sum of its own slice alone; with all sums on all ranks a step costs 3(P-1)n: "
                  "section 3 (hole 3)")


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "14", *sys.argv[1:]]))
