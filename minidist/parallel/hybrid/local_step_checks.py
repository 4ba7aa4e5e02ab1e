"""What a plan with local steps (chapter 21) goes with: each refusal is one line."""

from typing import TYPE_CHECKING, Any

from minidist.errors import ConfigError, PlanError
from minidist.parallel.hybrid.strategies import load

if TYPE_CHECKING:
    from minidist.parallel.hybrid.plan import Plan

OUTER_OPTIMIZERS = ("sgd", "nesterov")
"""What ranks that meet seldom make of the way that each has come (compress/outer.py)."""

OUTER_SCHEMES = ("none", "fp16", "bf16", "8bit", "4bit")
"""How the way that each has come travels: schemes that know nothing of gradients, layers or the inner optimizer."""

OF_STREAMING: dict[str, Any] = {"fragments": 1, "delay": 0, "mix": 0.0, "outer_compress": "none"}
OF_LOCAL_STEPS: dict[str, Any] = {"outer": "nesterov", "outer_lr": None, "outer_momentum": None, **OF_STREAMING}
"""Options of local steps alone, and what stands for none."""


def check_local_steps(plan: "Plan") -> None:
    """Raise PlanError unless local steps and their options go together, and with the rest of the plan."""
    given = [option for option, none in OF_LOCAL_STEPS.items() if getattr(plan, option) != none]
    if plan.local_steps is None:
        if given:
            raise PlanError(f"plan {given[0]}={getattr(plan, given[0])}: is for ranks that meet seldom; add "
                            f"local_steps=25, or leave it out")
        return
    if not isinstance(plan.local_steps, int) or plan.local_steps < 1:
        raise PlanError(f"plan local_steps={plan.local_steps!r}: ranks meet after a whole number of steps, from 1")
    _check_company(plan, given)
    if not isinstance(plan.fragments, int) or plan.fragments < 1 or plan.local_steps % plan.fragments:
        raise PlanError(f"plan fragments={plan.fragments} with local_steps={plan.local_steps}: each fragment has its "
                        f"turn once in so many steps; choose fragments that divide local_steps")
    if not isinstance(plan.delay, int) or not 0 <= plan.delay < plan.local_steps:
        raise PlanError(f"plan delay={plan.delay} with local_steps={plan.local_steps}: a fragment is mixed in before "
                        f"it sets out again; choose 0 to {plan.local_steps - 1}")
    if not 0 <= plan.mix < 1:
        raise PlanError(f"plan mix={plan.mix}: of a rank's own weights a part from 0 to less than 1 stays")
    _check_outer(plan)
    if plan.outer_compress.partition(":")[0] not in OUTER_SCHEMES:
        raise PlanError(f"plan outer_compress={plan.outer_compress}: choose one of {', '.join(OUTER_SCHEMES)}, with "
                        f"its options")
    if plan.outer_compress != "none":
        try:
            load("compress")(plan.outer_compress)
        except ConfigError as error:
            raise PlanError(f"plan outer_{error}") from None


def check_change(plan: "Plan", other: "Plan") -> None:
    """Raise PlanError if a training cannot go on under the other plan, from memory to memory."""
    if plan.local_steps is not None or other.local_steps is not None:
        raise PlanError("change_plan: with local steps each rank has weights and state of its own, and without none "
                        "has; start a new run")


def _check_outer(plan: "Plan") -> None:
    if plan.outer not in OUTER_OPTIMIZERS:
        raise PlanError(f"plan outer={plan.outer!r}: choose one of {', '.join(OUTER_OPTIMIZERS)}")
    if plan.outer_lr is not None and not 0 < plan.outer_lr < float("inf"):
        raise PlanError(f"plan outer_lr={plan.outer_lr}: the outer rate is above 0")
    if plan.outer_momentum is not None and not 0 <= plan.outer_momentum < 1:
        raise PlanError(f"plan outer_momentum={plan.outer_momentum}: choose from 0 to less than 1")
    if plan.outer == "nesterov" and plan.outer_momentum == 0:
        raise PlanError("plan outer=nesterov with outer_momentum=0: it looks ahead along the momentum; choose "
                        "outer=sgd")


def _check_company(plan: "Plan", given: list[str]) -> None:
    """The rest of the plan."""
    local = f"plan local_steps={plan.local_steps}"
    if plan.composed:
        axis = next(axis for axis, size in plan.axes.items() if axis != "dp" and size > 1)
        raise PlanError(f"{local} with {axis}={plan.axes[axis]}: each rank trains a whole model by itself; use "
                        f"dp={plan.size}")
    if plan.compress != "none":
        raise PlanError(f"{local} with compress={plan.compress}: no gradient travels; use outer_compress")
    if (plan.zero, plan.precision, plan.offload, plan.device_memory) != (0, "fp32", "none", None):
        raise PlanError(f"{local}: zero, precision, offload and device_memory are for ranks that make each step "
                        f"together; leave them out")
    if plan.strategy == "data-parallel" or (plan.strategy == "parameter-server" and not plan.asynchronous):
        raise PlanError(f"{local} with strategy={plan.strategy}: use strategy=ddp, or parameter-server with "
                        f"asynchronous, where each worker meets the servers by itself")
    alone = [option for option in given if option in OF_STREAMING]
    if plan.asynchronous and alone:
        raise PlanError(f"{local} with asynchronous and {alone[0]}={getattr(plan, alone[0])}: a worker sends all "
                        f"weights at once, and waits for the answer; leave {alone[0]} out")
