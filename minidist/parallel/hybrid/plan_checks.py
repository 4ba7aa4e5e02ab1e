"""Which options of a plan go together: each refusal is one line that names a plan that fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from minidist.comm.collectives.select import ALGORITHMS
from minidist.errors import PlanError
from minidist.nn import GPTConfig
from minidist.nn.config import divisors
from minidist.nn.shares import narrowest
from minidist.parallel.hybrid.option_checks import (
    budget_misfits,
    check_compress,
    check_kept_inputs,
    check_local_steps,
    check_pipeline,
    layer_numbers,
    updating_misfits,
)
from minidist.parallel.hybrid.plan_options import PlanOption, options_of
from minidist.parallel.memory.activations import ALL, chosen

if TYPE_CHECKING:
    from minidist.parallel.hybrid.plan import Plan

ZERO_STAGES = (0, 1, 2, 3)
"""What the data axis divides among its ranks: nothing, the optimizer, the gradients too, the
parameters too."""

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
"""How weights and gradients are kept: as the model's dtype says, or in two bytes beside float32
master weights; with fp8 the inputs of matrix products are rounded to one byte."""

OFFLOADS = ("none", "optimizer", "all")
"""What leaves the device: nothing; optimizer state and update, to the host; all that lasts, to
disk."""

STRATEGIES = ("ddp", "data-parallel", "parameter-server")
"""How the data axis is trained: replicas that are equals (with zero: divided), one process, workers
and servers."""

ATTENTIONS = ("ring", "all-to-all")
"""How ranks of cp, each with some tokens, see all keys: these go round (ring_attention.py), or
heads are swapped for tokens (ulysses.py)."""

PLACEMENTS = ("node", "rank")
"""How ranks are counted along the axes: node by node, whatever the launcher's numbers are; or by
those numbers."""

SERVER_DEVICES = ("same", "cpu", "cuda")
SERVER_DTYPES = ("same", "float32", "float64")
"""Where parameter servers are, and in which dtype they update: as the workers, or otherwise."""

AXES = ("dp", "pp", "ep", "cp", "tp")
"""Mesh axes, outermost first: data, pipeline, expert, context, tensor."""

ORDER = ",".join(AXES)
"""The axes as `order` has them: the last is innermost, its ranks are neighbours."""

OTHER_AXES: dict[str, Any] = {
    "microbatches": None,
    "stages_per_rank": None,
    "stage_layers": "even",
    "attention": "ring",
    "sequence_parallel": False,
    "shard": None,
}
"""Options that depend on the sizes of the axes, and what stands for none."""


def axis_order(order: str | Sequence[str]) -> tuple[str, ...]:
    """Return all axes, the innermost last; axes that `order` ("tp,dp") does not name are first.
    Raises: PlanError.
    """
    given = order.split(",") if isinstance(order, str) else list(order)
    if set(given) - set(AXES) or len(set(given)) < len(given):
        raise PlanError(
            f"order {','.join(given)}: name different axes of {', '.join(AXES)}, the innermost last"
        )
    return (*(axis for axis in AXES if axis not in given), *given)


def data_alone(plan: "Plan", ranks: int | None = None, **options: Any) -> tuple["Plan", str] | None:
    """Return the plan with all its ranks (or `ranks`) on the data axis, and a text of it; None if
    there is no such plan."""
    dropped = {option: none for option, none in OTHER_AXES.items() if getattr(plan, option) != none}
    axes = {**dict.fromkeys(AXES, 1), "dp": ranks or plan.size}
    other = _changed(plan, **{**axes, **dropped, **options})
    return other and (other[0], other[1] + (f" without {' and '.join(dropped)}" if dropped else ""))


def _changed(plan: "Plan", **options: Any) -> tuple["Plan", str] | None:
    """Return the plan with other options, and a text of its axes; None if there is no such plan."""
    try:
        other = replace(plan, **options)
    except PlanError:
        return None
    return other, words(other.axes)


def savings(plan: "Plan") -> str:
    """Return, for errors, ways to use less of the device's memory that the plan does not use
    yet."""
    ways = ["use fewer sequences per pass (accumulate)"]
    if plan.checkpoint_blocks != ALL and plan.activation_memory is None:
        ways.append("keep less of them (checkpoint_blocks)")
    if plan.zero < 3 and plan.copies > 1:
        ways.append("divide more (zero)")
    if plan.offload != "all" and not plan.updates_each_microbatch:
        ways.append("offload more (offload)")
    return ", ".join(("raise it", *ways[:-1])) + f", or {ways[-1]}"


def words(axes: Mapping[str, int]) -> str:
    """Return axes as the command line has them, without axes of one rank: "dp=2,tp=4"."""
    return ",".join(f"{axis}={axes[axis]}" for axis in AXES if axes.get(axis, 1) > 1) or "dp=1"


class Need(NamedTuple):
    """A condition that an option of a plan needs.

    Attributes: there: return whether a plan meets it; why: return the end of the error if not.
    """

    there: Callable[["Plan"], bool]
    why: Callable[["Plan"], str]


NEEDS = {
    "zero": Need(
        lambda plan: plan.zero > 0,
        lambda plan: "zero=0: nothing is divided among ranks; choose zero=1, 2 or 3",
    ),
    "zero=3": Need(
        lambda plan: plan.zero == 3,
        lambda plan: f"zero={plan.zero}: only ZeRO-3 gathers units; choose zero=3",
    ),
    "pp": Need(
        lambda plan: plan.pp > 1,
        lambda plan: "pp=1: there is no pipeline; use pp=2, or leave it out",
    ),
    "cp": Need(
        lambda plan: plan.cp > 1,
        lambda plan: "cp=1: no sequence is cut; use cp=2, or leave it out",
    ),
    "tp": Need(
        lambda plan: plan.tp > 1,
        lambda plan: (
            "tp=1: it divides what lies between tensor-parallel regions; use tp=2, or cp=2, which "
            "divides attention too"
        ),
    ),
    "servers": Need(
        lambda plan: plan.strategy == "parameter-server",
        lambda plan: (
            f"strategy={plan.strategy}: there is no server; use strategy=parameter-server, or "
            "leave it out"
        ),
    ),
    "replicas": Need(
        lambda plan: plan.strategy == "data-parallel",
        lambda plan: (
            f"strategy={plan.strategy}: each rank has one device; several are for strategy "
            "data-parallel"
        ),
    ),
    "local steps": Need(
        lambda plan: plan.local_steps is not None,
        lambda plan: (
            "every gradient summed: it is for ranks that train separately between two sums; add "
            "local_steps=25, or leave it out"
        ),
    ),
}
"""{PlanOption.needs: its condition}."""


@cache
def _options() -> dict[str, tuple[Field[Any], PlanOption]]:
    """Return the options that have choices or need something."""
    from minidist.parallel.hybrid.plan import Plan

    found = options_of(Plan)
    return {name: one for name, one in found.items() if one[1].choices or one[1].needs}


def options_that_need(what: str) -> dict[str, Any]:
    """Return the options of a plan that need `what` (a key of NEEDS), with their defaults."""
    return {name: each.default for name, (each, about) in _options().items() if about.needs == what}


def check(plan: "Plan") -> None:
    """Raise PlanError unless the plan's fields go together for every model."""
    for axis, size in plan.axes.items():
        if not isinstance(size, int) or size < 1:
            raise PlanError(
                f"plan axis {axis}={size}: the number of ranks along an axis is a whole number "
                "from 1"
            )
    if plan.bucket_bytes < 1:
        raise PlanError(f"plan bucket_bytes={plan.bucket_bytes}: a bucket holds at least one byte")
    if not isinstance(plan.accumulate, int) or plan.accumulate < 1:
        raise PlanError(
            f"plan accumulate={plan.accumulate!r}: a step has at least one backward pass"
        )
    axis_order(plan.order)
    for name, (each, about) in _options().items():
        value = getattr(plan, name)
        if about.choices and value not in about.choices:
            raise PlanError(
                f"plan {name}={value!r}: choose one of {', '.join(map(str, about.choices))}"
            )
        if about.needs and value != each.default and not NEEDS[about.needs].there(plan):
            given = name if value is True else f"{name}={value}"
            raise PlanError(f"plan {given} with {NEEDS[about.needs].why(plan)}")
    for part in (
        _check_zero,
        _check_algorithm,
        _check_offload,
        _check_strategy,
        check_compress,
        check_pipeline,
        check_kept_inputs,
        check_local_steps,
    ):
        part(plan)


