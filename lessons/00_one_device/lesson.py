"""Lesson 00: one device trains; every byte it fills is counted and held against a formula.

python lessons/00_one_device/lesson.py
mpirun -n 4 python lessons/00_one_device/lesson.py               # four processes, each does it all:
                                                                 four times all
python lessons/00_one_device/lesson.py --break keep-the-losses   # see README.md, section 6
"""

import pydoc_data.topics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minidist.autograd.ops.attention import KEEP_UP_TO, QUERY_BLOCK
from minidist.autograd.tensor import no_grad
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.console import size_text
from minidist.data import text
from minidist.device import account
from minidist.errors import GradientError
from minidist.lessons.lab import new_model
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.nn import GPT, GPTConfig
from minidist.optim import Adam
from minidist.parallel.step.single import Single, plain_single
from minidist.parallel.zero.memory_formula import MIXED, SINGLE, STATE, state_bytes

CONFIG = GPTConfig(vocabulary=128, context=64, layers=4, width=96, heads=4)
BATCH = 8
FLOAT32 = 4
SHOWN = ("parameters", "gradients", "optimizer", "activations", "total")
BILLION = 10**9


def tour(group: Group, page: Page) -> None:
    """Run the lesson; each rank runs all of it and needs no other rank."""
    page.heading("1  The way of the data: disk -> CPU -> device")
    ids = data_path(page)
    plain_beside_single(page, ids)
    page.heading("2  One training step, as the memory account saw it")
    memory, parameters = one_step(page, ids)
    page.heading("3  Measured, and by the formula: 16 bytes a parameter")
    beside_formula(page, memory, parameters)
    seven_billion(page)
    page.heading("4  Activations, and their formula")
    activations(page)
    page.heading("5  All ranks of this job")
    all_ranks(group, page, memory)


def data_path(page: Page) -> np.ndarray:
    """Show the bytes and seconds of each hop of the data; return the training ids."""
    file = Path(pydoc_data.topics.__file__)
    begin = time.perf_counter()
    source = file.read_bytes()
    read = time.perf_counter()
    corpus = text.load("python")
    loaded = time.perf_counter()
    inputs, targets = text.batch(corpus.train, 0, batch=BATCH, context=CONFIG.context, seed=0)
    cut = time.perf_counter()
    ids = corpus.train.nbytes + corpus.validation.nbytes
    page.table(
        "Where the bytes are",
        ["place", "what", "bytes", "seconds"],
        [
            ["disk", file.name, size_text(len(source)), f"{read - begin:.4f}"],
            ["CPU", f"token ids, {corpus.train.dtype}", size_text(ids), f"{loaded - read:.4f}"],
            [
                "device",
                f"one batch, {BATCH} x {CONFIG.context}, inputs and targets",
                size_text(inputs.nbytes + targets.nbytes),
                f"{cut - loaded:.4f}",
            ],
        ],
        note="the disk is read once; each step moves one small batch (on a CPU the device is "
        "the CPU)",
    )
    return corpus.train


def plain_beside_single(page: Page, ids: np.ndarray) -> None:
    """Compare three steps of the plain loop with three steps of the library's class."""
    batches = [
        text.batch(ids, step, batch=BATCH, context=CONFIG.context, seed=0) for step in range(3)
    ]
    with account.use(account.MemoryAccount()):
        models = [GPT(CONFIG) for _ in range(2)]
        for model in models:
            model.initialize(seed=0)
        single = Single(models[1])
        optimizer = Adam(list(models[1].parameters()), 1e-3)
        losses = [
            plain_single(models[0], Adam(list(models[0].parameters()), 1e-3), batches),
            [single.step(batch, optimizer) for batch in batches][-1],
        ]
        equal = all(
            np.array_equal(a.data, b.data)
            for a, b in zip(*(m.parameters() for m in models), strict=True)
        )
    page.say(
        f"After three steps the plain loop has loss {losses[0]:.6f}, the library's Single "
        f"{losses[1]:.6f}; the weights {'have the same bits' if equal else 'DIFFER'}."
    )


def one_step(page: Page, ids: np.ndarray) -> tuple[dict[str, dict[str, int]], int]:
    """Show the account at several moments of the first step; return its snapshot and the number of
    parameters."""
    with account.use(account.MemoryAccount()) as memory:
        stations: list[tuple[str, dict[str, int]]] = []
        model = new_model(CONFIG)
        optimizer = Adam(list(model.parameters()), 1e-3)
        stations.append(("model, optimizer", memory.now))
        inputs, targets = text.batch(ids, 0, batch=BATCH, context=CONFIG.context, seed=0)
        loss = model.loss(inputs, targets, divisor=targets.size)
        stations.append(("forward", memory.now))
        loss.backward()
        stations.append(("backward", memory.now))
        optimizer.step()
        stations.append(("optimizer.step", memory.now))
        snapshot = memory.snapshot()
        optimizer.zero_grad()
        stations.append(("zero_grad", memory.now))
        stations.append(("peak", memory.peak))
        page.table(
            f"{CONFIG.layers} layers of width {CONFIG.width}, {BATCH} x {CONFIG.context} tokens",
            ["after", *SHOWN],
            [[name, *(size_text(now[category]) for category in SHOWN)] for name, now in stations],
            note="total: these four and the workspace of single operations. peak: the most of each "
            "column at any moment, so the peak of the total is not the sum of the other peaks",
        )
        return snapshot, sum(parameter.size for parameter in model.parameters())


