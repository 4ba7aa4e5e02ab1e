"""`minidist train --verify`: is parallel equal to serial, on the user's own run?

The weights after the run's first STEPS steps are compared with those of one process that makes the
same steps. The measure is the largest |a - b| over the largest |b| of the whole model, because a
gradient that is zero in exact arithmetic (attention's key bias) has no relative error. Mixed
precision has another measure, OF_THE_WAY.

Only the first steps are compared, because training is chaotic: it multiplies any difference, even
the difference between two orders of the same sum. On the default text two correct runs in float64
differed by 8e-14 after 20 steps, by 3e-11 after 40.
"""

import math
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from minidist.cli.train.attempts import by_itself
from minidist.cli.train.settings import Settings
from minidist.comm.group import Group
from minidist.comm.records import hand_out_record, unhurried
from minidist.console import plural
from minidist.device import account
from minidist.optim import sum_of_squares
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.memory.activations import ways_of

STEPS = 20
BOUNDS = {"float64": 1e-10, "float32": 3e-2}
"""float32 rounds 5e8 times more coarsely than float64. Adam divides each gradient by its own size,
so it turns the rounding error of a small gradient into a good part of a step: 1e-2 was seen after
20 steps at a rate of 4e-3."""

OF_THE_WAY = 3e-1
"""The bound in mixed precision: the distance between both models over the distance that training
moved the serial one. A small gradient of 8 or 11 bits (in fp8: 3) is only rounding error, which
Adam turns into a whole step in either direction, so the largest difference tells nothing; but few
weights have such gradients. 1e-2 was seen in a small model, 1.3e-1 in the default one at its full
rate from step 2 on; 9e-1 where one of two ranks' gradients are lost."""

Weights = dict[str, np.ndarray]


def verify(
    early: Weights, settings: Settings, world: Group, metrics: dict[str, Any], console: Console
) -> int:
    """Train STEPS steps on one process, compare with `early`, the plan's weights after the same
    steps, and print a table.

    Every rank calls it; only rank 0 trains and fills metrics["verify"], while the others wait.

    Returns: the exit status, the same on every rank: 0 equal, 1 not, or nothing could be compared.
    """
    alone = world.split(world.rank)  # all ranks take part
    assert alone is not None
    equal = False
    if world.rank == 0:
        with by_itself("--verify"):
            args = settings.args
            arithmetic = args.dtype if args.precision == "fp32" else args.precision
            differences = compare(early, *train_alone(settings, alone), arithmetic)
            metrics["verify"] = differences
            print_differences(console, differences, min(STEPS, args.steps))
            equal = differences["moved"] and differences["compared"] <= differences["bound"]
    with unhurried(world):
        equal = hand_out_record(world, equal)
    alone.close()
    return int(not equal)


def train_alone(settings: Settings, alone: Group) -> tuple[Weights, Weights]:
    """Return the weights before the first step and after the same steps on one process."""
    with account.use(account.MemoryAccount()):  # without the run's memory limit
        args = settings.args
        rounded = "8bit" in ways_of(settings.args.keep_activations)
        plan = Plan(
            precision=args.precision,
            **(
                {"checkpoint_blocks": args.checkpoint_blocks, "keep_activations": "8bit"}
                if rounded
                else {}
            ),
        )
        serial = Trainer(plan, settings.config, alone, **settings.trainer_options())
        start = serial.state_dict()
        for step in range(min(STEPS, settings.args.steps)):
            serial.step(settings.training_batch(step))
        return start, serial.state_dict()


def compare(ours: Weights, start: Weights, serial: Weights, arithmetic: str) -> dict[str, Any]:
    """Measure the difference between two models.

    Args:    arithmetic: the run's precision, or for fp32 its dtype; it chooses the bound.
    Returns: "largest", relative to the largest weight of the model; "of_the_way", the distance
             relative to serial's distance from its start; "moved": whether serial left its start;
             "compared": the measure to which "bound" applies; "parameters": each tensor's largest
             difference.
    """
    gaps = {name: float(np.max(np.abs(ours[name] - serial[name]))) for name in serial}
    sizes = {name: float(np.max(np.abs(serial[name]))) for name in serial}
    largest = max(gaps.values()) / max(sizes.values())
    way = distance(serial, start)
    of_the_way = distance(ours, serial) / (way or 1.0)
    return {
        "largest": largest,
        "of_the_way": of_the_way,
        "moved": way > 0,
        "dtype": arithmetic,
        "compared": largest if arithmetic in BOUNDS else of_the_way,
        "bound": BOUNDS.get(arithmetic, OF_THE_WAY),
        "parameters": {
            name: {"difference": gaps[name], "of_its_largest": gaps[name] / (sizes[name] or 1.0)}
            for name in serial
        },
    }


def distance(a: Weights, b: Weights) -> float:
    """Return the root of the sum of the squared differences over all tensors."""
    return math.sqrt(sum_of_squares(a[name] - b[name] for name in a))


def print_differences(console: Console, differences: dict[str, Any], steps: int) -> None:
    """Print the verdict, and the eight tensors that differ most."""
    verdict = "Equal" if differences["compared"] <= differences["bound"] else "NOT EQUAL"
    what = (
        f"the largest difference is {differences['compared']:.2e} of the model's largest weight"
        if differences["dtype"] in BOUNDS
        else f"the models are {differences['compared']:.2e} of the way that training went apart"
    )
    console.rule(f"parallel and serial after {plural(steps, 'step')}", style="dim", align="left")
    if not differences["moved"]:
        console.print(
            "NOTHING TO COMPARE: one process has the weights it began with. In fp16 the loss "
            "scale begins high, and steps that overflow are skipped; take more --steps",
            markup=False,
        )
        return
    console.print(
        f"{verdict}: {what}; the bound is {differences['bound']:.0e} in {differences['dtype']}",
        markup=False,
    )
    columns = ("largest difference", "of its own largest weight")
    table = Table(
        "parameter (the eight that differ most)",
        *(Column(name, justify="right") for name in columns),
        header_style="bold",
    )
    for name, row in sorted(
        differences["parameters"].items(), key=lambda item: -item[1]["difference"]
    )[:8]:
        table.add_row(name, f"{row['difference']:.2e}", f"{row['of_its_largest']:.2e}")
    console.print(table)
