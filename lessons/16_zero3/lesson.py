"""Lesson 16: ZeRO-3 (FSDP): weights gathered before use and freed after; prefetch; hybrid sharding.

mpirun -n 4 python lessons/16_zero3/lesson.py
python lessons/16_zero3/lesson.py                             # no launcher: four threads
python lessons/16_zero3/lesson.py --break forget-to-free      # see README.md, section 8
"""

from functools import partial

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.comm.transports.throttled import delayed
from minidist.console import size_text
from minidist.device import account
from minidist.errors import GradientError
from minidist.lessons import zero_lab as lab
from minidist.lessons.lab import difference, new_model, spread
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.nn import GPTConfig
from minidist.observe.overlap import measure
from minidist.observe.timeline import Timeline
from minidist.parallel.zero.fsdp_units import Unit
from minidist.parallel.zero.memory_formula import SINGLE, STATE, in_flight, state_bytes
from minidist.parallel.zero.zero3 import Zero3, plain_zero3

TIMED = GPTConfig(vocabulary=64, context=64, layers=8, width=96, heads=4)  # to see overlap
# The delayed links over which overlap is measured: seconds, bytes per second.
ALPHA = 100e-6
BANDWIDTH = 400e6


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  Equal weights: one process, the plain loop, ZeRO-3")
    equal_weights(group, page)
    page.heading("2  Memory: the only stage that stores nothing twice")
    memory_table(group, page)
    page.heading("3  Prefetch: off and on, over slow links")
    overlap_table(group, page)
    page.heading("4  Traffic: 3(P-1) n, 2 if weights stay, 4 with an all-gather too many")
    traffic_table(group, page)
    page.heading("5  Hybrid sharding: a copy for every pair of ranks")
    hybrid_table(group, page)


# --------------------------------------------------------------------------------------- 1 equality


def equal_weights(group: Group, page: Page) -> None:
    """Run the same steps in three ways; compare the weights."""
    target = lab.alone()
    rows = [["one process", "0", "0"]]
    model = new_model(lab.SMALL)
    units = [module for _, module in model.children() if list(module.parameters())]
    plain_zero3(model, units, lab.new_adam, group, lab.batches(lab.SMALL))
    for name, weights in (
        ("plain loop", lab.state_vector(model.state_dict())),
        ("ZeRO-3", lab.trained(group, 3)),
    ):
        rows.append([name, f"{difference(weights, target):.1e}", f"{spread(group, weights):.0e}"])
    page.table(
        f"After {lab.STEPS} steps of Adam on {group.size} ranks, float64, 7 sequences a step",
        ["", "off one process by", "gathered apart by"],
        rows,
    )


# ----------------------------------------------------------------------------------------- 2 memory


def unit_bytes() -> int:
    """Return the bytes of the largest unit, a block."""
    return sum(p.data.nbytes for p in new_model(lab.MEASURED).blocks[0].parameters())


def memory_table(group: Group, page: Page) -> None:
    """Show every stage's memory between steps, and the peak of ZeRO-3's parameters."""
    parameters, _ = lab.parameter_bytes(lab.MEASURED)
    rows = []
    seen = {}
    for stage in range(4):
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
    page.table(
        f"Bytes a parameter between steps, rank 0 of {group.size}, float32",
        ["", *STATE, "sum", "formula", ""],
        rows,
    )
    held = state_bytes(parameters, SINGLE, zero=3, ranks=group.size)
    more = in_flight(3, largest=unit_bytes())
    rows = []
    for name in ("parameters", "gradients"):
        most = held[name] + more[name]
        peak = seen[name]["peak"]
        rows.append(
            [
                name,
                size_text(held[name]),
                size_text(peak),
                size_text(most),
                "ok" if peak <= 1.01 * most else verdict(peak, most),
            ]
        )
    page.table(
        f"ZeRO-3 at the peak of a step; the largest unit, a block, has {size_text(unit_bytes())}",
        ["", "shard", "peak", "shard + two units", ""],
        rows,
        note="what N4:424 calls the minimum is the shard only; units in flight and activations are "
        "added",
    )


# ---------------------------------------------------------------------------------------- 3 overlap


def hidden_share(group: Group, ahead: int, *, steps: int = 9) -> float:
    """Return the hidden share of communication in this rank's quickest step but the first, over
    delayed links."""
    timeline = Timeline(group.rank)
    with delayed(group, alpha=ALPHA, beta=1 / BANDWIDTH) as slow:
        timeline.follow(slow.ledger)
        strategy = Zero3(new_model(TIMED), slow, ahead=ahead, recorder=timeline)
        optimizer = lab.new_adam(strategy.parameters)
        for step in range(steps):
            with timeline.span("step", step=step):
                strategy.step(lab.global_batch(TIMED, step, 4 * group.size), optimizer)
    taken = [span for span in timeline.spans if span.name == "step"][1:]
    quickest = min(taken, key=lambda span: span.stop - span.start)
    return measure(timeline, steps=[quickest.details["step"]]).share


