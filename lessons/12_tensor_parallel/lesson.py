"""Lesson 12: tensor parallelism: every matrix cut, two all-reduces per region, a split loss.

mpirun -n 4 python lessons/12_tensor_parallel/lesson.py
python lessons/12_tensor_parallel/lesson.py                     # no launcher: four threads
python lessons/12_tensor_parallel/lesson.py --break no-f        # see README.md, section 8
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops.collectives import gather_copies
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.device import account
from minidist.grading import load_module, sent_since, totals
from minidist.lessons.lab import difference, new_model, state_difference
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import arguments, run_lesson
from minidist.nn.shares import head_shares
from minidist.nn.weight_shard import WeightShard
from minidist.optim import Adam
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.single import Single
from minidist.parallel.tensor.tensor_layers import SplitOutput
from minidist.parallel.tensor.tensor_parallel import elements_sent, plain_tensor_mlp

HERE = Path(__file__).resolve()
lab, broken = (load_module(HERE.with_name(name), "12") for name in ("experiments.py", "broken.py"))
CONFIG = lab.CONFIG
BATCH = lab.BATCH
ITEM = lab.ITEM
STEPS = 3


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  Columns, then rows: an MLP by hand")
    by_hand(group, page)
    page.heading("2  What each rank holds")
    shapes(group, page)
    page.heading("3  Equal to one process")
    equal(group, page)
    page.heading("4  Traffic beside its formula, and beside data parallelism's")
    traffic(group, page)
    beside_data_parallel(group, page)
    page.heading("5  The loss without the logits")
    loss_of_slices(group, page)
    page.heading("6  Memory: what is divided, and what is not")
    memory(group, page)


# ---------------------------------------------------------------------------------------- 1 by hand


def by_hand(group: Group, page: Page) -> None:
    """Compare the plain loop with the same MLP in one piece."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(10, 8))
    dy = draw.normal(size=(10, 8))
    up = draw.normal(size=(8, 32))
    down = draw.normal(size=(32, 8))
    bias = draw.normal(size=8)
    own = np.array_split(np.arange(32), group.size)[group.rank]
    before = totals(group.ledger)
    y, dx, dup, ddown = plain_tensor_mlp(x, up[:, own], down[own], bias, dy, group)
    _, nbytes = sent_since(group.ledger, before)
    inner = x @ up
    active = np.maximum(inner, 0)
    dinner = (dy @ down.T) * (inner > 0)
    whole = {
        "y": (y, active @ down + bias),
        "dx": (dx, dinner @ up.T),
        "d up, own columns": (dup, x.T @ dinner[:, own]),
        "d down, own rows": (ddown, active[:, own].T @ dy),
    }
    rows = [
        [name, str(ours.shape), f"{difference(ours, target):.0e}"]
        for name, (ours, target) in whole.items()
    ]
    sent = all_ranks(group, nbytes)
    formula = 2 * 2 * (group.size - 1) * x.nbytes
    rows.append(
        ["sent by all ranks", f"{size_text(sent)} of {size_text(formula)}", verdict(sent, formula)]
    )
    page.table(
        f"x (10, 8), up (8, 32), down (32, 8) on {group.size} ranks, rank 0",
        ["", "shape", "off by"],
        rows,
        note="two all-reduces of x's size; no gather between the two products (N2:156)",
    )


def all_ranks(group: Group, number: float) -> int:
    """Return the sum of a number over the ranks; the ledger counts it as control."""
    with group.ledger.control():
        return int(group.all_reduce(np.array([float(number)]))[0])


# --------------------------------------------------------------------------- 2 what each rank holds


def shapes(group: Group, page: Page) -> None:
    """Show each weight of a block and of the ends: whole, and on the first and last rank."""
    model = lab.cut_model(group)
    mine = np.array([[p.size] for p in model.parameters()], dtype=np.int64)
    with group.ledger.control():
        sizes = group.all_gather(mine.reshape(1, -1))
    rows = []
    for number, (name, p) in enumerate(model.named_parameters()):
        if name.startswith("blocks.") and not name.startswith("blocks.0."):
            continue
        whole = p.whole if isinstance(p, WeightShard) else p.shape
        how = "cut" if isinstance(p, WeightShard) else "whole"
        rows.append(
            [
                name,
                str(whole),
                how,
                *(f"{100 * sizes[r, number] / np.prod(whole):.0f} %" for r in (0, group.size - 1)),
            ]
        )
    page.table(
        f"{CONFIG.heads} heads, {CONFIG.hidden} hidden numbers, {CONFIG.vocabulary} ids on "
        f"{group.size} ranks",
        ["weight", "serial", "", "rank 0 has", f"rank {group.size - 1} has"],
        rows,
        note="sizes need not divide: the first ranks have one more. A key head is never cut "
        "through",
    )
    shares = head_shares(8, 2, min(group.size, 8))
    page.table(
        "8 query heads on 2 key heads (grouped-query)",
        ["", "query heads", "key heads"],
        [
            [f"rank {rank}", f"{q.start}..{q.stop - 1}", f"{k.start}..{k.stop - 1}"]
            for rank, (q, k) in enumerate(shares)
        ],
        note="fewer key heads than ranks: several ranks hold the same one, and add up its gradient",
    )


