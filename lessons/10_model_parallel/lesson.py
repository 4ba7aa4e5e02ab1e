"""Lesson 10: model parallel: layers over ranks; state per rank, traffic at the cuts, waiting.

mpirun -n 4 python lessons/10_model_parallel/lesson.py
python lessons/10_model_parallel/lesson.py                          # no launcher: four threads
python lessons/10_model_parallel/lesson.py --break no-gradient-back # see README.md, section 6
"""

from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.console import plural, size_text
from minidist.errors import DeadlockError
from minidist.grading import load_module
from minidist.lessons.lab import new_model
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.nn import GPT, GPTConfig
from minidist.optim import AdamW
from minidist.parallel.pipeline.model_parallel import ModelParallel, plain_model_parallel
from minidist.parallel.pipeline.stages import StagePass, Stages, balanced_layers
from minidist.parallel.step.single import Single
from minidist.parallel.zero.memory_formula import MIXED

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "10")
STEPS = 3
NOTES = GPTConfig(vocabulary=32_000, context=2_048, layers=32, width=4_096, heads=32)
NOTES_DEVICES = 4


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  The same model as on one rank")
    same(group, page)
    page.heading("2  What each rank holds")
    holdings(group, page)
    if group.rank == 0:
        notes_size(page)
    page.heading("3  How long ranks wait")
    waiting(group, page)
    page.heading("4  What crosses the cuts")
    traffic(group, page)


# --------------------------------------------------------------------------------------- 1 equality


def same(group: Group, page: Page) -> None:
    """Compare with one process: the plain loop's gradients after a batch, the library's weights
    after some steps."""
    config = lab.config_for(group.size)
    alone = new_model(config)
    plain = plain_gradients(group, alone)
    single = Single(alone)
    strategy = ModelParallel(GPT(config), group, seed=0)
    for rule in (single, strategy):
        optimizer = AdamW(rule.parameters, 1e-2)
        for step in range(STEPS):
            rule.step(lab.global_batch(config, step), optimizer, clip=0.5)
    target = single.state_dict()
    off = max(np.abs(array - target[name]).max() for name, array in strategy.state_dict().items())
    page.table(
        f"Off one process by, in float64, {group.size} ranks",
        ["", "after", "largest difference"],
        [
            ["plain loop, gradients of blocks", "1 batch", f"{plain:.0e}"],
            ["ModelParallel, weights", f"{STEPS} steps", f"{off:.0e}"],
        ],
    )


def plain_gradients(group: Group, alone: GPT) -> float:
    """Return the largest difference between the plain loop's gradients of blocks and one
    process's."""
    config = alone.config
    mine = part_of_model(group, config)
    inputs, targets = lab.global_batch(config, 0)
    plain_model_parallel(
        lambda x, targets, divisor: mine.forward(group.rank, x, targets=targets, divisor=divisor),
        group,
        inputs,
        targets,
        targets.size,
    )
    alone.loss(inputs, targets, targets.size).backward()
    serial = dict(alone.named_parameters())
    off = [
        np.abs(weight.grad - serial[name].grad).max()
        for name, weight in mine.model.named_parameters()
        if name.startswith("blocks.")
    ]
    alone.zero_grad()
    with group.ledger.control():
        return float(group.all_reduce(np.array([max(off)]), op="max")[0])


def part_of_model(group: Group, config: Any) -> Stages:
    """Return this rank's layers, initialized."""
    layers = [len(part) for part in np.array_split(np.arange(config.layers), group.size)]
    mine = Stages(GPT(config), layers, [group.rank])
    mine.model.initialize(0)
    return mine


# --------------------------------------------------------------------------- 2 what each rank holds


def holdings(group: Group, page: Page) -> None:
    """Show the parameters of each rank."""
    config = lab.config_for(group.size)
    strategy = ModelParallel(GPT(config), group, seed=0)
    with group.ledger.control():
        counts = group.all_gather(np.array([sum(weight.size for weight in strategy.weights)]))
    whole = sum(p.size for p in GPT(config).parameters())
    table = config.vocabulary * config.width
    rows = [
        [f"rank {rank}", _parts(strategy.layers, rank), f"{count:,}", f"{count / whole:.0%}"]
        for rank, count in enumerate(counts)
    ]
    expected = whole + table * (group.size > 1)
    rows.append(
        [
            "together",
            f"{config.layers} blocks",
            f"{counts.sum():,}",
            "ok" if counts.sum() == expected else f"off {counts.sum() - expected}",
        ]
    )
    page.table(
        f"Parameters; the whole model has {whole:,}",
        ["", "has", "parameters", "of the whole"],
        rows,
        note=f"together {table:,} more than the model: the tied token table lies at both ends",
    )


