"""Grades exercise 18: your routing beside the library's, and your mixture on ranks beside one
process."""

import math
import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidist.autograd.ops.experts import top_positions
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.errors import MinidistError
from minidist.grading import Mistake, Result, expect, judge, variant
from minidist.launch import run
from minidist.lessons.checking import LIMIT, on_ranks
from minidist.nn import GPT, GPTConfig, MixtureConfig, mixture
from minidist.nn.moe import mixtures, rebalance
from minidist.parallel.experts.expert_parallel import plain_experts

TOKENS = 9
WIDTH = 8
EXPERTS = 5
K = 2

CUT_FROM = (plain_experts,)
ANSWERS = {
    1: "np.argsort(-chances, axis=1, kind='stable')[:, :k]",
    2: "capacity * k * tokens / experts",
    3: "taken[expert] < room",
    7: "experts * float(f @ chances.mean(axis=0))",
    8: "rate * np.sign(load.mean() - load)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check the gate, the places, the kept tokens, the ways of the rows, and the balance.

    Rows go to the experts and back. Experts are balanced in two ways; both are checked.
    """
    yield _choose(exercise)
    yield _places(exercise)
    yield _keep(exercise)
    for size in (2, 4):
        yield _journey(exercise, size)
    yield _balance(exercise)
    yield _biases(exercise)


def _layer(balance: str = "loss", capacity: float | None = 0.8) -> Any:
    """Return a GPT with the library's mixture, which is the answer key."""
    config = GPTConfig(
        vocabulary=8, context=TOKENS, layers=1, width=WIDTH, heads=1, dtype="float64"
    )
    model = mixture(
        GPT(config),
        MixtureConfig(
            experts=EXPERTS,
            top_k=K,
            balance=balance,
            capacity=capacity,
            balance_weight=1.0,
            bias_rate=0.25,
        ),
    )
    model.initialize(1)
    model.blocks[0].mlp.scores.weight.data[...] *= 40.0  # type: ignore[union-attr]
    return model


def _chances(experts: int) -> np.ndarray:
    e = np.exp(np.random.default_rng(3).normal(size=(TOKENS, experts)))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def _choose(exercise: ModuleType) -> Result:
    """Check hole 1, the choice of experts: of few experts, then of many."""
    for experts, k in ((EXPERTS, K), (600, 90)):
        chances = _chances(experts)
        right = top_positions(chances, k)
        mine = np.asarray(exercise.choose(chances, k))
        if not np.array_equal(mine, right):
            break
    task = f"experts of {TOKENS} tokens"
    if np.array_equal(mine, right):
        return Result(task, True, f"{right.size} choices", f"{right.size} choices")
    shaped = mine.shape == right.shape
    token, place = np.argwhere(mine != right)[0] if shaped else (0, 0)
    return judge(
        f"{task}, choice {place + 1} of token {token}" if shaped else task,
        False,
        str(right[token, place]) if shaped else f"shape {right.shape}",
        str(mine[token, place]) if shaped else f"shape {mine.shape}",
        "not the likeliest",
        "argsort sorts upwards: section 2 (hole 1)",
        signs={
            "not k a token": not shaped,
            "probabilities, and not the experts' numbers": mine.dtype.kind == "f",
            "the likeliest is not the first": shaped
            and not np.array_equal(mine, right[:, ::-1])
            and np.array_equal(np.sort(mine, axis=1), np.sort(right, axis=1)),
            "the likeliest comes last": np.array_equal(mine, right[:, ::-1]),
            "those are the least likely": np.array_equal(mine, np.argsort(chances, axis=1)[:, :k]),
        },
    )


def _places(exercise: ModuleType) -> Result:
    """Check hole 2, the number of places of an expert."""
    for capacity, k, tokens, experts in ((1.0, 2, 24, 8), (2.1, 1, 16, 8), (1.0, 2, 9, 5)):
        right = MixtureConfig(experts=experts, top_k=k, capacity=capacity).places(tokens)
        mine = exercise.places(capacity, k, tokens, experts)
        if mine != right:
            return judge(
                f"places for {tokens} tokens, k={k}, {experts} experts, capacity {capacity}",
                False,
                str(right),
                str(mine),
                "not capacity times the share",
                "tokens make k choices each: section 3 (hole 2)",
                signs={
                    "a token counts once, but has k choices": k > 1
                    and mine == math.ceil(capacity * tokens / experts),
                    "the capacity does not count": capacity != 1
                    and mine == math.ceil(k * tokens / experts),
                    "divided by k": k > 1 and mine == math.ceil(capacity * tokens / (k * experts)),
                    "not divided by the experts": mine == math.ceil(capacity * k * tokens),
                    "experts and tokens are exchanged": mine
                    == math.ceil(capacity * k * experts / tokens),
                    "rounded down": mine == math.floor(capacity * k * tokens / experts) < right,
                    "one place too many": mine == right + 1,
                },
            )
    return Result("places", True, "3 cases", "3 cases")


def _keep(exercise: ModuleType) -> Result:
    """Check hole 3, the choices that are kept, against the library's routing of one sequence."""
    layer = mixtures(_layer())[0]
    layer(tensor(np.random.default_rng(0).normal(size=(1, TOKENS, WIDTH))))
    assert layer.routing is not None, "it has run"
    chosen = layer.routing.chosen[0]
    right = layer.routing.kept[0]
    mine = np.asarray(exercise.keep(chosen, layer.config.places(TOKENS), EXPERTS))
    room = layer.config.places(TOKENS)
    return judge(
        f"choices taken of {chosen.size}",
        np.array_equal(mine, right),
        str(int(right.sum())),
        str(int(mine.sum())),
        "other choices are taken",
        "with `room` places, the choice that finds `room` taken is dropped: section 3 (hole 3)",
        signs={
            "nothing is dropped": mine.all(),
            "nothing is taken": not mine.any(),
            "one too many": np.array_equal(mine, _kept(chosen, room + 1)),
            "one too few": np.array_equal(mine, _kept(chosen, room - 1)),
            "taken and dropped are exchanged": np.array_equal(mine, ~right),
            "the places of all experts are counted together": mine.sum() == room
            and mine.reshape(-1)[:room].all(),
        },
    )


MISTAKES = {
    "the rows that are sent are not sorted": (
        "np.split(x[order], ends[:-1])",
        "np.split(x, ends[:-1])",
        "5",
    ),
    "the rows are in the order of their tokens": (
        'np.argsort(chosen, kind="stable")',
        "np.arange(len(chosen))",
        "4",
    ),
    "sorted from the last expert to the first": (
        'np.argsort(chosen, kind="stable")',
        'np.argsort(-chosen, kind="stable")',
        "4",
    ),
    "the numbers of the experts, and not the positions of the rows": (
        'np.argsort(chosen, kind="stable")',
        "np.sort(chosen)",
        "4",
    ),
    "the new position of each row, and not the row at each position": (
        'np.argsort(chosen, kind="stable")',
        'np.argsort(np.argsort(chosen, kind="stable"))',
        "4",
    ),
    "the results are sorted once more": (
        "y[order] = np.concatenate(back)",
        "y[...] = np.concatenate(back)[order]",
        "6",
    ),
    "the results are in the order of the experts": (
        "y[order] = np.concatenate(back)",
        "y[...] = np.concatenate(back)",
        "6",
    ),
    "the results stand at their expert's number, and not at their token's place": (
        "y[order] = np.concatenate(back)",
        "y[chosen] = np.concatenate(back)",
        "6",
    ),
    "the weights are multiplied twice": (
        "y[order] = np.concatenate(back)",
        "y[order] = weight[order, None] * np.concatenate(back)",
        "6",
    ),
    "nothing is put into y": ("y[order] = np.concatenate(back)", "pass", "6"),
}
"""{name: (code of the plain version, what a student may write there, the hole)}"""


def _kept(chosen: np.ndarray, room: int) -> np.ndarray:
    """Return which choices are taken with `room` places."""
    taken = [0] * EXPERTS
    kept = np.zeros(chosen.shape, bool)
    for place, expert in np.ndenumerate(chosen):
        kept[place] = taken[expert] < room
        taken[expert] += 1
    return kept


def _journey(exercise: ModuleType, size: int) -> Result:
    """Check holes 4, 5 and 6, the plain loop on ranks, against one process."""
    rng = np.random.default_rng(size)
    count = 6 * size + 1
    x = rng.normal(size=(count, WIDTH))
    weight = rng.random(count)
    chosen = rng.integers(0, size, count)
    experts = rng.normal(size=(size, WIDTH, WIDTH))
    right = np.einsum("nh,nhk->nk", x, experts[chosen]) * weight[:, None]

    def job(group: Group, loop: Any = exercise.plain_experts) -> tuple[int, np.ndarray]:
        mine = np.array_split(np.arange(count), size)[group.rank]
        seen = []

        def my_expert(rows: np.ndarray) -> np.ndarray:
            seen.append(len(rows))
            return np.asarray(rows @ experts[group.rank])

        y = np.asarray(loop(x[mine], chosen[mine], weight[mine], my_expert, group))
        return sum(seen), y

    task = f"{size} ranks, {count} tokens"
    ranks = on_ranks(job, size=size, task=task, advice="one array for each rank: section 1")
    rows = [seen for seen, _ in ranks]
    due = np.bincount(chosen, minlength=size).tolist()
    if rows != due:
        return Result(
            task,
            False,
            f"rows of the experts {due}",
            str(rows),
            "rows for the wrong ranks",
            "cut the sorted rows where one expert's end: section 1 (hole 5)",
        )
    found = np.concatenate([y for _, y in ranks])
    off = float(np.abs(found - right).max())

    def gives(old: str, new: str) -> bool:
        try:
            wrong = run(job, variant(plain_experts, old, new), size=size, limit=LIMIT)
        except (MinidistError, ValueError):
            return False  # this mistake cannot run here
        return np.allclose(found, np.concatenate([y for _, y in wrong]))

    return judge(
        task,
        off < 1e-12,
        "the rows of one process",
        f"off by {off:.1g}",
        "rows met other experts, or came back to other tokens",
        "row i of the sorted ones is token order[i]'s: section 1 (holes 4 and 6)",
        signs={
            name: Mistake(
                partial(gives, old, new),
                f"row i of the sorted ones is token order[i]'s: section 1 (hole {hole})",
            )
            for name, (old, new, hole) in MISTAKES.items()
        },
    )


def _balance(exercise: ModuleType) -> Result:
    """Check hole 7, the balance loss, against the library's, which is a sum over tokens."""
    model = _layer(capacity=None)
    layer = mixtures(model)[0]
    x = tensor(np.random.default_rng(0).normal(size=(1, TOKENS, WIDTH)))
    layer(x)
    assert layer.balance is not None
    e = np.exp(x.data[0] @ layer.scores.weight.data)
    chances = e / e.sum(axis=1, keepdims=True)
    right = layer.balance.item() / TOKENS
    assert layer.routing is not None, "it has run"
    f = np.bincount(layer.routing.chosen[0].reshape(-1), minlength=EXPERTS) / (TOKENS * K)
    p = chances.mean(axis=0)
    mine = float(exercise.balance_loss(layer.routing.chosen[0], chances))
    return expect(
        "balance loss",
        right,
        mine,
        "not E Σ f p",
        "with f = p = 1/E it must be 1: section 4 (hole 7)",
        known={
            "the factor E is missing": right / EXPERTS,
            "a sum over tokens instead of the mean": right * TOKENS,
            "the factor E is missing, and a sum over tokens": right * TOKENS / EXPERTS,
            "divided by E": right / EXPERTS**2,
            "the wrong sign": -right,
            "the shares of the choices twice, and not the chances": EXPERTS * float(f @ f),
            "the chances twice, and not the shares of the choices": EXPERTS * float(p @ p),
            "f and p are summed before they are multiplied": 1.0,
        },
        same=partial(np.isclose, rtol=1e-10),
        show="{:.4f}".format,
    )


def _biases(exercise: ModuleType) -> Result:
    """Check hole 8, the moves of the biases."""
    model = _layer("bias")
    load = np.array([9, 1, 3, 4, 3])
    rebalance(model, np.stack([[load, load]]))
    layer = mixtures(model)[0]
    assert layer.bias is not None
    right = layer.bias.data
    start = np.arange(EXPERTS) / 8
    mine = np.asarray(exercise.move_biases(start, load, 0.25)) - start
    return judge(
        f"moves of the biases after loads {load.tolist()}",
        np.allclose(mine, right),
        str(right.tolist()),
        str(np.round(mine, 3).tolist()),
        "other steps",
        "rate times the sign of the distance to the mean: section 4 (hole 8)",
        signs={
            "the busy are liked more": np.allclose(mine, -right),
            "the rate is missing": np.allclose(mine, right / 0.25),
            "the old biases are lost": np.allclose(mine + start, right),
            "moved by the distance: each moves by rate, however far it is from the mean": np.allclose(
                mine, 0.25 * (load.mean() - load)
            ),
            "an expert with the mean load moves, too": np.allclose(
                mine[load != 4], right[load != 4]
            ),
            "the busy do not move down": np.allclose(mine, np.maximum(right, 0)),
            "compared with another number than the mean": np.isin(np.abs(mine), (0, 0.25)).all(),
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "18", *sys.argv[1:]]))
