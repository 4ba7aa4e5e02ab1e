"""Lesson 25: five sick jobs, the rule that names the culprit of each, and what a power cap costs.

mpirun -n 4 python lessons/25_observe/lesson.py
python lessons/25_observe/lesson.py                          # no launcher: two threads
python lessons/25_observe/lesson.py --break who-waits        # see README.md, section 8
"""

from dataclasses import replace
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.files import scratch
from minidist.grading import load_module
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.observe.diagnose.fault import ranks_text
from minidist.observe.diagnose.plain import (
    plain_behind,
    plain_first_bad,
    plain_growth,
    plain_slow_link,
    plain_waited_for,
)
from minidist.observe.power_cap import best_frequency, frequency_under, step_joules, step_seconds
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.models import model

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "25")
# Watts of an invented processor.
STATIC = 30.0
DYNAMIC = 100.0
# Seconds of its step.
COMPUTE = 0.8
REST = 0.2
AT_REST = 0.2
"""Part of a GPU's watts that it takes while it waits: assumed, no source states it for an H100."""
CAP = 0.6
"""Part of its watts that a cap allows."""
ARROW_BATCH = 64
AT_THE_END = 1 << 40
"""Bytes of a bucket that no gradient fills: all are sent after backward."""


def tour(group: Group, page: Page) -> None:
    """Run the lesson on one rank, because its jobs have ranks of their own."""
    if group.rank == 0:
        page.heading("1  A hang")
        hang(page)
        page.heading("2  A slow rank")
        slow_rank(page)
        page.heading("3  A slow link")
        slow_link(page)
        page.heading("4  A leak")
        leak(page)
        page.heading("5  A NaN")
        first_bad(page)
        page.heading("6  Energy, and a power cap")
        caps(page)
        arrows(page)
        page.heading("7  Three processes that really run")
        real(page)
    group.barrier()


# ----------------------------------------------------------------------------------- five sick jobs


def hang(page: Page) -> None:
    """Show which ranks hold up the job."""
    job = lab.sick_job("hang", size=8, seed=3)
    found = plain_behind(job.calls)
    rows = [
        [
            ranks_text(rank for rank, last in job.calls.items() if last == number),
            number,
            "hold up the job" if number < max(job.calls.values()) else "wait",
        ]
        for number in sorted(set(job.calls.values()))
    ]
    page.table(
        "A hang of 8 ranks: the last call of each",
        ["ranks", "call", ""],
        rows,
        note=f"behind: {ranks_text(found)}: {'ok' if found == job.culprit else 'off'}",
    )


def slow_rank(page: Page) -> None:
    """Show that a slow rank waits least."""
    job = lab.sick_job("slow rank", size=4, seed=1)
    found = plain_waited_for(job.arrivals)
    last = np.bincount(job.arrivals.argmax(axis=1), minlength=4)
    rows = [
        [
            rank,
            f"{1e3 * job.waits[:, rank].mean():.1f} ms",
            f"{last[rank]} of {len(job.arrivals)}",
            "ok" if rank == found == job.culprit else "",
        ]
        for rank in range(4)
    ]
    page.table(
        "A slow rank: how long each waits, how often it comes last",
        ["rank", "waits a step", "came last in", "found"],
        rows,
        note="the slow rank waits least: a table of waiting times blames the wrong ones",
    )


def slow_link(page: Page) -> None:
    """Show that the quick messages of a link show what the link can do."""
    job = lab.sick_job("slow link", size=4, seed=2)
    found = plain_slow_link(job.links)
    rows = [
        [
            f"{src} → {dst}",
            f"{1e3 * np.quantile(some, 0.25):.1f} ms",
            f"{1e3 * np.mean(some):.1f} ms",
            f"{1e3 * max(some):.1f} ms",
            "ok" if (src, dst) == found == job.culprit else "",
        ]
        for (src, dst), some in sorted(job.links.items())
    ]
    page.table(
        "A slow link, one way: seconds of its messages",
        ["link", "a quarter is below", "mean", "longest", "found"],
        rows,
        note="a fifth of all messages met a receiver without a core, which lengthens every mean",
    )


def leak(page: Page) -> None:
    """Show the rank whose memory grows in every step."""
    job = lab.sick_job("leak", size=4, seed=4)
    growth = [plain_growth(job.memory[:, rank]) for rank in range(4)]
    rows = [
        [
            rank,
            f"{job.memory[0, rank] / lab.MIB:.0f} MiB",
            f"{job.memory[-1, rank] / lab.MIB:.0f} MiB",
            f"{growth[rank] / lab.MIB:.2f} MiB",
            "ok" if growth[rank] > lab.MIB and rank == job.culprit else "",
        ]
        for rank in range(4)
    ]
    page.table(
        "A leak",
        ["rank", "first", "last", "grows in most steps by", "found"],
        rows,
        note="another rank has made one large array, once: that is no leak",
    )