def overlap_table(group: Group, page: Page) -> None:
    """Show overlap with and without prefetch on two ranks, so that a small machine has a core for
    each."""
    pair = group.split(0 if group.rank < 2 else None)
    rows = []
    for ahead in (0, 1, 2):
        if pair is not None:
            rows.append([f"ahead = {ahead}", f"{hidden_share(pair, ahead):.0%}"])
        group.barrier()
    page.table(
        f"Rank 0 of 2, each message {ALPHA * 1e6:.0f} µs and 1 s for {BANDWIDTH / 1e6:.0f} MB",
        ["", "communication that is hidden"],
        rows,
        note="in the quickest of 8 steps. ahead: how much may be gathered before its turn, in units "
        "as large as the largest. Seconds of a busy machine differ too much from run to run to be "
        "compared: README.md's figure has milliseconds",
    )


# ---------------------------------------------------------------------------------------- 4 traffic


def with_final_gather(group: Group) -> None:
    """Run N0:375's step 8: after the update all ranks gather the weights."""
    strategy = Zero3(new_model(lab.MEASURED), group)
    strategy.step(lab.global_batch(lab.MEASURED, 0), lab.new_adam(strategy.parameters))
    for unit in strategy.units:
        unit.start_gather()
        unit.wait_for_weights()


def traffic_table(group: Group, page: Page) -> None:
    """Compare the bytes of one step over all ranks with the formulas."""
    _, nbytes = lab.parameter_bytes(lab.MEASURED)
    cases = [
        ("1 pass", 3, lab.traffic(group, 3)),
        ("2 passes", 6, lab.traffic(group, 3, accumulate=2)),
        ("weights stay to backward", 2, lab.traffic(group, 3, free_after_forward=False)),
        ("a final all-gather, N0:375", 4, lab.sent(group, lambda: with_final_gather(group))),
    ]
    rows = [["DDP", *_row(lab.traffic(group, 0), 2, group, nbytes)]]
    rows += [[name, *_row(counted, times, group, nbytes)] for name, times, counted in cases]
    page.table(
        f"One step, {group.size} ranks together, n = {size_text(nbytes)}",
        ["", "all-gather", "reduce", "together", "formula", ""],
        rows,
        note="50 % more than DDP for one pass; the next forward gathers anyway, so nothing is "
        "shared at the end",
    )


def _row(counted: dict[str, int], times: int, group: Group, nbytes: int) -> list[str]:
    total = counted["all_reduce"] + counted["reduce_scatter"] + counted["all_gather"]
    return [
        size_text(counted["all_gather"]),
        size_text(counted["reduce_scatter"] + counted["all_reduce"]),
        size_text(total),
        f"{times}(P-1) n",
        verdict(total, times * (group.size - 1) * nbytes),
    ]


# ----------------------------------------------------------------------------------------- 5 hybrid


def hybrid_table(group: Group, page: Page) -> None:
    """Compare one copy for all ranks with one per two ranks: memory, and bytes inside and between
    copies."""
    if group.size % 2 or group.size < 4:
        page.say(f"{group.size} ranks cannot be cut into pairs; run this on 4.")
        return
    parameters, nbytes = lab.parameter_bytes(lab.MEASURED)
    rows = []
    for shard in (group.size, 2):
        copies = group.size // shard
        seen = lab.memory(group, 3, shard=shard)
        counted = lab.traffic(group, 3, shard=shard)
        held = state_bytes(parameters, SINGLE, zero=3, ranks=group.size, shard=shard)["total"]
        inside = 3 * copies * (shard - 1) * nbytes
        between = 2 * (copies - 1) * nbytes
        measured = (counted["reduce_scatter"] + counted["all_gather"], counted["all_reduce"])
        together = sum(seen[name]["now"] for name in STATE)
        rows.append(
            [
                f"{copies} cop{'ies' if copies > 1 else 'y'} of {shard} ranks",
                f"{together / parameters:.2f}",
                f"{held / parameters:.2f}",
                *map(size_text, measured),
                size_text(inside),
                size_text(between),
                "ok" if measured == (inside, between) else "off",
            ]
        )
    page.table(
        f"{group.size} ranks: bytes a parameter on each, bytes of all in a step",
        ["", "held", "formula", "inside", "between", "formula", "formula", ""],
        rows,
        note="inside: gathers and reduce-scatters of a copy; between copies: gradients of "
        "shards, summed",
    )


# ----------------------------------------------------------------------------------------- Break it


