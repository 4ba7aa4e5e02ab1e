"""Provide what the tests of mixtures share: a mixture trained on ranks, beside one process."""

import hashlib
from typing import Any

import numpy as np
from split import BOUND, SIZES, STEPS
from training import difference, global_batch, tiny

from minidist.device import account
from minidist.nn import GPT, DropoutKey, MixtureConfig, mixture
from minidist.optim import AdamW
from minidist.parallel.experts.expert_load import ExpertLoad
from minidist.parallel.experts.expert_parallel import elements_sent
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.parallelize import parallelize
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.memory.activations import checkpoint_blocks
from minidist.parallel.precision.mixed_precision import MixedPrecision
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.single import Single
from minidist.parallel.step.strategy import Strategy

MOE: dict[str, Any] = {"experts": 5, "top_k": 2, "noise": 0.05}
KINDS: dict[str, dict[str, Any]] = {
    "loss": {},
    "capacity": {"capacity": 0.8, "top_k": 1},
    "bias": {"balance": "bias", "shared": 1, "capacity": 1.2},
}
"""What differs from MOE: balanced by the loss, with tokens dropped, balanced by biases."""


def train(
    world: Any,
    moe: dict[str, Any],
    changes: dict[str, Any],
    *,
    steps: int = STEPS,
    sequences: int = 5,
    clip: float | None = 0.5,
    accumulate: int = 1,
    checkpoint: str = "none",
    seed: int = 3,
    precision: str | None = None,
    optimizer: Any = AdamW,
    copies: int = 1,
) -> dict[str, Any]:
    """Return what a rank holds after some steps: whole weights, losses, loads of each step, what
    was sent, memory; rows sent to experts of other ranks, copies to other nodes, and the placement
    that was measured.

    Args:    copies: groups that each hold all experts.
    """
    config = tiny(**{**SIZES, **changes})
    state = {"step": 0}

    def key(part: Any) -> DropoutKey:
        return DropoutKey.of_sequences(seed, state["step"], part.first, *part.inputs.shape)

    def loss(part: Any, divisor: int) -> Any:
        return model.loss(part.inputs, part.targets, divisor, key=key(part))

    with account.use(account.MemoryAccount()) as memory:
        model = mixture(GPT(config), MixtureConfig(**{**MOE, **moe}))
        arithmetic = Precision() if precision is None else MixedPrecision(precision)
        checkpoint_blocks(model, checkpoint)
        # data × experts, the experts' ranks neighbours
        plan = Plan(dp=copies, ep=world.size // copies)
        mesh = Mesh(world, **plan.axes)
        strategy: Strategy
        if world.size == 1:
            model.initialize(seed)
            strategy = Single(model, loss=loss, precision=arithmetic)
        else:
            strategy = parallelize(model, mesh, plan, seed=seed, key=key, precision=arithmetic)
        load = ExpertLoad(model, mesh.copies)
        update = optimizer(strategy.parameters, 1e-2)
        losses = []
        counted = []
        rows = 0
        away = 0
        with world.ledger.during("step"):
            for step in range(steps):
                state["step"] = step
                losses.append(
                    strategy.step(
                        global_batch(step, sequences, config),
                        update,
                        clip=clip,
                        accumulate=accumulate,
                    )
                )
                load.settle()
                counted.append(load.step.copy())
                if world.size > 1:
                    own = mesh["ep"].rank
                    rows += int(load.routed.sum() - load.routed[:, own].sum())
                    away += int(load.copies.sum())
        sent = world.ledger.sent_bytes("step")
        formula = elements_sent(model, ranks=world.size, rows=0)
        return {
            "weights": strategy.state_dict(),
            "losses": losses,
            "sent": sent,
            "memory": memory.snapshot(),
            "loads": np.stack(counted),
            "rows": rows,
            "dense": formula,
            "config": config.as_dict(),
            "copies": away,
            "placed": load.placed(world.split(world.rank)) if len(set(world.nodes)) > 1 else None,
        }


def in_processes(
    world: Any, moe: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The same, with arguments that can travel to ranks of a new mpirun."""
    return train(world, moe, changes, **options)


def digest(rank: dict[str, Any]) -> str:
    """Return the digest of a rank's weights."""
    return hashlib.sha256(
        b"".join(array.tobytes() for array in rank["weights"].values())
    ).hexdigest()


def check_equal(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Ranks equal one process and each other, in weights, losses and loads."""
    assert difference(ranks[0]["weights"], alone["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-12)
    assert len({digest(rank) for rank in ranks}) == 1
    for rank in ranks:
        np.testing.assert_array_equal(rank["loads"], alone["loads"])
