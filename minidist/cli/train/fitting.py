"""The number of steps of a run without `--steps`: as many as fit into about a minute.

The first steps are measured. Their learning rate does not depend on the number that is then chosen,
because they lie inside the warm-up, and its length is that of MOST_STEPS. So the run's options,
with the number and the warm-up in them, give the same bits again.
"""

import argparse
import statistics
from collections.abc import Sequence
from copy import copy

from minidist.cli.train.progress import ProgressReport
from minidist.cli.train.rate import OF_SCHEDULE, extend_rate, learning_rate
from minidist.comm.records import hand_out_record
from minidist.parallel.hybrid.hybrid import Trainer

SECONDS = 60.0
"""Length of the steps of a run without --steps."""

FEWEST_STEPS = 100
MOST_STEPS = 500
"""Bounds of the number of steps; the most is also the number where nothing is measured."""

MEASURED = 10
"""Steps that are made before the number is chosen; fewer than the warm-up of MOST_STEPS."""

FIRST = 2
"""Measured steps that do not count: they allocate arrays and open connections."""

NOT_WITH = (
    "resume",
    "save_every",
    "elastic",
    "local_steps",
    "asynchronous",
    "graph",
    "warmup",
    *OF_SCHEDULE,
)
"""Options whose meaning depends on the number of steps, or whose ranks do not step together: with
one of them a run without --steps has MOST_STEPS."""


def chooses_steps(args: argparse.Namespace) -> bool:
    """Return whether the run chooses its number of steps by measuring the first ones."""
    return "steps" not in getattr(args, "given", ()) and not any(
        getattr(args, name) not in (None, False) for name in NOT_WITH
    )


def steps_that_fit(seconds: Sequence[float]) -> int:
    """Return how many steps fit into SECONDS, rounded to tens, within the bounds.

    Args:    seconds: of each measured step.
    """
    fit = SECONDS / statistics.median(seconds)
    return min(max(round(fit / 10) * 10, FEWEST_STEPS), MOST_STEPS)


def choose_steps(
    trainer: Trainer, args: argparse.Namespace, seconds: Sequence[float], report: ProgressReport
) -> None:
    """Set the run's number of steps, and the end of its learning rate, to what fits.

    Every rank calls it after MEASURED steps. Rank 0 decides and prints.

    Args:    seconds: of each step so far, on this rank.
    Cost:    one broadcast of a number, counted under `control`.
    """
    steps = hand_out_record(trainer.world, steps_that_fit(seconds[FIRST:]))
    before = copy(args)
    args.steps = steps
    args.given = [*getattr(args, "given", ()), "steps"]  # for the command that repeats the run
    extend_rate(args, before)
    trainer.learning_rate = learning_rate(args)
    report.expect(steps)
    if steps < MOST_STEPS:
        report.line(
            f"{steps} steps of {statistics.median(seconds[FIRST:]):.2g} s: about a minute, as "
            f"--steps was not given; --steps {steps} --warmup {args.warmup} repeats this run"
        )
