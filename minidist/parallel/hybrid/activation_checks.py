"""What goes with how activations are kept: the part of a plan's checks that belongs to chapter 19."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from minidist.errors import PlanError
from minidist.nn import GPTConfig
from minidist.parallel.memory.activations import ALL, NONE, SCORES, ways_of

if TYPE_CHECKING:
    from minidist.parallel.hybrid.plan import Plan


def check(plan: "Plan") -> None:
    """Raise PlanError unless the plan says together how inputs of blocks are kept, and which blocks keep theirs alone.
    """
    ways, kept = ways_of(plan.keep_activations), f"plan keep_activations={plan.keep_activations}"
    if plan.activation_memory is not None:
        given = f"plan activation_memory={plan.activation_memory}"
        if plan.activation_memory < 1:
            raise PlanError(f"{given}: activations take at least one byte; write 64MiB")
        if plan.checkpoint_blocks != NONE:
            raise PlanError(f"{given} with checkpoint_blocks={plan.checkpoint_blocks}: it chooses the blocks itself; "
                            f"leave one of the two out")
        if plan.strategy != "ddp":
            raise PlanError(f"{given} with strategy={plan.strategy}: its ranks do not agree on blocks; use ddp")
    if not ways:
        return
    if plan.strategy != "ddp":
        raise PlanError(f"{kept} with strategy={plan.strategy}: its models keep their inputs themselves; use ddp")
    if plan.checkpoint_blocks in (NONE, SCORES) and plan.activation_memory is None:
        raise PlanError(f"{kept} with checkpoint_blocks={plan.checkpoint_blocks}: no block keeps its input alone; use "
                        f"checkpoint_blocks={ALL}")
    if "shard" in ways and plan.tp == 1:
        raise PlanError(f"{kept} with tp=1: no other rank has the same inputs; use tp=2, or 8bit or offload")
    if "shard" in ways and plan.sequence_parallel:
        raise PlanError(f"{kept} with sequence_parallel: ranks of tp have different tokens, so inputs are divided "
                        f"already; leave one of the two out")


def misfits(plan: "Plan", config: GPTConfig) -> Iterator[tuple[str, str]]:
    """Why a model cannot be trained so, as plan_checks says it: the first steps are measured to choose for all."""
    if plan.activation_memory is not None and config.mixture is not None:
        yield ("activation_memory with experts: how many tokens these get changes from step to step, and the choice is "
               "made once", "checkpoint_blocks=all")
