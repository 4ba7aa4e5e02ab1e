"""Grades exercise 14: ranks as threads train a small GPT with your ZeRO-1; one process is the
answer key."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import Mistake, Result, expect, sent_since, totals
from minidist.lessons import zero_lab as lab
from minidist.lessons.checking import on_ranks, parity, replicas
from minidist.lessons.lab import alone, new_model, weights
from minidist.nn import GPTConfig
from minidist.optim import Adam
from minidist.parallel.step.flat import Flat
from minidist.parallel.zero.zero1 import plain_zero1

CONFIG = GPTConfig(vocabulary=13, context=5, layers=1, width=8, heads=2, dtype="float64")
# Numbers of ranks that do not divide the number of parameters.
SIZES = (3, 5)
STEPS = 3

CUT_FROM = (plain_zero1,)
ANSWERS = {
    1: "slice(rank * (n // size) + min(rank, n % size), (rank + 1) * (n // size) + min(rank + "
    "1, n % size))"
}
"""The right code of the hole beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check which rank owns which weights, then whole runs and what a step sends."""
    for n, size in ((12, 3), (13, 3), (14, 5), (2, 3)):
        yield _owners(exercise, n, size)
    for size in SIZES:
        ranks = on_ranks(
            _train,
            exercise,
            size=size,
            task=f"{STEPS} steps on {size} ranks",
            advice="every rank calls the same collectives: section 1",
        )
        yield _divided(size, ranks)
        overlapped = any(rank["overlapped"] for rank in ranks)
        yield lab.gathered(
            f"{size} ranks, what is gathered", overlapped, "section 1, step 4 (hole 4)"
        )
        yield _replicas(size, ranks)
        yield _weights(size, ranks)
        yield _traffic(size, ranks)


# -------------------------------------------------------------------------------- what the ranks do


def _train(group: Group, exercise: ModuleType) -> dict[str, Any]:
    """Run some steps of the student's ZeRO-1; return what was seen."""
    model = new_model(CONFIG)
    drawn = weights(model)
    given: list[tuple[int, bool]] = []
    read: list[Any] = []
    first = [0]

    def new_optimizer(pieces: Any) -> Any:
        held = [np.asarray(piece.data) for piece in pieces]
        read[:] = [piece.grad for piece in pieces]
        first[0] = _place(held, model)
        shared = all(
            any(np.shares_memory(data, p.data) for p in model.parameters())
            for data in held
            if data.size
        )
        given.append((sum(data.size for data in held), shared))
        return Adam(pieces, 0.01)

    before = totals(group.ledger)
    watched = lab.WatchedGroup(group)
    batches = [lab.global_batch(CONFIG, step) for step in range(STEPS)]
    exercise.plain_zero1(model, new_optimizer, watched, batches)
    sent = sent_since(group.ledger, before)
    flat = Flat(list(model.parameters()), group)
    return {
        "right": flat.chunk_size,
        "begins": flat.chunk.start,
        "first": first[0],
        "new_sums": watched.new_sums and bool(np.array_equal(weights(model), drawn)),
        "new_gathers": watched.new_gathers,
        "unread": bool(watched.sums)
        and not any(np.shares_memory(grad, y) for grad in read for y in watched.sums),
        "gathers_sums": watched.gathers_sums,
        "adds_weights": watched.adds_weights,
        "n": flat.size,
        "given": given[-1],
        "sent": sent,
        "overlapped": watched.overlapped,
        "weights": weights(model),
    }


def _place(held: list[np.ndarray], model: Any) -> int:
    """Return the index of the first held number in the vector of all weights."""
    start = min(p.data.ctypes.data for p in model.parameters())
    return min((data.ctypes.data for data in held if data.size), default=start) - start >> 3


def _alone(scale: float = 1.0) -> np.ndarray:
    """Return the weights of one process on the global batches, with gradients times `scale`."""
    batches = [lab.global_batch(CONFIG, step) for step in range(STEPS)]
    return alone(new_model(CONFIG), partial(Adam, lr=0.01), batches, scale)


# --------------------------------------------------------------------------- against the answer key


