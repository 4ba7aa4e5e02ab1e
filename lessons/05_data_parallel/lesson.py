"""Lesson 05: DP: one process, a thread per replica; the load of device 0, compared with DDP.

python lessons/05_data_parallel/lesson.py                          # no launcher: four threads
                                                                   for DDP
mpirun -n 4 python lessons/05_data_parallel/lesson.py              # DDP's ranks are processes
python lessons/05_data_parallel/lesson.py --break average-twice    # see README.md, section 8
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import load_module
from minidist.launch import run
from minidist.lessons.lab import difference, new_model, rule_batch, weights
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.observe.timeline import Timeline
from minidist.optim import SGD, Adam
from minidist.parallel.data.data_parallel import DataParallel, plain_data_parallel
from minidist.parallel.data.ddp import DDP

NOTES_MIB = {
    "DP": [39418, *[14366] * 6, 14222],  # N0:181 to N0:188
    "DDP": [39400, 39548, 39868, 39638, 39596, 39482, 39548, 39558],
}  # N0:201 to N0:208
lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "05")


def tour(group: Group, page: Page) -> None:
    """Run the lesson: DP in rank 0's process, DDP on all ranks."""
    page.heading("1  One process with several devices, and one without")
    if group.rank == 0:
        equal_weights(page)
    page.heading("2  The five steps (N0:133), timed; and who reads the data")
    if group.rank == 0:
        five_steps(page)
        readers(group.size, page)
    page.heading("3.1  Bytes through device 0")
    if group.rank == 0:
        device_0(page)
    group.barrier()
    page.heading("3.2  Process, memory, busy time of DP and of DDP (N0:180)")
    smi(group, page)
    if group.rank == 0:
        smi_of_the_notes(page)
    page.heading("5  Taking turns: the interpreter's lock (N1:38)")
    if group.rank == 0:
        lock(page)
    group.barrier()
    page.heading("6  A step's time, DP's and DDP's")
    beside_ddp(group, page)


def equal_weights(page: Page) -> None:
    """Compare weights and losses of 1 to 8 replicas, and of the plain loop, with those of one
    process."""
    serial, losses = lab.train(0)
    rows = []
    for replicas in (1, 2, 3, 5, 8):
        model, ours = lab.train(replicas)
        error = difference(weights(model), weights(serial))
        rows.append(
            [
                replicas,
                f"{error:.1e}",
                f"{ours[-1]:.6f}",
                f"{losses[-1]:.6f}",
                "ok" if error < 1e-10 else "off",
            ]
        )
    models = [new_model(lab.SMALL) for _ in range(3)]
    loss = plain_data_parallel(
        models,
        Adam(list(models[0].parameters()), 1e-2),
        [rule_batch(lab.SMALL, step, 6) for step in range(5)],
    )
    error = difference(weights(models[0]), weights(serial))
    rows.append(
        [
            "3, the plain loop",
            f"{error:.1e}",
            f"{loss:.6f}",
            f"{losses[-1]:.6f}",
            "ok" if error < 1e-10 else "off",
        ]
    )
    page.table(
        "After 5 steps of 6 sequences, float64, Adam",
        ["replicas", "off one process by", "loss", "one process", ""],
        rows,
        note="6 sequences do not divide by 5, and 8 replicas are too many for them",
    )


def five_steps(page: Page) -> None:
    """Show the milliseconds of each step on each device."""
    timelines = [Timeline(rank) for rank in range(4)]
    strategy = DataParallel(new_model(lab.TALL), 4, recorders=timelines)
    optimizer = Adam(strategy.parameters, 1e-3)
    for step in range(3):
        for timeline in timelines:
            timeline.spans.clear()
        strategy.step(rule_batch(lab.TALL, step, 16), optimizer)
    names = {
        "split the batch": "DP 1",
        "copy the model": "DP 2",
        "forward": "DP 3",
        "gather outputs": "DP 3",
        "loss": "DP 3",
        "backward": "DP 4",
        "sum gradients": "DP 5",
        "optimizer": "    ",
    }
    rows = [
        [f"{notes}  {name}", *(_milliseconds(timeline, name) for timeline in timelines)]
        for name, notes in names.items()
    ]
    page.table(
        "Milliseconds in one step on 4 devices",
        ["", *(f"device {rank}" for rank in range(4))],
        rows,
        note="the others have no loss and no optimizer; what they wait for stands in the steps "
        "of transfer",
    )