def _check_zero(plan: "Plan") -> None:
    """Raise PlanError unless the ZeRO stage and the number of ranks that share a copy fit."""
    if plan.shard is None:
        return
    fits = divisors(plan.copies)
    axes = " × ".join(axis for axis in ("dp", "ep", "cp") if axis == "dp" or plan.axes[axis] > 1)
    if plan.shard not in fits:
        raise PlanError(
            f"plan shard={plan.shard!r}: the {plan.copies} rank{'s' * (plan.copies > 1)} of "
            f"{axes} cannot be divided into copies of {plan.shard!r} ranks; choose one of "
            f"{', '.join(map(str, fits))}"
        )


def _check_algorithm(plan: "Plan") -> None:
    """Raise PlanError unless each collective of the data axis has the algorithm."""
    verbs = ["reduce_scatter", "all_gather"] if plan.zero else ["all_reduce"]
    if plan.shard is not None and plan.shard < plan.copies:
        verbs.append("all_reduce")
    taken = [
        name for name in ALGORITHMS[verbs[0]] if all(name in ALGORITHMS[verb] for verb in verbs)
    ]
    if plan.algorithm not in (*taken, "auto"):
        raise PlanError(
            f"plan algorithm={plan.algorithm!r} with zero={plan.zero}, which sends by "
            f"{', '.join(verbs)}: choose one of {', '.join(taken)}, auto"
        )