# ------------------------------------------------------------------------------------------ 3 equal

CASES = {
    "plain GPT": {},
    "tied, rotary, rms, gated": {
        "tied": True,
        "positions": "rotary",
        "norm": "rms",
        "activation": "silu",
    },
    "2 key heads": {"kv_heads": 2},
}


def equal(group: Group, page: Page) -> None:
    """Train several models by one process and by all ranks; compare the weights."""
    rows = []
    for name, changes in CASES.items():
        config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        single = Single(new_model(config))
        cut = lab.cut_strategy(group, config)
        optimizers = [Adam(s.parameters, 1e-2) for s in (single, cut)]
        for step in range(STEPS):
            losses = [
                strategy.step(lab.batch_of(config, step), optimizer, clip=0.5)
                for strategy, optimizer in zip((single, cut), optimizers, strict=True)
            ]
        gap = state_difference(cut.state_dict(), single.state_dict())
        rows.append(
            [
                name,
                f"{losses[0]:.9f}",
                f"{losses[1]:.9f}",
                f"{gap:.0e}",
                "ok" if gap < 1e-10 else f"off {gap:.0e}",
            ]
        )
    page.table(
        f"After {STEPS} steps of Adam with clipping, float64, {group.size} ranks",
        ["", "loss, one process", f"loss, {group.size} ranks", "weights off by", "1e-10"],
        rows,
        note="state_dict puts the shards together in one process's layout",
    )


# ---------------------------------------------------------------------------------------- 4 traffic


def measure_step(group: Group, strategy: Any, batch: Any) -> tuple[int, list[int]]:
    """Return (bytes that all ranks sent in a step, this rank's bytes of each call except
    control's)."""
    calls: list[int] = []
    end = group.ledger.subscribe(
        lambda event: (
            calls.append(event.details["nbytes"])
            if event.kind == "call"
            and event.details["axis"] == "tp"
            and event.details["verb"] == "all_reduce"
            else None
        )
    )
    optimizer = Adam(strategy.parameters, 1e-3)
    before = totals(group.ledger)
    strategy.step(batch, optimizer)
    _, nbytes = sent_since(group.ledger, before)
    end()
    return all_ranks(group, nbytes), calls


def traffic(group: Group, page: Page) -> None:
    """Show the traffic of a step by purpose, with activations kept and with blocks computed
    again."""
    rows = []
    p = group.size
    tokens = BATCH * CONFIG.context
    h = CONFIG.width
    layers = CONFIG.layers
    for which, each in (("none", 4), ("all", 6)):
        strategy = lab.cut_strategy(group, checkpoint=which)
        nbytes, calls = measure_step(group, strategy, lab.batch_of(CONFIG, 0))
        formula = ITEM * elements_sent(
            CONFIG, ranks=p, tokens=tokens, recomputed=layers if which == "all" else 0
        )
        name = "kept" if which == "none" else "blocks computed again"
        expected = each * layers + 4 if p > 1 else len(calls)
        rows.append(
            [
                name,
                len(calls),
                f"{each} L + 4",
                verdict(len(calls), expected),
                size_text(nbytes),
                size_text(formula),
                verdict(nbytes, formula),
            ]
        )
    parts = {
        "blocks": 4 * layers * tokens * h,
        "embedding, forward": tokens * h,
        "head, backward": tokens * h,
        "loss": 3 * tokens,
    }
    page.table(
        f"All-reduces of a step: L = {layers} blocks, {tokens} tokens, width {h}, {p} ranks",
        ["activations", "calls", "formula", "", "all ranks sent", "formula", ""],
        rows,
        note="  ".join(
            f"{name} {size_text(2 * (p - 1) * ITEM * numbers)}" for name, numbers in parts.items()
        )
        + "; the loss is two of the calls",
    )


