"""Run what lesson 07's tables, figure and break-its share: a model, batches, a recorded step,
drift."""

from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.comm.transports.throttled import delayed
from minidist.device import account
from minidist.grading import sent_since, totals
from minidist.lessons.lab import held_out_loss, new_model, spread, weights
from minidist.nn import GPTConfig
from minidist.observe.overlap import measure
from minidist.observe.timeline import Timeline
from minidist.optim import Adam
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import part_of

# to compare weights
SMALL = GPTConfig(vocabulary=64, context=16, layers=2, width=32, heads=4, dtype="float64")
TIMED = GPTConfig(vocabulary=128, context=64, layers=4, width=128, heads=4)  # to see overlap
# on simulated GPUs
GPT2 = GPTConfig(vocabulary=50304, context=1024, layers=12, width=768, heads=12)
BUCKET = 1 << 19  # bytes; small, so that this small model has several
SEQUENCES = 8  # of a global batch
STATE = ("parameters", "gradients", "optimizer")
HELD = {
    "parameters, gradients, optimizer": STATE,
    "activations": ("activations",),
    "peak of the sum": ("total",),
}


def global_batch(
    config: GPTConfig, step: int, sequences: int = SEQUENCES
) -> tuple[np.ndarray, np.ndarray]:
    """Return a global batch that can be learned: each token follows from the token before it, but
    for a little noise."""
    rng = np.random.default_rng(step)
    ids = np.empty((sequences, config.context + 1), np.int64)
    ids[:, 0] = rng.integers(0, config.vocabulary, sequences)
    for position in range(config.context):
        noise = rng.random(sequences) < 0.1
        follow = (5 * ids[:, position] + 3) % config.vocabulary
        ids[:, position + 1] = np.where(
            noise, rng.integers(0, config.vocabulary, sequences), follow
        )
    return ids[:, :-1].copy(), ids[:, 1:].copy()


HELD_OUT = global_batch(SMALL, 10_000, sequences=32)
"""A batch that is not trained on."""


def peaks(
    group: Group | None, config: GPTConfig = TIMED, *, sequences: int = SEQUENCES
) -> dict[str, int]:
    """Return the peak bytes of two steps on this rank, by category: with DDP, or without a
    group."""
    with account.use(account.MemoryAccount()) as memory:
        model = new_model(config)
        strategy = Single(model) if group is None else DDP(model, group, bucket_bytes=BUCKET)
        optimizer = Adam(list(model.parameters()), 1e-3)
        for step in range(2):
            strategy.step(global_batch(config, step, sequences), optimizer)
        return {category: held["peak"] for category, held in memory.snapshot().items()}


# ---------------------------------------------------------------------------------- a recorded step