def beside_formula(page: Page, memory: dict[str, dict[str, int]], parameters: int) -> None:
    """Compare the measured bytes per parameter with the formula, by category."""
    rows = []
    together = 0
    for category in STATE:
        measured = memory[category]["now"]
        bytes_each = getattr(SINGLE, category)
        together += measured
        rows.append(
            [
                category,
                measured,
                f"{bytes_each} x {parameters}",
                bytes_each * parameters,
                f"{measured / parameters:.2f}",
                verdict(measured, bytes_each * parameters),
            ]
        )
    all_of_it = SINGLE.together
    rows.append(
        [
            "together",
            together,
            f"{all_of_it} x {parameters}",
            all_of_it * parameters,
            f"{together / parameters:.2f}",
            verdict(together, all_of_it * parameters),
        ]
    )
    page.table(
        "float32 with Adam, after one step",
        ["category", "measured bytes", "formula", "", "bytes a parameter", ""],
        rows,
    )


def seven_billion(page: Page) -> None:
    """Compare what N2:16-26 says with what follows from its own numbers and from N4's five
    sources."""
    pie = (35, 15, 45)
    own = (14, 14, 56)
    mixed, float32 = (
        [round(state_bytes(7, each)[name]) for name in STATE] for each in (MIXED, SINGLE)
    )
    rows = [
        [
            name,
            f"{pie[i]} %",
            *(f"{part[i]} GB, {100 * part[i] / sum(part):.0f} %" for part in (own, mixed, float32)),
        ]
        for i, name in enumerate(STATE)
    ]
    rows.append(["together", "95 %", *(f"{sum(part)} GB" for part in (own, mixed, float32))])
    page.table(
        "7 billion parameters",
        ["", "pie, N2:16", "list, N2:24", "mixed, N4:241", "float32"],
        rows,
        note="N2's list leaves out the fp32 master weights: 56 GB where N4's five sources give 84",
    )
    one = megatron_activations(sequence=2048, batch=1, width=4096, heads=32, layers=32)
    page.say(
        "Activations of one sequence of 2,048 tokens, by s b h (34 + 5 a s / h): "
        f"{one / BILLION:.1f} GB, {100 * one / (one + sum(mixed) * BILLION):.0f} % of the whole "
        "and not 5 %."
    )


