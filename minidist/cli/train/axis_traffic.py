"""Traffic of a composed plan: bytes sent along each axis of the mesh, measured and by formula."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
from rich.table import Column, Table

from minidist.console import exactly
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.hybrid.hybrid_costs import elements_sent, wide_elements
from minidist.parallel.hybrid.hybrid_step import Hybrid
from minidist.parallel.memory.activations import chosen
from minidist.parallel.memory.kept_inputs import bytes_of
from minidist.parallel.step.step import Batch

WIDE = 4
"""Bytes of a number that is sent as float32 even in low precision."""


def formula(trainer: Trainer, data: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """Return bytes of all ranks and steps by axis, and the number of this rank's parameters.

    Every rank calls it.

    Args:    data: the formula of this rank's group of the data axis. batch: one batch of the run.
    Cost:    two all-gathers of a few integers per rank, under `control`.
    """
    plan = trainer.plan
    itemsize = next(trainer.model.parameters()).dtype.itemsize
    strategy = cast(Hybrid, trainer.strategy)
    config = replace(trainer.config, context=batch[0].shape[1])
    sequences = len(batch[0])
    again = recomputed_steps(trainer)
    axes = _of_all_steps(
        partial(elements_sent, config, plan, sequences), trainer.steps_here, sum(again), itemsize
    )
    if itemsize < WIDE:
        wide = _of_all_steps(
            partial(wide_elements, config, plan, sequences),
            trainer.steps_here,
            sum(again),
            WIDE - itemsize,
        )
        axes = {axis: nbytes + wide.get(axis, 0) for axis, nbytes in axes.items()}
    if "shard" in plan.ways:
        numbers = sequences * config.context * config.width
        axes["tp"] += (
            sum(again) * (plan.tp - 1) * bytes_of(numbers, config.width, itemsize, plan.ways)
        )
    with trainer.world.ledger.control():
        shared = dict.fromkeys(
            (trainer.mesh.copies.axis, *([trainer.mesh.experts.axis] if plan.ep > 1 else []))
        )
        own = np.array(
            [[data[kind].get(axis, 0) for axis in shared] for kind in ("axes", "plain")], np.int64
        )
        each = strategy.replica_group.all_gather(own).reshape(-1, *own.shape).sum(axis=0)
        numbers = trainer.world.all_gather(
            np.array(
                [
                    passes * trainer.loads.sent_by(layer)
                    for layer, passes in (
                        (layer, 3 if again[layer] else 2) for layer in range(config.layers)
                    )
                ],
                np.int64,
            )
        )
    sent, plain = (dict(zip(shared, map(int, counts), strict=True)) for counts in each)
    unknown = data["plain"].keys() - data["axes"].keys()
    axes = {**sent, **axes}
    if plan.ep > 1:
        axes["ep"] = int(numbers.sum()) * itemsize
    axes = {
        axis: nbytes
        for axis, nbytes in axes.items()
        if axis not in unknown and math.prod(plan.axes[name] for name in axis.split(",")) > 1
    }
    return {
        "sent_bytes": None if unknown else sum(axes.values()),
        "messages": None,
        "buckets": data["buckets"],
        "axes": axes,
        **({"plain": plain} if plan.compress != "none" else {}),
        "held": sum(p.size for p in strategy.model.parameters()),
        "held_experts": sum(p.size for p in strategy.model.parameters() if p.shared_by is not None),
    }


def recomputed_steps(trainer: Trainer) -> list[int]:
    """Return, for each layer of the model, the number of this job's steps in which backward
    recomputed it."""
    if trainer.budget is not None:
        return trainer.budget.recomputed_steps(trainer.steps_here)
    layers = trainer.config.layers
    blocks = chosen(trainer.plan.checkpoint_blocks, layers)
    return [trainer.steps_here * (layer in blocks) for layer in range(layers)]


def _of_all_steps(
    sent: Callable[..., dict[str, int]], steps: int, again: int, itemsize: int
) -> dict[str, int]:
    """Return the bytes of `steps` steps by axis, with `again` recomputations of blocks in all.

    `sent`: elements of one step.
    """
    once = sent(recomputed=0)
    more = sent(recomputed=1)
    return {
        axis: (steps * count + again * (more[axis] - count)) * itemsize
        for axis, count in once.items()
    }


def stage_layers(trainer: Trainer) -> list[int] | None:
    """Return the number of layers of each stage of the pipeline; None without a pipeline."""
    pipeline = trainer.strategy.pipeline
    return None if pipeline is None else pipeline.layers


def traffic_table(metrics: dict[str, Any]) -> Table:
    """Return a table of all ranks' bytes in a step along each axis, without scalars."""
    steps = metrics["steps"]
    by_formula = metrics["formula"]["axes"]
    sent = dict.fromkeys(by_formula, 0)
    for rank in metrics["ranks"]:
        for axis, verbs in rank["sent_bytes"].items():
            name = axis.split(".")[0]  # hybrid sharding's parts of dp count as dp
            sent[name] = sent.get(name, 0) + sum(verbs.values())
    table = Table(
        "axis",
        *(Column(name, justify="right") for name in ("ranks", "bytes", "formula")),
        header_style="bold",
    )
    for axis, nbytes in sent.items():
        if axis in by_formula or (nbytes and axis != "control"):
            ranks = math.prod(metrics["plan"].get(name, 1) for name in axis.split(","))
            table.add_row(
                axis,
                str(ranks),
                exactly(nbytes / steps),
                exactly(by_formula[axis] / steps) if axis in by_formula else "",
            )
    return table
