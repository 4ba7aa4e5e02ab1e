"""Grades exercise 13: against the library's zigzag, its online softmax, and the bytes that ring
attention sends."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.console import plural
from minidist.device.backend import random_uniform
from minidist.grading import Mistake, Result, Signs, expect, judge, variant
from minidist.parallel.context.ring_attention import (
    own_blocks,
    plain_ring_attention,
    ring_attention,
    zigzag,
)

RANKS = (1, 2, 3, 4)
LENGTHS = (24, 13)

CUT_FROM = (plain_ring_attention,)
ANSWERS = {
    1: "2 * ranks - 1 - rank",
    2: "query_block >= key_block",
    7: "tokens_of(length, rank, ranks)",
    8: "2 * (ranks - 1)",
    9: "4 * ranks - 2",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check blocks, pairs, attention, positions and bytes.

    Attention has one head, first with small scores, then with large ones.
    """
    for ranks in RANKS:
        yield from _blocks(exercise, ranks)
    yield from _pairs(exercise)
    for size in (1.0, 900.0):
        for ranks in RANKS:
            yield from _attention(exercise, ranks, size)
    yield from _positions(exercise)
    for ranks in RANKS[:0:-1]:
        yield from _sent(exercise, ranks)


def _blocks(exercise: ModuleType, ranks: int) -> Iterator[Result]:
    target = [[number for number, _ in own_blocks(24, rank, ranks)] for rank in range(ranks)]
    measured = [
        [int(number) for number in exercise.blocks_of(rank, ranks)] for rank in range(ranks)
    ]
    yield expect(
        f"blocks, {plural(ranks, 'rank')}",
        target,
        measured,
        "other blocks",
        f"there are {2 * ranks} blocks, 0 to {2 * ranks - 1}; each is of one rank, and each rank has "
        "one from the front and one from the back: section 3 (hole 1)",
        known={
            "numbers begin at 0, so the last is 2·ranks - 1": [
                [r, 2 * ranks - r] for r in range(ranks)
            ],
            "the next one: that is a sequence cut in `ranks`": [[r, r + 1] for r in range(ranks)],
            "every rank-th: the last rank would still have most to do": [
                [r, ranks + r] for r in range(ranks)
            ],
            "one block too few": [[r, 2 * ranks - 2 - r] for r in range(ranks)],
        },
    )


def _pairs(exercise: ModuleType) -> Iterator[Result]:
    target = [[q >= k for k in range(4)] for q in range(4)]
    measured = [[bool(exercise.multiplied(q, k)) for k in range(4)] for q in range(4)]
    other = next(
        ((q, k) for q in range(4) for k in range(4) if target[q][k] != measured[q][k]),
        (0, 0),
    )
    yield expect(
        "pairs of 4 blocks",
        target,
        measured,
        "other pairs",
        "a query sees itself and what is before it: section 3 (hole 2)",
        known={
            "queries must see their own block too": [[q > k for k in range(4)] for q in range(4)],
            "the wrong way round: queries look back, not ahead": [
                [q <= k for k in range(4)] for q in range(4)
            ],
            "L/P × L/P: only the own block": [[q == k for k in range(4)] for q in range(4)],
            "without a mask; these look ahead": [[True] * 4] * 4,
        },
        show=lambda table: (
            (
                f"queries of block {other[0]} {'see' if table[other[0]][other[1]] else 'do not see'} "
                f"keys of block {other[1]}"
            )
            if measured != target
            else f"{sum(map(sum, table))} of 16"
        ),
    )


def _numbers(name: str, *shape: int) -> np.ndarray:
    return (
        2 * random_uniform(f"check 13, {name}", 0, range(int(np.prod(shape))), "float64") - 1
    ).reshape(shape)


