"""Lesson 11: pipelines: schedules as lists, checked, timed and run; bubble, activations, traffic.

mpirun -n 4 python lessons/11_pipeline/lesson.py
python lessons/11_pipeline/lesson.py                      # no launcher: four threads
python lessons/11_pipeline/lesson.py --break swap-order   # see README.md, section 8
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.device import account
from minidist.errors import DeadlockError, ScheduleError
from minidist.grading import load_module
from minidist.lessons.lab import new_model
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.nn import GPT
from minidist.optim import AdamW
from minidist.parallel.pipeline.instructions import (
    Forward,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
)
from minidist.parallel.pipeline.pipedream import PipeDream
from minidist.parallel.pipeline.pipeline import Pipeline, plain_gpipe
from minidist.parallel.pipeline.schedule_checker import (
    Clock,
    broken,
    check,
    check_spans,
    clock_of,
    peak_held,
)
from minidist.parallel.pipeline.schedules import of_orders
from minidist.parallel.pipeline.stages import Stages
from minidist.parallel.step.single import Single

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "11")
# UNIT: seconds that a sleeping stage needs for a forward.
STEPS = 2
MICROBATCHES = 4
UNIT = 0.006
SEEN = 4  # how often PipeDream sees its batch


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  The same weights as one process")
    same_weights(group, page)
    page.heading("2  What each rank does, by the checker's clock")
    if group.rank == 0:
        charts(group.size, page)
    page.heading("3  The bubble")
    bubbles(group, page)
    if group.rank == 0:
        slow_messages(page)
    page.heading("4  Activations held")
    activations(group, page)
    page.heading("5  Traffic")
    traffic(group, page)
    page.heading("6  PipeDream: an update for each microbatch")
    pipedream(group, page)
    page.heading("9  The notes' chart (N2:201)")
    if group.rank == 0:
        notes_chart(page)


# --------------------------------------------------------------------------------------- 1 equality


def same_weights(group: Group, page: Page) -> None:
    """Compare the plain loop's gradients, and each schedule's weights after some steps, with one
    process."""
    config = lab.config_for(group.size)
    alone = new_model(config)
    gradients = plain_gradients(group, alone)
    single = Single(alone)
    optimizer = AdamW(single.parameters, 1e-2)
    for step in range(STEPS):
        single.step(lab.global_batch(config, step), optimizer, clip=0.5)
    target = single.state_dict()
    rows = [["plain loop, gradients", "1 pass", gradients]]
    largest = max(np.abs(array).max() for array in target.values())
    for name in lab.NAMES:
        pipeline = lab.pipeline_for(group, name, MICROBATCHES)
        optimizer = AdamW(pipeline.parameters, 1e-2)
        for step in range(STEPS):
            pipeline.step(lab.global_batch(config, step), optimizer, clip=0.5)
        off = (
            max(np.abs(array - target[key]).max() for key, array in pipeline.state_dict().items())
            / largest
        )
        rows.append([f"{lab.TITLES[name]}, weights", f"{STEPS} steps", f"{off:.0e}"])
    page.table(
        f"Off one process by, in float64: {group.size} ranks, {MICROBATCHES} microbatches, "
        f"{config.layers} layers",
        ["", "after", "largest difference"],
        rows,
    )


def plain_gradients(group: Group, alone: GPT) -> str:
    """Return the largest difference between the plain loop's gradients of a block and one
    process's."""
    config = alone.config
    layers = np.full(group.size, alone.config.layers // group.size)
    layers[: alone.config.layers % group.size] += 1
    mine = Stages(GPT(config), layers.tolist(), [group.rank])
    mine.model.initialize(0)
    inputs, targets = lab.global_batch(config, 0)

    def stage(x: Any, targets: Any, divisor: int) -> Any:
        return mine.forward(group.rank, x, targets=targets, divisor=divisor)

    micros = list(
        zip(
            np.array_split(inputs, MICROBATCHES), np.array_split(targets, MICROBATCHES), strict=True
        )
    )
    plain_gpipe(stage, group, micros, targets.size)
    alone.loss(inputs, targets, targets.size).backward()
    serial = dict(alone.named_parameters())
    off = [
        np.abs(weight.grad - serial[name].grad).max()
        for name, weight in mine.model.named_parameters()
        if name.startswith("blocks.")
    ]
    alone.zero_grad()
    with group.ledger.control():
        return f"{float(group.all_reduce(np.array([max(off)]), op='max')[0]):.0e}"


# --------------------------------------------------------------------------- 2 charts, 3 the bubble


def charts(ranks: int, page: Page) -> None:
    """Show each schedule as text, one column per forward of a microbatch on one of the rank's
    stages."""
    for name in lab.NAMES[1:]:
        schedule = lab.schedule_of(name, ranks, MICROBATCHES)
        clock = clock_of(schedule, lab.times_of(name))
        page.say(
            f"{lab.TITLES[name]}: {len(schedule.lists[0])} instructions for rank 0, bubble "
            f"{clock.bubble:.0%}"
        )
        for line in lab.as_text(clock, cell=lab.times_of(name).forward):
            page.say(f"    {line}" if len(line) < 105 else f"    {line[:100]} …")
        page.say()
    page.say(
        "A column is one forward of one stage. Where a rank has two stages (interleaved, ZB-V, "
        "DualPipe-V),"
    )
    page.say("a column is half as long, and small letters are the second stage.")
    page.say()


def bubbles(group: Group, page: Page) -> None:
    """Compare the bubble by formula, by the clock, and by stages that sleep."""
    size = group.size
    count = 2 * group.size
    rows = []
    for name in lab.NAMES:
        spans = lab.slept(group, name, count, UNIT)
        formula, ideal = lab.ideal_bubble(name, size, count)
        clock = clock_of(lab.schedule_of(name, size, count), lab.times_of(name))
        if spans:
            measured = Clock(size, tuple(spans))
            slow = clock_of(
                lab.schedule_of(name, size, count), replace(lab.times_of(name), message=0.5)
            )
            rows.append(
                [
                    lab.TITLES[name],
                    f"{clock.length:g} F",
                    f"{slow.length:g} F",
                    formula,
                    f"{ideal:.1%}",
                    f"{clock.bubble:.1%}",
                    verdict(clock.bubble, ideal, 1e-9),
                    f"{measured.bubble:.1%}",
                ]
            )
    page.table(
        f"The share of idle time: p = {size} ranks, m = {count} microbatches, backward = 2 "
        f"forward, v = {lab.CHUNKS}",
        ["", "length", "if a message takes F/2", "formula", "", "clock", "", "slept"],
        rows,
        note="clock: the schedule on a clock of its own, which the formula must give exactly. "
        f"slept: wall time of stages that sleep {1e3 * UNIT:g} ms for a forward; a busy "
        "machine adds idle time",
    )


def slow_messages(page: Page) -> None:
    """Show by the clock how long a pass takes if messages take time."""
    ranks = 4
    count = 16
    names = lab.NAMES[2:]
    page.table(
        f"Slow messages, by the clock: p = {ranks}, m = {count}, in forwards of a rank",
        ["a message takes", *(lab.TITLES[name] for name in names)],
        [
            [
                told,
                *(
                    f"{clock_of(lab.schedule_of(name, ranks, count), times).length:g}"
                    for name, times in (
                        (name, replace(lab.times_of(name), message=message)) for name in names
                    )
                ),
            ]
            for told, message in (("no time", 0.0), ("½ forward", 0.5), ("1 forward", 1.0))
        ],
    )


# ------------------------------------------------------------------------- 4 activations, 5 traffic


def activations(group: Group, page: Page) -> None:
    """Show the microbatches held by the list, and the bytes by the account."""
    count = 2 * group.size
    rows = []
    for name in lab.NAMES:
        held = peak_held(lab.schedule_of(name, group.size, count))
        with group.ledger.control():
            peaks = group.all_gather(np.array([lab.peak_activations(group, name, count)]))
        rows.append(
            [
                lab.TITLES[name],
                held[0],
                size_text(int(peaks[0])),
                held[-1],
                size_text(int(peaks[-1])),
            ]
        )
    page.table(
        f"At the peak, {count} microbatches of one sequence",
        ["", "rank 0 holds", "bytes", f"rank {group.size - 1} holds", "bytes"],
        rows,
        note="microbatches; of a rank's two stages (interleaved, ZB-V, DualPipe-V) each counts, "
        "half as large",
    )


def traffic(group: Group, page: Page) -> None:
    """Compare the bytes of all ranks with the formula."""
    config = lab.config_for(group.size)
    rows = []
    inputs, _ = batch = lab.global_batch(config, 0)
    for name in lab.NAMES:
        pipeline = lab.pipeline_for(group, name, MICROBATCHES)
        optimizer = AdamW(pipeline.parameters, 1e-2)
        with group.ledger.during(f"lesson 11, {name}"):
            pipeline.step(batch, optimizer)
        sent = group.ledger.sent_bytes(f"lesson 11, {name}").get(group.axis, {})
        with group.ledger.control():
            sends, tables = group.all_reduce(
                np.array([sent.get("send", 0), sent.get("all_reduce", 0)])
            )
        schedule = pipeline.schedule
        boundaries = sum(schedule.leaves(stage, stage + 1) for stage in range(schedule.stages))
        formula = 2 * boundaries * inputs.size * config.width * 8
        table = (
            2 * config.vocabulary * config.width * 8 * (schedule.rank_of(schedule.stages - 1) > 0)
        )
        rows.append(
            [
                lab.TITLES[name],
                boundaries,
                size_text(sends),
                size_text(formula),
                size_text(tables),
                size_text(table),
                "ok" if (sends, tables) == (formula, table) else "off",
            ]
        )
    page.table(
        f"One step, B = {len(inputs)} sequences of T = {config.context}, width h = "
        f"{config.width}, float64",
        ["", "boundaries", "sent", "2 B T h each", "tied table", "2 V h", ""],
        rows,
    )


# -------------------------------------------------------------------------------------- 6 PipeDream


def pipedream(group: Group, page: Page) -> None:
    """Show how late each stage's weights are in PipeDream, what that costs, and the loss compared
    with 1F1B's."""
    config = replace(lab.config_for(group.size), tied=False)
    count = 2 * group.size
    schedule = lab.schedule_of("1f1b", group.size, count)
    losses = {}
    held = [0.0, 0.0]
    for kind in (Pipeline, PipeDream):
        with account.use(account.MemoryAccount()) as memory:
            strategy = kind(GPT(config), group, schedule, seed=0)
            optimizer = AdamW(strategy.parameters, 1e-2)
            before = memory.now["parameters"]
            memory.reset_peak()  # of building the model
            losses[kind] = [
                strategy.step(lab.global_batch(config, 0, count), optimizer) for _ in range(SEEN)
            ]
        if isinstance(strategy, PipeDream):
            late = max(microbatch - met for microbatch, met in strategy.updates)
            held = [
                late,
                (memory.peak["parameters"] - before)
                / sum(weight.data.nbytes for weight in strategy.weights),
            ]
    with group.ledger.control():
        table = group.all_gather(np.array([held]))
    ranks = range(group.size)
    page.table(
        f"PipeDream with {count} microbatches, by recorded updates and by the account",
        ["", "updates late, at most", "copies of its weights", "p - 1 - stage", ""],
        [
            [
                f"stage {rank}",
                f"{table[rank][0]:.0f}",
                f"{table[rank][1]:.0f}",
                group.size - 1 - rank,
                verdict(table[rank][1], group.size - 1 - rank),
            ]
            for rank in ranks
        ],
    )
    page.table(
        f"Loss on one batch, seen {SEEN} times",
        ["", "updates", "first", "last"],
        [
            [name, SEEN * updates, f"{losses[kind][0]:.3f}", f"{losses[kind][-1]:.3f}"]
            for name, updates, kind in (
                ("1F1B: one update a batch", 1, Pipeline),
                (f"PipeDream: {count} updates a batch", count, PipeDream),
            )
        ],
        note="not the same training: more updates, each from one sequence, with weights that "
        "are a little old",
    )


# ------------------------------------------------------------------------------- 9 the notes' chart


def notes_chart(page: Page) -> None:
    """Compare the notes' chart as drawn with the same order in which each waits for what it
    needs."""
    spans = lab.notes_spans()
    drawn = Clock(4, tuple(spans))
    right = clock_of(of_orders("the notes' order", lab.orders_of(spans)), lab.Times(2.0, 2.0))
    rows = [
        ["as drawn", f"{drawn.length:g}", f"{drawn.bubble:.0%}", len(broken(spans))],
        [
            "the same order, each waiting for what it needs",
            f"{right.length:g}",
            f"{right.bubble:.0%}",
            len(broken(right.spans)),
        ],
    ]
    page.table(
        "The chart of N2:201: GPipe, 4 stages, 4 microbatches, F = B = 2",
        ["", "length", "bubble", "dependencies broken"],
        rows,
    )
    for line in lab.as_text(right, cell=2.0):
        page.say(f"    {line}")


# ----------------------------------------------------------------------------------------- Break it


def refused(schedule: Schedule) -> None:
    """Print what the checker says of a schedule."""
    try:
        check(schedule)
    except ScheduleError as error:
        print(f"the checker, before anything runs:\n  {error}")


def swap_order() -> None:
    """Check two stages that both receive before they send."""
    right = lab.schedule_of("naive", 2, 2)
    turn = {SendActivation(0, 0): RecvGradient(0, 0), RecvGradient(0, 0): SendActivation(0, 0)}
    lists = (
        tuple(turn.get(instruction, instruction) for instruction in right.lists[0]),
        right.lists[1],
    )
    print("rank 0:", "; ".join(map(str, lists[0][:4])))
    refused(Schedule("swapped", 2, 2, 1, lists))
    print("run without it, by plain sends and receives:")
    md.run(lab.run_unchecked, lists, size=2)


def notes_chart_checked() -> None:
    """Check the chart of N2:201."""
    for early, needed in broken(lab.notes_spans()):
        print(
            f"GPU {early.rank} begins B{early.instruction.microbatch + 1} at {early.start:g}, "
            f"GPU {needed.rank} ends it at {needed.stop:g}"
        )
    check_spans(lab.notes_spans())


def too_early() -> None:
    """Check a stage that computes before its input has arrived."""
    right = lab.schedule_of("1f1b", 2, 3)
    turn = {RecvActivation(1, 1): Forward(1, 1), Forward(1, 1): RecvActivation(1, 1)}
    refused(
        Schedule(
            "too early", 2, 3, 1, (right.lists[0], tuple(turn.get(i, i) for i in right.lists[1]))
        )
    )


def crossed() -> None:
    """Send microbatches in another order than they are received: nothing hangs, and the results are
    wrong."""

    def loss(group: Group, order: list[int]) -> float:
        config = lab.config_for(2)
        mine = Stages(GPT(config), [4, 4], [group.rank])
        mine.model.initialize(0)
        inputs, targets = (np.array_split(ids, 2) for ids in lab.global_batch(config, 0))
        if group.rank == 0:
            for number in order:
                group.send(mine.forward(0, inputs[number], targets=targets[number]).data, dst=1)
            return 0.0
        return sum(
            mine.forward(
                1, tensor(group.recv(src=0)), targets=part, divisor=8 * config.context
            ).item()
            for part in targets
        )

    for name, order in (("in order", [0, 1]), ("crossed", [1, 0])):
        print(f"sent {name}: loss {md.run(loss, order, size=2)[1]:.6f}")
    right = lab.schedule_of("gpipe", 2, 2)
    kinds = (Forward, SendActivation)
    lists = (
        tuple(
            sorted(
                right.lists[0],
                key=lambda i: (kinds.index(type(i)) if isinstance(i, kinds) else 2, -i.microbatch),
            )
        ),
        right.lists[1],
    )
    refused(Schedule("crossed", 2, 2, 1, lists))


BREAKS = {
    "swap-order": Break(swap_order, says="0 waits for 1", error=DeadlockError),
    "notes-chart": Break(
        notes_chart_checked,
        says="12 dependencies are broken",
        error=ScheduleError,
    ),
    "too-early": Break(too_early, says="too early: rank 1 does the forward of microbatch 1"),
    "crossed": Break(crossed, says="sent crossed: loss 3.49"),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
