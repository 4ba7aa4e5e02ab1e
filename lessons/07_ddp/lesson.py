"""Lesson 07: DDP: the six steps timed, buckets and overlap, traffic and its formula, mistakes.

mpirun -n 4 python lessons/07_ddp/lesson.py
python lessons/07_ddp/lesson.py                        # no launcher: four threads
python lessons/07_ddp/lesson.py --break per-epoch      # see README.md, section 8
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.console import size_text
from minidist.grading import load_module, sent_since, totals
from minidist.lessons.lab import alone, difference, gradients, new_model, spread, weights
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import arguments, run_lesson
from minidist.observe.timeline import Timeline
from minidist.optim import Adam
from minidist.parallel.data.ddp import DDP, plain_ddp

STEPS = 5  # of the runs that are compared
SCALED = (8, 64)
lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "07")
broken = load_module(Path(__file__).resolve().with_name("broken.py"), "07")
smi = load_module(Path(__file__).resolve().parents[1] / "05_data_parallel" / "experiments.py", "05")


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  Equal replicas: one process, the plain loop, DDP")
    equal_weights(group, page)
    page.heading("2  The six steps (N0:403), timed")
    timelines = lab.record_step(group)
    six_steps(timelines, page)
    data_path(lab.data_path(group), page)
    page.heading("3.1  Buckets: what overlaps with backward, and what does not")
    buckets(timelines, page)
    page.heading("3.2  Overlap over links that take their time")
    overlap(group, page)
    page.heading("3.4  Traffic beside its formula")
    traffic(group, page)
    page.heading("4  Sum or average? Uneven parts")
    uneven_parts(group, page)
    page.heading("5  Synchronise per batch or per epoch (N0:416)")
    drift_table(group, page)
    page.heading("9  What the notes claim: N0:200, N0:430, N1:29")
    processes(group, page)
    if group.rank == 0:
        scaling(page)
    group.barrier()
    what_a_rank_holds(group, page)


def scaling(page: Page) -> None:
    """Show how many times as many tokens per second as one GPU a simulated cluster reaches (chapter
    24)."""
    rows = []
    for gpus in SCALED:
        strong, weak = (
            lab.times_of_one_gpu(gpus, batch) for batch in ({"batch": 512}, {"each": 8})
        )
        rows.append(
            [gpus, f"{strong:.1f}", f"{strong / gpus:.0%}", f"{weak:.1f}", f"{weak / gpus:.0%}"]
        )
    page.table(
        "DDP of a GPT of 124 million parameters on H100s, 8 a node, bf16: times the speed of one",
        ["GPUs", "512 sequences a step in all", "of linear", "8 sequences a GPU", "of linear"],
        rows,
        note="strong scaling: the same batch, so each GPU computes less while the gradients "
        "stay as large. weak scaling: a batch that grows with the GPUs",
    )


# --------------------------------------------------------------------------------------- 1 equality


def equal_weights(group: Group, page: Page) -> None:
    """Run the same steps in three ways: compare weights, messages and bytes of rank 0."""
    batches = [lab.global_batch(lab.SMALL, step) for step in range(STEPS)]
    target = alone(new_model(lab.SMALL), partial(Adam, lr=1e-2), batches)

    plain = new_model(lab.SMALL)
    before = totals(group.ledger)
    plain_ddp(plain, Adam(list(plain.parameters()), 1e-2), group, batches)
    plain_sent = sent_since(group.ledger, before)
    before = totals(group.ledger)

    model = new_model(lab.SMALL)
    ddp = DDP(model, group, bucket_bytes=lab.BUCKET)
    optimizer = Adam(list(model.parameters()), 1e-2)
    for batch in batches:
        ddp.step(batch, optimizer)
    ddp_sent = sent_since(group.ledger, before)

    rows = [["one process", "0", "0", 0, "0 B"]]
    for name, replica, (messages, nbytes) in (
        ("plain loop", plain, plain_sent),
        ("DDP", model, ddp_sent),
    ):
        error = difference(weights(replica), target)
        rows.append(
            [
                name,
                f"{error:.1e}",
                f"{spread(group, weights(replica)):.0e}",
                messages // STEPS,
                size_text(nbytes / STEPS),
            ]
        )
    page.table(
        f"After {STEPS} steps on {group.size} ranks, float64, Adam",
        ["", "off one process by", "replicas apart by", "messages a step", "bytes a step"],
        rows,
        note="same bytes; DDP needs fewer messages, since gradients share buckets",
    )


# ------------------------------------------------------------------------- 2, 3.1 the recorded step


def six_steps(timelines: list[Timeline], page: Page) -> None:
    """Show each rank's time by the numbers of the notes' steps."""
    if not timelines:
        return
    columns: list[tuple[str, Any]] = [
        ("2, 3 forward", lambda t: lab.milliseconds(lab.of(t, "forward"))),
        ("4 backward", lambda t: lab.milliseconds(lab.of(t, "backward"))),
        ("5 all-reduce", lambda t: lab.milliseconds(lab.reduces(t))),
        ("of that: waited", lambda t: lab.milliseconds(lab.of(t, "wait for gradients"))),
        ("6 update", lambda t: lab.milliseconds(lab.of(t, "optimizer"))),
    ]
    page.table(
        "Milliseconds in one step (the median step)",
        ["", *(name for name, _ in columns)],
        [[f"rank {t.rank}", *(f"{measure(t):.1f}" for _, measure in columns)] for t in timelines],
        note="step 5 runs beside step 4: only what is waited for costs time; step 1 was done "
        "before training",
    )


def data_path(ranks: list[dict[str, Any]], page: Page) -> None:
    """Show the picture of N0:148 from a recorded step; its columns are the steps of N0:403, in the
    picture's order."""
    if not ranks:
        return
    rows = []
    for place, seen in enumerate(ranks):
        to = f" -> rank {', '.join(map(str, seen['to']))}" if seen["to"] else ""
        rows.append(
            [
                f"disk {'-' if len(ranks) == 1 else '+'}-> CPU -> rank {place}",
                f"{size_text(seen['read'])}, {seen['rows']} rows",
                f"{size_text(seen['model'])}, came: {size_text(seen['came'])}",
                size_text(seen["gradients"]),
                f"{size_text(seen['sent'])}{to}",
            ]
        )
    page.table(
        "The way of the data (N0:148), as recorded in one step",
        ["", "2: data", "1: model", "4: gradients", "5: ring all-reduce"],
        rows,
        note="the rows are made here and not read; each rank draws its own model; only "
        "gradients travel, to one neighbour",
    )