def first_bad(page: Page) -> None:
    """Show which rank had the first number that is not finite."""
    job = lab.sick_job("not finite", size=4, seed=5)
    found = plain_first_bad(job.bad)
    rows = [
        [f"step {step}", rank, layer, "ok" if (rank, layer) == found == job.culprit else ""]
        for step, _, rank, layer in job.bad
    ]
    page.table(
        "Numbers that are not finite, as the ranks told of them",
        ["", "rank", "layer", "the first"],
        rows,
        note="a step later the sum of the gradients has brought it to every rank",
    )


# ----------------------------------------------------------------------------------------- 6 energy


def caps(page: Page) -> None:
    """Show the seconds and joules of a step under a cap, on a simulated clock and by formula."""
    rows: list[list[Any]] = []
    for cap in (130.0, 100.0, 80.0, 60.0, 45.0, 33.0):
        frequency = frequency_under(cap, static=STATIC, dynamic=DYNAMIC)
        seconds, joules = metered(frequency)
        formula = step_joules(frequency, work=COMPUTE, rest=REST, static=STATIC, dynamic=DYNAMIC)
        rows.append(
            [
                f"{cap:g} W",
                f"{frequency:.2f}",
                f"{seconds:.2f} s",
                f"{joules:.1f} J",
                verdict(joules, formula, 0.01),
            ]
        )
    best = best_frequency(static=STATIC, dynamic=DYNAMIC)
    page.table(
        f"A processor of {STATIC:g} W at rest and {STATIC + DYNAMIC:g} W at work",
        ["cap", "frequency", "a step", "joules", ""],
        rows,
        note=f"least energy at frequency {best:.2f}: below it a longer step's static watts cost "
        "more than is saved",
    )
    late = step_seconds(1.0, work=1.5 * COMPUTE, rest=REST) - step_seconds(
        1.0, work=COMPUTE, rest=REST
    )
    page.say(
        f"A rank that computes 1.5 times as long lets each other rank wait {late:.1f} s a step, "
        f"at {STATIC:g} W: {STATIC * late:.0f} J a step and rank for nothing."
    )


def arrows(page: Page) -> None:
    """Show what each arrow of the notes (N2:466) saves alone, on eight simulated H100."""
    replicas = Plan(dp=8, precision="bf16", bucket_bytes=AT_THE_END)
    stages = Plan(dp=4, pp=2, precision="bf16", microbatches=4)
    wide = simulated(Plan(dp=8, bucket_bytes=AT_THE_END))
    plain = simulated(replicas)
    fewest = simulated(replace(stages, schedule="1f1b"))
    filled = simulated(replace(stages, schedule="zb-h1"))
    hidden = simulated(replace(replicas, bucket_bytes=25 << 20))
    frequency = frequency_under(CAP, static=AT_REST, dynamic=1 - AT_REST)
    rows = [
        ["MP: precision", "dp=8", "fp32 → bf16", *saved(wide, plain)],
        ["DV: a cap", "dp=8", f"cap of {CAP:.0%}", *saved(plain, plain, frequency)],
        ["AS: schedule", "dp=4,pp=2", "1f1b → zb-h1", *saved(fewest, filled)],
        ["CC: overlap", "dp=8", "at the end → in buckets", *saved(plain, hidden)],
    ]
    page.table(
        f"The notes' four arrows, each alone: four blocks of GPT-2 XL, {ARROW_BATCH} sequences, "
        "h100:1x8",
        ["arrow", "plan", "change", "a step, ms", "computes, ms", "joules", "saved"],
        rows,
        note=f"simulated, not measured; assumed: a GPU that waits takes {AT_REST:.0%} of its watts",
    )


def simulated(plan: Plan) -> tuple[float, float, float]:
    """Return the seconds of a step, those that a device computes, and the watts of all devices."""
    found = md.simulate(plan, model("gpt2-xl", layers=4), "h100:1x8", batch=ARROW_BATCH)
    watts = (found.cluster.device.watts or 0.0) * plan.size
    return found.step_seconds, fsum(found.parts["busy"].values()), watts