def beside_data_parallel(group: Group, page: Page) -> None:
    """Compare with data parallelism on the same model and batch: N2:158 calls the volume small."""
    config = replace(CONFIG, vocabulary=8, layers=4)
    rows = []
    for sequences in (group.size, 2 * group.size, 4 * group.size):
        batch = lab.batch_of(config, 0, sequences)
        cut, _ = measure_step(group, lab.cut_strategy(group, config), batch)
        replicas, _ = measure_step(group, DDP(new_model(config), group), batch)
        tokens = sequences * config.context
        formula = ITEM * elements_sent(config, ranks=group.size, tokens=tokens)
        rows.append(
            [
                tokens,
                f"{tokens / config.width:.1f} h",
                size_text(cut),
                verdict(cut, formula),
                size_text(replicas),
                f"{cut / replicas:.2f}" if replicas else "-",
            ]
        )
    page.table(
        f"{config.layers} blocks of width h = {config.width}: one step, all ranks",
        ["tokens B T", "", "tensor parallel", "", "data parallel", "ratio"],
        rows,
        note="4 L B T h against 12 L h²: equal at B T = 3 h a step; training takes many more "
        "tokens",
    )


# ------------------------------------------------------------------------------------------- 5 loss


def loss_of_slices(group: Group, page: Page) -> None:
    """Compare the loss by gathering logits with the loss by two all-reduces: value, bytes,
    memory."""
    tokens = 64
    vocabulary = 1003
    logits = np.random.default_rng(0).normal(size=(tokens, vocabulary))
    targets = np.random.default_rng(1).integers(0, vocabulary, tokens)
    own = np.array_split(np.arange(vocabulary), group.size)[group.rank]
    output = SplitOutput(vocabulary, lab.cut_model(group).tokens.region)
    ways: dict[str, Callable[[Any], Any]] = {
        "gathered": lambda x: ops.cross_entropy(gather_copies(x, dim=1, group=group), targets),
        "two all-reduces": lambda x: output.loss(x, targets, divisor=None),
    }
    target = ops.cross_entropy(logits, targets).item()
    rows = []
    formulas = {
        "gathered": (group.size - 1) * tokens * vocabulary,
        "two all-reduces": 6 * (group.size - 1) * tokens,
    }
    for name, way in ways.items():
        with account.use(account.MemoryAccount()) as memory:
            x = tensor(logits[:, own].copy(), requires_grad=True)
            before = totals(group.ledger)
            loss = way(x)
            sent = all_ranks(group, sent_since(group.ledger, before)[1])
            loss.backward()
            peak = memory.peak["total"]
        rows.append(
            [
                name,
                f"{loss.item() - target:.0e}",
                size_text(sent),
                size_text(ITEM * formulas[name]),
                verdict(sent, ITEM * formulas[name]),
                size_text(peak),
            ]
        )
    page.table(
        f"{tokens} tokens, {vocabulary} ids, {group.size} ranks; the logits are "
        f"{size_text(logits.nbytes)}",
        ["", "loss off by", "all ranks sent", "formula", "", "peak, rank 0"],
        rows,
        note="maxima first, then sums of exp(logit - maximum) and targets' logits together: 3 "
        "numbers a token",
    )


# ----------------------------------------------------------------------------------------- 6 memory


def memory(group: Group, page: Page) -> None:
    """Compare a block on one rank with the same block on all: weights, and activations inside and
    outside the regions."""
    config = replace(CONFIG, heads=8, width=64)
    p = group.size
    one = lab.block_bytes(config, new_model)
    ours = lab.block_bytes(config, lambda c: lab.cut_model(group, c))
    with group.ledger.control():
        everyone = group.all_gather(np.array([ours]))
    h = config.width
    tokens = BATCH * config.context
    outside = ITEM * tokens * (4 * h + 2)
    held = int(everyone[:, 1].sum())
    rows = [
        [
            "weights",
            size_text(one[0]),
            size_text(int(everyone[:, 0].max())),
            size_text(int(everyone[:, 0].sum())),
            verdict(int(everyone[:, 0].sum()), one[0] + (p - 1) * 6 * h * ITEM),
        ],
        [
            "activations",
            size_text(one[1]),
            size_text(int(everyone[:, 1].max())),
            size_text(held),
            verdict(held, one[1] + (p - 1) * outside),
        ],
        ["  of these outside", size_text(outside), size_text(outside), size_text(p * outside), ""],
    ]
    page.table(
        f"One block of width {h}, {tokens} tokens, float64",
        ["", "one process", f"most of {p} ranks", "all ranks together", ""],
        rows,
        note="norms and two biases (6 h), and what norms keep and give (4 h + 2 a token), are "
        "on every rank: lesson 13 divides the second",
    )


BREAKS = broken.BREAKS


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS)