def notes_size(page: Page) -> None:
    """Show N2:166: 32 layers on four devices, as the library cuts them, for a model of Llama-7B's
    size without numbers."""
    layers = balanced_layers([1.0] * NOTES.layers, NOTES_DEVICES)
    counts = [
        sum(weight.size for weight in Stages(GPT(NOTES), layers, [stage]).model.parameters())
        for stage in range(NOTES_DEVICES)
    ]
    first = np.concatenate([[0], np.cumsum(layers)])
    names = [f"GPU {stage}" for stage in range(NOTES_DEVICES)] + ["together"]
    ranges = [f"{start + 1}-{stop}" for start, stop in zip(first, first[1:], strict=False)] + [
        f"1-{NOTES.layers}"
    ]
    has = [_parts(layers, stage) for stage in range(NOTES_DEVICES)] + [""]
    rows = [
        [name, span, words, f"{count / 1e9:.2f} billion", f"{MIXED.together * count / 1e9:.1f} GB"]
        for name, span, words, count in zip(names, ranges, has, [*counts, sum(counts)], strict=True)
    ]
    page.table(
        f"N2:166: {NOTES.layers} layers on {NOTES_DEVICES} GPUs, width {NOTES.width}, "
        f"{NOTES.vocabulary:,} symbols",
        ["", "layers", "has", "parameters", "weights, gradients, Adam"],
        rows,
        note=f"mixed precision, {MIXED.together} bytes a parameter; activations come on top",
    )


def _parts(layers: list[int], rank: int) -> str:
    """Return what a rank has, in words."""
    last = rank == len(layers) - 1
    return ", ".join(
        ["embedding"] * (rank == 0) + [plural(layers[rank], "block")] + ["norm, output"] * last
    )


# ---------------------------------------------------------------------------- 3 how long ranks wait


def waiting(group: Group, page: Page) -> None:
    """Show each rank's milliseconds in the quickest of some steps; then with another division of
    the layers."""
    config = lab.config_for(group.size, layers=2 * group.size)
    spans = lab.recorded_step(group, config, sequences=8)
    last = [1] * (group.size - 1) + [group.size + 1]
    uneven = lab.recorded_step(group, config, sequences=8, layers=last)
    if not spans:
        return

    def total(rank: list[Any], name: str) -> str:
        return (
            f"{1e3 * sum(stop - start for kind, start, stop in rank if kind.startswith(name)):.2f}"
        )

    page.table(
        "Milliseconds in one step",
        ["", "forward", "backward", "waits for an activation", "for a gradient"],
        [
            [
                f"rank {number}",
                *(
                    total(rank, name)
                    for name in (
                        "forward",
                        "backward",
                        "wait for the activation",
                        "wait for the gradient",
                    )
                ),
            ]
            for number, rank in enumerate(spans)
        ],
    )
    ideal = (group.size - 1) / group.size
    page.table(
        "The share of the ranks' time in which they do not compute",
        ["layers", "measured", "(p-1)/p"],
        [
            ["2 on each rank", f"{lab.idle(spans):.1%}", f"{ideal:.1%}"],
            [f"{', '.join(map(str, last))}", f"{lab.idle(uneven):.1%}", f"{ideal:.1%}"],
        ],
        note="one rank works at a time, so the split of the layers changes memory and no time; a "
        "busy machine adds idle time",
    )


# ---------------------------------------------------------------------------------------- 4 traffic


