"""Grades exercise 13: against the library's zigzag, its online softmax, and the bytes that ring attention sends."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

import minidist as md
from minidist.autograd import ops
from minidist.autograd.ops.online_attention import OnlineSoftmax
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.console import plural
from minidist.device.backend import random_uniform
from minidist.grading import Result, expect
from minidist.parallel.context.ring_attention import own_blocks, ring_attention, zigzag

RANKS, LENGTHS = (1, 2, 3, 4), (24, 13)

ANSWERS = {
    1: "2 * ranks - 1 - rank",
    2: "query_block >= key_block",
    3: "np.maximum(top, scores.max(axis=1, keepdims=True))",
    4: "np.exp(top - now)",
    5: "total * shrink + p.sum(axis=1, keepdims=True)",
    6: "y * shrink + p @ v",
    7: "tokens_of(length, rank, ranks)",
    8: "2 * (ranks - 1)",
    9: "4 * ranks - 2",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Blocks and pairs; one update, then a whole sequence by updates; positions; bytes."""
    for ranks in RANKS:
        yield from _blocks(exercise, ranks)
    yield from _pairs(exercise)
    yield from _update(exercise)
    yield from _update(exercise, shift=1000.0)
    for ranks in RANKS:
        yield from _attention(exercise, ranks)
    yield from _positions(exercise)
    for ranks in RANKS[:0:-1]:
        yield from _sent(exercise, ranks)


def _blocks(exercise: ModuleType, ranks: int) -> Iterator[Result]:
    target = [[number for number, _ in own_blocks(24, rank, ranks)] for rank in range(ranks)]
    measured = [[int(number) for number in exercise.blocks_of(rank, ranks)] for rank in range(ranks)]
    known = {"numbers begin at 0, so the last is 2·ranks - 1": [[r, 2 * ranks - r] for r in range(ranks)],
             "the next one: that is a sequence cut in `ranks`": [[r, r + 1] for r in range(ranks)],
             "every rank-th: the last rank would still have most to do": [[r, ranks + r] for r in range(ranks)]}
    mistake = next((name for name, numbers in known.items() if numbers == measured), "other blocks")
    yield expect(f"blocks, {plural(ranks, 'rank')}", target, measured, mistake, "zigzag: section 3 (hole 1)")


def _pairs(exercise: ModuleType) -> Iterator[Result]:
    target = [[q >= k for k in range(4)] for q in range(4)]
    measured = [[bool(exercise.multiplied(q, k)) for k in range(4)] for q in range(4)]
    known = {"queries must see their own block too": [[q > k for k in range(4)] for q in range(4)],
             "the wrong way round: queries look back, not ahead": [[q <= k for k in range(4)] for q in range(4)],
             "L/P × L/P: only the own block": [[q == k for k in range(4)] for q in range(4)],
             "without a mask; these look ahead": [[True] * 4] * 4}
    mistake = next((name for name, table in known.items() if table == measured), "other pairs")
    count = [sum(map(sum, table)) for table in (target, measured)]
    yield Result("pairs of 4 blocks", target == measured, f"{count[0]} of 16", f"{count[1]} of 16", mistake,
                 "causal: section 3 (hole 2)")


def _numbers(name: str, *shape: int) -> np.ndarray:
    return (2 * random_uniform(f"check 13, {name}", 0, range(int(np.prod(shape))), "float64") - 1).reshape(shape)


def _update(exercise: ModuleType, shift: float = 0.0) -> Iterator[Result]:
    """A second piece: for some queries the maximum rises, for others it does not. A shift of all scores is no matter.
    """
    large = f", scores near {shift:g}" if shift else ""
    scores, v, y = shift + 3 * _numbers("scores", 6, 5), _numbers("v", 5, 3), _numbers("y", 6, 3)
    top, total = shift + np.array([[-1.0], [4.0], [0.0], [5.0], [-3.0], [3.5]]), 2.0 + _numbers("total", 6, 1)
    now = np.maximum(top, scores.max(axis=1, keepdims=True))
    p, shrink = np.exp(scores - now), np.exp(top - now)
    fresh, weighted = p.sum(axis=1, keepdims=True), p @ v
    with np.errstate(over="ignore", invalid="ignore"):
        measured = exercise.update(top.copy(), total.copy(), y.copy(), scores.copy(), v.copy())
    yield _compare(f"maximum{large}", now, measured[0], {
        "that of the new piece alone": scores.max(axis=1, keepdims=True), "the old one never rises": top,
        "one number for all queries; each has its own": np.full_like(now, now.max())}, "section 1 (hole 3)")
    inverse = np.exp(now - top)
    yield _compare(f"sum{large}", total * shrink + fresh, measured[1], {
        "what was summed under the old maximum is left as it was": total + fresh,
        "the keys before are forgotten": fresh, "the new keys are forgotten": total * shrink,
        "the wrong way round: sums under a smaller maximum are too large": total * inverse + fresh,
        "p is under the new maximum already": (total + fresh) * shrink}, "section 1 (holes 4, 5)")
    yield _compare(f"weighted sum{large}", y * shrink + weighted, measured[2], {
        "what was summed under the old maximum is left as it was": y + weighted,
        "the keys before are forgotten": weighted, "the new keys are forgotten": y * shrink,
        "the wrong way round: sums under a smaller maximum are too large": y * inverse + weighted,
        "p is under the new maximum already": (y + weighted) * shrink,
        "divide once, at the end": (y * shrink + weighted) / (total * shrink + fresh)}, "section 1 (holes 4, 6)")


