"""What the tests of tensor, sequence and context parallelism share: a GPT trained by either, beside one process."""

from typing import Any

from training import global_batch, tiny

from minidist import account
from minidist.nn import GPT, DropoutKey
from minidist.optim import AdamW
from minidist.parallel.activations import checkpoint_blocks
from minidist.parallel.mixed_precision import MixedPrecision
from minidist.parallel.single import Single

SIZES: dict[str, Any] = {"heads": 8, "width": 16, "vocabulary": 13}


def train(world: Any, cut: Any, strategy_of: Any, changes: dict[str, Any], *, steps: int = 3, sequences: int = 3,
          clip: float | None = 0.5, accumulate: int = 1, checkpoint: str = "none", seed: int = 3,
          precision: str | None = None, optimizer: Any = AdamW, spoil: Any = None,
          whole: bool | None = None) -> dict[str, Any]:
    """What a rank holds after some steps: whole and own weights, losses, what was sent, memory.

    Args:    cut: makes the model a part of itself; strategy_of: trains it; both not used if `whole` (on one rank).
             spoil: is given the cut model before its weights are drawn.
    """
    config = tiny(**{**SIZES, **changes})
    whole = world.size == 1 if whole is None else whole
    with account.use(account.MemoryAccount()) as memory:
        model = GPT(config)
        if not whole:
            cut(model, world)
        if spoil is not None:
            spoil(model)
        model.initialize(seed)
        checkpoint_blocks(model, checkpoint)
        state = {"step": 0}

        def loss(part: Any, divisor: int) -> Any:
            key = (DropoutKey.of_sequences(seed, state["step"], part.first, *part.inputs.shape)
                   if config.dropout else None)
            return model.loss(part.inputs, part.targets, divisor, key=key)

        kind = {} if precision is None else {"precision": MixedPrecision(precision)}
        strategy = (Single(model, loss=loss, **kind) if whole else strategy_of(model, world, loss=loss, **kind))
        update = optimizer(strategy.parameters, 1e-2)
        losses = []
        with world.ledger.during("step"):
            for step in range(steps):
                state["step"] = step
                losses.append(strategy.step(global_batch(step, sequences, config), update, clip=clip,
                                            accumulate=accumulate))
        sent = world.ledger.sent_bytes("step")
        return {"weights": strategy.state_dict(), "losses": losses, "sent": sent, "memory": memory.snapshot(),
                "config": config.as_dict()}



def tensor(world: Any, changes: dict[str, Any], **options: Any) -> dict[str, Any]:
    """`train` under tensor parallelism."""
    from minidist.parallel.tensor_parallel import TensorParallel, tensor_parallel

    return train(world, tensor_parallel, TensorParallel, changes, **options)


def tensor_in_processes(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The same, with arguments that can travel to ranks of a new mpirun."""
    return tensor(world, changes, **options)


def sequence(world: Any, changes: dict[str, Any], **options: Any) -> dict[str, Any]:
    """`train` under sequence parallelism."""
    from minidist.parallel.sequence_parallel import SequenceParallel, sequence_parallel

    return train(world, sequence_parallel, SequenceParallel, changes, **options)


def sequence_in_processes(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The same, with arguments that can travel to ranks of a new mpirun."""
    return sequence(world, changes, **options)


def context(world: Any, changes: dict[str, Any], **options: Any) -> dict[str, Any]:
    """`train` under context parallelism, by a ring."""
    from minidist.parallel.ring_attention import ContextParallel, context_parallel

    return train(world, context_parallel, ContextParallel, changes, **options)


def context_in_processes(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The same, with arguments that can travel to ranks of a new mpirun."""
    return context(world, changes, **options)


def swapped(world: Any, changes: dict[str, Any], **options: Any) -> dict[str, Any]:
    """`train` under context parallelism, by all-to-all attention."""
    from minidist.parallel.ulysses import ContextParallel, ulysses

    return train(world, ulysses, ContextParallel, changes, **options)


def swapped_in_processes(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The same, with arguments that can travel to ranks of a new mpirun."""
    return swapped(world, changes, **options)
