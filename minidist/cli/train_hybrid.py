"""What a run tells of a composed plan: what was sent along each axis of the mesh, beside its formula."""

from typing import Any

import numpy as np
from rich.table import Table

from minidist.parallel.activations import chosen
from minidist.parallel.hybrid import Trainer
from minidist.parallel.hybrid_step import Hybrid, elements_sent

LOSS_BYTES = 4
"""A number of the loss, at the least: in low precision maxima and sums over the vocabulary travel as float32."""


def formula(trainer: Trainer, strategy: Hybrid, data: dict[str, Any], batch: Any) -> dict[str, Any]:
    """Bytes of all ranks and steps by axis, and how many parameters this rank has. Every rank calls it.

    Args:    data: the bytes of this rank's group of dp; batch: one of the run.

    Cost:    one all-gather of a float64 a rank, under `control`.
    """
    plan, config, itemsize = trainer.plan, trainer.config, strategy.weights[0].dtype.itemsize
    elements = elements_sent(config, plan, batch[0].size,
                             recomputed=len(chosen(plan.checkpoint_blocks, config.layers)))
    axes = {axis: count * itemsize * trainer.steps_done for axis, count in elements.items()}
    if plan.tp > 1 and itemsize < LOSS_BYTES:
        of_loss = 2 * (plan.tp - 1) * 3 * batch[0].size
        axes["tp"] += of_loss * (LOSS_BYTES - itemsize) * trainer.steps_done
    with trainer.world.ledger.control():
        each = strategy.cut.all_gather(np.array([data["sent_bytes"]], np.int64))
    if plan.dp > 1:
        axes = {"dp": int(each.sum()), **axes}
    return {"sent_bytes": sum(axes.values()), "messages": None, "buckets": data["buckets"], "axes": axes,
            "held": sum(p.size for p in strategy.model.parameters())}


def measured(metrics: dict[str, Any]) -> dict[str, int]:
    """Bytes of all ranks and steps by axis; hybrid sharding's parts of dp count as dp."""
    sent = dict.fromkeys(metrics["formula"]["axes"], 0)
    for rank in metrics["ranks"]:
        for axis, verbs in rank["sent_bytes"].items():
            if axis != "control":
                name = axis.split(".")[0]
                sent[name] = sent.get(name, 0) + sum(verbs.values())
    return sent


def traffic_table(metrics: dict[str, Any]) -> Table:
    """All ranks' bytes a step along each axis, scalars apart."""
    steps, by_formula = len(metrics["losses"]), metrics["formula"]["axes"]
    table = Table(header_style="bold")
    table.add_column("axis")
    for column in ("ranks", "bytes", "formula"):
        table.add_column(column, justify="right")
    for axis, sent in measured(metrics).items():
        if not sent and axis not in by_formula:
            continue
        expected = by_formula.get(axis)
        table.add_row(axis, str(metrics["plan"].get(axis, "")), f"{sent / steps:,.1f}".removesuffix(".0"),
                      "" if expected is None else f"{expected / steps:,.1f}".removesuffix(".0"))
    return table
