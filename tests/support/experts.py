"""What the tests of mixtures share: a mixture trained on ranks, beside one process."""

from typing import Any

import numpy as np
from split import SIZES, STEPS
from training import global_batch, tiny

from minidist.device import account
from minidist.nn import GPT, DropoutKey, MixtureConfig, mixture
from minidist.nn.moe import loads, rebalance
from minidist.optim import AdamW
from minidist.parallel.experts.expert_parallel import ExpertParallel, elements_sent, expert_parallel
from minidist.parallel.memory.activations import checkpoint_blocks
from minidist.parallel.precision.mixed_precision import MixedPrecision
from minidist.parallel.step.single import Single

MOE: dict[str, Any] = {"experts": 5, "top_k": 2, "noise": 0.05}


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
    spoil: Any = None,
    copies: int = 1,
) -> dict[str, Any]:
    """What a rank holds after some steps: whole weights, losses, loads of each step, what was sent,
    memory; rows sent to experts of other ranks, copies to other nodes, and the placement that was
    measured.

    Args:    copies: groups that each hold all experts.
    """
    config = tiny(**{**SIZES, **changes})
    with account.use(account.MemoryAccount()) as memory:
        group = world
        same = None
        model = mixture(GPT(config), MixtureConfig(**{**MOE, **moe}))
        if world.size > 1:
            if copies > 1:  # data × experts, the experts' ranks neighbours
                group = world.split(world.rank // (world.size // copies), axis="ep")
                same = world.split(world.rank % (world.size // copies), axis="dp")
            expert_parallel(model, group, copies=same)
        model.initialize(seed)
        checkpoint_blocks(model, checkpoint)
        state = {"step": 0}

        def loss(part: Any, divisor: int) -> Any:
            key = DropoutKey.of_sequences(seed, state["step"], part.first, *part.inputs.shape)
            if spoil is not None:
                key = spoil(key, part)
            return model.loss(part.inputs, part.targets, divisor, key=key)

        kind = {} if precision is None else {"precision": MixedPrecision(precision)}
        strategy: Any = (
            Single(model, loss=loss, **kind)
            if world.size == 1
            else ExpertParallel(model, group, everyone=world, loss=loss, **kind)
        )
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
                if world.size == 1:
                    counted.append(loads(model))
                    rebalance(model, counted[-1])
                else:
                    counted.append(strategy.loads.copy())
                    rows += int(strategy.routed.sum() - strategy.routed[:, group.rank].sum())
                    away += int(strategy.load.copies.sum())
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
            "placed": strategy.load.placed(world.split(world.rank))
            if len(set(world.nodes)) > 1
            else None,
        }


def in_processes(
    world: Any, moe: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """The same, with arguments that can travel to ranks of a new mpirun."""
    return train(world, moe, changes, **options)