def _compare(what: str, target: np.ndarray, measured: Any, known: dict[str, np.ndarray], advice: str) -> Result:
    measured = np.asarray(measured, np.float64)
    if measured.shape != target.shape:
        return Result(what, False, f"shape {target.shape}", f"shape {measured.shape}", "a number for each query",
                      advice)
    mistake = next((name for name, wrong in known.items() if np.allclose(wrong, measured)), "other numbers")
    if not np.isfinite(measured).all():
        mistake = "exp of a large score is infinite: subtract first"
    off = float(np.abs(measured - target).max())
    return Result(what, off < 1e-12, "off by 0", f"off by {off:.0e}", mistake, advice)


def _attention(exercise: ModuleType, ranks: int) -> Iterator[Result]:
    """A rank's tokens against all pieces, by its blocks, pairs and updates, beside the library's."""
    for length in LENGTHS:
        q, k, v = (3 * _numbers(name, length, 4) for name in "qkv")
        whole, off = ops.causal_attention(*(x[None, None] for x in (q, k, v))).data[0, 0], 0.0
        for rank in range(ranks):
            own = exercise.tokens_of(length, rank, ranks)
            running = OnlineSoftmax(q[None, None, own])
            top, total, y = running.top[0, 0].T, running.total[0, 0].T, running.y[0, 0]
            for source in range(ranks):
                piece = exercise.tokens_of(length, (rank - source) % ranks, ranks)
                ahead = own[:, None] < piece
                scores = np.where(ahead, -np.inf, q[own] @ k[piece].T / 2)
                top, total, y = exercise.update(top, total, y, scores, v[piece])
            off = max(off, float(np.abs(y / total - whole[own]).max()))
        yield Result(f"attention, {plural(ranks, 'rank')}, {length} tokens", off < 1e-12, "off by 0",
                     f"off by {off:.0e}", "not what one process computes", "section 1 (holes 3 to 6)")


def _positions(exercise: ModuleType) -> Iterator[Result]:
    for length, ranks in ((24, 2), (13, 3)):
        target = [zigzag(length, rank, ranks).tolist() for rank in range(ranks)]
        measured = [np.asarray(exercise.positions_for_rotary(length, rank, ranks)).tolist() for rank in range(ranks)]
        starts = np.cumsum([0, *map(len, target)])
        known = {"every rank counts from 0: the offset is forgotten": [list(range(len(own))) for own in target],
                 "an offset, as if a rank's tokens were consecutive": [
                     list(range(start, start + len(own))) for start, own in zip(starts[:-1], target, strict=True)],
                 "all positions; it has only its own tokens": [list(range(length))] * ranks}
        mistake = next((name for name, numbers in known.items() if numbers == measured), "other positions")
        yield expect(f"positions, {plural(ranks, 'rank')}, {length} tokens", target, measured, mistake,
                     "section 5 (hole 7)")


def _sent(exercise: ModuleType, ranks: int) -> Iterator[Result]:
    """What the library's ring sends, by the ledger."""
    length = 4 * ranks
    block = 8 * 4 * 4

    def job(group: Group) -> tuple[int, int]:
        own = zigzag(length, group.rank, ranks)
        q, k, v = (tensor(_numbers(name, 1, 1, length, 4)[:, :, own], requires_grad=True) for name in "qkv")
        y = ring_attention(q, k, v, group=group, length=length)
        forward = group.ledger.sent_bytes()["world"]["exchange"]
        y.backward(np.ones(y.shape))
        return forward // block, (group.ledger.sent_bytes()["world"]["exchange"] - forward) // block

    target = md.run(job, size=ranks)[0]
    forward, backward = exercise.blocks_sent(ranks)
    known = {"a rank has its own piece already: one hop less": 2 * ranks, "keys and values are two": ranks - 1}
    yield expect(f"blocks sent forward, {plural(ranks, 'rank')}", target[0], forward,
                 next((name for name, number in known.items() if number == forward), "another number"),
                 "section 4 (hole 8)")
    known = {"keys and values must go round again: no rank kept them": 2 * ranks,
             "the gradients have one hop more: home": 4 * (ranks - 1), "that is forward's": 2 * (ranks - 1),
             "keys and values stop one hop earlier": 4 * ranks}
    yield expect(f"blocks sent backward, {plural(ranks, 'rank')}", target[1], backward,
                 next((name for name, number in known.items() if number == backward), "another number"),
                 "section 4 (hole 9)")


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "13", *sys.argv[1:]]))