def traffic(group: Group, page: Page) -> None:
    """Compare the bytes of a step with the formula."""
    config = lab.config_for(group.size)
    size = group.size
    strategy = ModelParallel(GPT(config), group, seed=0)
    inputs, _ = batch = lab.global_batch(config, 0)
    with group.ledger.during("lesson 10"):
        strategy.step(batch, AdamW(strategy.parameters, 1e-2), clip=0.5)
    sent = group.ledger.sent_bytes("lesson 10").get(group.axis, {})
    with group.ledger.control():
        sends, tables = (
            int(n)
            for n in group.all_reduce(np.array([sent.get("send", 0), sent.get("all_reduce", 0)]))
        )
    cut = 2 * (size - 1) * inputs.size * config.width * 8
    table = 2 * config.vocabulary * config.width * 8 * (size > 1)
    ddp = 2 * (size - 1) * sum(p.size for p in GPT(config).parameters()) * 8
    page.table(
        f"One step over all ranks: B = {len(inputs)} sequences of T = {config.context}, width h = "
        f"{config.width}, float64",
        ["", "measured", "formula", "", ""],
        [
            [
                "activations and their gradients",
                size_text(sends),
                "2 B T h (p-1)",
                size_text(cut),
                verdict(sends, cut),
            ],
            ["tied table", size_text(tables), "2 V h", size_text(table), verdict(tables, table)],
            ["DDP would send", "", "2 (p-1) Ψ", size_text(ddp), ""],
        ],
    )


# ----------------------------------------------------------------------------------------- Break it


def train(group: Group, steps: int, broken: str) -> dict[str, Any]:
    """Return the weights after some steps with one part of the algorithm left out."""
    config = lab.config_for(group.size)
    strategy: Any = (
        Single(GPT(config)) if broken == "single" else ModelParallel(GPT(config), group, seed=0)
    )
    if broken == "gradient":
        backward = strategy.backward

        def silent(work: StagePass, number: int) -> None:
            x, _ = work.kept[group.rank, number]
            if x is not None:
                x.register_hook(lambda dx: dx * 0.0)
            backward(work, number)

        strategy.backward = silent
    if broken == "table":
        strategy.ends = None
    optimizer = AdamW(strategy.parameters, 1e-2, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        losses.append(strategy.step(lab.global_batch(config, 0), optimizer))
    fresh = part_of_model(group, config).model.state_dict()
    moved = {
        name: float(np.abs(weight - fresh[name]).max())
        for name, weight in strategy.model.state_dict().items()
    }
    return {
        "losses": losses,
        "moved": moved,
        "table": strategy.model.state_dict().get("tokens.weight"),
    }


def no_gradient_back() -> None:
    """Send zeros from each rank instead of the gradient of its input."""
    for name, what in (("right", ""), ("no gradient back", "gradient")):
        ranks = md.run(train, 40, what, size=4)
        moved = [
            max(value for key, value in rank["moved"].items() if key.startswith("blocks."))
            for rank in ranks
        ]
        print(
            f"{name}: loss {ranks[0]['losses'][0]:.3f} -> {ranks[0]['losses'][-1]:.3f}; the "
            f"ranks' blocks moved by {', '.join(f'{value:.2f}' for value in moved)}"
        )


def forget_the_table() -> None:
    """Train a tied table at both ends whose gradients are not added."""
    for name, what in (("summed", ""), ("each end by itself", "table")):
        ranks = md.run(train, 20, what, size=4)
        apart = np.abs(ranks[0]["table"] - ranks[3]["table"]).max()
        print(
            f"{name}: loss {ranks[0]['losses'][-1]:.4f} after 20 steps; the two copies of the "
            f"table are {apart:.3f} apart"
        )


def everybody_receives() -> None:
    """Let each rank wait for a gradient before it has sent its activation."""

    def job(group: Group) -> None:
        mine = part_of_model(group, lab.config_for(group.size))
        batch = lab.global_batch(lab.config_for(2), 0)
        if group.rank == 0:
            y = mine.forward(0, batch[0], targets=batch[1])
            dy = group.recv(src=1)
            group.send(y.data, dst=1)
            y.backward(dy)
        else:
            x = tensor(group.recv(src=0), requires_grad=True)
            mine.forward(1, x, targets=batch[1]).backward()
            group.send(x.grad, dst=0)

    print("expected: both ranks end")
    md.run(job, size=2)


BREAKS = {
    "no-gradient-back": Break(
        no_gradient_back,
        says="the ranks' blocks moved by 0.00, 0.00, 0.00, 0.30",
    ),
    "forget-the-table": Break(forget_the_table, says="the two copies of the table are 0.33"),
    "everybody-receives": Break(everybody_receives, says="0 waits for 1", error=DeadlockError),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
