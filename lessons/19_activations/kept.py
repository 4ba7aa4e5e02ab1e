"""Sections 5 to 7 of lesson 19: inputs kept in three ways, the error of 8 bits, a budget, and
context compression."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops.compressed_attention import compressed_attention
from minidist.autograd.tensor import tensor
from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons.lab import gradients
from minidist.lessons.page import Page, verdict
from minidist.nn import GPT, DropoutKey
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.memory.activation_budget import MEASURED
from minidist.parallel.memory.activations import checkpoint_blocks, ways_of
from minidist.parallel.memory.kept_inputs import GROUP, InputKeeper
from minidist.parallel.step.step import rows_of

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "19")
STEPS = 2
DRAWS = (1, 4, 16, 64)
TOKENS = 64
STRENGTH = 10.0
RATIOS = (1, 2, 4, 8, 16)
SMALL = replace(lab.CONFIG, layers=3, width=32, context=16)


# ------------------------------------------------------------------------- the inputs that are left


def step_with(group: Group, kept: str, tp: int) -> dict[str, Any]:
    """Return, after two steps on the ranks of tp, what a block's input took on a rank, what was
    sent for it, and the weights."""
    config = replace(lab.CONFIG, layers=2)
    before = group.ledger.sent_bytes("step").get("tp", {}).get("all_gather", 0)
    trainer = Trainer(
        Plan(dp=group.size // tp, tp=tp, checkpoint_blocks="all", keep_activations=kept),
        config,
        group,
    )
    loss = [trainer.step(lab.batch_of(config)) for _ in range(STEPS)][-1]
    record = trainer.keeper.record() if trainer.keeper is not None else None
    digest = trainer.weights_sha256()
    trainer.close()
    inputs = STEPS * config.layers
    sent = group.ledger.sent_bytes("step").get("tp", {}).get("all_gather", 0) - before
    whole = rows_of_rank_0(group, tp) * config.context * config.width * 4
    here = record["kept_bytes"] // inputs if record else whole
    moved = record["moved_bytes"].get("host to device", 0) // inputs if record else 0
    return {
        "kept": kept,
        "here": here,
        "moved": moved,
        "sent": sent // inputs,
        "loss": loss,
        "digest": digest,
    }


def rows_of_rank_0(group: Group, tp: int) -> int:
    """Return the number of sequences of rank 0, where dp divides the batch."""
    return rows_of(lab.BATCH, size=group.size // tp, rank=0)[0]


def shared_bytes(numbers: int, ways: Sequence[str], tp: int) -> tuple[int, int]:
    """Return the bytes of an input that rank 0 keeps, and those that it sends in a gather: all but
    rank 1's part."""
    arrays = [(numbers, 4)]
    if "8bit" in ways:
        tokens = numbers // lab.CONFIG.width
        arrays = [(numbers, 1), (tokens * -(-lab.CONFIG.width // GROUP), 4)]
    parts = np.zeros(tp, int)
    for count, itemsize in arrays:
        parts += itemsize * np.diff(bounds(count, tp))
    return int(parts[0]), int(parts.sum() - parts[1 % tp])


def inputs_left(group: Group, page: Page) -> None:
    """Show one block's input on rank 0, by way; up to 4 ranks are on the axis tp, so that shard has
    ranks to share with."""
    tp = group.size if 1 < group.size <= lab.CONFIG.heads else 1
    kinds = [
        "whole",
        "8bit",
        "offload",
        *(["shard", "8bit,shard", "8bit,shard,offload"] if tp > 1 else []),
    ]
    found = [step_with(group, kept, tp) for kept in kinds]
    rows = []
    numbers = rows_of_rank_0(group, tp) * lab.CONFIG.context * lab.CONFIG.width
    for each in found:
        ways = ways_of(each["kept"])
        own, sent = shared_bytes(numbers, ways, tp if "shard" in ways else 1)
        rows.append(
            [
                each["kept"],
                size_text(each["here"]),
                size_text(own),
                verdict(each["here"], own),
                "host" if each["moved"] else "device",
                each["sent"],
                sent,
                verdict(each["sent"], sent),
                "equal" if each["digest"] == found[0]["digest"] else "other",
                f"{each['loss']:.6f}",
            ]
        )
    page.table(
        f"A block's input between forward and backward, rank 0 of tp={tp}",
        ["kept", "bytes", "formula", "", "where", "sent", "formula", "", "weights", "loss"],
        rows,
        note="shard and offload lose nothing; 8bit rounds, so its second step starts from other "
        "weights",
    )


# ------------------------------------------------------------------------------ the error of 8 bits


class Nearest(InputKeeper):
    """8 bits, rounded to the nearest code instead of by chance."""

    def _codes(self, where: str, key: DropoutKey | None, x: Any) -> tuple[Any, ...]:
        scale = np.abs(x).max(axis=-1, keepdims=True) / 127
        return np.rint(x / np.where(scale > 0, scale, 1)).astype(np.int8), scale.astype(np.float32)


def gradient(keeper: Any, seed: int = 0) -> np.ndarray:
    """Return all gradients of one batch as one vector; `seed` is that of the random rounding."""
    model: GPT = lab.model_of(SMALL, "none")
    checkpoint_blocks(model, "all", keeper)
    model.loss(
        *lab.batch_of(SMALL), key=DropoutKey.of_sequences(seed, 0, 0, lab.BATCH, SMALL.context)
    ).backward()
    return gradients(model)


def errors(keeper: InputKeeper) -> list[float]:
    """Return the error of the mean gradient of the first 1, 4, 16, … draws, relative to the exact
    gradient's length."""
    exact = gradient(None)
    total = np.zeros_like(exact, np.float64)
    found = []
    for draw in range(1, max(DRAWS) + 1):
        total += gradient(keeper, draw)
        if draw in DRAWS:
            found.append(float(np.linalg.norm(total / draw - exact) / np.linalg.norm(exact)))
    keeper.close()
    return found


def rounding(page: Page) -> None:
    """Compare rounding by chance with rounding to nearest, over draws."""
    chance = errors(InputKeeper(["8bit"]))
    nearest = errors(Nearest(["8bit"]))
    page.table(
        "Error of a gradient from inputs of 8 bits, relative to its length",
        ["mean over so many draws", "rounded by chance", "first / √draws", "rounded to nearest"],
        [
            [draws, f"{100 * a:.3f} %", f"{100 * chance[0] / draws**0.5:.3f} %", f"{100 * b:.3f} %"]
            for draws, a, b in zip(DRAWS, chance, nearest, strict=True)
        ],
        note="one draw of chance is worse than nearest; its errors cancel over steps, and those "
        "of nearest stay",
    )


# ----------------------------------------------------------------------------------------- a budget


def with_budget(alone: Group, memory: int | None, which: str = "none") -> tuple[int, Any]:
    """Return the peak of activations of a few steps, and what was chosen."""
    trainer = Trainer(Plan(activation_memory=memory, checkpoint_blocks=which), lab.CONFIG, alone)
    trainer.account.reset_peak()  # of trainers before this one
    for _ in range(MEASURED + 1):
        trainer.step(lab.batch_of(lab.CONFIG))
    chosen = trainer.budget.chosen if trainer.budget is not None else None
    peak = trainer.account.peak["activations"]
    trainer.close()
    return peak, chosen


def budgets(alone: Group) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (budget, peak, choice) for budgets from the least possible to one where everything
    fits."""
    floor = with_budget(alone, None, "all")[0]
    most = with_budget(alone, None)[0]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        memory = int(floor + part * (most - floor)) + 64
        peak, chosen = with_budget(alone, memory)
        yield memory, peak, chosen


def budget(alone: Group, page: Page) -> None:
    """Show what the knapsack chose for five budgets."""
    rows = [
        [
            size_text(memory),
            size_text(peak),
            "ok" if peak <= memory else "off, above it",
            *(chosen.count(way) for way in ("none", "scores", "all")),
        ]
        for memory, peak, chosen in budgets(alone)
    ]
    page.table(
        f"--activation-memory on {lab.CONFIG.layers} blocks, after {MEASURED} measured steps",
        ["budget", "peak", "", "kept", "scores again", "all again"],
        rows,
        note="measured times differ from run to run, and so may the choice; the bytes are kept to",
    )


# ------------------------------------------------------------------------------ context compression


def found_by_query(ratio: int) -> float:
    """Return how much of one old token's value the last query gets when it looks for exactly this
    token."""
    key, value = np.zeros((2, 1, 1, TOKENS, 1))
    key[0, 0, 3] = value[0, 0, 3] = 1.0
    query = np.full((1, 1, TOKENS, 1), STRENGTH)
    arrays = [tensor(array) for array in (query, key, value)]
    y = (
        ops.causal_attention(*arrays)
        if ratio == 1
        else compressed_attention(*arrays, ratio=ratio, window=1)
    )
    return float(y.data[0, 0, -1, 0])


def by_formula(ratio: int) -> float:
    """Return the same by formula: the token's group has the mean of its scores and the mean of its
    values."""
    weight = ratio * np.exp(STRENGTH / ratio)
    return float(weight / (weight + TOKENS - ratio) / ratio)


def compression(page: Page) -> None:
    """Show by ratio how much is found of one token among 64."""
    rows: list[Sequence[Any]] = []
    for ratio in RATIOS:
        found = found_by_query(ratio)
        formula = by_formula(ratio)
        rows.append(
            [
                ratio,
                TOKENS // ratio,
                f"{found:.4f}",
                f"{formula:.4f}",
                verdict(found, formula, 1e-9),
            ]
        )
    page.table(
        f"A query looks for one old token of {TOKENS}",
        ["tokens a group", "entries kept", "found of its value", "formula", ""],
        rows,
        note="1 token a group is attention; more, and what is asked for is mixed with its "
        "neighbours",
    )