def buckets(timelines: list[Timeline], page: Page) -> None:
    """Show when rank 0's buckets started and arrived, counted from the begin of its backward."""
    if not timelines or not lab.reduces(timelines[0]):
        return
    backward = lab.of(timelines[0], "backward")[0]
    rows = []
    for index, span in enumerate(lab.reduces(timelines[0])):
        inside = max(0.0, min(span.stop, backward.stop) - span.start) / (span.stop - span.start)
        rows.append(
            [
                f"bucket {index}",
                size_text(span.details["nbytes"]),
                f"{1e3 * (span.start - backward.start):.1f} ms",
                f"{1e3 * (span.stop - backward.start):.1f} ms",
                f"{100 * inside:.0f} %",
            ]
        )
    page.table(
        f"Rank 0's buckets; its backward lasted {lab.milliseconds([backward]):.1f} ms",
        ["", "sent", "begins", "ends", "hidden behind backward"],
        rows,
    )


# -------------------------------------------------------------------------------------- 3.2 overlap


def overlap(group: Group, page: Page) -> None:
    """Show how much of the all-reduces lies under computation, over a ten-gigabit network, by
    bucket size."""
    rows = []
    for name, bucket_bytes in (
        (size_text(1 << 18), 1 << 18),
        (size_text(lab.BUCKET), lab.BUCKET),
        ("one for everything", 1 << 30),
    ):
        shares = lab.hidden_shares(group, bucket_bytes)
        if shares:
            rows.append([name, *(f"{share:.0%}" for share in shares)])
    page.table(
        "Communication hidden behind backward",
        ["buckets of", *(f"rank {rank}" for rank in range(group.size))],
        rows,
        note="each message is held back 50 µs, and 1 s for 1,250 MB: a network that needs no core; "
        "minidist bench overlap-step has the other strategies beside it",
    )


# -------------------------------------------------------------------------------------- 3.4 traffic


def traffic(group: Group, page: Page) -> None:
    """Compare the bytes and messages of one step, summed over the ranks, with the formulas."""
    model = new_model(lab.TIMED)
    ddp = DDP(model, group, bucket_bytes=lab.BUCKET)
    optimizer = Adam(list(model.parameters()), 1e-3)
    before = totals(group.ledger)
    ddp.step(lab.global_batch(lab.TIMED, 0), optimizer)
    mine = np.array(sent_since(group.ledger, before))
    with group.ledger.control():
        messages, nbytes = (int(value) for value in group.all_reduce(mine))
    size = group.size
    gradient_bytes = sum(bucket.data.nbytes for bucket in ddp.buckets)
    rows: list[list[Any]] = [
        [
            "bytes",
            size_text(nbytes),
            "2(P-1) n",
            size_text(2 * (size - 1) * gradient_bytes),
            verdict(nbytes, 2 * (size - 1) * gradient_bytes),
        ],
        [
            "messages",
            messages,
            "P 2(P-1) buckets",
            size * 2 * (size - 1) * len(ddp.buckets),
            verdict(messages, size * 2 * (size - 1) * len(ddp.buckets)),
        ],
    ]
    page.table(
        f"One step, {size} ranks: n = {size_text(gradient_bytes)} of gradients in "
        f"{len(ddp.buckets)} buckets",
        ["", "measured", "formula", "", ""],
        rows,
        note=f"a rank's part: 2(P-1)/P n = {size_text(nbytes / size)}",
    )


