"""Lesson 08: a batch in several passes: the same weights, less memory, and the traffic by strategy.

mpirun -n 4 python lessons/08_accumulation/lesson.py
python lessons/08_accumulation/lesson.py                          # no launcher: four threads
python lessons/08_accumulation/lesson.py --break forget-to-zero   # see README.md, section 8
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.errors import GradientError
from minidist.grading import load_module, sent_since, totals
from minidist.lessons.lab import (
    alone,
    difference,
    gradients,
    held_out_loss,
    new_model,
    spread,
    weights,
)
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.optim import SGD, Adam
from minidist.parallel.data.accumulation import plain_accumulation
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import micro_parts, part_of

lab = load_module(Path(__file__).resolve().parents[1] / "07_ddp" / "experiments.py", "07")
passing = load_module(Path(__file__).resolve().with_name("experiments.py"), "08")
STEPS = 5  # of the runs that are compared
STRATEGIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank; only rank 0 measures memory."""
    page.heading("1  The same weights, whatever the passes")
    same_weights(group, page)
    page.heading("2  What is divided by what")
    if group.rank == 0:
        means(page)
    page.heading("3  Memory: the activations of one pass")
    if group.rank == 0:
        memory(page)
    page.heading("4  Which strategy reduces when")
    traffic(group, page)
    page.heading("5  Long sequences (N2:419)")
    if group.rank == 0:
        long_sequences(page)
    page.heading("6  Is a larger batch worth it? (N1 §2.1)")
    if group.rank == 0:
        large_batches(page)


# ----------------------------------------------------------------------------------- 1 same weights


def same_weights(group: Group, page: Page) -> None:
    """Compare steps of one process in one pass with the plain loop and DDP in several passes."""
    batches = [
        lab.global_batch(lab.SMALL, step, sequences=3 * group.size + 1) for step in range(STEPS)
    ]
    target = alone(new_model(lab.SMALL), partial(Adam, lr=1e-2), batches)
    rows = []
    for name, passes in (("plain loop", 2), ("DDP", 1), ("DDP", 2), ("DDP", 4)):
        model = new_model(lab.SMALL)
        before = totals(group.ledger)
        optimizer = Adam(list(model.parameters()), 1e-2)
        if name == "DDP":
            ddp = DDP(model, group, bucket_bytes=lab.BUCKET)
            for batch in batches:
                ddp.step(batch, optimizer, accumulate=passes)
        else:
            plain_accumulation(model, optimizer, group, batches, passes)
        messages, nbytes = sent_since(group.ledger, before)
        error = difference(weights(model), target)
        rows.append(
            [
                name,
                passes,
                f"{error:.1e}",
                f"{spread(group, weights(model)):.0e}",
                messages // STEPS,
                size_text(nbytes / STEPS),
            ]
        )
    page.table(
        f"{STEPS} steps of {len(batches[0][0])} rows on {group.size} ranks, float64, Adam, "
        "beside one process",
        ["", "passes", "off by", "ranks apart", "messages a step", "bytes a step"],
        rows,
        note="rows that do not divide evenly, and ranks with fewer rows than passes, change "
        "nothing",
    )


# ------------------------------------------------------------------------------------------ 2 means


def means(page: Page) -> None:
    """Compare the gradient of even and uneven passes, divided rightly and in two wrong ways."""
    rows = []
    for count, passes in ((8, 4), (7, 4), (5, 4)):
        batch = lab.global_batch(lab.SMALL, 0, sequences=count)
        target = passing.gradient(batch, 1, "all")
        errors = [
            float(
                np.linalg.norm(passing.gradient(batch, passes, how) - target)
                / np.linalg.norm(target)
            )
            for how in ("all", "own", "twice")
        ]
        sizes = "+".join(str(len(part)) for part in np.array_split(np.arange(count), passes))
        rows.append([sizes, *("ok" if error < 1e-12 else f"off {error:.0%}" for error in errors)])
    page.table(
        "The gradient of a batch in four passes",
        ["rows", "sum of shares", "mean of means", "divided twice"],
        rows,
        note="a mean of means is right where all passes are alike, so the mistake is easily missed",
    )


# ----------------------------------------------------------------------------------------- 3 memory


def memory(page: Page) -> None:
    """Show the peaks by category for 1, 2, 4 and 8 passes."""
    found = {passes: passing.peaks(passing.CONFIG, passing.ROWS, passes) for passes in (1, 2, 4, 8)}
    rows = []
    for passes, peak in found.items():
        formula = found[1]["activations"] / passes
        sizes = [
            size_text(peak[name])
            for name in ("parameters", "gradients", "optimizer", "activations", "total")
        ]
        rows.append(
            [
                f"{passes}",
                f"{passing.ROWS // passes}",
                *sizes,
                size_text(formula),
                verdict(peak["activations"], formula, 0.01),
            ]
        )
    page.table(
        f"Peaks of a step of {passing.ROWS} × {passing.CONFIG.context} tokens, by the account",
        [
            "passes",
            "rows a pass",
            "parameters",
            "gradients",
            "Adam",
            "activations",
            "total",
            "activations / A",
            "",
        ],
        rows,
        note="no second gradient buffer: a pass adds to what is there; each column has its own "
        "peak, and the total includes temporary arrays",
    )


