"""The learning rate of `minidist train`: its options, and the arguments of Trainer that follow from
them."""

import argparse
from collections.abc import Callable
from typing import Any

from minidist.console import (
    fail,
    fraction,
    not_negative,
    plural,
    positive,
    positive_number,
    whole_number,
)
from minidist.optim import LR_SCHEDULES, LearningRate

OF_SCHEDULE = {
    "lr_floor": ("cosine", "linear", "wsd"),
    "lr_decay": ("wsd",),
    "lr_every": ("step",),
    "lr_factor": ("step",),
}
"""Options, and the schedules that use them."""

JUMP = 0.01
"""The relative change of the rate from which it is reported as a jump."""


def add_rate(add: Callable[..., Any]) -> None:
    """Add the options of the learning rate."""
    add(
        "--lr",
        type=positive_number,
        default=4e-3,
        metavar="RATE",
        help="peak rate (default: 0.004)",
    )
    add(
        "--lr-schedule",
        choices=list(LR_SCHEDULES),
        default="cosine",
        help="after the warm-up: cosine or linear down to the floor; inverse-sqrt, as "
        "1/sqrt(step); wsd, the peak until the last steps, then linear "
        "(warm-up-stable-decay); step, a factor at a time; constant has no warm-up "
        "(default: cosine)",
    )
    add(
        "--warmup",
        type=whole_number(0, 10**9),
        metavar="K",
        help="steps in which the rate rises (default: a twentieth of the steps)",
    )
    add(
        "--lr-floor",
        type=not_negative,
        metavar="SHARE",
        help="of cosine, linear and wsd: the rate at the end, as a share of the peak (default: "
        "0.1)",
    )
    add(
        "--lr-decay",
        type=positive,
        metavar="K",
        help="of wsd: how many of the last steps decay (default: a fifth)",
    )
    add(
        "--lr-every",
        type=positive,
        metavar="K",
        help="of step: how many steps a rate lasts (default: a third of the steps)",
    )
    add(
        "--lr-factor",
        type=fraction,
        metavar="F",
        help="of step: the next rate, as a share of this one (default: 0.1)",
    )


def warmup_steps(args: argparse.Namespace) -> int:
    """Return the number of steps in which the rate rises."""
    return -(-args.steps // 20) if args.warmup is None else int(args.warmup)


def lr_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the optional numbers of a LearningRate that were given."""
    return {
        name.removeprefix("lr_"): value
        for name in OF_SCHEDULE
        if (value := getattr(args, name)) is not None
    }


def check_rate(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go with the schedule, or numbers that do not fit
    the run."""
    for name, schedules in OF_SCHEDULE.items():
        if getattr(args, name) is not None and args.lr_schedule not in schedules:
            fail(
                f"--{name.replace('_', '-')} is for --lr-schedule {' or '.join(schedules)}, not "
                f"{args.lr_schedule}; leave it out"
            )
    learning_rate(args)


def learning_rate(args: argparse.Namespace) -> LearningRate:
    """Return the rate that the options describe.

    Raises: ConfigError for numbers that do not fit the run.
    """
    return LearningRate(
        name=args.lr_schedule,
        peak=args.lr,
        warmup=warmup_steps(args),
        total=args.steps,
        **lr_options(args),
    )


def extend_rate(args: argparse.Namespace, before: argparse.Namespace) -> None:
    """Set the options of a run with more steps than `before` so that only the end of its schedule
    moves."""
    rate = learning_rate(before).extended(args.steps)
    args.warmup = rate.warmup
    if rate.name == "wsd":
        args.lr_decay = rate.decay
    if rate.name == "step":
        args.lr_every = rate.every


def jump(before: LearningRate, after: LearningRate, update: int, step: int) -> str | None:
    """Return a line if the next step's rate in a resumed run differs from the rate that it would
    have had.

    Args:    before, after: the rates of the run as it was recorded, and as it continues. update:
             number of the next update, from 0; step: of the next step.
    """
    was = before(update)
    comes = after(update)
    if not update or abs(comes - was) <= JUMP * was:
        return None
    why = (
        f"--lr {after.peak:g}, and it was {before.peak:g}"
        if after.peak != before.peak
        else (
            f"{after.name} over {after.total} steps, and it was over {before.total}; its warm-up "
            f"stays {plural(after.warmup, 'step')}"
        )
    )
    return (
        f"the learning rate jumps from {before(update - 1):.3g} to {comes:.3g} in step "
        f"{step + 1}: {why}"
    )
