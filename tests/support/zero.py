"""Provide what the tests of the ZeRO stages share: a job that trains a tiny GPT by any stage, and
what all stages must pass."""

from typing import Any

import numpy as np
from training import SMALL_BUCKETS, difference, global_batch, tiny

import minidist as md
from minidist.device import account
from minidist.nn import GPT
from minidist.optim import SGD, Adam, AdamW
from minidist.parallel.step.replicas import weights_digest
from minidist.parallel.step.single import Single
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2
from minidist.parallel.zero.zero3 import Zero3

BOUND = 1e-10
STAGES: dict[int, Any] = {1: Zero1, 2: Zero2, 3: Zero3}
OPTIMIZERS: dict[str, Any] = {"adamw": AdamW, "adam": Adam, "sgd": SGD}


def make(world: Any, stage: int, model: GPT, **options: Any) -> Any:
    """The strategy of a stage; 0 is one process."""
    if stage == 3:
        units = [
            module
            for _, module in model.children()
            if model.head is not None or module is not model.tokens
        ]
        return Zero3(model, world, **{"units": units, **options})
    return STAGES[stage](model, world, **options) if stage else Single(model)


def train(
    world: Any,
    stage: int,
    changes: dict[str, Any] | None = None,
    *,
    steps: int = 2,
    sequences: int = 5,
    optimizer: str = "adamw",
    clip: float | None = 0.5,
    frozen: tuple[str, ...] = (),
    seed: int = 3,
    bucket_bytes: int = SMALL_BUCKETS,
    step_options: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return what a rank holds after `steps` steps of `stage`: weights, losses, digest, ledger,
    memory, the weights' bytes."""
    config = tiny(**(changes or {}))
    memory = account.current()
    model = GPT(config)
    model.initialize(seed)
    named = dict(model.named_parameters())
    assert named.keys() >= set(frozen)
    for name, parameter in named.items():
        parameter.requires_grad = name not in frozen
    strategy = make(
        world,
        stage,
        model,
        **({"bucket_bytes": bucket_bytes} if stage in (1, 2) else {}),
        **options,
    )
    rule = OPTIMIZERS[optimizer](
        [p for p in strategy.parameters if getattr(p, "requires_grad", True)], 1e-2
    )
    memory.reset_peak()
    with world.ledger.during("step"):
        losses = [
            strategy.step(
                global_batch(step, sequences, config), rule, clip=clip, **(step_options or {})
            )
            for step in range(steps)
        ]
    seen = memory.snapshot()
    weights = strategy.state_dict() if hasattr(strategy, "state_dict") else model.state_dict()
    return {
        "weights": weights,
        "losses": losses,
        "digest": weights_digest(weights),
        "memory": seen,
        "sent": world.ledger.sent_bytes("step"),
        "messages": world.ledger.messages("step"),
        "nbytes": sum(array.nbytes for array in weights.values()),
    }


def check_equal(
    stage: int,
    size: int,
    changes: dict[str, Any] | None = None,
    *,
    step_options: dict[str, Any] | None = None,
    strategy_options: dict[str, Any] | None = None,
    bound: float = BOUND,
    **options: Any,
) -> list[dict[str, Any]]:
    """Ranks equal one process within `bound`, and each other to the bit; returns what they hold."""
    serial = md.run(lambda world: train(world, 0, changes, **options), size=1)[0]
    ranks = md.run(
        lambda world: train(
            world, stage, changes, step_options=step_options, **(strategy_options or {}), **options
        ),
        size=size,
    )
    assert difference(ranks[0]["weights"], serial["weights"]) < bound
    np.testing.assert_allclose(ranks[0]["losses"], serial["losses"], rtol=bound)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert len({tuple(rank["losses"]) for rank in ranks}) == 1
    return ranks


def train_as_told(
    world: Any, stage: int, changes: dict[str, Any] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """`train` with arguments that can travel to ranks of a new mpirun."""
    return train(world, stage, changes, **options)


def sent_for_training(ranks: list[dict[str, Any]], axis: str = "world") -> dict[str, int]:
    """Bytes by verb, summed over ranks, scalars apart."""
    total: dict[str, int] = {}
    for rank in ranks:
        assert rank["sent"].keys() <= {axis, "control"}
        for verb, nbytes in rank["sent"].get(axis, {}).items():
            total[verb] = total.get(verb, 0) + nbytes
    return total