def record_step(
    group: Group,
    config: GPTConfig = TIMED,
    *,
    sequences: int = SEQUENCES,
    bucket_bytes: int = BUCKET,
    steps: int = 7,
    quickest: bool = False,
) -> list[Timeline]:
    """Return every rank's timeline of the median (or quickest) of some steps of DDP, on rank 0;
    else an empty list."""
    timeline = Timeline(group.rank)
    model = new_model(config)
    ddp = DDP(model, group, bucket_bytes=bucket_bytes, recorder=timeline)
    optimizer = Adam(list(model.parameters()), 1e-3)
    timeline.follow(group.ledger)
    for step in range(steps):
        group.barrier()
        with timeline.span("step", step=step):
            ddp.step(global_batch(config, step, sequences), optimizer)
    collected = timeline.collect(group) or []
    if collected:
        lengths = {
            span.details["step"]: span.stop - span.start
            for span in collected[0].spans
            if span.name == "step"
        }
        chosen = sorted(lengths, key=lambda step: lengths[step])[0 if quickest else steps // 2]
        for ours in collected:
            ours.spans = [
                span
                for span in ours.spans
                if span.details.get("step") == chosen and span.details.get("verb") != "barrier"
            ]
    return collected


def data_path(group: Group) -> list[dict[str, Any]]:
    """Return on rank 0 a recorded step by the steps of N0:403, one dict per rank; [] elsewhere.

    Each has bytes: `came` of the model from others before the step, `model`, `read` of its part of
    the batch, `gradients`, and `sent` in the step's all-reduces to the ranks `to`, in `messages`
    messages.
    """
    timeline = Timeline(group.rank)
    began = totals(group.ledger)
    model = new_model(TIMED)
    ddp = DDP(model, group, bucket_bytes=BUCKET, recorder=timeline)
    optimizer = Adam(list(model.parameters()), 1e-3)
    came = sent_since(group.ledger, began)[1]  # what is sent arrives: equal on all ranks
    timeline.follow(group.ledger)
    batch = global_batch(TIMED, 0)
    part = part_of(batch, size=group.size, rank=group.rank)
    ddp.step(batch, optimizer)
    sent = [
        span.details
        for span in timeline.spans
        if span.row == "messages" and span.details.get("verb") == "all_reduce"
    ]
    found = gather_records(
        group,
        {
            "rank": group.rank,
            "came": came,
            "model": weights(model).nbytes,
            "rows": len(part.inputs),
            "read": part.inputs.nbytes + part.targets.nbytes,
            "gradients": sum(p.data.nbytes for p in ddp.parameters),
            "to": sorted({details["dst"] for details in sent}),
            "messages": len(sent),
            "sent": sum(details["nbytes"] for details in sent),
        },
    )
    return found or []


def hidden_shares(group: Group, bucket_bytes: int, *, steps: int = 3) -> list[float]:
    """Return on rank 0 which share of each rank's all-reduces lies under its computation, over
    delayed links."""
    timeline = Timeline(group.rank)
    model = new_model(TIMED)
    with delayed(group, alpha=50e-6, beta=8e-10) as slow:
        timeline.follow(slow.ledger)
        ddp = DDP(model, slow, bucket_bytes=bucket_bytes, recorder=timeline)
        optimizer = Adam(list(model.parameters()), 1e-3)
        for step in range(steps):
            with timeline.span("step", step=step):
                ddp.step(global_batch(TIMED, step), optimizer)
    return [measure(ours, steps=range(1, steps)).share for ours in timeline.collect(group) or []]


def times_of_one_gpu(gpus: int, batch: dict[str, int]) -> float:
    """Return the tokens per second of DDP on `gpus` simulated H100s, divided by those of one.

    Args: batch: sequences per step, as {"batch": of all GPUs} or {"each": of one GPU}.
    """

    def tokens_a_second(count: int) -> float:
        rows = batch.get("batch", count * batch.get("each", 0))
        cluster = f"h100:{-(-count // 8)}x{min(count, 8)}"
        found = md.simulate(md.Plan(dp=count, precision="bf16"), GPT2, cluster, batch=rows)
        return float(rows * GPT2.context / found.step_seconds)

    return tokens_a_second(gpus) / tokens_a_second(1)


def of(timeline: Timeline, name: str, row: str = "compute") -> list[Any]:
    """Return a timeline's spans of one name, in order."""
    return sorted(
        (span for span in timeline.spans if span.name == name and span.row == row),
        key=lambda span: span.start,
    )


def reduces(timeline: Timeline) -> list[Any]:
    """Return the all-reduces of the buckets, in order."""
    return sorted(
        (span for span in timeline.spans if span.name.startswith("all_reduce bucket")),
        key=lambda span: span.start,
    )


def milliseconds(spans: list[Any]) -> float:
    """Return the sum of the spans' lengths, in milliseconds."""
    return 1e3 * sum(span.stop - span.start for span in spans)


# -------------------------------------------------------------------------------------------- drift


def drift(
    group: Group, synchronise: str, *, epochs: int = 5, batches: int = 16, watch: int = 1
) -> dict[str, Any]:
    """Train with Adam; synchronise gradients at every "batch", weights at the end of every "epoch",
    or "never".

    Returns: "apart", the distance between the replicas after every `watch`-th batch (before weights
    are averaged), and at the end of each epoch the held-out loss of rank 0's "own" replica and of
    the "mean" of all replicas.
    """
    model = new_model(SMALL)
    parameters = list(model.parameters())
    ddp = DDP(model, group) if synchronise == "batch" else None
    optimizer = Adam(parameters, 1e-2)
    run: dict[str, Any] = {
        "synchronise": synchronise,
        "batches": batches,
        "apart": [],
        "own": [],
        "mean": [],
    }
    for step in range(epochs * batches):
        batch = global_batch(SMALL, step)
        if ddp is not None:
            ddp.step(batch, optimizer)
        else:
            part = part_of(batch, size=group.size, rank=group.rank)
            model.loss(part.inputs, part.targets, divisor=part.targets.size).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % watch == 0:
            run["apart"].append(spread(group, weights(model)))
        if (step + 1) % batches == 0:
            own = [parameter.data.copy() for parameter in parameters]
            run["own"].append(held_out_loss(model, HELD_OUT))
            for parameter in parameters:
                group.all_reduce(parameter.data, op="mean", out=parameter.data)
            run["mean"].append(held_out_loss(model, HELD_OUT))
            if synchronise == "never":
                for parameter, array in zip(parameters, own, strict=True):
                    parameter.data[...] = array
    return run
