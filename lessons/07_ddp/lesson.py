"""Lesson 07: DDP: the six steps timed, buckets and overlap, traffic beside its formula, and what goes wrong without.

    mpirun -n 4 python lessons/07_ddp/lesson.py
    python lessons/07_ddp/lesson.py                        # alone: four ranks as threads
    python lessons/07_ddp/lesson.py --digits               # the notes' MNIST example (N1:58), corrected
    python lessons/07_ddp/lesson.py --break per-epoch      # see README.md, section 8
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.nn import GPT, GPTConfig
from minidist.observe.page import Page, size_text, verdict
from minidist.observe.timeline import Timeline
from minidist.optim import SGD, Adam
from minidist.parallel.common.update import part_of
from minidist.parallel.ddp import DDP
from minidist.parallel.single import Single
from minidist.teaching import arguments, load_module, run_lesson, sent_since, totals

HERE = Path(__file__).resolve().parent
SMALL = GPTConfig(vocabulary=64, context=16, layers=2, width=32, heads=4, dtype="float64")  # to compare weights
TIMED = GPTConfig(vocabulary=128, context=64, layers=4, width=128, heads=4)  # to see overlap
BUCKET = 1 << 18  # bytes; small, so that this small model has several
SEQUENCES, STEPS = 8, 5  # of a global batch; of the runs that are compared


def plain_ddp(model, optimizer, group, batches):
    """The whole of DDP, without buckets and without overlap (README, section 1; the numbers are N0:403's)."""
    for inputs, targets, global_tokens in batches:                            # 2 my part of the data
        loss = model.loss(inputs, targets, divisor=global_tokens)             # 3 forward
        loss.backward()                                                       # 4 backward: my gradients
        for parameter in model.parameters():                                  # 5 synchronise: everybody's gradients
            group.all_reduce(parameter.grad, out=parameter.grad)
        optimizer.step()                                                      # 6 update: the same on every rank
        optimizer.zero_grad()


def tour(group: Any, page: Page) -> None:
    """The lesson, run by every rank."""
    page.heading("1  Equal replicas: one process, the plain loop, DDP")
    equal_weights(group, page)
    page.heading("2  The six steps (N0:403), timed")
    timelines = record_step(group)
    six_steps(timelines, page)
    page.heading("3  Buckets: what overlaps with backward, and what does not")
    buckets(timelines, page)
    page.heading("4  Traffic beside its formula")
    traffic(group, page)
    page.heading("5  Sum or average? Uneven parts")
    uneven_parts(group, page)
    page.heading("6  Synchronise per batch or per epoch (N0:416)")
    drift_table(group, page)


# --------------------------------------------------------------------------------------------------------- helpers

def new_model(config: GPTConfig, seed: int = 0) -> GPT:
    """A replica: the same seed gives the same weights on every rank."""
    model = GPT(config)
    model.initialize(seed=seed)
    return model


def global_batch(config: GPTConfig, step: int, sequences: int = SEQUENCES) -> tuple[np.ndarray, np.ndarray]:
    """A global batch with something to learn: each token follows from the one before, except for a little noise."""
    rng = np.random.default_rng(step)
    ids = np.empty((sequences, config.context + 1), np.int64)
    ids[:, 0] = rng.integers(0, config.vocabulary, sequences)
    for position in range(config.context):
        noise = rng.random(sequences) < 0.1
        follow = (5 * ids[:, position] + 3) % config.vocabulary
        ids[:, position + 1] = np.where(noise, rng.integers(0, config.vocabulary, sequences), follow)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def weights(model: GPT) -> np.ndarray:
    """All parameters end to end."""
    return np.concatenate([np.asarray(parameter.data).ravel() for parameter in model.parameters()])


def gradients(model: GPT) -> np.ndarray:
    """All gradients end to end."""
    return np.concatenate([np.array(parameter.grad).ravel() for parameter in model.parameters()])


def apart(group: Any, mine: np.ndarray) -> float:
    """The largest difference between any rank's array and rank 0's, over rank 0's largest number; the same everywhere."""
    with group.ledger.control():
        first = group.broadcast(mine)
        return float(group.all_reduce(np.abs(mine - first).max(keepdims=True), op="max")[0] / np.abs(first).max())


# ---------------------------------------------------------------------------------------------------- 1 equality

def equal_weights(group: Any, page: Page) -> None:
    """The same steps three ways: weights, messages and bytes of rank 0."""
    batches = [global_batch(SMALL, step) for step in range(STEPS)]
    alone = new_model(SMALL)
    single, optimizer = Single(alone), Adam(list(alone.parameters()), 1e-2)
    for batch in batches:
        single.step(batch, optimizer)

    plain, before = new_model(SMALL), totals(group.ledger)
    parts = [part_of(batch, size=group.size, rank=group.rank) for batch in batches]
    plain_ddp(plain, Adam(list(plain.parameters()), 1e-2), group,
              [(inputs, targets, batch[1].size) for (inputs, targets), batch in zip(parts, batches, strict=True)])
    plain_sent, before = sent_since(group.ledger, before), totals(group.ledger)

    model = new_model(SMALL)
    ddp, optimizer = DDP(model, group, bucket_bytes=BUCKET), Adam(list(model.parameters()), 1e-2)
    for batch in batches:
        ddp.step(batch, optimizer)
    ddp_sent = sent_since(group.ledger, before)

    target = weights(alone)
    rows = [["one process", "0", "0", 0, "0 B"]]
    for name, replica, (messages, nbytes) in (("plain loop", plain, plain_sent), ("DDP", model, ddp_sent)):
        error = np.abs(weights(replica) - target).max() / np.abs(target).max()
        rows.append([name, f"{error:.1e}", f"{apart(group, weights(replica)):.0e}", messages // STEPS,
                     size_text(nbytes / STEPS)])
    page.table(f"After {STEPS} steps on {group.size} ranks, float64, Adam",
               ["", "off one process by", "replicas apart by", "messages a step", "bytes a step"], rows,
               note="same bytes; DDP needs fewer messages, since gradients share buckets")


# ---------------------------------------------------------------------------------------- 2, 3 the recorded step

def record_step(group: Any, steps: int = 7) -> list[Timeline]:
    """The timelines of the median of some steps of DDP, every rank's, on rank 0; an empty list elsewhere."""
    timeline = Timeline(group.rank)
    model = new_model(TIMED)
    ddp = DDP(model, group, bucket_bytes=BUCKET, recorder=timeline)
    optimizer = Adam(list(model.parameters()), 1e-3)
    stop = group.ledger.subscribe(timeline._on_event)
    for step in range(steps):
        group.barrier()
        with timeline.span("step", step=step):
            ddp.step(global_batch(TIMED, step), optimizer)
    stop()
    collected = timeline.collect(group) or []
    if collected:
        lengths = {span.details["step"]: span.stop - span.start for span in collected[0].spans if span.name == "step"}
        middle = sorted(lengths, key=lambda step: lengths[step])[steps // 2]
        for ours in collected:
            ours.spans = [span for span in ours.spans if span.details.get("step") == middle and span.name != "barrier"]
    return collected


def of(timeline: Timeline, name: str, row: str = "compute") -> list[Any]:
    """A timeline's spans of one name, in order."""
    return sorted((span for span in timeline.spans if span.name == name and span.row == row), key=lambda span: span.start)


def reduces(timeline: Timeline) -> list[Any]:
    """The all-reduces of the buckets, in order."""
    return [span for span in of(timeline, "all_reduce", "communication") if span.details["axis"] != "control"]


def milliseconds(spans: list[Any]) -> float:
    """The spans' lengths together."""
    return 1e3 * sum(span.stop - span.start for span in spans)


def six_steps(timelines: list[Timeline], page: Page) -> None:
    """Where each rank's time went, in the notes' numbering."""
    if not timelines:
        return
    columns = [("1 copy", lambda t: 0.0), ("2, 3 forward", lambda t: milliseconds(of(t, "forward"))),
               ("4 backward", lambda t: milliseconds(of(t, "backward"))),
               ("5 all-reduce", lambda t: milliseconds(reduces(t))),
               ("of that: waited", lambda t: milliseconds(of(t, "wait for gradients"))),
               ("6 update", lambda t: milliseconds(of(t, "optimizer")))]
    page.table("Milliseconds in one step (the median step)", ["", *(name for name, _ in columns)],
               [[f"rank {t.rank}", *(f"{measure(t):.1f}" for _, measure in columns)] for t in timelines],
               note="step 5 runs beside step 4; only what is waited for costs time. Step 1 happened once, before training")


def buckets(timelines: list[Timeline], page: Page) -> None:
    """When rank 0's buckets set out and arrived, counted from the beginning of its backward."""
    if not timelines or not reduces(timelines[0]):
        return
    backward = of(timelines[0], "backward")[0]
    rows = []
    for index, span in enumerate(reduces(timelines[0])):
        inside = max(0.0, min(span.stop, backward.stop) - span.start) / (span.stop - span.start)
        rows.append([f"bucket {index}", size_text(span.details["nbytes"]), f"{1e3 * (span.start - backward.start):.1f} ms",
                     f"{1e3 * (span.stop - backward.start):.1f} ms", f"{100 * inside:.0f} %"])
    page.table(f"Rank 0's buckets; its backward lasted {milliseconds([backward]):.1f} ms",
               ["", "sent", "begins", "ends", "hidden behind backward"], rows)


# ------------------------------------------------------------------------------------------------------ 4 traffic

def traffic(group: Any, page: Page) -> None:
    """Bytes and messages of one step, summed over the ranks, beside the formulas."""
    model = new_model(TIMED)
    ddp, optimizer = DDP(model, group, bucket_bytes=BUCKET), Adam(list(model.parameters()), 1e-3)
    before = totals(group.ledger)
    ddp.step(global_batch(TIMED, 0), optimizer)
    mine = np.array(sent_since(group.ledger, before))
    with group.ledger.control():
        messages, nbytes = (int(value) for value in group.all_reduce(mine))
    size, gradient_bytes = group.size, sum(bucket.data.nbytes for bucket in ddp.buckets)
    rows = [["bytes", size_text(nbytes), "2(P-1) n", size_text(2 * (size - 1) * gradient_bytes),
             verdict(nbytes, 2 * (size - 1) * gradient_bytes)],
            ["messages", messages, "P 2(P-1) buckets", size * 2 * (size - 1) * len(ddp.buckets),
             verdict(messages, size * 2 * (size - 1) * len(ddp.buckets))]]
    page.table(f"One step, all {size} ranks together: n = {size_text(gradient_bytes)} of gradients in {len(ddp.buckets)} buckets",
               ["", "measured", "formula", "", ""], rows, note=f"a rank's part: 2(P-1)/P n = {size_text(nbytes / size)}")


# ------------------------------------------------------------------------------------------------- 5 uneven parts

def uneven_parts(group: Any, page: Page) -> None:
    """The gradient of one batch, cut unevenly, three ways: as one process has it, and two ways to average wrongly."""
    inputs, targets = global_batch(SMALL, 0, sequences=2 * group.size)
    shares = [group.size + 1, *([1] * (group.size - 1))]  # rank 0 has half of all sequences
    start = sum(shares[:group.rank])
    mine = slice(start, start + shares[group.rank])
    alone = new_model(SMALL)
    alone.loss(inputs, targets, divisor=targets.size).backward()
    target, rows = gradients(alone), []
    for name, divisor, factor in (("sum of shares: loss / all ranks' tokens", targets.size, 1.0),
                                  ("mean of means: loss / own tokens, averaged", targets[mine].size, 1 / group.size),
                                  ("averaged twice: loss / all ranks' tokens, averaged", targets.size, 1 / group.size)):
        model = new_model(SMALL)
        model.loss(inputs[mine], targets[mine], divisor=divisor).backward()
        total = group.all_reduce(gradients(model)) * factor
        error = float(np.linalg.norm(total - target) / np.linalg.norm(target))
        rows.append([name, f"{np.linalg.norm(total):.4f}", f"{np.linalg.norm(target):.4f}",
                     verdict(round(1 + error, 9), 1)])
    page.table(f"Rank 0 has {shares[0]} sequences, the others 1", ["gradient", "its length", "right length", "error"], rows)


# --------------------------------------------------------------------------------------------------------- 6 drift

def drift(group: Any, every: int, epochs: int = 4, batches: int = 10) -> dict[str, Any]:
    """Train with SGD, averaging weights after every `every` steps (1: as good as DDP); how far the replicas part.

    Averaging weights after each SGD step is the same as averaging gradients before it, so `every=1` is DDP and
    `every=batches` is N0:416's 'per epoch'. Each rank sees its own part of the data only, as in real training.
    """
    model = new_model(SMALL)
    optimizer = SGD(list(model.parameters()), lr=0.5)
    held_out = global_batch(SMALL, 10_000, sequences=32)
    distance, loss = [], []
    for step in range(epochs * batches):
        inputs, targets = part_of(global_batch(SMALL, step, sequences=4 * group.size), size=group.size, rank=group.rank)
        model.loss(inputs, targets, divisor=targets.size).backward()
        optimizer.step()
        optimizer.zero_grad()
        distance.append(apart(group, weights(model)))
        if (step + 1) % every == 0:
            for parameter in model.parameters():
                group.all_reduce(parameter.data, op="mean", out=parameter.data)
            distance[-1] = distance[-1] if every > 1 else apart(group, weights(model))
        loss.append(float(model.loss(*held_out, divisor=held_out[1].size).item()))
    return {"distance": distance, "loss": loss, "every": every, "batches": batches}


def drift_table(group: Any, page: Page) -> None:
    """Distance between replicas at the end of each epoch, and what the model has learnt."""
    rows = []
    for name, every in (("every batch (DDP)", 1), ("every epoch", 10), ("never", 10**9)):
        run = drift(group, every)
        ends = range(run["batches"] - 1, len(run["distance"]), run["batches"])
        rows.append([name, *(f"{run['distance'][end]:.1e}" for end in ends), f"{run['loss'][-1]:.3f}"])
    page.table("Replicas apart, just before the epoch's end is averaged (largest difference over largest weight)",
               ["synchronised", "epoch 1", "epoch 2", "epoch 3", "epoch 4", "held-out loss, rank 0"], rows)
