"""Lesson 15: ZeRO-2: each rank keeps the sums of its own part of the gradient.

mpirun -n 4 python lessons/15_zero2/lesson.py
python lessons/15_zero2/lesson.py                             # no launcher: four threads
python lessons/15_zero2/lesson.py --break forget-to-free      # see README.md, section 6
"""

from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.device import account
from minidist.lessons import zero_lab as lab
from minidist.lessons.lab import difference, new_model, spread
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.memory_formula import MIXED, SINGLE, STATE, in_flight, state_bytes
from minidist.parallel.zero.zero2 import Zero2, plain_zero2

BILLION = 10**9


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  Equal weights: one process, the plain loop, ZeRO-2")
    equal_weights(group, page)
    page.heading("2  Memory: between steps, and at the peak of one")
    memory_table(group, page)
    page.heading("3  N4's formula, with and without its 2Ψ")
    formulas(page)
    page.heading("4  Traffic by the number of backward passes")
    traffic_table(group, page)


# --------------------------------------------------------------------------------------- 1 equality


def equal_weights(group: Group, page: Page) -> None:
    """Run the same steps in three ways; compare the weights."""
    target = lab.alone()
    rows = [["one process", "0", "0"]]
    model = new_model(lab.SMALL)
    plain_zero2(model, lab.new_adam, group, lab.batches(lab.SMALL))
    for name, weights in (
        ("plain loop", lab.state_vector(model.state_dict())),
        ("ZeRO-2", lab.trained(group, 2)),
    ):
        rows.append([name, f"{difference(weights, target):.1e}", f"{spread(group, weights):.0e}"])
    page.table(
        f"After {lab.STEPS} steps of Adam on {group.size} ranks, float64, 7 sequences a step",
        ["", "off one process by", "replicas apart by"],
        rows,
    )


# ----------------------------------------------------------------------------------------- 2 memory


def memory_table(group: Group, page: Page) -> None:
    """Compare with the formula: between steps each category, and at the peak the gradients with
    shard and two buckets."""
    parameters, nbytes = lab.parameter_bytes(lab.MEASURED)
    rows = []
    peaks = []
    for stage in (0, 1, 2):
        seen = lab.memory(group, stage)
        held = state_bytes(parameters, SINGLE, zero=stage, ranks=group.size)
        together = sum(seen[name]["now"] for name in STATE)
        rows.append(
            [
                lab.NAMES[stage],
                *(f"{seen[name]['now'] / parameters:.2f}" for name in STATE),
                f"{together / parameters:.2f}",
                f"{held['total'] / parameters:.2f}",
                verdict(together, held["total"], 0.01),
            ]
        )
        most = held["gradients"] + in_flight(stage, largest=lab.BUCKET)["gradients"]
        peak = seen["gradients"]["peak"]
        peaks.append(
            [
                lab.NAMES[stage],
                size_text(held["gradients"]),
                size_text(peak),
                size_text(most),
                "ok" if peak <= 1.01 * most else verdict(peak, most),
            ]
        )
    page.table(
        f"Bytes a parameter between steps, rank 0 of {group.size}, float32",
        ["", *STATE, "sum", "formula", ""],
        rows,
    )
    page.table(
        f"Gradients, of {size_text(nbytes)} in all, buckets of {size_text(lab.BUCKET)}",
        ["", "between steps", "peak", "at most", ""],
        peaks,
        note="at most: the shard, a bucket that fills and one in flight",
    )


# --------------------------------------------------------------------------------------- 3 formulas


def formulas(page: Page) -> None:
    """Compare N4:336 with the right value for stage 2: 7.5 billion parameters on 64 devices."""
    held = state_bytes(7_500_000_000, MIXED, zero=2, ranks=64)
    without = held["gradients"] + held["optimizer"]
    page.table(
        "7.5 billion parameters, 64 devices, K = 12",
        ["", "formula", "GB"],
        [
            ["N4:336, stage 2", "(2+K)Ψ/N", f"{without / BILLION:.1f}"],
            ["with the weights", "2Ψ + (2+K)Ψ/N", f"{held['total'] / BILLION:.1f}"],
            ["N4:338, the figure", "", "16.6"],
        ],
        note="every rank still has all weights: they are divided in stage 3",
    )


# ---------------------------------------------------------------------------------------- 4 traffic


def traffic_table(group: Group, page: Page) -> None:
    """Compare the bytes of one step over all ranks with the formula, for 1, 2 and 4 passes."""
    _, nbytes = lab.parameter_bytes(lab.MEASURED)
    rows = []
    for passes in (1, 2, 4):
        for stage, times in ((1, 2), (2, passes + 1)):
            counted = lab.traffic(group, stage, accumulate=passes)
            total = counted["reduce_scatter"] + counted["all_gather"]
            formula = times * (group.size - 1) * nbytes
            rows.append(
                [
                    f"{lab.NAMES[stage]}, {passes} pass{'es' * (passes > 1)}",
                    *(size_text(counted[verb]) for verb in ("reduce_scatter", "all_gather")),
                    size_text(total),
                    f"{times}(P-1) n",
                    verdict(total, formula),
                ]
            )
    page.table(
        f"One step, {group.size} ranks together, n = {size_text(nbytes)}",
        ["", "reduce-scatter", "all-gather", "together", "formula", ""],
        rows,
        note="no rank has a buffer in which several passes could add up: each pass must reduce",
    )