# ----------------------------------------------------------------------------------- 4 uneven parts


def uneven_parts(group: Group, page: Page) -> None:
    """Compare the gradient of one batch, cut unevenly: as one process has it, and two wrong ways to
    average."""
    inputs, targets = lab.global_batch(lab.SMALL, 0, sequences=2 * group.size)
    shares = [group.size + 1, *([1] * (group.size - 1))]  # rank 0 has half of all sequences
    start = sum(shares[: group.rank])
    mine = slice(start, start + shares[group.rank])
    serial = new_model(lab.SMALL)
    serial.loss(inputs, targets, divisor=targets.size).backward()
    target = gradients(serial)
    rows = []
    for name, divided_by, divisor, then, factor in (
        ("sum of shares", "all ranks' tokens", targets.size, "summed", 1.0),
        ("mean of means", "own tokens", targets[mine].size, "averaged", 1 / group.size),
        ("averaged twice", "all ranks' tokens", targets.size, "averaged", 1 / group.size),
    ):
        model = new_model(lab.SMALL)
        model.loss(inputs[mine], targets[mine], divisor=divisor).backward()
        total = group.all_reduce(gradients(model)) * factor
        error = float(np.linalg.norm(total - target) / np.linalg.norm(target))
        rows.append(
            [
                name,
                divided_by,
                then,
                f"{np.linalg.norm(total):.4f}",
                "ok" if error < 1e-12 else f"off {error:.0%}",
            ]
        )
    page.table(
        f"The gradient when rank 0 has {shares[0]} sequences and the others 1; its right length is "
        f"{np.linalg.norm(target):.4f}",
        ["", "loss divided by", "then", "length", "error"],
        rows,
    )


# ------------------------------------------------------------------------------------------ 5 drift


def drift_table(group: Group, page: Page) -> None:
    """Show the distance between replicas at the end of each epoch, and the loss of rank 0's replica
    and of the mean."""
    rows = []
    for way in ("batch", "epoch", "never"):
        run = lab.drift(group, way, watch=16)
        rows.append(
            [
                way,
                *(f"{end:.2f}" for end in run["apart"][::2]),
                f"{run['own'][1]:.2f}",
                f"{run['mean'][1]:.2f}",
                f"{run['own'][-1]:.2f}",
                f"{run['mean'][-1]:.2f}",
            ]
        )
    page.table(
        "Distance of the replicas in epochs 1, 3, 5; held-out loss in 2 and 5, of rank 0's and "
        "of their mean",
        ["every", "apart 1", "apart 3", "apart 5", "own 2", "mean 2", "own 5", "mean 5"],
        rows,
        note="apart: largest difference over largest weight; the mean of replicas that never "
        "met is worst",
    )


# -------------------------------------------------------------------------------------- 9 processes


def processes(group: Group, page: Page) -> None:
    """Show the notes' nvidia-smi table for DDP, measured: one process per replica, all with the
    same load."""
    records = smi.smi_of_ddp(group)
    if records is None:
        return
    page.table(
        "DDP: 16 sequences a step",
        ["rank", "process id", "memory, peak", "busy a step"],
        [
            [f"{rank}", record["pid"], size_text(record["peak"]), f"{1e3 * record['busy']:.1f} ms"]
            for rank, record in enumerate(records)
        ],
        note="lesson 05 has DP's beside it: one process, and device 0 fuller than the rest",
    )
    if len({record["pid"] for record in records}) == 1 < len(records):
        page.say(
            "Here the ranks are threads of one process; start this with mpirun -n 4, and their "
            "ids differ."
        )


# ------------------------------------------------------------------------------ 9 what a rank holds


def what_a_rank_holds(group: Group, page: Page) -> None:
    """Compare the memory account of one process with a DDP rank's: state, activations, total."""
    single = lab.peaks(None)
    ddp = lab.peaks(group)
    sequences = max(1, group.size // 2)
    few = [
        rank["activations"]
        for rank in gather_records(group, lab.peaks(group, sequences=sequences)) or []
    ]
    rows = [
        [
            name,
            *(size_text(sum(held[category] for category in categories)) for held in (single, ddp)),
        ]
        for name, categories in lab.HELD.items()
    ]
    page.table(
        f"Memory at the peak, {lab.SEQUENCES} sequences a step: rank 0 of {group.size}",
        ["", "one process", "DDP"],
        rows,
        note=f"a step of fewer sequences, {sequences}, leaves {few.count(0)} of {group.size} "
        "ranks without any: they hold the same state and compute nothing",
    )


BREAKS = broken.BREAKS


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
