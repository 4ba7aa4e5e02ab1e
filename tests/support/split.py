"""Provide what the tests of tensor, sequence and context parallelism share: a GPT trained by
either, beside one process."""

from typing import Any

import numpy as np
from training import difference, global_batch, tiny

import minidist as md
from minidist.device import account
from minidist.nn import GPT, DropoutKey, GPTConfig
from minidist.optim import SGD, AdamW
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.parallelize import compose, divide
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.memory.activations import checkpoint_blocks
from minidist.parallel.precision.mixed_precision import MixedPrecision
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.single import Single
from minidist.parallel.step.strategy import Strategy

Rank = dict[str, Any]
"""What a rank holds after training."""

BOUND = 1e-10
SIZES: dict[str, Any] = {"heads": 8, "width": 16, "vocabulary": 13}
GROUPED = {
    "heads": 8,
    "kv_heads": 2,
    "width": 32,
    "positions": "rotary",
    "activation": "silu",
    "norm": "rms",
    "tied": True,
}
STEPS = 2  # the second shows what the first has left in weights and in the optimizer


def train(
    world: Any,
    plan: dict[str, Any],
    changes: dict[str, Any],
    *,
    steps: int = STEPS,
    sequences: int = 3,
    clip: float | None = 0.5,
    accumulate: int = 1,
    checkpoint: str = "none",
    seed: int = 3,
    precision: str | None = None,
    optimizer: Any = AdamW,
    spoil: Any = None,
    axis: Any = None,
) -> dict[str, Any]:
    """Return what a rank holds after some steps: whole and own weights, losses, what was sent,
    memory.

    Args:    plan: the fields of a Plan that divides the model; not used on one rank.
             spoil: is given the cut model before its weights are drawn.
             axis: the class that divides the model between the ranks of tp, even if there is one.
    """
    config = tiny(**{**SIZES, **changes})
    whole = world.size == 1
    state = {"step": 0}

    def key(part: Any) -> DropoutKey | None:
        if not config.dropout:
            return None
        return DropoutKey.of_sequences(seed, state["step"], part.first, *part.inputs.shape)

    def loss(part: Any, divisor: int) -> Any:
        return model.loss(part.inputs, part.targets, divisor, key=key(part))

    with account.use(account.MemoryAccount()) as memory:
        model = GPT(config)
        arithmetic = Precision() if precision is None else MixedPrecision(precision)
        checkpoint_blocks(model, checkpoint)
        divided = Plan(**({} if whole else plan))
        mesh = Mesh(world, **divided.axes)
        axes = divide(model, mesh, divided) if axis is None else [axis(model, mesh["tp"])]
        if spoil is not None:
            spoil(model)
        strategy: Strategy
        if not axes:
            model.initialize(seed)
            strategy = Single(model, loss=loss, precision=arithmetic)
        else:
            strategy = compose(
                model,
                mesh,
                divided,
                axes,
                seed=seed,
                key=key,
                precision=arithmetic,
            )
        update = optimizer(strategy.parameters, 1e-2)
        losses = []
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
        sent = world.ledger.sent_bytes("step")
        return {
            "weights": strategy.state_dict(),
            "losses": losses,
            "sent": sent,
            "memory": memory.snapshot(),
            "config": config.as_dict(),
        }


# Each is given its options as a dict, so that they can travel to ranks of a new mpirun.


def tensor(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> Rank:
    """`train` under tensor parallelism."""
    return train(world, {"tp": world.size}, changes, **options)


def sequence(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> Rank:
    """`train` under sequence parallelism."""
    return train(world, {"tp": world.size, "sequence_parallel": True}, changes, **options)


def context(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> Rank:
    """`train` under context parallelism, by a ring."""
    return train(world, {"cp": world.size}, changes, **options)


def swapped(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> Rank:
    """`train` under context parallelism, by all-to-all attention."""
    return train(world, {"cp": world.size, "attention": "all-to-all"}, changes, **options)


def run(kind: Any, size: int, changes: dict[str, Any], **options: Any) -> list[Rank]:
    """Return what each of `size` ranks holds after training by one of the four."""
    return md.run(kind, changes, options, size=size)


# ----------------------------------------------------------------------------------- what must hold


def any_job(**changes: Any) -> Any:
    """Decorates a test of (size, changes, options); `changes`: strategies for a config's fields
    beside those of all."""
    from hypothesis import given  # noqa: PLC0415 - ranks of an mpirun import this module
    from hypothesis import strategies as st  # noqa: PLC0415

    return given(
        size=st.integers(2, 5),
        changes=st.fixed_dictionaries(
            {
                "heads": st.sampled_from([6, 8]),
                "kv_heads": st.sampled_from([None, 1, 2]),
                "width": st.just(48),
                "tied": st.booleans(),
                "activation": st.sampled_from(["gelu", "silu"]),
                "layers": st.integers(1, 2),
                "norm": st.sampled_from(["layer", "rms"]),
                "positions": st.sampled_from(["learned", "rotary"]),
                "dropout": st.sampled_from([0.0, 0.2]),
                **changes,
            }
        ),
        options=st.fixed_dictionaries(
            {
                "sequences": st.integers(1, 4),
                "clip": st.sampled_from([None, 0.1]),
                "optimizer": st.sampled_from([AdamW, SGD]),
                "accumulate": st.integers(1, 2),
                "checkpoint": st.sampled_from(["none", "scores", "all", "0"]),
            }
        ),
    )


def check_equal(ranks: list[Rank], alone: Rank) -> None:
    """Ranks equal one process within BOUND, and each other to the bit."""
    for rank in ranks:
        assert same_bits(rank, ranks[0]) and rank["losses"] == ranks[0]["losses"]
    assert difference(ranks[0]["weights"], alone["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-12)


def same_bits(one: Rank, other: Rank) -> bool:
    """Return whether two ranks hold the same whole weights."""
    names = one["weights"].keys()
    return names == other["weights"].keys() and all(
        one["weights"][name].tobytes() == other["weights"][name].tobytes() for name in names
    )


def check_parity(kind: Any, size: int, changes: dict[str, Any], **options: Any) -> None:
    """Ranks of `kind` equal one process and each other."""
    ranks = run(kind, size, changes, **options)
    check_equal(ranks, run(kind, 1, changes, **options)[0])


def check_job(
    kind: Any,
    elements_sent: Any,
    size: int,
    changes: dict[str, Any],
    options: dict[str, Any],
    *,
    steps: int,
) -> None:
    """Ranks of `kind` equal one process and each other, and send what its formula says."""
    ranks, alone = (run(kind, count, changes, steps=steps, **options) for count in (size, 1))
    check_equal(ranks, alone[0])
    parameters = sum(array.size for array in alone[0]["weights"].values())
    formula = elements_sent(
        GPTConfig(**ranks[0]["config"]),
        parameters,
        ranks=size,
        sequences=options["sequences"],
        recomputed=blocks_again(ranks[0], options.get("checkpoint", "none")),
    )
    assert sent_along_the_axis(ranks) == 8 * steps * formula


def sent_along_the_axis(ranks: list[Rank]) -> int:
    """Bytes that all ranks sent, but for `control`."""
    return sum(
        nbytes
        for rank in ranks
        for axis, verbs in rank["sent"].items()
        if axis != "control"
        for nbytes in verbs.values()
    )


def blocks_again(rank: Rank, checkpoint: str = "none") -> int:
    """Return how many blocks are computed again, so that they send twice in forward."""
    return {"none": 0, "scores": 0, "all": rank["config"]["layers"], "0": 1}[checkpoint]