MISTAKES = {
    "only that of the new piece": (
        "np.maximum(top, scores.max(axis=1, keepdims=True))",
        "scores.max(axis=1, keepdims=True)",
        3,
    ),
    "one number for all queries; each has its own": (
        "np.maximum(top, scores.max(axis=1, keepdims=True))",
        "np.maximum(top, scores.max())",
        3,
    ),
    "what was summed under the old maximum is left as it was": (
        "shrink = np.exp(top - now)",
        "shrink = 1.0",
        4,
    ),
    "the new maximum is not taken off the old one": (
        "shrink = np.exp(top - now)",
        "shrink = np.exp(top)",
        4,
    ),
    "the keys before are forgotten in the sum": ("total * shrink + p.sum", "p.sum", 5),
    "p is under the new maximum already": (
        "total * shrink + p.sum(axis=1, keepdims=True)",
        "(total + p.sum(axis=1, keepdims=True)) * shrink",
        5,
    ),
    "the old sum is not scaled": ("total * shrink +", "total +", 5),
    "one sum for all queries; each has its own": ("p.sum(axis=1, keepdims=True)", "p.sum()", 5),
    "the largest of this piece, not its sum": ("p.sum(axis=1", "p.max(axis=1", 5),
    "a mean of this piece, not its sum": ("p.sum(axis=1", "p.mean(axis=1", 5),
    "keys are weighted, not values": ("p @ v", "p @ k", 6),
    "p is under the new maximum already; only what is older is scaled": (
        "y * shrink + p @ v",
        "(y + p @ v) * shrink",
        6,
    ),
    "the keys before are forgotten in the weighted sum": ("y * shrink + p @ v", "p @ v", 6),
    "the old weighted sum is not scaled": ("y * shrink + p @ v", "y + p @ v", 6),
    "divide once, at the end": ("y * shrink + p @ v", "(y * shrink + p @ v) / total", 6),
}
"""{name: (code of the plain version, what a student may write there, the hole)}"""


def _attention(exercise: ModuleType, ranks: int, size: float) -> Iterator[Result]:
    """Check the outputs of each rank's tokens against the library's attention.

    Every second query is multiplied by `size`; the others stay as they are.
    """
    for length in LENGTHS:
        q, k, v = (3 * _numbers(name, length, 4) for name in "qkv")
        q *= np.where(np.arange(length) % 2, 1.0, size)[:, None]
        whole = ops.causal_attention(*(x[None, None] for x in (q, k, v))).data[0, 0]

        def run(attention: Any, length: int = length, q: Any = q, k: Any = k, v: Any = v) -> Any:
            def job(group: Group) -> Any:
                own = zigzag(length, group.rank, ranks)
                with np.errstate(all="ignore"):
                    return np.array(attention(q[own], k[own], v[own], own, group))

            return md.run(job, size=ranks)

        due = [whole[zigzag(length, rank, ranks)] for rank in range(ranks)]
        task = f"attention, {plural(ranks, 'rank')}, {length} tokens{', large scores' * (size > 1)}"
        found = run(exercise.plain_ring_attention)
        if any(mine.shape != right.shape for mine, right in zip(found, due, strict=True)):
            yield Result(
                task,
                False,
                f"shape {due[0].shape}",
                f"shape {found[0].shape}",
                "a number for each query",
                "section 1 (holes 3 to 6)",
            )
            return
        off = np.max([np.abs(mine - right).max() for mine, right in zip(found, due, strict=True)])
        signs: Signs = {
            name: Mistake(partial(_gives, found, run, old, new), f"section 1 (hole {number})")
            for name, (old, new, number) in MISTAKES.items()
        }
        yield judge(
            task,
            off < 1e-12,
            "off by 0",
            f"off by {off:.0e}",
            "not what one process computes",
            "section 1 (holes 3 to 6)",
            signs={
                **signs,
                "no number (NaN): exp of a large score, or -inf less -inf": any(
                    np.isnan(mine).any() for mine in found
                ),
                "infinite: a query's sum is 0 when y is divided by it": not all(
                    np.isfinite(mine).all() for mine in found
                ),
            },
        )


