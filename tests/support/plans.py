"""Provide what the tests of composed plans share: a job that trains a tiny GPT by any plan, beside
one process."""

from typing import Any

import numpy as np
from training import difference, global_batch, tiny

import minidist as md
from minidist.cli.train import metrics
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.pipeline.schedules import ORDERS, UPDATING
from minidist.parallel.step.replicas import weights_digest

BOUND = 1e-10
# those that train as one process does
SCHEDULES = [name for name in ORDERS if name not in UPDATING]
BIAS: dict[str, Any] = {
    "experts": 4,
    "capacity": 1.2,
    "shared": 1,
    "balance": "bias",
    "bias_rate": 0.1,
}
"""A mixture that biases balance."""
MOST = {"layers": 3, "heads": 4, "tied": True, "dropout": 0.2}  # what most can go wrong in


def train(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank holds after some steps. `options`: plan (its fields), steps, sequences,
    and the Trainer's."""
    config = tiny(**changes)
    options = {"optimizer": "adamw", "lr": 1e-2, "clip": 0.5, "seed": 3, **options}
    plan = Plan(**{"bucket_bytes": 2048, **options.pop("plan", {})})
    steps = options.pop("steps", 2)
    sequences = options.pop("sequences", 5)
    trainer = Trainer(plan, config, world, **options)
    losses = [trainer.step(global_batch(step, sequences, config)) for step in range(steps)]
    trainer.check_replicas()
    batch = global_batch(steps, 3, config)
    losses.append(trainer.evaluate([batch, global_batch(0, 1, config)]))
    weights = trainer.state_dict()
    result = {
        "weights": weights,
        "losses": losses,
        "digest": weights_digest(weights),
        "sent": world.ledger.sent_bytes("step"),
        "formula": metrics.gradient_formula(trainer, global_batch(0, sequences, config)),
        "memory": trainer.account.snapshot(),
        "offload": metrics.offload_record(trainer),
    }
    trainer.close()
    return result


def check(changes: dict[str, Any], plan: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Every rank equals one process in weights, losses and evaluation, and all ranks in every bit;
    their results."""
    (serial,) = md.run(
        train, changes, {**options, "plan": {"precision": plan.get("precision", "fp32")}}, size=1
    )
    ranks = md.run(train, changes, {**options, "plan": plan}, size=Plan(**plan).size)
    assert difference(ranks[0]["weights"], serial["weights"]) < BOUND
    assert np.max(np.abs(np.subtract(ranks[0]["losses"], serial["losses"]))) < BOUND
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1
    return ranks


def sent_by_axis(ranks: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes of all ranks, scalars apart; what travels within and between copies of a state is of
    one axis."""
    sent: dict[str, int] = {}
    for axis, verbs in (
        (axis, verbs) for rank in ranks for axis, verbs in rank["sent"].items() if axis != "control"
    ):
        name = axis.split(".")[0]
        sent[name] = sent.get(name, 0) + sum(verbs.values())
    return {axis: count for axis, count in sent.items() if count}
