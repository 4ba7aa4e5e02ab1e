"""Measure what lesson 08's tables, figure and break-its share: gradients, memory and traffic by
passes."""

from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.device import account
from minidist.grading import load_module, sent_since, totals
from minidist.lessons.lab import gradients, new_model
from minidist.nn import GPTConfig
from minidist.optim import Adam
from minidist.parallel.data.accumulation import elements_sent
from minidist.parallel.step.single import Single

lab = load_module(Path(__file__).resolve().parents[1] / "07_ddp" / "experiments.py", "07")
# The model whose memory is measured.
CONFIG = GPTConfig(vocabulary=128, context=64, layers=4, width=96, heads=4)
ROWS = 8  # of a batch
FLOAT64 = 8


def gradient(batch: Any, passes: int, divisor: str) -> np.ndarray:
    """Return one process's gradient of a batch in some passes.

    Args: divisor: the loss is divided by "all" tokens, by a pass's "own" tokens, or "twice".
    """
    inputs, targets = batch
    model = new_model(lab.SMALL)
    for rows in np.array_split(np.arange(len(inputs)), passes):
        tokens = {
            "all": targets.size,
            "own": passes * targets[rows].size,
            "twice": passes * targets.size,
        }[divisor]
        model.loss(inputs[rows], targets[rows], divisor=tokens).backward()
    return gradients(model)


def gradient_of(values: np.ndarray, batch: Any) -> np.ndarray:
    """Return the gradient of one batch for these weights, all parameters end to end."""
    inputs, targets = batch
    model = new_model(lab.SMALL)
    first = 0
    for parameter in model.parameters():
        parameter.data[...] = values[first : first + parameter.size].reshape(parameter.shape)
        first += parameter.size
    model.loss(inputs, targets, divisor=targets.size).backward()
    return gradients(model)


def peaks(config: GPTConfig, rows: int, passes: int) -> dict[str, int]:
    """Return the peaks of one process's step, in bytes by category."""
    with account.use(account.MemoryAccount()) as seen:
        model = new_model(config)
        single = Single(model)
        single.step(
            lab.global_batch(config, 0, rows), Adam(single.parameters, 1e-3), accumulate=passes
        )
        return seen.peak


def record(group: Group) -> dict[str, Any]:
    """Record for the figure the account at every module and gradient of a step in 1, 2 and 4
    passes, and the traffic."""
    runs = {passes: moments(passes) for passes in (1, 2, 4)} if group.rank == 0 else {}
    group.barrier()
    return {
        "memory": runs,
        "traffic": [
            measure_traffic(group, zero, passes) for zero in range(4) for passes in (1, 2, 4)
        ],
        "size": group.size,
    }


def moments(passes: int) -> list[dict[str, int]]:
    """Return the bytes alive by category at every module and gradient of one step, the second."""
    found: list[dict[str, int]] = []
    with account.use(account.MemoryAccount()) as seen:
        model = new_model(CONFIG)
        optimizer = Adam(list(model.parameters()), 1e-3)

        def note(*_: Any) -> None:
            found.append(seen.now)

        for module in model.modules():
            module.register_forward_hook(note)
        for parameter in model.parameters():
            parameter.hooks.append(note)
        for step in range(2):
            inputs, targets = lab.global_batch(CONFIG, step, ROWS)
            found.clear()
            for rows in np.array_split(np.arange(ROWS), passes):
                note()
                loss = model.loss(inputs[rows], targets[rows], divisor=targets.size)
                loss.backward()
                note()
                del loss
            optimizer.step()
            note()
            optimizer.zero_grad()
            note()
    return found


def measure_traffic(group: Group, zero: int, passes: int) -> dict[str, Any]:
    """Return on every rank what all ranks sent in one step, without scalars, and the formula's
    value."""
    trainer = md.Trainer(md.Plan(dp=group.size, zero=zero, accumulate=passes), lab.SMALL, group)
    before = totals(group.ledger)
    trainer.step(lab.global_batch(lab.SMALL, 0, sequences=4 * group.size))
    trainer.close()  # first: ZeRO-1 and 2 still send weights when a step returns
    mine = np.array(sent_since(group.ledger, before))
    with group.ledger.control():
        messages, nbytes = (int(value) for value in group.all_reduce(mine))
    count = sum(p.size for p in trainer.model.parameters())
    return {
        "zero": zero,
        "passes": passes,
        "parameters": count,
        "messages": messages,
        "elements": nbytes // FLOAT64,
        "formula": elements_sent(count, ranks=group.size, zero=zero, accumulate=passes),
    }
