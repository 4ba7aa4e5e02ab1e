"""Run what lesson 21's tables and figures share: a small GPT that learns text by each scheme, and
its traffic."""

import statistics
import time
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.group import Group
from minidist.data import text
from minidist.lessons.lab import new_model
from minidist.nn import GPT, GPTConfig
from minidist.optim import AdamW
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.compress.streaming import fragment_sent
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step.scheme import GradientRun
from minidist.parallel.step.step import Batch, part_of

TEXT = text.load("python")
CONFIG = GPTConfig(vocabulary=len(TEXT.symbols), context=32, layers=2, width=32, heads=2)
# EVERY: steps between two validations; PERIOD: H of DiLoCo
SEQUENCES = 8
STEPS = 125
EVERY = 10
PERIOD = 25

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "8bit": {"compress": "8bit"},
    "4bit": {"compress": "4bit"},
    "sign": {"compress": "sign"},
    "1-bit": {"compress": f"1-bit:warmup={STEPS // 5}"},
    "top-k 1 %": {"compress": "top-k:density=0.01"},
    "powersgd": {"compress": "powersgd:rank=2"},
    f"DiLoCo, H={PERIOD}": {"local_steps": PERIOD},
}
"""Ways to send a step's gradients, or seldom: what a Plan says of each."""

KEPT = (
    "8bit",
    "4bit",
    "sign",
    "powersgd:rank=2",
    "top-k:density=0.1",
    "top-k:density=0.01",
    "random-k:density=0.1",
    "random-k:density=0.01",
)
"""Schemes whose error is measured: of one gradient, and of the sum of many."""


class Link(NamedTuple):
    """A network by the α-β model: seconds of a message, and of a byte."""

    name: str
    alpha: float
    beta: float


LINKS = tuple(
    Link(name, 50e-6, 8 / bits)
    for name, bits in (("10 Mbit/s", 1e7), ("100 Mbit/s", 1e8), ("1 Gbit/s", 1e9))
)


class Moment(NamedTuple):
    """A validation in training. sent, messages: of the busiest rank, since the first step."""

    step: int
    loss: float
    sent: int
    messages: int


def global_batch(step: int, sequences: int = SEQUENCES) -> Batch:
    """Return a batch of the training text, by step only."""
    return text.batch(TEXT.train, step, batch=sequences, context=CONFIG.context, seed=0)


def validation() -> list[Batch]:
    """Return batches of held-out text."""
    return [text.batch(TEXT.validation, 0, batch=32, context=CONFIG.context, seed=1)]


def numbers(config: GPTConfig = CONFIG) -> int:
    """Return how many parameters the model has."""
    return sum(p.size for p in GPT(config).parameters())


def new_weights() -> tuple[GPT, list[Any]]:
    """Return a new model and its parameters, the same on every rank."""
    model = new_model(CONFIG)
    return model, list(model.parameters())


def trainer_of(group: Group, way: dict[str, Any], **options: Any) -> Trainer:
    """Return a Trainer of the small GPT; all gradients are one bucket."""
    return Trainer(
        Plan(dp=group.size, bucket_bytes=2**30, **way),
        CONFIG,
        group,
        **{"optimizer": "adamw", "lr": 3e-3, **options},
    )


def sent_by(group: Group) -> tuple[int, int]:
    """Return (bytes, messages) that this rank has sent along the data axis in steps."""
    found = [
        sum(counts.get("dp", {}).values())
        for counts in (group.ledger.sent_bytes("step"), group.ledger.messages("step"))
    ]
    return found[0], found[1]


def busiest(group: Group, *values: float) -> list[float]:
    """Return the largest of each value over the ranks."""
    with group.ledger.control():
        largest: list[float] = group.all_gather(np.array([values], np.float64)).max(axis=0).tolist()
    return largest


