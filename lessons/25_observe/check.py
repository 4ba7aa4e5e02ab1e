"""Grades exercise 25: your rules judge jobs with unseen faults, and healthy ones."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidist.grading import Mistake, Result, judge, load_module
from minidist.observe.diagnose.plain import (
    plain_behind,
    plain_first_bad,
    plain_growth,
    plain_slow_link,
    plain_waited_for,
)
from minidist.observe.power_cap import step_joules

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "25")
SIZES = (2, 3, 5, 8)
SEEDS = range(1000, 1008)

CUT_FROM = (plain_behind, plain_waited_for, plain_slow_link, plain_growth, plain_first_bad)
ANSWERS = {7: "static * (work / frequency + rest) + dynamic * frequency ** 2 * work"}
"""The right code of the holes beyond the plain versions."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check a hang with 30 ranks behind, then jobs of each kind, then energy."""
    yield _thirty(exercise)
    yield _several_calls(exercise)
    yield _jobs(
        "hang",
        "a hang",
        lambda job: sorted(map(int, exercise.plain_behind(job.calls))) or None,
        "the ranks that have not made the newest call, not those that wait in it: section 1 "
        "(hole 1)",
    )
    yield _jobs(
        "slow rank",
        "a slow rank",
        lambda job: exercise.plain_waited_for(job.arrivals),
        "section 2, steps 2 and 3 (holes 2 and 3)",
    )
    yield _jobs(
        "slow link",
        "a slow link",
        lambda job: _link(exercise.plain_slow_link(job.links)),
        "a busy core makes a message late and never early: section 3 (hole 4)",
    )
    yield from _growths(exercise)
    yield _jobs(
        "leak",
        "a leak",
        lambda job: _leaking(exercise, job),
        "how much it grows from step to step, in most steps: section 4 (hole 5)",
    )
    yield _jobs(
        "not finite",
        "a number that is not finite",
        lambda job: _pair(exercise.plain_first_bad(job.bad)),
        "sums over ranks carry it to all others; the first step counts: section 5 (hole 6)",
    )
    yield _first_of_a_step(exercise)
    for frequency in (1.0, 0.6):
        yield _energy(exercise, frequency)


def _thirty(exercise: ModuleType) -> Result:
    """Check the published hard case: 30 of 32 ranks are behind."""
    calls = {rank: 641 if rank in (4, 9) else 640 for rank in range(32)}
    found = sorted(map(int, exercise.plain_behind(calls)))
    right = [rank for rank in range(32) if rank not in (4, 9)]
    return judge(
        "30 ranks in call 640, two in 641",
        found == right,
        "the 30",
        "the two" if found == [4, 9] else f"{len(found)} ranks",
        "not the ranks that are behind",
        "name whoever has not made the newest call: section 1 (hole 1)",
        signs={
            "your code blames the ranks that wait": Mistake(
                found == [4, 9], "the two have done their part and wait: section 1 (hole 1)"
            ),
            "your code names only one of them": Mistake(
                len(found) == 1, "all that are behind hold up the job: section 1 (hole 1)"
            ),
        },
    )


def _several_calls(exercise: ModuleType) -> Result:
    """Check ranks that are behind by one call, and ranks that are behind by many."""
    found = sorted(map(int, exercise.plain_behind({0: 641, 1: 641, 2: 640, 3: 612})))
    return Result(
        "ranks in calls 641, 641, 640 and 612",
        found == [2, 3],
        "ranks 2, 3",
        f"ranks {', '.join(map(str, found))}",
        "not all that are behind",
        "whoever has not made the newest call: section 1 (hole 1)",
    )


WHY = {
    ("slow rank", "healthy"): "a step that nobody delays has a last rank too: only steps above the "
    "limit count (hole 3)",
    ("slow rank", "two slow ranks"): "of two late ranks neither is the only one that delays the "
    "others: the delay is counted from the last but one (hole 2)",
    (
        "slow rank",
        "slow rank",
    ): "the rank that arrives last is the slow one, in the steps whose delay "
    "is above the limit (holes 2 and 3)",
    (
        "slow link",
        "busy receiver",
    ): "most messages of this link are late for another reason, and the "
    "fastest are as fast as any (hole 4)",
    (
        "slow link",
        "slow link",
    ): "late messages are on all links; only on the slow link the fastest are slow too (hole 4)",
    ("leak", "healthy"): "an array that is made once is no leak (hole 5)",
    ("leak", "leak"): "the leak is in every step (hole 5)",
}
"""{(the rule's fault, the fault of a job that it judged wrongly): why}."""


def _jobs(kind: str, task: str, rule: Callable[[Any], Any], advice: str) -> Result:
    """Check the rule on jobs with the fault, on healthy jobs, and on jobs with another fault."""
    missed: list[str] = []
    alarms: list[str] = []
    kinds: set[str] = set()
    count = 0
    others = 0
    for size in SIZES:
        for seed in SEEDS:
            for other in lab.KINDS:
                job = lab.sick_job(other, size=size, seed=seed)
                found = rule(job)
                sick = other == kind
                count += sick
                others += not sick
                if found != (job.culprit if sick else None):
                    right = job.culprit if sick else "nobody"
                    text = f"{size} ranks, {other}: {_named(found)} is named, not {_named(right)}"
                    (missed if sick else alarms).append(text)
                    kinds.add(other)
    example = next(iter([*alarms, *missed]), "")
    why = next(
        (why for (rule_of, other), why in WHY.items() if rule_of == kind and other in kinds), ""
    )
    return judge(
        f"{count} jobs with {task}, {others} without",
        not missed and not alarms,
        f"{count} culprits, no false alarm",
        f"{count - len(missed)} culprits, {len(alarms)} false alarms"
        + (f", for example {example}" if example else ""),
        "the culprit is missed",
        f"{why}; {advice}" if why else advice,
        signs={"a false alarm": bool(alarms)},
    )