def _milliseconds(timeline: Timeline, name: str) -> str:
    spans = [span for span in timeline.spans if span.name == name]
    return f"{1e3 * sum(span.stop - span.start for span in spans):.1f}" if spans else "-"


def device_0(page: Page) -> None:
    """Show the bytes through device 0 by number of devices, with those of a rank of DDP's ring."""
    rows = []
    for replicas in range(1, 8):
        found = lab.traffic(replicas, 2 * replicas)
        sent = sum(found["sent"].values())
        received = sum(found["received"].values())
        ring = (
            FORMULAS["all_reduce", "ring"].bytes_of(Case(size=replicas, nbytes=found["model"]))
            / replicas
        )
        both = verdict(sent + received, found["formula_sent"] + found["formula_received"])
        rows.append(
            [
                replicas,
                size_text(sent),
                size_text(found["formula_sent"]),
                size_text(received),
                size_text(found["formula_received"]),
                both,
                size_text(ring),
            ]
        )
    page.table(
        f"Bytes of one step, 2 sequences a device; the model has {size_text(found['model'])}",
        ["devices", "0 sends", "formula", "0 receives", "formula", "", "a rank of a ring sends"],
        rows,
        note="formula: (R-1) models out, (R-1) gradients in; outputs in and their gradients "
        "out; inputs out",
    )