def train(group: Group, way: dict[str, Any], steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Train; return {"moments", "losses", "seconds"}.

    "moments" are the validations. "seconds" is the median processor time per step of a rank's own
    thread.
    """
    trainer = trainer_of(group, way, **options)
    held = validation()
    before = sent_by(group)
    spent = list[float]()
    losses = list[float]()
    moments = [Moment(0, trainer.evaluate(held), 0, 0)]
    for step in range(steps):
        begin = time.thread_time()
        losses.append(trainer.step(global_batch(step)))
        spent.append(time.thread_time() - begin)
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            loss = trainer.evaluate(held)
            sent, messages = busiest(group, *np.subtract(sent_by(group), before))
            moments.append(Moment(step + 1, loss, int(sent), int(messages)))
    seconds = busiest(group, statistics.median(spent))[0]
    trainer.close()
    return {"moments": moments, "losses": losses, "seconds": seconds}


def clock(moment: Moment, seconds: float, link: Link) -> float:
    """Return the seconds until a moment of a run over a link: computation, then messages and bytes
    one after another, without overlap."""
    return moment.step * seconds + moment.messages * link.alpha + moment.sent * link.beta


# ---------------------------------------------------------------------- the kept part of a gradient


def kept(group: Group, steps: int, texts: tuple[str, ...] = KEPT) -> dict[str, dict[str, float]]:
    """Return by scheme the shares of the squared length that arrive, of the first gradient and of
    the sum of `steps` gradients.

    "lost": the largest |applied + residuals - gradients| over the largest |gradients|, of the sum.
    The gradients are those of plain training, the same for every scheme.
    """
    model, weights = new_weights()
    optimizer = AdamW(weights, 3e-3)
    size = sum(p.size for p in weights)
    schemes = {name: scheme_of(name) for name in texts}
    applied = {name: np.zeros(size) for name in texts}
    for scheme in schemes.values():
        scheme.attach([GradientRun.whole(weights, group, "all_reduce")])
    total = np.zeros(size)
    first = dict[str, float]()
    for step in range(steps):
        inputs, targets = global_batch(step)
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        mine = np.concatenate([np.ravel(p.grad) for p in weights])
        whole = group.all_reduce(mine)
        total += whole
        for name, scheme in schemes.items():
            bucket = mine.copy()
            scheme.begin_step()
            scheme.start_all_reduce(0, bucket).wait()
            applied[name] += bucket
            first.setdefault(name, share(bucket, whole))
        for p, gradient in zip(
            weights, np.split(whole, np.cumsum([p.size for p in weights])[:-1]), strict=True
        ):
            p.grad[...] = gradient.reshape(p.shape)
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: {
            "first": first[name],
            "sum": share(applied[name], total),
            "lost": float(
                np.abs(applied[name] + residuals(schemes[name], group, size) - total).max()
                / np.abs(total).max()
            ),
        }
        for name in texts
    }


def share(arrived: np.ndarray, given: np.ndarray) -> float:
    """Return 1 - |given - arrived|² / |given|²."""
    return 1 - float(
        np.sum((given - arrived) ** 2, dtype=np.float64) / np.sum(given**2, dtype=np.float64)
    )


def residuals(scheme: Any, group: Group, size: int) -> np.ndarray:
    """Return what all ranks together have not sent yet, (size,)."""
    total = group.all_reduce(
        np.asarray(scheme.errors.get(("worker", 0), np.zeros(size)), np.float64)
    )
    if ("server", 0) in scheme.errors:
        total = total + group.all_gather(np.asarray(scheme.errors["server", 0], np.float64))
    return total


def fragment_rows(every: int, fragments: int, delay: int, steps: int) -> list[str]:
    """Return one row per fragment: S where it is sent, M where it is mixed in, X where both happen
    in one step."""
    rows = []
    for fragment in range(fragments):
        sent = {
            step
            for step in range(1, steps + 1)
            if fragment_sent(step, every, fragments) == fragment
        }
        landed = {step + delay for step in sent}
        rows.append(
            "".join(
                "X"
                if step in sent & landed
                else "S"
                if step in sent
                else "M"
                if step in landed
                else "·"
                for step in range(1, steps + 1)
            )
        )
    return rows
