"""Traffic of the strategies with a centre: data-parallel and parameter-server.

On a ring all ranks send the same number of bytes; here device 0 and the servers send different
numbers from the others.
"""

from typing import Any, cast

from rich.table import Column, Table

from minidist.console import exactly
from minidist.parallel.data.data_parallel import DataParallel
from minidist.parallel.data.server_keys import keys_by_server
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.step.step import Batch, Part, micro_parts, part_of

Counts = list[list[int]]
"""[bytes, messages] of each rank, or device."""


def device_records(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the records of metrics.rank_records for each device of the one process."""
    return [
        {
            "rank": device.rank,
            "coordinates": {"dp": device.rank},
            "sent_bytes": device.group.ledger.sent_bytes(),
            "messages": device.group.ledger.messages(),
            "sent_to": {str(rank): axes for rank, axes in device.group.ledger.sent_to().items()},
            "memory": device.account.snapshot(),
        }
        for device in cast(DataParallel, trainer.strategy).devices
    ]


def formula(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    """Return bytes and messages of a run by rank or device, if no worker is lost.

    Args: batch: one batch of the run.
    """
    counts = (
        _by_device(trainer, batch)
        if trainer.plan.strategy == "data-parallel"
        else _by_role(trainer)
    )
    return {
        "sent_bytes": sum(nbytes for nbytes, _ in counts),
        "messages": sum(messages for _, messages in counts),
        "buckets": 0,
        "by_rank": counts,
        "lost": sorted(getattr(trainer.strategy, "gone", ())),
    }


def _by_role(trainer: Trainer) -> Counts:
    """Return the counts by role.

    A worker pushes all gradients. A server sends its keys to each worker; asynchronously once more
    at the end.
    """
    plan = trainer.plan
    steps = trainer.steps_here
    workers = trainer.plan.workers
    keys = [
        sum(p.data.nbytes for p in share) for share in keys_by_server(trainer.model, plan.servers)
    ]
    # with local steps the weight change of a round is pushed, with the size of a gradient
    rounds = steps // (plan.local_steps or 1)
    pulls = rounds + plan.asynchronous
    return [[rounds * sum(keys), rounds * plan.servers]] * workers + [
        [pulls * workers * nbytes, pulls * workers] for nbytes in keys
    ]


def _by_device(trainer: Trainer, batch: Batch) -> Counts:
    """Return the counts by device.

    Device 0 sends models, inputs and output gradients. The others send gradients and outputs.
    """
    inputs = batch[0]
    size = trainer.plan.replicas
    model = sum(p.data.nbytes for p in trainer.model.parameters())
    per_row = (
        trainer.config.vocabulary * inputs.shape[1] * next(trainer.model.parameters()).data.itemsize
    )
    counts = [[(size - 1) * model, size - 1], *([model, 1] for _ in range(size - 1))]
    for micro in micro_parts(Part(batch[0], batch[1], 0), trainer.plan.accumulate):
        rows = [
            len(part_of((micro.inputs, micro.targets), size=size, rank=rank).inputs)
            for rank in range(size)
        ]
        if not rows[0]:
            continue
        counts[0][0] += sum(rows[1:]) * (per_row + inputs[0].nbytes)
        counts[0][1] += (size - 1) * (2 + (rows[-1] == 0))
        for rank in range(1, size):
            counts[rank][0] += rows[rank] * per_row
            counts[rank][1] += 1
    return [
        [trainer.steps_here * nbytes, trainer.steps_here * messages] for nbytes, messages in counts
    ]


def traffic_table(metrics: dict[str, Any]) -> Table:
    """Return a table of the bytes and messages per step of each device, worker or server, without
    scalars, and the formula."""
    steps = metrics["steps"]
    plan = Plan(**metrics["plan"])
    columns = ("bytes", "formula", "messages", "formula")
    table = Table(
        "sender", *(Column(name, justify="right") for name in columns), header_style="bold"
    )
    totals = [0, 0, 0, 0]
    for record in metrics["ranks"]:
        by_formula = metrics["formula"]["by_rank"][record["rank"]]
        row = [
            value
            for kind, expected in zip(("sent_bytes", "messages"), by_formula, strict=True)
            for value in (sum(record[kind].get("dp", {}).values()), expected)
        ]
        totals = [total + value for total, value in zip(totals, row, strict=True)]
        table.add_row(
            _name(plan, record["rank"]),
            *(exactly(value / steps) for value in row),
            end_section=record is metrics["ranks"][-1],
        )
    table.add_row("all", *(exactly(value / steps) for value in totals))
    return table


def _name(plan: Plan, rank: int) -> str:
    if plan.strategy == "data-parallel":
        return f"device {rank}"
    return f"worker {rank}" if rank < plan.workers else f"server {rank - plan.workers}"