def readers(size: int, page: Page) -> None:
    """Show the rows that each device or rank reads from the data, and what must travel after
    that."""
    sequences = 4 * size
    row = rule_batch(lab.TALL, 0, 1)[0].nbytes
    found = lab.traffic(size, sequences, lab.TALL)
    # The rest is the gradients of the outputs.
    sent = found["sent"].get("scatter", 0) - found["received"].get("gather", 0)
    rows = [
        [
            "DP",
            f"device 0: {sequences}",
            "0",
            size_text(sent),
            size_text(sequences * (size - 1) // size * row),
            verdict(sent, sequences * (size - 1) // size * row),
        ],
        ["DDP", f"rank 0: {sequences // size}", f"{sequences // size}", "0 B", "0 B", "ok"],
    ]
    page.table(
        f"Who reads, disk -> CPU -> device: {sequences} sequences, {size} devices or ranks",
        ["", "reads", "each other reads", "inputs sent on", "formula", ""],
        rows,
        note="DDP's ranks know their numbers, and each reads its own rows (lesson 07's sampler)",
    )


def smi(group: Group, page: Page) -> None:
    """Show the notes' nvidia-smi tables, measured."""
    dp = lab.smi_of_dp(group.size) if group.rank == 0 else []
    group.barrier()
    ddp = lab.smi_of_ddp(group)
    if group.rank:
        return
    assert ddp is not None
    for name, records in (("DP", dp), ("DDP", ddp)):
        rows = [
            [f"{rank}", record["pid"], size_text(record["peak"]), f"{1e3 * record['busy']:.1f} ms"]
            for rank, record in enumerate(records)
        ]
        peaks = [record["peak"] for record in records]
        page.table(
            f"{name}: 16 sequences a step",
            ["device" if name == "DP" else "rank", "process id", "memory, peak", "busy a step"],
            rows,
            note=f"the fullest holds {max(peaks) / min(peaks):.2f} times what the least full does",
        )
    if len({record["pid"] for record in ddp}) == 1 < len(ddp):
        page.say(
            "Here DDP's ranks are threads of one process; start this with mpirun -n 4, and "
            "their ids differ."
        )


def smi_of_the_notes(page: Page) -> None:
    """Compare the memory numbers of N0:180 and N0:200, in MiB of eight GPUs, with eight devices and
    eight ranks here."""
    here = {"DP": lab.smi_of_dp(8), "DDP": run(lab.smi_of_ddp, size=8)[0]}
    rows = []
    for name, told in NOTES_MIB.items():
        peaks = [record["peak"] for record in here[name]]
        rows.append(
            [
                name,
                f"{told[0]:,}",
                f"{min(told[1:]):,} to {max(told[1:]):,}",
                f"{max(told) / min(told):.2f}",
                size_text(peaks[0]),
                size_text(max(peaks[1:])),
                f"{max(peaks) / min(peaks):.2f}",
            ]
        )
    page.table(
        "Memory of eight devices: the notes' nvidia-smi (MiB), and here",
        [
            "",
            "notes: GPU 0",
            "GPU 1 to 7",
            "most / least",
            "here: 0",
            "1 to 7",
            "most / least here",
        ],
        rows,
        note="how much more device 0 holds depends on the model and its batch; that DDP's are "
        "alike does not",
    )


def lock(page: Page) -> None:
    """Show how many processors are busy at once, on a clock and here: a model that is mostly
    Python, and one that is mostly BLAS."""
    counted = []
    measured = []
    for name, config, sequences, steps in (
        ("small products: 12 layers of width 8", lab.PYTHON, 4, 2),
        ("large products: 1 layer of width 256", lab.BLAS, 4, 1),
    ):
        clocks = [lab.turns_on_a_clock(config, ranks, sequences=sequences) for ranks in (1, 4)]
        counted.append(
            [name, f"{clocks[1][1]:.2f}", *(f"{1e3 * seconds:.1f} ms" for seconds, _ in clocks)]
        )
        here = [lab.turns(config, ranks, sequences=sequences, steps=steps) for ranks in (1, 4)]
        measured.append(
            [name, f"{here[1]['cores']:.2f}", *(f"{1e3 * one['seconds']:.1f} ms" for one in here)]
        )
    columns = ["busy processors", "one replica", "four replicas"]
    page.table(
        "Counted, the passes of 4 sequences",
        ["four replicas on the clock", *columns],
        counted,
        note=f"each NumPy call holds the lock for {1e6 * lab.HOLD:g} µs, then computes without it at "
        f"{lab.FLOPS / 1e9:g} GFLOP/s or {lab.BYTES / 1e9:g} GB/s; each replica has a processor",
    )
    page.table(
        "Measured here, a step of 4 sequences",
        ["four replicas", *columns],
        measured,
        note=f"wall time, {os.cpu_count()} processors as busy as they are, one BLAS thread a replica",
    )


def beside_ddp(group: Group, page: Page) -> None:
    """Compare DP with DDP: on a clock, from counted calls and bytes, for 1 to 8 devices; and by
    measured time, on as many devices as there are ranks."""
    if group.rank == 0:
        rows = []
        for ranks in (1, 2, 4, 8):
            found = lab.step_on_a_clock(lab.BLAS, ranks, sequences=8)
            dp = found["dp passes"] + found["dp link"]
            ddp = found["ddp passes"] + found["ddp link"]
            rows.append(
                [ranks, *(f"{1e3 * found[name]:.1f} ms" for name in lab.PARTS), f"{dp / ddp:.2f}"]
            )
        page.table(
            "On the clock: 8 sequences, one layer of width 256",
            [
                "devices",
                "DP: passes",
                "device 0's link",
                "DDP: passes",
                "a rank's link",
                "DP / DDP",
            ],
            rows,
            note=f"passes: as in section 5. Links carry {lab.LINK / 1e9:g} GB/s each "
            "way; device 0 sends, then receives; a rank of DDP's ring does both at once. DDP hides "
            "most of that behind backward, DP nothing",
        )
        dp = lab.wall_of(DataParallel(new_model(lab.BLAS), group.size), lab.BLAS, sequences=8)
    group.barrier()
    ddp = lab.wall_of(DDP(new_model(lab.BLAS), group), lab.BLAS, sequences=8)
    if group.rank == 0:
        page.say(
            f"Here, {group.size} of each, on {os.cpu_count()} processors as busy as they are: a "
            f"step of DP takes {1e3 * dp:.0f} ms, of DDP over {group.transport.name} "
            f"{1e3 * ddp:.0f} ms."
        )


# ----------------------------------------------------------------------------------------- Break it


class AveragesTwice(DataParallel):
    """DP that divides the gradients of a mean by the number of replicas once more (N0:138)."""

    def loss_of(
        self, outputs: np.ndarray, targets: np.ndarray, divisor: int
    ) -> tuple[np.ndarray, float]:
        gradients, loss = super().loss_of(outputs, targets, divisor)
        return gradients / len(self.devices), loss


class ScattersTheLoss(DataParallel):
    """DP that sends the loss itself to the replicas, for backward (N0:137)."""

    def loss_of(
        self, outputs: np.ndarray, targets: np.ndarray, divisor: int
    ) -> tuple[np.ndarray, float]:
        gradients, loss = super().loss_of(outputs, targets, divisor)
        return np.full_like(gradients, loss), loss


class ForgetsToCopy(DataParallel):
    """DP that copies the model only before the first step."""

    def copy_model(self, device: Any) -> None:
        if not getattr(device, "copied", False):
            super().copy_model(device)
            device.copied = True


def average_twice() -> None:
    """Compare the right losses with those if gradients are averaged although the loss was a
    mean."""
    print("SGD: every step is 4 times too short; expected: the losses of the first line")
    _compare(AveragesTwice, "averaged twice", SGD, 0.5)
    print(
        "Adam: it divides each gradient by its usual size; expected: the losses of the first line"
    )
    _compare(AveragesTwice, "averaged twice, Adam", Adam, 1e-2)


def scatter_the_loss() -> None:
    """Scatter one number to every output: backward runs, but training does not progress."""
    _compare(ScattersTheLoss, "the loss scattered", SGD, 0.5, steps=4)  # a fifth overflows


def forget_the_copy() -> None:
    """Train replicas with old weights: their gradients belong to another model."""
    _compare(ForgetsToCopy, "copied once", SGD, 0.5)


def _compare(strategy: Any, name: str, optimizer: Any, lr: float, *, steps: int = 8) -> None:
    right, losses = lab.train(4, optimizer=optimizer, lr=lr, steps=steps, sequences=8)
    wrong, others = lab.train(
        4, optimizer=optimizer, lr=lr, steps=steps, sequences=8, strategy=strategy
    )
    print(f"{'right:':22s} loss " + " ".join(f"{loss:.4f}" for loss in losses))
    print(f"{name + ':':22s} loss " + " ".join(f"{loss:.4f}" for loss in others))
    apart = difference(weights(wrong), weights(right))
    print(f"weights apart by {apart:.1e} of the largest; expected: less than 1e-10")


def update_the_replicas() -> None:
    """Run N1:23 as it stands: each replica updates itself by its own gradient; show how much the
    replicas then differ."""
    models = [new_model(lab.SMALL) for _ in range(4)]
    optimizers = [SGD(list(model.parameters()), 0.5) for model in models]
    for step in range(5):
        inputs, targets = rule_batch(lab.SMALL, step, 8)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = slice(2 * rank, 2 * rank + 2)
            model.loss(inputs[mine], targets[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
        furthest = max(difference(weights(model), weights(models[0])) for model in models)
        print(
            f"step {step}: the replicas are apart by {furthest:.3f} of the largest weight; "
            "expected: 0, all replicas the same"
        )


def too_many_threads() -> None:
    """Show thread thrashing (N1:39): four replicas, and in each BLAS uses more threads than there
    are processors."""
    for threads in (1, 4):
        ticks, waited = lab.products_on_a_clock(4, threads)
        print(
            f"4 replicas with {threads} BLAS thread{'s' * (threads > 1)} each, 3 products each, "
            f"on a clock with 2 processors: {ticks} ticks, expected {4 * 3 * lab.PRODUCT // 2}; "
            f"{waited / 2 / ticks:.0%} of the processors' time is spent in waiting"
        )
        with threadpool_limits(threads, user_api="blas"):
            seconds = min(lab.products(4) for _ in range(2))
        print(
            f"  here, {os.cpu_count()} processors as busy as they are: {1e3 * seconds:.0f} ms "
            "for 3 products of 192 x 192 each"
        )


BREAKS = {
    "average-twice": Break(average_twice, says="averaged twice, Adam:  loss 3.4457"),
    "scatter-the-loss": Break(scatter_the_loss, says="the loss scattered:    loss 3.4457 3.93"),
    "forget-the-copy": Break(forget_the_copy, says="weights apart by 3.9e-01"),
    "update-the-replicas": Break(
        update_the_replicas,
        says="step 4: the replicas are apart by 0.26",
    ),
    "too-many-threads": Break(too_many_threads, says="100 ticks, expected 24; 76% of the"),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