def _gives(found: list[np.ndarray], run: Any, old: str, new: str) -> bool:
    """Return whether the plain version with `new` in place of `old` gives what was found, with
    finite numbers."""
    wrong = run(variant(plain_ring_attention, old, new))
    return any(np.isfinite(part).any() for part in wrong) and all(
        np.allclose(mine, part, equal_nan=True) for mine, part in zip(found, wrong, strict=True)
    )


def _positions(exercise: ModuleType) -> Iterator[Result]:
    for length, ranks in ((24, 2), (13, 3)):
        target = [zigzag(length, rank, ranks).tolist() for rank in range(ranks)]
        measured = [
            np.asarray(exercise.positions_for_rotary(length, rank, ranks)).tolist()
            for rank in range(ranks)
        ]
        starts = np.cumsum([0, *map(len, target)])
        yield expect(
            f"positions, {plural(ranks, 'rank')}, {length} tokens",
            target,
            measured,
            "other positions",
            "section 5 (hole 7)",
            known={
                "every rank counts from 0: the offset is forgotten": [
                    list(range(len(own))) for own in target
                ],
                "an offset, as if a rank's tokens were consecutive": [
                    list(range(start, start + len(own)))
                    for start, own in zip(starts[:-1], target, strict=True)
                ],
                "all positions; it has only its own tokens": [list(range(length))] * ranks,
                "another rank's positions": target[::-1],
                "every rank-th token; a rank has two blocks": [
                    list(range(rank, length, ranks)) for rank in range(ranks)
                ],
                "a rank's two blocks do not lie side by side": [
                    list(range(own[0], own[0] + len(own))) for own in target
                ],
                "numbers of blocks, not positions of tokens": [
                    [number for number, _ in own_blocks(length, rank, ranks)]
                    for rank in range(ranks)
                ],
                "positions begin at 0": [[place + 1 for place in own] for own in target],
            },
            signs={
                "in another order than the tokens": [sorted(own) for own in measured]
                == [sorted(own) for own in target]
            },
        )


def _sent(exercise: ModuleType, ranks: int) -> Iterator[Result]:
    """Check how many arrays are sent against the library's ring, as its ledger counts them."""
    length = 4 * ranks
    array = 8 * 4 * 4

    def job(group: Group) -> tuple[int, int]:
        own = zigzag(length, group.rank, ranks)
        q, k, v = (
            tensor(_numbers(name, 1, 1, length, 4)[:, :, own], requires_grad=True) for name in "qkv"
        )
        y = ring_attention(q, k, v, group=group, length=length)
        forward = group.ledger.sent_bytes()["world"]["exchange"]
        y.backward(np.ones(y.shape))
        return forward // array, (group.ledger.sent_bytes()["world"]["exchange"] - forward) // array

    target = md.run(job, size=ranks)[0]
    forward, backward = exercise.arrays_sent(ranks)
    yield expect(
        f"arrays sent forward, {plural(ranks, 'rank')}",
        target[0],
        forward,
        "another number",
        "section 4 (hole 8)",
        known={
            "a rank has its own piece already: one send less": 2 * ranks,
            "keys and values are two": ranks - 1,
            "keys and values are two, and a rank has its own piece already": ranks,
            "that is forward and backward": 4 * (ranks - 1),
            "that is of all ranks, not of one": 2 * ranks * (ranks - 1),
        },
    )
    yield expect(
        f"arrays sent backward, {plural(ranks, 'rank')}",
        target[1],
        backward,
        "another number",
        "section 4 (hole 9)",
        known={
            "keys and values must go round again: no rank kept them": 2 * ranks,
            "the gradients are sent once more: home": 4 * (ranks - 1),
            "that is forward's": 2 * (ranks - 1),
            "keys and values are sent once less": 4 * ranks,
            "keys and values are two, each is sent once less": 4 * ranks - 1,
            "their gradients are two, like keys and values": 3 * ranks - 2,
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "13", *sys.argv[1:]]))