def _check_offload(plan: "Plan") -> None:
    if plan.offload == "all" and plan.zero != 3:
        raise PlanError(
            f"plan offload=all streams the units of ZeRO-3, and the plan has zero={plan.zero}; use "
            f"zero=3, on one rank too"
        )
    if plan.offload == "optimizer" and not plan.zero and plan.copies > 1:
        raise PlanError(
            "plan offload=optimizer with zero=0 would keep and update the same state "
            f"{plan.copies} times; use zero=1, 2 or 3"
        )
    if plan.offload != "none" and plan.compress != "none" and plan.shard not in (None, plan.copies):
        raise PlanError(
            f"plan offload={plan.offload} with compress={plan.compress} and shard={plan.shard}: "
            "copies are summed on the host, where no scheme has its residuals; leave one of the "
            "three out"
        )
    if plan.device_memory is not None and plan.device_memory < 1:
        raise PlanError(
            f"plan device_memory={plan.device_memory}: a device has at least one byte; write 64MiB"
        )


def _check_strategy(plan: "Plan") -> None:
    """Raise PlanError unless the plan fits a strategy other than DDP and ZeRO, and has no option
    that only another strategy uses."""
    others = (plan.zero, plan.precision, plan.offload, plan.device_memory)
    served = (
        plan.strategy == "parameter-server" and not plan.asynchronous and plan.precision == "bf16"
    )
    if plan.strategy != "ddp" and others != (0, "bf16" if served else "fp32", "none", None):
        raise PlanError(
            f"plan strategy={plan.strategy}: zero, precision, offload and device_memory are for "
            f"strategy ddp; leave them out (synchronous servers also take precision=bf16)"
        )
    if plan.asynchronous and plan.server_dtype != "same":
        raise PlanError(
            f"plan server_dtype={plan.server_dtype} with asynchronous: a worker reports the "
            "weights of the run, but its own are rounded; leave one of the two out"
        )
    if plan.strategy == "parameter-server" and plan.composed:
        raise PlanError(
            f"plan {words({**plan.axes, 'dp': 1})} with strategy={plan.strategy}: it keeps whole "
            f"models; use strategy=ddp{_or(data_alone(plan))}"
        )
    numbers = plan.devices.split(",") if plan.devices else []
    if numbers and (
        len(numbers) != plan.replicas or not all(n.isascii() and n.isdigit() for n in numbers)
    ):
        raise PlanError(
            f"plan devices={plan.devices} with replicas={plan.replicas}: name a GPU for each, as "
            f"{','.join(map(str, range(plan.replicas)))}"
        )
    if plan.strategy == "data-parallel" and (plan.size > 1 or plan.replicas < 1):
        raise PlanError(
            "plan strategy=data-parallel is one process with a thread for each of its replicas; "
            f"start one rank instead of {plan.size}, and use replicas={max(plan.size, 2)}"
        )
    if plan.strategy == "parameter-server" and not 1 <= plan.servers < plan.dp:
        raise PlanError(
            f"plan servers={plan.servers}: of {plan.dp} rank{'s' * (plan.dp > 1)} on the data "
            f"axis, at least one is a server and one a worker; start {max(2, plan.servers + 1)} "
            "or more"
        )
    if plan.staleness is not None and plan.staleness < 0:
        raise PlanError(
            f"plan staleness={plan.staleness}: it is how many steps a worker may be ahead of the "
            "slowest; choose 0 or more"
        )


# ----------------------------------------------------------------------------------- plan and model