def _named(found: Any) -> str:
    """Return who is named, as text for a student."""
    return "nobody" if found is None else str(found)


def _link(found: Any) -> Any:
    return None if found is None else tuple(map(int, found))


def _pair(found: Any) -> Any:
    return None if found is None else (int(found[0]), str(found[1]))


def _leaking(exercise: ModuleType, job: Any) -> int | None:
    """Return the rank whose memory grows most; None if it grows by at most 1 MiB per step."""
    growth = [
        float(exercise.plain_growth(job.memory[:, rank])) for rank in range(job.memory.shape[1])
    ]
    return int(np.argmax(growth)) if max(growth) > lab.MIB else None


def _growths(exercise: ModuleType) -> Iterator[Result]:
    """Check memory whose last, middle or first steps differ from most others.

    `cases` has the MiB gained in each step.
    """
    cases = {
        "2 MiB a step, an array freed at the end": [2.0] * 20 + [-50.0],
        "2 MiB a step, an array freed at the beginning": [-90.0] + [2.0] * 20,
        "steady, an array more at the end": [0.0] * 20 + [64.0],
        "steady, an array more at the beginning": [64.0] + [0.0] * 20,
        "steady, an array more in the middle": [0.0] * 10 + [64.0] + [0.0] * 10,
        "5 MiB more in every third step": [5.0, 0.0, 0.0] * 8,
    }
    for name, gained in cases.items():
        memory = 300 * lab.MIB + lab.MIB * np.cumsum([0.0, *gained])
        found = float(exercise.plain_growth(memory)) / lab.MIB
        right = float(np.median(gained))
        yield judge(
            f"growth: {name}",
            abs(found - right) < 0.01,
            f"{right:.1f} MiB a step",
            f"{found:.1f} MiB a step",
            "not what most steps add",
            "how much it grows from step to step, in most steps: section 4 (hole 5)",
            signs={
                "your code gives the memory itself, not its growth": found > 200,
                "your number changes by an array that is made or freed once": Mistake(
                    abs(found - float(np.mean(gained))) < 0.01,
                    "the middle one of all differences, not their mean: section 4 (hole 5)",
                ),
                "your code takes the largest difference, which is one step of many": abs(
                    found - max(gained)
                )
                < 0.01,
            },
        )


def _first_of_a_step(exercise: ModuleType) -> Result:
    """Check that the first step is named, and in this step the first moment.

    The step alone, or the moment alone, would name another rank.
    """
    bad = [
        (7, 0.9, 0, "blocks.2"),
        (5, 0.8, 1, "blocks.1"),
        (5, 0.3, 2, "blocks.3"),
        (6, 0.1, 3, "blocks.0"),
    ]
    found = exercise.plain_first_bad(bad)
    named = "nobody" if found is None else f"rank {found[0]}, {found[1]}"
    return Result(
        "two ranks in step 5, at 0.3 and at 0.8",
        _pair(found) == (2, "blocks.3"),
        "rank 2, blocks.3",
        named,
        "not the first number",
        "the first step, and of it the first moment: section 5 (hole 6)",
    )


def _energy(exercise: ModuleType, frequency: float) -> Result:
    """Check the joules of a step."""
    given = {"work": 2.0, "rest": 0.5, "static": 30.0, "dynamic": 100.0}
    target = step_joules(frequency, **given)
    found = float(exercise.joules(frequency, **given))
    work, rest, static, dynamic = given.values()
    slow = work / frequency
    whole_step = "they are paid for the whole step: section 6 (hole 7)"

    def gives(joules: float) -> bool:
        return abs(found - joules) < 1e-9 * joules

    return judge(
        f"joules of a step at {frequency:g} of the frequency",
        gives(target),
        f"{target:.1f} J",
        f"{found:.1f} J",
        "not the energy of a step",
        "watts times seconds, of the static and of the dynamic watts: section 6 (hole 7)",
        signs={
            "your code pays the dynamic watts while it rests, too": Mistake(
                gives((static + dynamic * frequency**3) * (slow + rest)),
                "they last only as long as the computation: section 6 (hole 7)",
            ),
            "your computation takes as long at every frequency": Mistake(
                gives(static * (slow + rest) + dynamic * frequency**3 * work)
                or gives(static * (work + rest) + dynamic * frequency**2 * work),
                "it takes longer at a lower one, for both kinds of watts: section 6 (hole 7)",
            ),
            "your code pays the static watts only while it rests": Mistake(
                gives(static * rest + dynamic * frequency**2 * work), whole_step
            ),
            "your code pays the static watts only while it computes": Mistake(
                gives(static * slow + dynamic * frequency**2 * work), whole_step
            ),
            "your code adds dynamic watts to joules": Mistake(
                gives(static * (slow + rest) + dynamic * frequency**3),
                "the dynamic watts, too, are times seconds: section 6 (hole 7)",
            ),
            "your dynamic watts fall with f², not with f³": gives(
                static * (slow + rest) + dynamic * frequency * work
            ),
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "25", *sys.argv[1:]]))