def _owners(exercise: ModuleType, n: int, size: int) -> Result:
    """Check that the slices together have every weight once."""
    edges = bounds(n, size)
    target = list(zip(edges, edges[1:], strict=False))
    mine = [
        (own.start, own.stop) for own in (exercise.chunk_of(n, rank, size) for rank in range(size))
    ]
    owners = [sum(start <= number < stop for start, stop in mine) for number in range(n)]
    nobody = next((number for number, count in enumerate(owners) if not count), None)
    several = next((number for number, count in enumerate(owners) if count > 1), None)
    return expect(
        f"{n} weights on {size} ranks",
        target,
        mine,
        "wrong slices",
        "the first n % P ranks take one more, as numpy.array_split does: section 1 (hole 1)",
        signs={
            f"weights without an owner: number {nobody} has no owner": nobody is not None,
            f"number {several} has {owners[several or 0]} owners": several is not None,
        },
    )


def _divided(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that each optimizer was given its rank's own chunk."""
    given = [rank["given"][0] for rank in ranks]
    right = [rank["right"] for rank in ranks]
    if given == right and not all(rank["given"][1] for rank in ranks):
        return Result(
            f"{size} ranks, weights of each optimizer",
            False,
            "part of `weights`",
            "a copy",
            "the optimizer changes a copy",
            "which is never read: give it the chunk itself: (hole 2)",
        )
    begins = [rank["begins"] for rank in ranks]
    first = [rank["first"] for rank in ranks]
    if given == right and first != begins:
        return Result(
            f"{size} ranks, first weight of each optimizer",
            False,
            str(begins),
            str(first),
            "another rank's chunk"
            if any(first)
            else "the whole vector was given, or rank 0's chunk",
            "each rank updates its own chunk, weights[flat.chunk]: section 1 (hole 2)",
        )
    if given == right and any(rank["unread"] for rank in ranks):
        return Result(
            f"{size} ranks, gradients that the optimizer reads",
            False,
            "mine, to which the reduce-scatter writes",
            "another array",
            "the optimizer reads other gradients",
            "the sums arrive in mine: give pieces that array itself: section 1 (hole 2)",
        )
    return expect(
        f"{size} ranks, weights of each optimizer",
        right,
        given,
        "the wrong part",
        "its state is what ZeRO-1 divides; give it weights[flat.chunk]: section 1 (hole 2)",
        known={"the optimizer is not divided": [ranks[0]["n"]] * size},
    )


def _replicas(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that after the steps all ranks have the same weights."""
    mistake, advice = (
        "the all-gather is missing",
        "each rank knows only its own new weights until they are shared: "
        "section 1, step 4 (hole 4)",
    )
    if any(rank["new_gathers"] for rank in ranks):
        mistake, advice = lab.new_array("the model", "section 1, step 4 (hole 4)")
    return replicas(
        f"{size} ranks, replicas after {STEPS} steps",
        [rank["weights"] for rank in ranks],
        mistake,
        advice,
    )


def _weights(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that the weights are those of one process."""
    nowhere, advice = lab.new_array("the optimizer", "section 1, step 2 (hole 3)")
    return parity(
        f"{size} ranks, weights",
        _alone(),
        [rank["weights"] for rank in ranks],
        "wrong gradients",
        "mine holds the sum over the ranks, no more: section 1, step 2 (hole 3)",
        known={
            "averaged twice": Mistake(
                lambda: _alone(1 / size),
                f"the gradients are {size} times too small, which Adam nearly hides; the loss is "
                "divided by all ranks' tokens already: section 1, step 2 (hole 3)",
            )
        },
        signs={
            nowhere: Mistake(any(rank["new_sums"] for rank in ranks), advice),
            **lab.wrong_gathers(ranks, "section 1, step 4 (hole 4)"),
        },
    )


def _traffic(size: int, ranks: list[dict[str, Any]]) -> Result:
    """Check that all ranks together send 2(P-1) n bytes per step."""
    n = 8 * ranks[0]["n"]
    measured = sum(rank["sent"][1] for rank in ranks) / STEPS
    target = 2 * (size - 1) * n
    return expect(
        f"{size} ranks, bytes a step",
        target,
        measured,
        "wrong traffic",
        "a rank needs the sum of its own chunk only; with all sums on all ranks a step costs "
        "3(P-1)n or more: section 4 (hole 3)",
        signs={"an all-reduce where a reduce-scatter is enough": measured >= 1.4 * target},
        show=size_text,
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "14", *sys.argv[1:]]))