def saved(
    before: tuple[float, float, float], after: tuple[float, float, float], frequency: float = 1.0
) -> list[str]:
    """Return the cells of a step before and after a change: seconds, work, joules, what is
    saved."""
    cells = []
    joules = []
    for (seconds, work, watts), at in ((before, 1.0), (after, frequency)):
        given = {"work": work, "rest": seconds - work}
        power = {"static": AT_REST * watts, "dynamic": (1 - AT_REST) * watts}
        joules.append(step_joules(at, **given, **power))
        cells.append((1e3 * step_seconds(at, **given), 1e3 * work / at, joules[-1]))
    return [
        *(f"{one:.2f} → {other:.2f}" for one, other in zip(*cells, strict=True)),
        f"{1 - joules[1] / joules[0]:.0%}",
    ]


def metered(frequency: float, ticks: int = 10_000) -> tuple[float, float]:
    """Return the seconds and joules of a step on a simulated clock, whose meter reads watts in
    every tick."""
    seconds = step_seconds(frequency, work=COMPUTE, rest=REST)
    tick = seconds / ticks
    joules = 0.0
    for number in range(ticks):
        computes = (number + 0.5) * tick < COMPUTE / frequency
        joules += tick * (STATIC + (DYNAMIC * frequency**3 if computes else 0.0))
    return seconds, joules


# ------------------------------------------------------------------------------- 7 what really runs


def real(page: Page) -> None:
    """Train on three processes; rank 1 computes 1.5 times as long from step 4 on."""
    with scratch() as folder:
        lab.real_job(folder, victim=1, steps=20)
        found, steps = lab.told(folder)
    rows = [
        [
            rank,
            f"{1e3 * np.median([line['cpu'] for line in each.steps[5:]]):.1f} ms",
            f"{np.median([line['calls'] / line['seconds'] for line in each.steps[5:]]):.0%}",
        ]
        for rank, each in sorted(steps.items())
    ]
    page.table(
        "Three processes, recorded",
        ["rank", "own processor time a step", "of a step in calls"],
        rows,
    )
    for finding in found.findings[:1]:
        page.say(f"minidist diagnose: {finding.what} ({finding.cause}, {finding.sure}).")
    if not found.findings:
        page.say(
            "minidist diagnose names no rank: this machine is busy, and 16 slow steps are too few "
            "to be sure."
        )


# ----------------------------------------------------------------------------------------- Break it


def who_waits() -> None:
    """Blame the rank that waits longest."""
    job = lab.sick_job("slow rank", size=4, seed=1)
    blamed = int(job.waits.mean(axis=0).argmax())
    print(f"Expected: rank {job.culprit}, which computes 1.5 times as long as the others")
    print(
        f"rank {blamed} waits longest, {1e3 * job.waits[:, blamed].mean():.1f} ms a step, and is "
        f"blamed; slow is rank {job.culprit}, which waits "
        f"{1e3 * job.waits[:, job.culprit].mean():.1f} ms"
    )


def mean_of_messages() -> None:
    """Compare links by the mean of their messages: one late receiver makes a link look slow."""
    alarms = 0
    quick = 0
    for seed in range(50):
        links = {
            link: list(some)
            for link, some in lab.sick_job("healthy", size=4, seed=seed).links.items()
        }
        links[0, 1][3] += 0.5  # a receiver was stopped for half a second, once
        mean = {link: float(np.mean(some)) for link, some in links.items()}
        slowest = max(mean, key=lambda link: mean[link])
        alarms += mean[slowest] > 2 * float(
            np.median([value for link, value in mean.items() if link != slowest])
        )
        quick += plain_slow_link(links) is not None
    print("Expected: no alarm, because no link is slow")
    print(
        f"of 50 healthy jobs {alarms} have a slow link by the mean of its messages, and {quick} "
        "by the time below which a quarter of them lie"
    )


def last_less_first() -> None:
    """Compare memory at the end with memory at the beginning: one large array looks like a leak."""
    job = lab.sick_job("healthy", size=4, seed=0)
    steps = len(job.memory) - 1
    print("Expected: about 0 MiB a step for every rank, because none leaks")
    for rank in range(4):
        memory = job.memory[:, rank]
        print(
            f"rank {rank}: {(memory[-1] - memory[0]) / steps / lab.MIB:5.2f} MiB a step from "
            f"first to last, {plain_growth(memory) / lab.MIB:5.2f} MiB in most steps"
        )


BREAKS = {
    "who-waits": Break(who_waits, says="slow is rank 2"),
    "mean-of-messages": Break(
        mean_of_messages,
        says="50 have a slow link by the mean of its messages, and 0",
    ),
    "last-less-first": Break(last_less_first, says="rank 3:  2.22 MiB a step"),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=2)
