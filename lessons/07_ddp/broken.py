"""Run the experiments of section 8: each makes one mistake and shows its result."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.comm.transports.throttled import delayed
from minidist.console import plural, size_text
from minidist.errors import MismatchError
from minidist.grading import load_module
from minidist.lessons.lab import gradients, held_out_loss, new_model, spread, weights
from minidist.lessons.running import Break
from minidist.optim import SGD, Adam
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.step import part_of

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "07")


def per_epoch() -> None:
    """Average weights once per epoch instead of summing gradients at every batch."""
    run = md.run(partial(lab.drift, epochs=3), "epoch", size=4)[0]
    for step, distance in enumerate(run["apart"]):
        epoch, batch = divmod(step, run["batches"])
        print(
            f"epoch {epoch + 1} batch {batch + 1:2d}: apart {distance:.3f}  "
            f"{'#' * int(100 * distance)}"
        )
        if batch + 1 == run["batches"]:
            print(
                f"    held-out loss of rank 0's replica {run['own'][epoch]:.3f}, "
                f"of the mean of all {run['mean'][epoch]:.3f}"
            )
    right = md.run(partial(lab.drift, epochs=3), "batch", size=4)[0]
    print(
        f"gradients summed at every batch: apart {max(right['apart']):.3f} at most; held-out loss "
        f"{', '.join(f'{loss:.3f}' for loss in right['own'])}"
    )


def average_twice() -> None:
    """Make the gradient P times too small: SGD shows it, Adam hides it."""

    def train(group: Group, optimizer_class: Any, lr: float, factor: float) -> float:
        model = new_model(lab.SMALL)
        ddp = DDP(model, group)
        optimizer = optimizer_class(list(model.parameters()), lr)
        for step in range(40):
            batch = lab.global_batch(lab.SMALL, step)
            ddp.backward(ddp.forward(ddp.part_of(batch), divisor=batch[1].size))
            optimizer.step(scale=factor)
            optimizer.zero_grad()
        return held_out_loss(model, lab.HELD_OUT)

    for name, optimizer_class, lr in (("SGD", SGD, 0.5), ("Adam", Adam, 0.01)):
        right, wrong = (
            md.run(train, optimizer_class, lr, factor, size=4)[0] for factor in (1.0, 0.25)
        )
        print(
            f"{name:4s}: loss after 40 steps {right:.4f}; with gradients averaged twice {wrong:.4f}"
        )


def local_tokens() -> None:
    """Divide on each rank by the rank's own tokens: a mean of means."""

    def error(group: Group, first: int) -> float:
        inputs, targets = lab.global_batch(lab.SMALL, 0, sequences=first + group.size - 1)
        start = 0 if group.rank == 0 else first + group.rank - 1
        mine = slice(start, start + (first if group.rank == 0 else 1))
        alone = new_model(lab.SMALL)
        model = new_model(lab.SMALL)
        alone.loss(inputs, targets, divisor=targets.size).backward()
        model.loss(inputs[mine], targets[mine], divisor=targets[mine].size).backward()
        total = group.all_reduce(gradients(model), op="mean")
        return float(np.linalg.norm(total - gradients(alone)) / np.linalg.norm(gradients(alone)))

    for first in (1, 2, 4, 8):
        off = md.run(error, first, size=4)[0]
        print(
            f"rank 0 has {plural(first, 'sequence')}, ranks 1 to 3 one each: the gradient is off "
            f"by {off:.1%}, expected 0.0%"
        )


def different_seeds() -> None:
    """Start replicas with different weights."""
    md.run(lambda group: DDP(new_model(lab.SMALL, seed=group.rank), group), size=4)


def one_bucket() -> None:
    """Put everything into one bucket: nothing can start before backward ends.

    The bytes are counted, so they are the same on every machine.
    """

    def sizes_of(group: Group, bucket_bytes: int) -> list[int]:
        ddp = DDP(new_model(lab.TIMED), group, bucket_bytes=bucket_bytes)
        return [bucket.data.nbytes for bucket in ddp.buckets]

    for name, bucket_bytes in (
        ("one bucket for everything", 1 << 30),
        (f"buckets of {size_text(lab.BUCKET)}", lab.BUCKET),
    ):
        sizes = md.run(sizes_of, bucket_bytes, size=2)[0]
        print(
            f"{name}: {sizes[-1] / sum(sizes):.0%} of the gradients' bytes set out with "
            "backward's last gradient, when nothing is left to hide them"
        )


def step_early() -> None:
    """Update without waiting for the sums: replicas differ, at first by little."""

    def job(group: Group, waits: bool) -> list[float]:
        model = new_model(lab.SMALL)
        parameters = list(model.parameters())
        distances = []
        optimizer = Adam(parameters, 1e-2)
        with delayed(group, alpha=2e-4, beta=1e-8) as slow:  # a fast link would often be in time
            for step in range(4):
                batch = lab.global_batch(lab.SMALL, step)
                part = part_of(batch, size=group.size, rank=group.rank)
                model.loss(part.inputs, part.targets, divisor=batch[1].size).backward()
                handles = [
                    slow.start_all_reduce(p.grad, out=p.grad, algorithm="ring") for p in parameters
                ]
                if not waits:
                    optimizer.step()
                for handle in handles:
                    handle.wait()
                if waits:
                    optimizer.step()
                optimizer.zero_grad()
                distances.append(spread(group, weights(model)))
        return distances

    for name, waits in (("waits for the sums", True), ("steps at once", False)):
        distances = md.run(job, waits, size=4)[0]
        print(
            f"{name:18s}: replicas apart by "
            f"{', '.join(f'{distance:.1e}' for distance in distances)} after each step"
        )


BREAKS = {
    "step-early": Break(step_early, says="steps at once     : replicas apart by 2.0e-02"),
    "per-epoch": Break(per_epoch, says="held-out loss of rank 0's replica 3.74"),
    "average-twice": Break(
        average_twice,
        says="SGD : loss after 40 steps 3.5749; with gradients averaged twice 3.77",
    ),
    "local-tokens": Break(
        local_tokens,
        says="rank 0 has 8 sequences, ranks 1 to 3 one each: the gradient is off by 84",
    ),
    "different-seeds": Break(
        different_seeds,
        says="the weights of ranks [1, 2, 3] differ from rank 0's",
        error=MismatchError,
    ),
    "one-bucket": Break(one_bucket, says="one bucket for everything: 100%"),
}