def forget_to_free() -> None:
    """Keep 0, 2 and 8 units in memory after their forward; show the peaks."""

    def peak(group: Group, forgotten: int) -> int:
        with account.use(account.MemoryAccount()) as seen:
            strategy = Zero3(new_model(lab.MEASURED), group)
            for unit in strategy.units[1 : 1 + forgotten]:
                unit.free = lambda: None  # type: ignore[method-assign]
            optimizer = lab.new_adam(strategy.parameters)
            for step in range(2):
                seen.reset_peak()
                strategy.step(lab.global_batch(lab.MEASURED, step), optimizer)
            return seen.peak["parameters"]

    print(
        f"all parameters are {size_text(lab.parameter_bytes(lab.MEASURED)[1])}, a block "
        f"{size_text(unit_bytes())}"
    )
    right = md.run(peak, 0, size=4)[0]
    for forgotten in (2, 8):
        print(
            f"{forgotten} units not freed: peak of parameters "
            f"{size_text(md.run(peak, forgotten, size=4)[0])}, expected {size_text(right)}"
        )
    print("and their weights stay those of the first step: weights that are there are not gathered")


def tied_in_a_unit() -> None:
    """Tie the embedding to the head, in a unit of its own: it is freed when the head needs it."""
    from dataclasses import replace

    def train(group: Group) -> None:
        strategy = Zero3(new_model(replace(lab.SMALL, tied=True)), group)
        strategy.step(lab.global_batch(lab.SMALL, 0), lab.new_adam(strategy.parameters))

    print("a tied embedding in a unit of its own; expected: one step without an error", flush=True)
    md.run(train, size=2)


def no_second_gather() -> None:
    """Run backward without the second all-gather: a freed weight reads as NaN."""

    def train(group: Group) -> float:
        strategy = Zero3(new_model(lab.SMALL), group)
        strategy._before_backward = lambda unit: None  # type: ignore[method-assign]
        strategy.step(lab.global_batch(lab.SMALL, 0), lab.new_adam(strategy.parameters))
        return float(
            np.mean(
                [np.isnan(piece.grad).mean() for piece in strategy.parameters if piece.grad.size]
            )
        )

    print(
        f"without the second all-gather {md.run(train, size=2)[0]:.0%} of the gradients are NaN, "
        "expected 0%: a freed weight reads as NaN, so the mistake is seen"
    )


def average_twice() -> None:
    """Divide each unit's sum by P although the loss already was."""
    from minidist.optim import SGD

    def train(group: Group, factor: float) -> float:
        strategy = Zero3(new_model(lab.SMALL), group)
        optimizer = SGD(strategy.parameters, 0.5)
        loss = 0.0
        update = optimizer.step

        def scaled(lr: float | None = None, scale: float = 1.0) -> None:
            update(lr, scale * factor)

        optimizer.step = scaled  # type: ignore[method-assign, assignment]
        for step in range(40):
            loss = strategy.step(lab.global_batch(lab.SMALL, step), optimizer)
        return loss

    right, wrong = (md.run(train, factor, size=4)[0] for factor in (1.0, 0.25))
    print(f"SGD: loss of step 40 {wrong:.4f} with gradients averaged twice, expected {right:.4f}")


def _free_unless_whole(unit: Unit) -> None:
    """Free a unit that is being gathered; keep one that is whole."""
    if not unit._whole:
        Unit.free(unit)


def stale_weights() -> None:
    """Keep units from one step to the next: they miss every update, which changes the shards."""

    def train(group: Group, stale: bool) -> list[float]:
        strategy = Zero3(new_model(lab.SMALL), group)
        optimizer = lab.new_adam(strategy.parameters)
        for unit in strategy.units if stale else ():
            unit.free = partial(_free_unless_whole, unit)  # type: ignore[method-assign]
        return [strategy.step(lab.global_batch(lab.SMALL, step), optimizer) for step in range(20)]

    right, wrong = (md.run(train, stale, size=4)[0] for stale in (False, True))
    print(
        f"loss of step 1: {wrong[0]:.4f}; of step 20: {wrong[-1]:.4f} with weights gathered once "
        f"and kept, expected {right[-1]:.4f}"
    )


BREAKS = {
    "forget-to-free": Break(forget_to_free, says="8 units not freed: peak of parameters 1.94 MiB"),
    "tied-in-a-unit": Break(tied_in_a_unit, says="the first loss is NaN", error=GradientError),
    "no-second-gather": Break(no_second_gather, says="of the gradients are NaN"),
    "average-twice": Break(
        average_twice, says="loss of step 40 3.0307 with gradients averaged twice, expected 2.0514"
    ),
    "stale-weights": Break(
        stale_weights,
        says="of step 20: 3.4765 with weights gathered once and kept, expected 1.4702",
    ),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
