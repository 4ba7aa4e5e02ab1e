"""Lesson 14: ZeRO-1: DDP's steps and traffic, with the optimizer's state divided among the ranks.

mpirun -n 4 python lessons/14_zero1/lesson.py
python lessons/14_zero1/lesson.py                             # no launcher: four threads
python lessons/14_zero1/lesson.py --break no-all-gather       # see README.md, section 6
"""

from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.lessons import zero_lab as lab
from minidist.lessons.lab import difference, new_model, spread
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.optim import SGD, Adam
from minidist.parallel.step.flat import Flat
from minidist.parallel.zero.memory_formula import MIXED, SINGLE, STATE, saving, state_bytes
from minidist.parallel.zero.replica import ParameterArrivals
from minidist.parallel.zero.zero1 import Zero1, plain_zero1

BILLION = 10**9


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  Equal weights: one process, the plain loop, ZeRO-1")
    equal_weights(group, page)
    page.heading("2  Memory: what a rank holds")
    memory_table(group, page)
    page.heading("3  How much is saved: limits and real sizes")
    savings(page)
    page.heading("4  Traffic: two ways to read the notes' step 5")
    traffic_table(group, page)


# --------------------------------------------------------------------------------------- 1 equality


def equal_weights(group: Group, page: Page) -> None:
    """Run the same steps in three ways: compare weights with one process, and between the ranks."""
    target = lab.alone()
    rows = [["one process", "0", "0"]]
    model = new_model(lab.SMALL)
    plain_zero1(model, lab.new_adam, group, lab.batches(lab.SMALL))
    for name, weights in (
        ("plain loop", lab.state_vector(model.state_dict())),
        ("ZeRO-1", lab.trained(group, 1)),
    ):
        rows.append([name, f"{difference(weights, target):.1e}", f"{spread(group, weights):.0e}"])
    page.table(
        f"After {lab.STEPS} steps of Adam on {group.size} ranks, float64, 7 sequences a step",
        ["", "off one process by", "replicas apart by"],
        rows,
    )


# ----------------------------------------------------------------------------------------- 2 memory


def memory_table(group: Group, page: Page) -> None:
    """Compare the bytes by category between steps of DDP and of ZeRO-1 with the formula."""
    parameters, _ = lab.parameter_bytes(lab.MEASURED)
    rows = []
    for stage in (0, 1):
        seen = lab.memory(group, stage)
        held = state_bytes(parameters, SINGLE, zero=stage, ranks=group.size)
        for category in STATE:
            measured = seen[category]["now"]
            rows.append(
                [
                    f"{lab.NAMES[stage]}: {category}",
                    size_text(measured),
                    size_text(held[category]),
                    f"{measured / parameters:.2f}",
                    verdict(measured, held[category], 0.01),
                ]
            )
    page.table(
        f"Rank 0 of {group.size}, {parameters:,} parameters in float32 (K = 8)",
        ["", "measured", "formula", "bytes a parameter", ""],
        rows,
        note="only the optimizer's row differs: a rank has Adam's two moments of its own chunk only",
    )


# ----------------------------------------------------------------------------------------- 3 limits


def savings(page: Page) -> None:
    """Show how many times less a rank holds, by number of ranks: the notes' 4 and 8 are limits for
    many ranks."""
    rows = [
        [
            str(ranks),
            *(
                f"{saving(each, zero=zero, ranks=ranks):.1f}"
                for each in (MIXED, SINGLE)
                for zero in (1, 2, 3)
            ),
        ]
        for ranks in (2, 4, 8, 64, 1024)
    ]
    page.table(
        "How many times less a rank holds than with DDP",
        ["ranks", "ZeRO-1, K=12", "ZeRO-2", "ZeRO-3", "ZeRO-1, K=8", "ZeRO-2", "ZeRO-3"],
        rows,
        note="N0:381 and N2:100 give 4 and 8 without a word on N; in float32 the limits are 2 "
        "and 4",
    )
    figures = [
        f"{state_bytes(7_500_000_000, MIXED, zero=zero, ranks=64)['total'] / BILLION:.1f}"
        for zero in range(4)
    ]
    page.say(
        "The paper's own example, 7.5 billion parameters on 64 devices: "
        f"{', '.join(figures[:3])} and {figures[3]} GB for DDP, ZeRO-1, 2, 3 (N4:285, 291)."
    )


# ---------------------------------------------------------------------------------------- 4 traffic


def all_reduce_version(group: Group) -> None:
    """Run N0:335 read literally: every rank gets every sum and updates its part, then all parts are
    shared."""
    model = new_model(lab.MEASURED)
    flat = Flat(list(model.parameters()), group)
    weights = flat.join()
    mine = np.zeros(flat.chunk_size, flat.dtype)
    optimizer = lab.new_adam(flat.pieces(weights[flat.chunk], mine))
    inputs, targets, tokens = next(lab.parts(group, lab.MEASURED))
    model.loss(inputs, targets, divisor=tokens).backward()
    gradient = np.concatenate([np.ravel(np.asarray(p.grad)) for p in model.parameters()])
    mine[...] = group.all_reduce(gradient, algorithm="ring")[flat.chunk]
    optimizer.step()
    group.all_gather(weights[flat.chunk].copy(), out=weights, algorithm="ring")