# ----------------------------------------------------------------------------------------- Break it


def peaks(group: Group, keep: bool) -> tuple[int, int]:
    """Return the gradients' bytes between steps and at the peak, of ZeRO-2 as it is or with its
    buffers kept."""
    with account.use(account.MemoryAccount()) as seen:
        strategy = Zero2(new_model(lab.MEASURED), group, bucket_bytes=lab.BUCKET)
        kept: list[Any] = []
        if keep:
            take_sum = strategy.gradients.take_sum

            def take_sum_and_keep() -> None:
                kept.extend(strategy.gradients._buffers.values())
                take_sum()

            strategy.gradients.take_sum = take_sum_and_keep  # type: ignore[method-assign]
        optimizer = lab.new_adam(strategy.parameters)
        for step in range(2):
            strategy.step(lab.global_batch(lab.MEASURED, step), optimizer)
        return seen.now["gradients"], seen.peak["gradients"]


def forget_to_free() -> None:
    """Keep a name that refers to each bucket: its memory is not freed."""
    _, nbytes = lab.parameter_bytes(lab.MEASURED)
    print(f"all gradients together are {size_text(nbytes)}")
    right, highest = md.run(peaks, False, size=4)[0]
    now, peak = md.run(peaks, True, size=4)[0]
    print(
        f"buckets kept in a list: {size_text(now)} after two steps, expected {size_text(right)}; "
        f"{size_text(peak)} at the peak, expected {size_text(highest)}"
    )


def update_too_early() -> None:
    """Update before the last bucket has arrived, over links with a latency of 10 ms."""

    def train(group: Group, wait: bool) -> np.ndarray:
        from minidist.comm.transports.throttled import delayed

        with delayed(group, alpha=0.01, beta=0) as slow:
            strategy = Zero2(new_model(lab.SMALL), slow, bucket_bytes=lab.SMALL_BUCKET)
            gradients = strategy.gradients
            optimizer = lab.new_adam(strategy.parameters)
            finish = gradients.finish
            gradients.finish = lambda: None  # type: ignore[method-assign]
            for step in range(10):
                batch = lab.global_batch(lab.SMALL, step)
                gradients.forget()
                strategy.backward(strategy.forward(strategy.part_of(batch), divisor=batch[1].size))
                for do in (finish, optimizer.step) if wait else (optimizer.step, finish):
                    do()
                strategy.arrivals.start()
                strategy.arrivals.wait_for_all()
            return lab.state_vector(strategy.state_dict())

    right, wrong = (md.run(train, wait, size=2)[0] for wait in (True, False))
    print(
        "10 steps with the last bucket's sums a step late: weights off by "
        f"{difference(wrong, right):.1%}, expected 0.0%"
    )
    print("no error, no NaN, equal replicas: nothing shows the mistake")


def average_twice() -> None:
    """Divide shards by P after they were summed, with and without clipping."""

    def train(group: Group, factor: float, clip: float | None) -> float:
        from minidist.optim import SGD

        strategy = Zero2(new_model(lab.SMALL), group)
        add = GradientShards.finish
        optimizer = SGD(strategy.parameters, 0.5)
        loss = 0.0

        def finish() -> None:
            add(strategy.gradients)
            for piece in strategy.parameters:
                piece.grad[...] *= factor

        strategy.gradients.finish = finish  # type: ignore[method-assign]
        for step in range(40):
            loss = strategy.step(lab.global_batch(lab.SMALL, step), optimizer, clip=clip)
        return loss

    for clip in (None, 0.05):
        right, wrong = (md.run(train, factor, clip, size=4)[0] for factor in (1.0, 0.25))
        print(f"clip {clip}: loss of step 40 {wrong:.4f} averaged twice, expected {right:.4f}")


def replace_instead_of_add() -> None:
    """Accumulate wrongly: the shard takes the last pass's sum and loses the earlier ones."""

    def train(group: Group, forget: bool) -> np.ndarray:
        strategy = Zero2(new_model(lab.SMALL), group, bucket_bytes=lab.SMALL_BUCKET)
        if forget:
            begin = strategy.gradients.begin

            def begin_and_forget(*, last: bool = True) -> None:
                begin(last=last)
                strategy.gradients.forget()

            strategy.gradients.begin = begin_and_forget  # type: ignore[method-assign]
        optimizer = lab.new_adam(strategy.parameters)
        for step in range(3):
            strategy.step(lab.global_batch(lab.SMALL, step), optimizer, accumulate=2)
        return lab.state_vector(strategy.state_dict())

    right, wrong = (md.run(train, forget, size=2)[0] for forget in (False, True))
    print(
        "two passes a step, the second in place of the first: weights off by "
        f"{difference(wrong, right):.1%}, expected 0.0%"
    )


BREAKS = {
    "forget-to-free": Break(
        forget_to_free,
        says="buckets kept in a list: 3.52 MiB after two steps",
    ),
    "update-too-early": Break(update_too_early, says="no error, no NaN, equal replicas"),
    "average-twice": Break(
        average_twice, says="loss of step 40 3.0307 averaged twice, expected 2.0514"
    ),
    "replace-instead-of-add": Break(replace_instead_of_add, says="weights off by 5.8%"),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