# ---------------------------------------------------------------------------------------- 4 traffic


def traffic(group: Group, page: Page) -> None:
    """Compare the measured traffic with the formula, by passes and strategy."""
    rows = []
    for zero, formula in enumerate(("2Ψ", "2Ψ", "(A+1)Ψ", "3AΨ")):
        for passes in (1, 2, 4):
            run = passing.measure_traffic(group, zero, passes)
            unit = run["parameters"] * (group.size - 1) or 1
            rows.append(
                [
                    STRATEGIES[zero] if passes == 1 else "",
                    passes,
                    run["messages"],
                    f"{run['elements']:,}",
                    f"{formula} (P-1)",
                    f"{run['elements'] / unit:g} Ψ(P-1)",
                    verdict(run["elements"], run["formula"]),
                ]
            )
    page.table(
        f"One step on {group.size} ranks, all ranks together: Ψ = {run['parameters']:,}",
        ["", "A", "messages", "elements sent", "formula", "measured", ""],
        rows,
        note="stages 2 and 3 have no room to keep a whole gradient's sum between passes",
    )


# --------------------------------------------------------------------------------- 5 long sequences


def long_sequences(page: Page) -> None:
    """Keep the tokens per step and per pass, and make sequences longer: show the memory."""
    rows = []
    tokens = 512
    for context in (64, 128, 256, 512):
        config = replace(passing.CONFIG, context=context, layers=2)
        sequences = tokens // context
        whole = passing.peaks(config, sequences, 1)["activations"]
        one = passing.peaks(config, sequences, sequences)["activations"]
        rows.append(
            [context, sequences, size_text(whole), sequences, size_text(one), f"{whole / one:.1f}×"]
        )
    page.table(
        f"{tokens} tokens a step, two layers: peak of activations",
        ["tokens a sequence", "sequences", "in one pass", "passes", "one sequence a pass", "less"],
        rows,
        note="a pass takes at least one sequence: where that is too much, accumulation is at "
        "its end",
    )


# ---------------------------------------------------------------------------------- 6 large batches