def traffic_table(group: Group, page: Page) -> None:
    """Compare the bytes of one step over all ranks: DDP, ZeRO-1, and ZeRO-1 with an all-reduce."""
    _, nbytes = lab.parameter_bytes(lab.MEASURED)
    rows = []
    for name, times, counted in (
        ("DDP", 2, lab.traffic(group, 0)),
        ("ZeRO-1, reduce-scatter", 2, lab.traffic(group, 1)),
        ("ZeRO-1, all-reduce", 3, lab.sent(group, lambda: all_reduce_version(group))),
    ):
        total = counted["all_reduce"] + counted["reduce_scatter"] + counted["all_gather"]
        formula = times * (group.size - 1) * nbytes
        rows.append(
            [
                name,
                *(
                    size_text(counted[verb])
                    for verb in ("all_reduce", "reduce_scatter", "all_gather")
                ),
                size_text(total),
                f"{times}(P-1) n",
                verdict(total, formula),
            ]
        )
    page.table(
        f"One step, {group.size} ranks together, n = {size_text(nbytes)} of gradients",
        ["", "all-reduce", "reduce-scatter", "all-gather", "together", "formula", ""],
        rows,
        note="an all-reduce is a reduce-scatter and an all-gather; ZeRO-1 updates between the two",
    )


# ----------------------------------------------------------------------------------------- Break it


def no_all_gather() -> None:
    """Leave out step 4: each rank continues with its own chunk new and the others' old."""

    def drift(group: Group) -> list[float]:
        model = new_model(lab.SMALL)
        strategy = Zero1(model, group, bucket_bytes=lab.SMALL_BUCKET)
        strategy.arrivals.start = lambda: None  # type: ignore[method-assign]
        optimizer = lab.new_adam(strategy.parameters)
        far = []
        for step in range(lab.STEPS):
            strategy.step(lab.global_batch(lab.SMALL, step), optimizer)
            far.append(spread(group, lab.state_vector(model.state_dict())))
        return far

    for step, far in enumerate(md.run(drift, size=4)[0], start=1):
        print(
            f"step {step}: replicas apart by {far:.3f} of the largest weight, expected 0.000  "
            f"{'#' * int(200 * far)}"
        )


def average_twice() -> None:
    """Divide gradients by P although the loss was already divided by all ranks' tokens."""

    def train(group: Group, optimizer_class: Any, lr: float, factor: float) -> float:
        strategy = Zero1(new_model(lab.SMALL), group)
        optimizer = optimizer_class(strategy.parameters, lr)
        loss = 0.0
        update = optimizer.step
        optimizer.step = lambda rate=None, scale=1.0: update(rate, scale * factor)
        for step in range(40):
            loss = strategy.step(lab.global_batch(lab.SMALL, step), optimizer)
        return loss

    for name, optimizer_class, lr in (("SGD", SGD, 0.5), ("Adam", Adam, 0.01)):
        right, wrong = (
            md.run(train, optimizer_class, lr, factor, size=4)[0] for factor in (1.0, 0.25)
        )
        print(
            f"{name:4s}: loss of step 40 {wrong:.4f} with gradients averaged twice, expected {right:.4f}"
        )


def read_too_early() -> None:
    """Begin the next forward before the weights have arrived."""

    def train(group: Group, wait: bool) -> tuple[float, np.ndarray]:
        from minidist.comm.transports.throttled import delayed

        with delayed(group, alpha=0.01, beta=0) as slow:
            strategy = Zero1(new_model(lab.SMALL), slow, bucket_bytes=lab.SMALL_BUCKET)
            optimizer = lab.new_adam(strategy.parameters)
            loss = 0.0
            for step in range(3):
                loss = strategy.step(lab.global_batch(lab.SMALL, step), optimizer)
                if not wait:
                    for parameter in strategy.model.parameters():
                        parameter.arrival = None
            ParameterArrivals.wait_for_all(strategy.arrivals)
            return loss, lab.state_vector(strategy.state_dict())

    (loss, right), (early, wrong) = (md.run(train, wait, size=2)[0] for wait in (True, False))
    print("forward does not wait for the weights; links with a latency of 10 ms")
    print(f"loss of step 3: {early:.4f}, expected {loss:.4f}")
    print(
        f"weights after 3 steps: off by {difference(wrong, right):.1%} of the largest, expected 0.0%"
    )


BREAKS = {
    "no-all-gather": Break(no_all_gather, says="step 5: replicas apart by 0.04"),
    "average-twice": Break(
        average_twice, says="loss of step 40 3.0307 with gradients averaged twice, expected 2.0514"
    ),
    "read-too-early": Break(read_too_early, says="off by 3.3% of the largest"),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