def megatron_activations(*, sequence: int, batch: int, width: int, heads: int, layers: int) -> int:
    """Return the bytes of activations in half precision with dropout, scores kept.

    Source: Korthikanti et al. 2022, equation 2.
    """
    return layers * sequence * batch * width * (34 + 5 * heads * sequence // width)


def kept_for_backward(config: GPTConfig, batch: int) -> int:
    """Return the bytes that our blocks' ops keep in float32 (README, section 4).

    They keep 16 h + a + 2 numbers per token and layer; in short sequences also one probability per
    head and key of a query block.
    """
    h = config.width
    heads = config.heads
    tokens = config.context
    blocks = [
        (min(start + QUERY_BLOCK, tokens) - start) * min(start + QUERY_BLOCK, tokens)
        for start in range(0, tokens, QUERY_BLOCK)
    ]
    probabilities = heads * sum(blocks) if tokens <= KEEP_UP_TO else 0
    return FLOAT32 * config.layers * batch * (tokens * (16 * h + heads + 2) + probabilities)


def activations(page: Page) -> None:
    """Show the account at the end of forward for several shapes; a block's share is what doubling
    the number of blocks adds."""
    rows = []
    for batch, context, width in (
        (4, 64, 64),
        (8, 64, 64),
        (4, 64, 128),
        (4, 128, 64),
        (4, 256, 64),
        (4, 512, 64),
    ):
        config = replace(CONFIG, context=context, width=width, layers=1)
        measured = alive_after_forward(replace(config, layers=2), batch) - alive_after_forward(
            config, batch
        )
        formula = kept_for_backward(config, batch)
        rows.append(
            [
                f"{batch} x {context}, width {width}",
                size_text(measured),
                size_text(formula),
                f"{measured / batch / context:.0f}",
                verdict(measured, formula, 0.01),
            ]
        )
    page.table(
        "What one block keeps for backward",
        ["tokens", "measured", "formula", "bytes a token", ""],
        rows,
        note=f"up to {KEEP_UP_TO} tokens attention keeps its probabilities, so the bytes a token "
        "grow with the context; beyond, it computes them again",
    )


def alive_after_forward(config: GPTConfig, batch: int) -> int:
    """Return the activation bytes at the end of one forward of a new model."""
    with account.use(account.MemoryAccount()) as memory:
        model = new_model(config)
        ids = np.arange(batch * config.context).reshape(batch, config.context) % config.vocabulary
        loss = model.loss(ids, ids, divisor=ids.size)
        alive = memory.now["activations"]
        del loss
    return alive


def all_ranks(group: Group, page: Page, memory: dict[str, dict[str, int]]) -> None:
    """Show what each rank of this job holds: every rank holds everything."""
    records = gather_records(group, {name: figures["peak"] for name, figures in memory.items()})
    if not records:
        return
    rows = [
        [f"rank {rank}", *(size_text(record[name]) for name in SHOWN)]
        for rank, record in enumerate(records)
    ]
    rows.append(
        ["together", *(size_text(sum(record[name] for record in records)) for name in SHOWN)]
    )
    page.table(
        "Peaks by rank",
        ["", *SHOWN],
        rows,
        note="every rank holds everything: no message was sent, and nothing was shared"
        if len(rows) > 2
        else "one rank; with mpirun -n 4 this table has four rows, all alike",
    )


def record_step(group: Group) -> list[dict[str, Any]]:
    """Record the account at the end of every module in forward and at every gradient in backward,
    for two steps of training.

    Returns, in order: {"phase": ..., "label": ..., "step": ..., "now": {category: bytes}}.
    """
    with account.use(account.MemoryAccount()) as memory:
        record: list[dict[str, Any]] = []
        phase = "start"
        number = 0

        def note(label: str) -> None:
            record.append({"phase": phase, "label": label, "step": number, "now": memory.now})

        model = new_model(CONFIG)
        optimizer = Adam(list(model.parameters()), 1e-3)
        for module in model.modules():
            module.register_forward_hook(lambda module, *rest: note(type(module).__name__))
        for parameter in model.parameters():
            parameter.hooks.append(lambda parameter: note(parameter.name))
        note("model made")
        ids = text.load("python").train
        for number in range(2):
            inputs, targets = text.batch(ids, number, batch=BATCH, context=CONFIG.context, seed=0)
            phase = "forward"
            loss = model.loss(inputs, targets, divisor=targets.size)
            note("loss")
            phase = "backward"
            loss.backward()
            del loss
            note("end of backward")
            phase = "optimizer"
            optimizer.step()
            note("optimizer.step")
            optimizer.zero_grad()
            note("zero_grad")
    return record


# ----------------------------------------------------------------------------------------- Break it


def _fresh() -> tuple[account.MemoryAccount, GPT, np.ndarray, np.ndarray]:
    """Return the current account, a new model counted in it, and a batch."""
    model = new_model(CONFIG)
    inputs, targets = text.batch(
        text.load("python").train, 0, batch=BATCH, context=CONFIG.context, seed=0
    )
    return account.current(), model, inputs, targets


def keep_the_losses() -> None:
    """Show the memory of ten loss Tensors in a list: they keep ten tapes."""
    memory, model, inputs, targets = _fresh()
    for kind in ("numbers", "Tensors"):
        losses = []
        for _ in range(10):
            loss = model.loss(inputs, targets, divisor=targets.size)
            losses.append(loss.item() if kind == "numbers" else loss)
        del loss
        print(
            f"ten losses kept as {kind}: {size_text(memory.now['activations'])} of activations "
            "are still alive; expected: 0 B"
        )


def no_no_grad() -> None:
    """Show the memory of an evaluation with the tape and without it."""
    memory, model, inputs, targets = _fresh()
    memory.reset_peak()
    with no_grad():
        value = model.loss(inputs, targets, divisor=targets.size).item()
    print(
        f"with no_grad:    loss {value:.6f}, peak of activations "
        f"{size_text(memory.peak['activations'])}"
    )
    memory.reset_peak()
    value = model.loss(inputs, targets, divisor=targets.size).item()
    print(
        f"without no_grad: loss {value:.6f}, peak of activations "
        f"{size_text(memory.peak['activations'])}; expected: as much as with it"
    )


def double_the_context() -> None:
    """Show whether activations grow linearly or quadratically with the context."""
    print("expected, if activations grew as the tokens do: the same bytes a token in each row")
    for context in (64, 128, 256, 512, 1024):
        alive = alive_after_forward(replace(CONFIG, context=context), 2)
        print(
            f"context {context:4d}: {size_text(alive)} of activations, {alive / context / 2:.0f} "
            "bytes a token"
        )


def backward_twice() -> None:
    """Run backward twice: the tape frees what it saved during the first backward."""
    _, model, inputs, targets = _fresh()
    loss = model.loss(inputs, targets, divisor=targets.size)
    loss.backward()
    loss.backward()


BREAKS = {
    "keep-the-losses": Break(keep_the_losses, says="as numbers: 0 B of activations"),
    "no-no-grad": Break(no_no_grad, says="peak of activations 14.8 MiB"),
    "double-the-context": Break(double_the_context, says="context  256: 17.68 MiB"),
    "backward-twice": Break(
        backward_twice,
        says="an earlier backward ran through cross_entropy",
        error=GradientError,
    ),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=1)