def large_batches(page: Page) -> None:
    """Train on the same 512 sequences in batches of 4, 16 and 64: fewer steps, with the same rate
    and with a larger one."""
    rows = []
    for batch in (4, 16, 64):
        losses = []
        for lr in (0.02, 0.02 * (batch / 4) ** 0.5):
            model = new_model(replace(lab.SMALL, layers=1, width=16))
            single = Single(model)
            optimizer = Adam(single.parameters, lr)
            for step in range(512 // batch):
                single.step(lab.global_batch(lab.SMALL, step, batch), optimizer)
            losses.append(held_out_loss(model, lab.HELD_OUT))
        rows.append([batch, 512 // batch, *(f"{loss:.3f}" for loss in losses)])
    page.table(
        "What 512 sequences teach: held-out loss",
        ["sequences a step", "steps", "rate 0.02", "rate 0.02 √(batch / 4)"],
        rows,
        note="accumulation makes a large batch possible; whether it learns as much is another "
        "question",
    )


# ----------------------------------------------------------------------------------------- Break it


def average_twice() -> None:
    """Divide by all tokens, and then by the passes: the gradient is A times too small."""
    for name, optimizer_class, lr in (("SGD", SGD, 0.2), ("Adam", Adam, 0.01)):
        losses = []
        for factor in (1.0, 0.25):
            model = new_model(lab.SMALL)
            optimizer = optimizer_class(list(model.parameters()), lr)
            for step in range(100):
                inputs, targets = lab.global_batch(lab.SMALL, step)
                for rows in np.array_split(np.arange(len(inputs)), 4):
                    model.loss(
                        inputs[rows], targets[rows], divisor=targets.size / factor
                    ).backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(held_out_loss(model, lab.HELD_OUT))
        print(
            f"{name:4s}: loss after 100 steps {losses[0]:.4f}; divided by the 4 passes as well "
            f"{losses[1]:.4f}"
        )


def forget_to_zero() -> None:
    """Keep the gradients of old batches: in one process they only add up; DDP refuses to sum them
    again."""
    model = new_model(lab.SMALL)
    optimizer = SGD(list(model.parameters()), 0.1)
    for step in range(5):
        inputs, targets = lab.global_batch(lab.SMALL, step)
        model.loss(inputs, targets, divisor=targets.size).backward()
        fresh = passing.gradient_of(weights(model), (inputs, targets))
        print(
            f"step {step + 1}: the gradient has length {np.linalg.norm(gradients(model)):.3f}; "
            f"this batch's own {np.linalg.norm(fresh):.3f}"
        )
        optimizer.step()

    def job(group: Group) -> None:
        ddp = DDP(new_model(lab.SMALL), group)
        for step in range(2):
            batch = lab.global_batch(lab.SMALL, step)
            ddp.backward(ddp.forward(ddp.part_of(batch), divisor=batch[1].size))

    md.run(job, size=2)


def reduce_every_pass() -> None:
    """Sum over the ranks after each pass: A times the traffic; and in place, sums are summed
    again."""

    def job(group: Group, passes: int, way: str) -> tuple[float, float]:
        batch = lab.global_batch(lab.SMALL, 0)
        serial = new_model(lab.SMALL)
        model = new_model(lab.SMALL)
        serial.loss(*batch, divisor=batch[1].size).backward()
        before = totals(group.ledger)
        total: Any = 0
        micros = micro_parts(part_of(batch, size=group.size, rank=group.rank), passes)
        for number, micro in enumerate(micros, start=1):
            model.loss(micro.inputs, micro.targets, batch[1].size).backward()
            if number == passes or way != "once":
                for p in model.parameters():
                    group.all_reduce(p.grad, out=p.grad, algorithm="ring")
            if way == "each pass's own":
                total = total + gradients(model)
                model.zero_grad()
        found = gradients(model) if way != "each pass's own" else total
        target = gradients(serial)
        return sent_since(group.ledger, before)[1], float(
            np.linalg.norm(found - target) / np.linalg.norm(target)
        )

    for way in ("once", "each pass's own", "in place, each pass"):
        for passes in (2, 4):
            nbytes, error = md.run(job, passes, way, size=2)[0]
            print(
                f"reduced {way:19s}, {passes} passes: rank 0 sends {size_text(nbytes)}, "
                f"the gradient is {'right' if error < 1e-12 else f'off by {error:.0%}'}"
            )


def step_before_last() -> None:
    """Step the optimizer after each pass: one process gets other weights; replicas that reduce last
    become different."""
    batch = lab.global_batch(lab.SMALL, 0)
    target = new_model(lab.SMALL)
    Single(target).step(batch, SGD(list(target.parameters()), 0.5), accumulate=4)

    def job(group: Group) -> tuple[float, float]:
        model = new_model(lab.SMALL)
        optimizer = SGD(list(model.parameters()), 0.5)
        for number, micro in enumerate(
            micro_parts(part_of(batch, size=group.size, rank=group.rank), 4), start=1
        ):
            model.loss(micro.inputs, micro.targets, batch[1].size).backward()
            if number == 4:
                for p in model.parameters():
                    group.all_reduce(p.grad, out=p.grad, algorithm="ring")
            optimizer.step()
            optimizer.zero_grad()
        return difference(weights(model), weights(target)), spread(group, weights(model))

    for size in (1, 2):
        error, apart = md.run(job, size=size)[0]
        print(
            f"{size} rank{'s' * (size > 1)}, a step after each of 4 passes: off one step by "
            f"{error:.1e}, replicas apart by {apart:.1e}; expected 0 and 0"
        )


def mean_of_means() -> None:
    """Divide each pass by its own tokens, then by the number of passes."""
    for count in (8, 7, 6, 5):
        batch = lab.global_batch(lab.SMALL, 0, sequences=count)
        target = passing.gradient(batch, 1, "all")
        error = float(
            np.linalg.norm(passing.gradient(batch, 4, "own") - target) / np.linalg.norm(target)
        )
        sizes = "+".join(str(len(part)) for part in np.array_split(np.arange(count), 4))
        found = "right" if error < 1e-12 else f"off by {error:.1%}"
        print(f"{count} rows in passes of {sizes}: the gradient is {found}")


BREAKS = {
    "average-twice": Break(average_twice, says="divided by the 4 passes as well 2.79"),
    "forget-to-zero": Break(
        forget_to_zero,
        says="call optimizer.zero_grad() after every step",
        error=GradientError,
    ),
    "reduce-every-pass": Break(
        reduce_every_pass,
        says="reduced in place, each pass, 4 passes: rank 0 sends 940 KiB, the gradient is off",
    ),
    "step-before-last": Break(
        step_before_last,
        says="2 ranks, a step after each of 4 passes: off one step by 4.8e-02",
    ),
    "mean-of-means": Break(
        mean_of_means,
        says="7 rows in passes of 2+2+2+1: the gradient is off by 26",
    ),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
