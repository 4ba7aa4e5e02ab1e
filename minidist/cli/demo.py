"""`minidist demo`: a tour, seconds to run and two minutes to read.

Three short jobs on this machine: a ring all-reduce whose every message is drawn with its bytes; a
job in which a rank is killed, and what its peers say; a GPT trained by DDP on three ranks, compared
with the same training on one process.
"""

import argparse
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from rich.table import Column, Table

from minidist.comm.group import Group
from minidist.console import exactly
from minidist.errors import PeerLostError
from minidist.launch import run as run_ranks
from minidist.nn import GPT, GPTConfig
from minidist.optim import SGD
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step.step import Batch
from minidist.terminal import Console

RING = 4  # ranks
CHUNK = 30  # numbers of float32 in each rank's chunk
TRAINED = 3  # ranks of DDP: they do not divide the batch evenly
SEQUENCES = 8
STEPS = 30
CONFIG = GPTConfig(vocabulary=11, context=12, layers=2, width=24, heads=2, dtype="float64")
LIMIT = 60.0  # seconds of each job
NEXT = (
    ("minidist train -n 2", "about a minute: trains a GPT on a real text, and shows the costs"),
    ("minidist lesson", "the lessons, one for each chapter; minidist lesson 03 is this ring"),
    ("minidist doctor", "what this machine has"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the tour has no options."""


def run(args: argparse.Namespace) -> int:
    """Run the three jobs and print what they show. Returns the exit status: 1 if one of them does
    not show what it should."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    good = [show_ring(console), show_lost_rank(console), show_training(console)]
    _title(console, "next")
    for command, what in NEXT:
        console.print(f"{command:<22}{what}", markup=False, soft_wrap=True)
    return 0 if all(good) else 1


def _title(console: Console, text: str) -> None:
    console.print()
    console.rule(text, style="dim", align="left")


# ------------------------------------------------------------------------------------- 1 a ring


def ring_messages(world: Group) -> tuple[list[int], list[int], bool]:
    """Return the chunks and the bytes that this rank sends in one ring all-reduce, in order, and
    whether the sum is right."""
    events: list[Any] = []
    x = np.arange(CHUNK * world.size, dtype=np.float32) + world.rank
    stop = world.ledger.subscribe(events.append)
    total = world.all_reduce(x, algorithm="ring")
    stop()
    sent = [event.details for event in events if event.kind == "message"]
    right = np.array_equal(
        total, world.size * np.arange(x.size, dtype=np.float32) + sum(range(world.size))
    )
    return [each["chunk"] for each in sent], [each["nbytes"] for each in sent], right


def ring_table(chunks: list[list[int]]) -> Table:
    """Return a table of the messages: a row per step, a column per sender.

    A cell has the chunk, and the ranks whose numbers are summed in it so far.

    Args:    chunks: of each rank, the chunks that it sends, in order.
    """
    size = len(chunks)
    holds = [[{rank} for _ in range(size)] for rank in range(size)]  # of rank, chunk
    table = Table(
        "step", *(Column(f"{rank} to {(rank + 1) % size}") for rank in range(size)), "each rank"
    )
    for step in range(2 * (size - 1)):
        adds = step < size - 1
        row = []
        before = [[set(parts) for parts in of_rank] for of_rank in holds]
        for rank in range(size):
            chunk = chunks[rank][step]
            parts = before[rank][chunk]
            row.append(f"{'ABCDEFGH'[chunk]} of {'+'.join(map(str, sorted(parts)))}")
            there = holds[(rank + 1) % size]
            there[chunk] = parts | there[chunk] if adds else parts
        what = "adds what it gets" if adds else "keeps what it gets"
        table.add_row(str(step + 1), *row, what, end_section=step == size - 2)
    return table


def show_ring(console: Console) -> bool:
    """Run a ring all-reduce between processes over TCP and draw its messages."""
    _title(console, f"1  a ring: {RING} processes add their arrays, and no rank is in the middle")
    console.print(
        "      0 --> 1\n"
        "      ^     |      each rank has 4 chunks A B C D\n"
        "      |     v      and sends to its right neighbour only\n"
        "      3 <-- 2",
        markup=False,
    )
    sent, nbytes, right = zip(
        *run_ranks(ring_messages, size=RING, transport="tcp", limit=LIMIT), strict=True
    )
    console.print(ring_table(list(sent)))
    whole = 4 * CHUNK * RING
    formula = 2 * (RING - 1) * whole / RING
    counted = [sum(each) for each in nbytes]
    console.print(
        f"bytes sent by each rank, as counted: {', '.join(map(str, counted))}; by the formula "
        f"2(P-1)/P x {whole}: {exactly(formula)}",
        markup=False,
        soft_wrap=True,
    )
    return all(right) and all(each == formula for each in counted)


# ------------------------------------------------------------------------------- 2 a lost rank


def work_until_killed(world: Group, victim: int) -> None:
    """Sum arrays with the others; `victim` kills its own process after some steps."""
    for step in range(10**6):
        if world.rank == victim and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        world.all_reduce(np.ones(1000))


def show_lost_rank(console: Console) -> bool:
    """Let a rank of a job be killed and print what the job says."""
    victim = 2
    _title(console, f"2  a loss: rank {victim} of 4 is killed (kill -9) in the middle of its work")
    begun = time.monotonic()
    try:
        run_ranks(work_until_killed, victim, size=4, transport="auto", limit=LIMIT)
    except PeerLostError as error:
        seconds = time.monotonic() - begun
        console.print(f"{type(error).__name__}: {error}", markup=False, soft_wrap=True)
        console.print(
            f"nobody waited for a limit: from the start of the job to this line {seconds:.1f} s",
            soft_wrap=True,
        )
        return f"rank {victim}" in str(error)
    console.print("the loss was not noticed", soft_wrap=True)
    return False


# ---------------------------------------------------------------------------------- 3 training


def batch_of(step: int) -> Batch:
    """Return a global batch of sequences that count: each token is the one before plus 3."""
    first = np.random.default_rng(step).integers(0, CONFIG.vocabulary, (SEQUENCES, 1))
    ids = (first + 3 * np.arange(CONFIG.context + 1)) % CONFIG.vocabulary
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def train_by_ddp(world: Group) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses and the weights of a training on the world's ranks."""
    trainer = Trainer(
        Plan(dp=world.size), CONFIG, world, seed=1, optimizer="sgd", lr=0.2, clip=None
    )
    losses = [trainer.step(batch_of(step)) for step in range(STEPS)]
    weights = trainer.state_dict()
    trainer.close()
    return losses, weights


def train_alone() -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the same by the plainest loop: one process, whole batches, no Trainer."""
    model = GPT(CONFIG)
    model.initialize(1)
    optimizer = SGD(list(model.parameters()), lr=0.2)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch_of(step)
        loss = model.loss(inputs, targets, divisor=targets.size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()))
    return losses, {name: np.array(weight.data) for name, weight in model.named_parameters()}


def show_training(console: Console) -> bool:
    """Train by DDP and in one process and print the losses and the largest difference of a weight."""
    _title(console, f"3  training: {TRAINED} ranks, each with a part of the batch, and one process")
    losses, weights = run_ranks(train_by_ddp, size=TRAINED, transport="auto", limit=LIMIT)[0]
    alone, target = train_alone()
    table = Table(
        Column("step", justify="right"),
        Column(f"loss, DDP on {TRAINED} ranks", justify="right"),
        Column("loss, one process", justify="right"),
    )
    for step in range(0, STEPS, 7):
        table.add_row(str(step + 1), f"{losses[step]:.12f}", f"{alone[step]:.12f}")
    console.print(table)
    gap = max(float(np.abs(weights[name] - target[name]).max()) for name in target)
    console.print(
        f"largest difference of a weight after {STEPS} steps: {gap:.1e} (float64; the ranks add "
        "in another order)",
        soft_wrap=True,
    )
    return gap < 1e-12