def check_model(plan: "Plan", config: GPTConfig) -> None:
    """Check that the plan can cut a model. Args: config: the model. Raises: PlanError with a plan
    or model that fits."""
    chosen(plan.checkpoint_blocks, config.layers)
    for wrong, remedy in _misfits(plan, config):
        other = data_alone(plan)
        fits = other is not None and not any(_misfits(other[0], config))
        raise PlanError(f"plan {wrong}; use {f'{other[1]}, or ' if other and fits else ''}{remedy}")


def check_ranks(plan: "Plan", ranks: int, config: GPTConfig | None = None) -> None:
    """Check that the plan is for this number of ranks. Raises: PlanError that names plans that are.

    Args:    ranks: of the job. config: the model, if given: the plans that the error names can cut
             it.
    """
    if plan.size == ranks:
        return
    found = (
        other
        for other in (_changed(plan, dp=ranks * plan.dp // plan.size), data_alone(plan, ranks))
        if other
        and other[0].size == ranks
        and (config is None or not any(_misfits(other[0], config)))
    )
    ways = [f"use {name}" for _, name in islice(found, 1)]
    if config is None or not any(_misfits(plan, config)):
        ways.append(f"start {plan.size}")
    if not ways and config is not None:
        check_model(plan, config)  # no number of ranks would help
    raise PlanError(
        f"plan {words(plan.axes)} is for {plan.size} rank{'s' * (plan.size > 1)}, the job has "
        f"{ranks}; {', or '.join(ways)}"
    )


def _or(other: tuple["Plan", str] | None) -> str:
    return f", or {other[1]}" if other else ""


def _misfits(plan: "Plan", config: GPTConfig) -> Iterator[tuple[str, str]]:
    """Yield why the plan cannot cut a model of this shape: (what does not fit, what would help,
    next to another plan)."""
    yield from _misfits_of_experts(plan, config)
    yield from budget_misfits(plan, config)
    yield from updating_misfits(plan, config)
    if plan.server_dtype == "float32" and config.dtype == "float64":
        yield (
            "server_dtype=float32 with dtype float64: servers would round what workers sent",
            "server_dtype=float64",
        )
    if plan.stages > config.layers + 2:
        yield (
            f"pp={plan.pp} with schedule={plan.schedule} has {plan.stages} stages, and the model "
            f"{config.layers} layer{'s' * (config.layers > 1)}: each stage but the first and the "
            "last needs one",
            f"at least {plan.stages - 2} layers",
        )
    numbers = layer_numbers(plan.stage_layers)
    if numbers is not None and sum(numbers) != config.layers:
        yield (
            f"stage_layers={plan.stage_layers} are {sum(numbers)} layers, and the model has "
            f"{config.layers}",
            "stage_layers=even",
        )
    what, count = narrowest(config)
    if plan.tp > count:
        few = f"{count} {what} leave" if count > 1 else f"1 {what.removesuffix('s')} leaves"
        yield f"tp={plan.tp}: {few} a rank without any", f"at least {plan.tp} {what}"
    least = config.heads // plan.tp
    if plan.attention == "all-to-all" and plan.cp > least:
        yield (
            f"cp={plan.cp} with attention=all-to-all: of {config.heads} heads tp={plan.tp} "
            f"leaves a rank {least}, to be divided by cp",
            "attention=ring, which takes any number of ranks",
        )


def _misfits_of_experts(plan: "Plan", config: GPTConfig) -> Iterator[tuple[str, str]]:
    """Yield, as _misfits, the misfits of a mixture of experts, and of ranks that divide it."""
    mixture = config.mixture
    if mixture is None:
        if plan.ep > 1:
            yield (
                f"ep={plan.ep}: the model has no experts to divide",
                f"a mixture (--experts {2 * plan.ep})",
            )
        return
    if mixture.experts % plan.ep:
        yield (
            f"ep={plan.ep}: {mixture.experts} experts do not divide among {plan.ep} ranks",
            f"{-(-mixture.experts // plan.ep) * plan.ep} experts",
        )
    if plan.strategy != "ddp":
        yield f"strategy={plan.strategy}: no rank there adds up the experts' loads", "strategy=ddp"
    if plan.local_steps is not None:
        yield (
            f"local_steps={plan.local_steps}: no rank there adds up the experts' loads",
            "local_steps=None",
        )
    if plan.precision == "fp8":
        yield "precision=fp8: experts' products are not linears, which fp8 is for", "precision=bf16"
