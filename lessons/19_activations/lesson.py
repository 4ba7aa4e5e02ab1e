"""Lesson 19: keep less of the forward, and compute it again when backward asks.

python lessons/19_activations/lesson.py
mpirun -n 4 python lessons/19_activations/lesson.py           # sections 4.1 and 5 on real ranks
python lessons/19_activations/lesson.py --break fresh-dropout # see README.md, section 9
"""

import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, tensor
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import arguments, run_lesson
from minidist.nn import DropoutKey, GPTConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.memory.activations import plain_recompute

HERE = Path(__file__).resolve()
lab, kept, broken = (
    load_module(HERE.with_name(name), "19") for name in ("experiments.py", "kept.py", "broken.py")
)
FLOAT32 = 4


def tour(group: Group, page: Page) -> None:
    """Run the lesson: sections 4.1 and 5 on all ranks together, the others only on rank 0."""
    first = group.rank == 0
    alone = group.split(group.rank)
    page.heading("1  The same gradients, to the bit")
    if first:
        same_gradients(page)
    page.heading("2  What is kept at the end of forward")
    if first:
        kept_at_the_end(page)
    page.heading("3  The peak of a step, and which blocks lower it")
    if first:
        peaks(page)
    page.heading("4  What it costs")
    if first:
        seconds(page)
    page.heading("4.1  Under ZeRO-3: nothing more is gathered")
    traffic(group, page)
    page.heading("5  The inputs that are left: 8 bits, shares, the host")
    kept.inputs_left(group, page)
    if first:
        kept.rounding(page)
    page.heading("6  A budget")
    if first:
        kept.budget(alone, page)
    page.heading("7  Context compression is another function")
    if first:
        kept.compression(page)


def gradients(config: GPTConfig, which: str) -> dict[str, np.ndarray]:
    """Return every weight's gradient of one batch."""
    model = lab.model_of(config, which)
    key = DropoutKey.of_sequences(0, 0, 0, lab.BATCH, config.context)
    model.loss(*lab.batch_of(config), key=key).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def same_gradients(page: Page) -> None:
    """Compare three ways and the plain loop, with dropout on."""
    config = replace(lab.CONFIG, dropout=0.1)
    plain = gradients(config, "none")
    rows = []
    for which in lab.WAYS[1:]:
        found = gradients(config, which)
        rows.append(
            [
                which,
                sum(np.array_equal(found[name], plain[name]) for name in plain),
                len(plain),
                f"{max(float(np.max(np.abs(found[name] - plain[name]))) for name in plain):.1e}",
            ]
        )
    weights = [
        Parameter(np.random.default_rng(i).normal(size=(16, 16)), name=f"w{i}") for i in range(4)
    ]
    blocks = [partial(lambda w, x: ops.gelu(ops.linear(x, w)), weight) for weight in weights]
    x = np.random.default_rng(9).normal(size=(8, 16))
    plain_recompute(blocks, tensor(x), np.ones((8, 16)))
    loop = [np.array(weight.grad) for weight in weights]
    h = tensor(x)
    for block in blocks:
        h = block(h)
    for weight in weights:
        weight.zero_grad()
    h.backward(np.ones((8, 16)))
    equal = sum(
        np.array_equal(a, np.asarray(weight.grad)) for a, weight in zip(loop, weights, strict=True)
    )
    rows.append(["the loop of section 1", equal, 4, "0.0e+00" if equal == 4 else "not equal"])
    page.table(
        "Gradients compared with those of a plain backward, dropout 0.1",
        ["kept", "equal to the bit", "of", "largest difference"],
        rows,
        note="what is computed again has the same bits; scores are made by another formula from "
        "the saved sums",
    )


def input_bytes(config: GPTConfig, batch: int = lab.BATCH) -> int:
    """Return the bytes of a block's input: batch × context × width numbers."""
    return FLOAT32 * batch * config.context * config.width


def score_bytes(config: GPTConfig, batch: int = lab.BATCH) -> int:
    """Return the bytes of a block's probabilities in a context of up to 64: batch × heads ×
    context² numbers."""
    return FLOAT32 * batch * config.heads * config.context**2


