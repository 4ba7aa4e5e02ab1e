"""`minidist train --verify`: is parallel equal to serial, on the user's own run?

The weights that the plan trained are held against those of one process that makes the same steps on the same global
batches. The measure is the largest |a - b| over the largest |b| of the whole model: a gradient that is zero in exact
arithmetic (attention's key bias) has no relative error of its own.
"""

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from minidist.cli.train_options import Settings
from minidist.comm.group import Group
from minidist.parallel.hybrid import Plan, Trainer

BOUNDS = {"float64": 1e-10, "float32": 1e-2}
"""float32 rounds sums differently in each order, and Adam makes whole steps of a rounding error where the gradient is
zero but for it; over hundreds of steps that adds up."""

A_DAY = 86400.0


def verify(trainer: Trainer, settings: Settings, world: Group, metrics: dict[str, Any], console: Console) -> int:
    """Train once more on one process and compare; fills metrics["verify"], prints a table. Returns the exit status.

    Every rank calls it. Rank 0 alone trains; the others wait for it, so that it has the machine.
    """
    alone = world.split(world.rank)     # all ranks take part
    assert alone is not None
    status = 0
    if world.rank == 0:
        differences = compare(trainer.model.state_dict(), train_alone(settings, alone))
        metrics["verify"] = differences
        print_differences(console, differences)
        status = 0 if differences["largest"] <= differences["bound"] else 1
    limit, world.transport.limit = world.transport.limit, A_DAY
    try:
        with world.ledger.control():
            status = int(world.broadcast(np.array([status]) if world.rank == 0 else None)[0])
    finally:
        world.transport.limit = limit
    alone.close()
    return status


def train_alone(settings: Settings, alone: Group) -> dict[str, np.ndarray]:
    """The weights after the same steps on one process."""
    serial = Trainer(Plan(), settings.config, alone, **settings.trainer_options())
    for step in range(settings.args.steps):
        serial.step(settings.training_batch(step))
    return serial.model.state_dict()


def compare(ours: dict[str, np.ndarray], serial: dict[str, np.ndarray]) -> dict[str, Any]:
    """The largest difference relative to the whole model's largest weight, and each tensor's relative to its own."""
    gaps = {name: float(np.max(np.abs(ours[name] - serial[name]))) for name in serial}
    sizes = {name: float(np.max(np.abs(serial[name]))) for name in serial}
    dtype = next(iter(serial.values())).dtype.name
    return {"largest": max(gaps.values()) / max(sizes.values()), "bound": BOUNDS[dtype], "dtype": dtype,
            "parameters": {name: {"difference": gaps[name], "of_its_largest": gaps[name] / (sizes[name] or 1.0)}
                           for name in serial}}


def print_differences(console: Console, differences: dict[str, Any]) -> None:
    """The verdict, and the tensors that differ most."""
    worst = sorted(differences["parameters"].items(), key=lambda item: -item[1]["difference"])[:8]
    verdict = "equal" if differences["largest"] <= differences["bound"] else "NOT EQUAL"
    table = Table(title=f"parallel against serial: largest difference {differences['largest']:.2e} of the model's "
                        f"largest weight, bound {differences['bound']:.0e} in {differences['dtype']}: {verdict}",
                  title_justify="left", header_style="bold")
    table.add_column("parameter (the eight that differ most)")
    table.add_column("largest difference", justify="right")
    table.add_column("of its own largest weight", justify="right")
    for name, row in worst:
        table.add_row(name, f"{row['difference']:.2e}", f"{row['of_its_largest']:.2e}")
    console.print(table)
