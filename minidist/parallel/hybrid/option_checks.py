"""Checks of options of chapters 11, 19 and 21: a pipeline's, kept inputs, compression, local steps.
The other checks are in plan_checks.py."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from minidist.errors import ConfigError, PlanError, ScheduleError
from minidist.nn import GPTConfig
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.memory.activations import ALL, NONE, SCORES, chosen, ways_of
from minidist.parallel.pipeline.schedules import stages_a_rank

if TYPE_CHECKING:
    from minidist.parallel.hybrid.plan import Plan

OUTER_OPTIMIZERS = ("sgd", "nesterov")
"""Outer optimizers of local steps (compress/outer.py)."""

OUTER_SCHEMES = ("none", "fp16", "bf16", "8bit", "4bit")
"""Compression schemes for the outer updates of local steps: those without state of a gradient, a
layer or the inner optimizer."""

OF_STREAMING: dict[str, Any] = {"fragments": 1, "delay": 0, "mix": 0.0, "outer_compress": "none"}
"""Options that synchronous local steps have and asynchronous ones do not, with their defaults."""


def check_kept_inputs(plan: "Plan") -> None:
    """Raise PlanError unless the options that say how blocks keep their inputs, and which blocks
    keep only their input, go together."""
    chosen(plan.checkpoint_blocks)  # check_model knows how many blocks there are
    ways = ways_of(plan.keep_activations)
    kept = f"plan keep_activations={plan.keep_activations}"
    if plan.activation_memory is not None:
        given = f"plan activation_memory={plan.activation_memory}"
        if plan.activation_memory < 1:
            raise PlanError(f"{given}: activations need at least one byte; write 64MiB")
        if plan.checkpoint_blocks != NONE:
            raise PlanError(
                f"{given} with checkpoint_blocks={plan.checkpoint_blocks}: it chooses the blocks "
                "itself; leave one of the two out"
            )
        if plan.strategy != "ddp":
            raise PlanError(
                f"{given} with strategy={plan.strategy}: its ranks do not agree on blocks; use ddp"
            )
    if not ways:
        return
    if plan.strategy != "ddp":
        raise PlanError(
            f"{kept} with strategy={plan.strategy}: its models keep their inputs themselves; use "
            "ddp"
        )
    if plan.checkpoint_blocks in (NONE, SCORES) and plan.activation_memory is None:
        raise PlanError(
            f"{kept} with checkpoint_blocks={plan.checkpoint_blocks}: no block keeps only its "
            f"input; use checkpoint_blocks={ALL}"
        )
    if "shard" in ways and plan.tp == 1:
        raise PlanError(
            f"{kept} with tp=1: no other rank has the same inputs; use tp=2, or 8bit or offload"
        )
    if "shard" in ways and plan.sequence_parallel:
        raise PlanError(
            f"{kept} with sequence_parallel: ranks of tp have different tokens, so inputs are "
            "divided already; leave one of the two out"
        )


def budget_misfits(plan: "Plan", config: GPTConfig) -> Iterator[tuple[str, str]]:
    """Yield why activation_memory cannot train a model, as plan_checks says it: the first steps are
    measured, and their choice holds for all steps."""
    if plan.activation_memory is not None and config.mixture is not None:
        yield (
            "activation_memory with experts: how many tokens these get changes from step to "
            "step, and the choice is made once",
            "checkpoint_blocks=all",
        )


def check_compress(plan: "Plan") -> None:
    """Raise PlanError unless the scheme exists, and gradients are summed in a way that takes a
    scheme."""
    if plan.compress == "none":
        return
    try:
        scheme_of(plan.compress)
    except ConfigError as error:
        raise PlanError(f"plan {error}") from None
    why = {
        "sums gradients otherwise; use strategy=ddp": plan.strategy != "ddp",
        "sends weights in every pass, and they must not lose digits; use zero=2": plan.zero == 3,
        "has no ranks that sum gradients; use dp=2": plan.copies == 1,
    }
    axes = ",".join(f"{axis}={size}" for axis, size in plan.axes.items() if size > 1)
    for reason in (reason for reason, wrong in why.items() if wrong):
        other = (
            f"strategy={plan.strategy}"
            if plan.strategy != "ddp"
            else f"zero={plan.zero} on {axes or 'dp=1'}"
        )
        raise PlanError(
            f"plan compress={plan.compress} with {other}, which {reason}, or compress=none"
        )


def check_local_steps(plan: "Plan") -> None:
    """Raise PlanError unless local steps and their options go together, and with the rest of the
    plan."""
    if plan.local_steps is None:
        return
    if not isinstance(plan.local_steps, int) or plan.local_steps < 1:
        raise PlanError(
            f"plan local_steps={plan.local_steps!r}: ranks exchange weights after a whole number "
            "of steps; choose 1 or more"
        )
    _check_company(plan)
    if (
        not isinstance(plan.fragments, int)
        or plan.fragments < 1
        or plan.local_steps % plan.fragments
    ):
        raise PlanError(
            f"plan fragments={plan.fragments} with local_steps={plan.local_steps}: each fragment "
            "is sent once in these steps; choose fragments that divide local_steps"
        )
    if not isinstance(plan.delay, int) or not 0 <= plan.delay < plan.local_steps:
        raise PlanError(
            f"plan delay={plan.delay} with local_steps={plan.local_steps}: a fragment must be "
            f"mixed in before it is sent again; choose 0 to {plan.local_steps - 1}"
        )
    if not 0 <= plan.mix < 1:
        raise PlanError(
            f"plan mix={plan.mix}: it is the part of a rank's own weights that stays; choose 0 to "
            "less than 1"
        )
    _check_outer(plan)
    if plan.outer_compress.partition(":")[0] not in OUTER_SCHEMES:
        raise PlanError(
            f"plan outer_compress={plan.outer_compress}: choose one of "
            f"{', '.join(OUTER_SCHEMES)}, with its options"
        )
    if plan.outer_compress != "none":
        try:
            scheme_of(plan.outer_compress)
        except ConfigError as error:
            raise PlanError(f"plan outer_{error}") from None


def check_change(plan: "Plan", other: "Plan") -> None:
    """Check that a training can continue under a plan. Args: other: that plan. Raises: PlanError
    for local steps."""
    if plan.local_steps is not None or other.local_steps is not None:
        raise PlanError(
            "change_plan: with local steps each rank has weights and state of its own, and "
            "without none has; start a new run"
        )


def _check_outer(plan: "Plan") -> None:
    if plan.outer_lr is not None and not 0 < plan.outer_lr < float("inf"):
        raise PlanError(f"plan outer_lr={plan.outer_lr}: choose an outer rate above 0")
    if plan.outer_momentum is not None and not 0 <= plan.outer_momentum < 1:
        raise PlanError(f"plan outer_momentum={plan.outer_momentum}: choose from 0 to less than 1")
    if plan.outer == "nesterov" and plan.outer_momentum == 0:
        raise PlanError(
            "plan outer=nesterov with outer_momentum=0: it looks ahead along the momentum; choose "
            "outer=sgd"
        )


def _check_company(plan: "Plan") -> None:
    """Raise PlanError unless local steps go together with the rest of the plan."""
    local = f"plan local_steps={plan.local_steps}"
    if plan.composed:
        axis = next(axis for axis, size in plan.axes.items() if axis != "dp" and size > 1)
        raise PlanError(
            f"{local} with {axis}={plan.axes[axis]}: each rank trains its own whole model; use "
            f"dp={plan.size}"
        )
    if plan.compress != "none":
        raise PlanError(
            f"{local} with compress={plan.compress}: no gradient travels; use outer_compress"
        )
    if (plan.zero, plan.precision, plan.offload, plan.device_memory) != (0, "fp32", "none", None):
        raise PlanError(
            f"{local}: zero, precision, offload and device_memory are for ranks that make each "
            "step together; leave them out"
        )
    if plan.strategy == "data-parallel" or (
        plan.strategy == "parameter-server" and not plan.asynchronous
    ):
        raise PlanError(
            f"{local} with strategy={plan.strategy}: use strategy=ddp, or parameter-server with "
            f"asynchronous, where each worker exchanges weights with the servers separately"
        )
    alone = [option for option, none in OF_STREAMING.items() if getattr(plan, option) != none]
    if plan.asynchronous and alone:
        raise PlanError(
            f"{local} with asynchronous and {alone[0]}={getattr(plan, alone[0])}: a worker sends "
            f"all weights at once, and waits for the answer; leave {alone[0]} out"
        )


# -------------------------------------------------------------------------------------- pipelines


def check_pipeline(plan: "Plan") -> None:
    """Raise PlanError unless the options of the pipeline go together, and with the rest of the
    plan."""
    try:
        stages_a_rank(plan.schedule, plan.stages_per_rank)
    except ScheduleError as error:
        raise PlanError(f"plan stages_per_rank={plan.stages_per_rank}: {error}") from None
    if plan.updates_each_microbatch:
        _check_updates(plan)
    numbers = layer_numbers(plan.stage_layers)
    if plan.stage_layers not in ("even", "measured") and (
        numbers is None or len(numbers) != plan.stages or 0 in numbers[1:-1]
    ):
        raise PlanError(
            f"plan stage_layers={plan.stage_layers!r}: choose even, measured, or {plan.stages} "
            f"number{'s' * (plan.stages > 1)} of layers, of each stage, as "
            f"{','.join(['2'] * plan.stages)}; only the first and the last may have none"
        )
    if plan.microbatches is None:
        return
    if not isinstance(plan.microbatches, int) or plan.microbatches < 1:
        raise PlanError(f"plan microbatches={plan.microbatches!r}: a pipeline needs at least one")
    if plan.pp == 1 and plan.microbatches > 1:
        raise PlanError(
            f"plan microbatches={plan.microbatches} with pp=1: there is no pipeline to fill; use "
            f"accumulate={plan.accumulate * plan.microbatches}, which makes as many passes, or pp=2"
        )


def layer_numbers(text: str) -> list[int] | None:
    """Return "1,2,1" as numbers; None for another text."""
    numbers = text.split(",")
    return (
        [*map(int, numbers)]
        if all(n.isascii() and n.isdigit() and len(n) < 10 for n in numbers)
        else None
    )


def _check_updates(plan: "Plan") -> None:
    """Raise PlanError unless the plan fits PipeDream, which updates each stage separately and so
    needs replicas with whole gradients."""
    given = f"plan schedule={plan.schedule}"
    if plan.pp == 1:
        raise PlanError(
            f"{given} with pp=1: no stage updates before another; use pp=2, or leave it out"
        )
    if plan.precision not in ("fp32", "bf16"):
        raise PlanError(
            f"{given} with precision={plan.precision}: its loss scale changes once per step, but "
            "each microbatch makes an update; use bf16, or schedule=1f1b"
        )
    alone = {"zero": 0, "ep": 1, "offload": "none", "compress": "none", "accumulate": 1}
    other = next((name for name, none in alone.items() if getattr(plan, name) != none), None)
    if other is not None:
        raise PlanError(
            f"{given} with {other}={getattr(plan, other)}: each microbatch makes an update, with "
            f"older weights kept whole; use {other}={alone[other]}, or schedule=1f1b"
        )


def updating_misfits(plan: "Plan", config: GPTConfig) -> Iterator[tuple[str, str]]:
    """Yield why PipeDream cannot train a model, as plan_checks says it."""
    if plan.updates_each_microbatch and config.tied:
        yield (
            f"schedule={plan.schedule} with a tied output: the first and the last rank would have "
            "to exchange gradients at each update of their table",
            "tied=False",
        )
    if (
        plan.updates_each_microbatch
        and config.mixture is not None
        and config.mixture.balance == "loss"
    ):
        yield (
            f"schedule={plan.schedule} with a balance loss: its scale is that of the batch, and "
            "each microbatch makes an update",
            "balance=bias",
        )


def check_clip(plan: "Plan", clip: float | None) -> None:
    """Raise PlanError if gradients are to be clipped by a norm that no rank ever knows."""
    if plan.updates_each_microbatch and clip is not None:
        raise PlanError(
            f"plan schedule={plan.schedule} with clip={clip}: each stage updates separately after "
            "each microbatch, and no rank knows the norm of all gradients; use clip=None (--clip 0)"
        )