def kept_at_the_end(page: Page) -> None:
    """Show what one block keeps, by way, for several shapes."""
    rows = []
    for config in (lab.CONFIG, replace(lab.CONFIG, width=128), replace(lab.CONFIG, context=32)):
        each = lab.inside(replace(config, layers=2))
        rows.append(
            [
                f"context {config.context}, width {config.width}",
                size_text(each["none"]),
                size_text(each["none"] - each["scores"]),
                size_text(score_bytes(config)),
                verdict(each["none"] - each["scores"], score_bytes(config)),
                size_text(each["all"]),
                size_text(input_bytes(config)),
                verdict(each["all"], input_bytes(config)),
            ]
        )
    page.table(
        f"What one block keeps, {lab.BATCH} sequences",
        ["tokens", "none", "scores less", "4 B heads T²", "", "all", "4 B T width", ""],
        rows,
        note="the formulas of parallel/memory/activations.py",
    )


def peaks(page: Page) -> None:
    """Compare the peak for k of L blocks with the formula's difference."""
    each = lab.inside(lab.CONFIG)
    x = each["all"]
    a = each["none"]
    most = lab.peak(lab.CONFIG, "none")
    rows = []
    for k in range(lab.CONFIG.layers + 1):
        which = ",".join(map(str, range(k))) or "none"
        measured = lab.peak(lab.CONFIG, which)
        saved = k * (a - x) if k < lab.CONFIG.layers else (k - 1) * (a - x)
        rows.append(
            [
                f"{k} of {lab.CONFIG.layers}",
                size_text(measured),
                f"{100 * measured / most:.0f} %",
                size_text(most - measured),
                size_text(saved),
                verdict(most - measured, saved, 0.05),
            ]
        )
    page.table(
        "Blocks that keep only their inputs",
        ["blocks", "peak", "", "less", "k (a - x)", ""],
        rows,
        note="the last block does not lower the peak: backward begins there and computes all of it "
        "again at once",
    )


def seconds(page: Page) -> None:
    """Show the median time of forward and backward, the three ways in turn."""
    models = {which: lab.model_of(lab.CONFIG, which) for which in lab.WAYS}
    batch = lab.batch_of(lab.CONFIG)
    spent: dict[str, list[float]] = {which: [] for which in lab.WAYS}
    for _ in range(5):
        for which, model in models.items():
            begin = time.perf_counter()
            model.loss(*batch).backward()
            spent[which].append(time.perf_counter() - begin)
            model.zero_grad()
    plain = statistics.median(spent["none"])
    page.table(
        "Forward and backward, median of 5",
        ["kept", "ms", "of none"],
        [
            [
                which,
                f"{1e3 * statistics.median(times):.1f}",
                f"{statistics.median(times) / plain:.2f}",
            ]
            for which, times in spent.items()
        ],
        note='with B = 2F, "all" should take 4/3; embedding, norm and output are not computed '
        "again",
    )


def traffic(group: Group, page: Page) -> None:
    """Show the bytes that ZeRO-3 sends in two steps, with recomputation and without."""
    config = replace(lab.CONFIG, layers=2, width=32)
    batch = lab.batch_of(config, batch=group.size)
    rows: list[list[Any]] = []
    for which in ("none", "all"):
        trainer = Trainer(Plan(dp=group.size, zero=3, checkpoint_blocks=which), config, group)
        trainer.account.reset_peak()
        before = group.ledger.sent_bytes("step").get("dp", {})
        losses = [trainer.step(batch) for _ in range(2)]
        after = group.ledger.sent_bytes("step").get("dp", {})
        sent = {verb: after[verb] - before.get(verb, 0) for verb in after}
        rows.append(
            [
                which,
                sent.get("all_gather", 0),
                sent.get("reduce_scatter", 0),
                f"{losses[-1]:.6f}",
                size_text(trainer.account.peak["activations"]),
            ]
        )
        trainer.close()
    rows[1].insert(3, verdict(sum(map(int, rows[1][1:3])), sum(map(int, rows[0][1:3]))))
    rows[0].insert(3, "")
    page.table(
        f"Two steps of ZeRO-3 on {group.size} ranks, rank 0",
        ["kept", "all_gather", "reduce_scatter", "", "loss", "peak of activations"],
        rows,
        note="the weights of a unit are there for its backward, and its forward runs then",
    )


BREAKS = broken.BREAKS


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=2)
