"""The strategies that a plan names, each loaded when a plan asks for it: to read one is to read its
chapter alone."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from minidist.autograd.ops.collectives import shard_of
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, dtype_name, on_gpu
from minidist.nn import GPT, DropoutKey, GPTConfig
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.single import Single
from minidist.parallel.step.strategy import DataAxis, Strategy

if TYPE_CHECKING:
    from minidist.parallel.hybrid.mesh import Mesh
    from minidist.parallel.hybrid.plan import Plan

SAME = "same"
"""Servers are on the workers' device, and keep the workers' dtype."""

PLACES = {
    "data-parallel": "data.data_parallel.DataParallel",
    "parameter-server": "data.parameter_server.ParameterServer",
    "zero=0": "data.ddp.DDP",
    "zero=1": "zero.zero1.Zero1",
    "zero=2": "zero.zero2.Zero2",
    "zero=3": "zero.zero3.Zero3",
    "tensor": "tensor.tensor_parallel.tensor_parallel",
    "sequence": "context.sequence_parallel.sequence_parallel",
    "loads": "experts.expert_load.ExpertLoad",
    "experts": "experts.expert_parallel.expert_parallel",
    "nodes": "experts.node_experts.settle_nodes",
    "ring": "context.ring_attention.attend_by_ring",
    "pieces": "context.sparse_ring_attention.attend_by_pieces",
    "all-to-all": "context.ulysses.attend_by_heads",
    "offload=none": "zero.shards.ShardStore",
    "offload=optimizer": "memory.offload.OnHost",
    "offload=all": "memory.offload_disk.OnDisk",
    "kept": "memory.kept_inputs.InputKeeper",
    "budget": "memory.activation_budget.ActivationBudget",
    "pipedream": "hybrid.pipedream_step.HybridPipeDream",
    "stage": "memory.activation_budget.Stage",
    "local-steps": "compress.local_steps.LocalSteps",
    "streaming": "compress.streaming.StreamingLocalSteps",
    "asynchronous": "compress.async_local_steps.AsyncLocalSteps",
    "outers": "compress.outer.OUTERS",
    "precision": "precision.mixed_precision.MixedPrecision",
    "compress": "compress.compress.scheme_of",
}
"""A plan's word -> module and name, inside parallel/."""


def load(name: str) -> Any:
    """The class or function of a plan's word."""
    module, _, attribute = PLACES[name].rpartition(".")
    return getattr(import_module(f"minidist.parallel.{module}"), attribute)


def make_model(plan: "Plan", config: GPTConfig, mesh: "Mesh") -> tuple[Precision, GPT]:
    """The plan's precision, and the model in it, not yet drawn. The ranks of a stage of `mesh`
    share fp8's scales."""
    if plan.precision == "fp32":
        return Precision(), GPT(config)
    precision: Any = load("precision")(plan.precision, masters=config.dtype)
    model = GPT(replace(config, dtype=dtype_name(precision.dtype)))
    if plan.precision == "fp8":
        precision.attach(model, mesh.stage)
    return precision, model


def make_strategy(
    model: GPT,
    group: Group,
    plan: "Plan",
    *,
    seed: int,
    device: str,
    store: Any,
    precision: Precision,
    key: Callable[[Array, int], DropoutKey | None],
    recorder: Recorder,
    loss: Callable[..., Any],
) -> Strategy:
    """Draw the model, and take the strategy of a plan that has the data axis alone; `group`: its
    ranks."""
    options: dict[str, Any] = {"loss": loss, "recorder": recorder}
    if plan.server_device != SAME and group.rank >= plan.workers:
        device = plan.server_device
    gpus = [int(number) for number in plan.devices.split(",") if number]
    if gpus:
        on_gpu(gpus[0]).use()  # of the calling thread: the optimizer's state is made there, too
    if plan.zero < 3:
        model.initialize(seed, device=device)
    if plan.strategy == "data-parallel":
        return load("data-parallel")(  # type: ignore[no-any-return]
            model,
            plan.replicas,
            gpus=gpus,
            recorders=[recorder, *(Silent() for _ in range(plan.replicas - 1))],
            forward=lambda replica, inputs, first: replica(inputs, key=key(inputs, first)),
        )
    if plan.local_steps is not None:
        return make_local_steps(model, group, plan, **options)
    if plan.strategy == "parameter-server":
        return load("parameter-server")(  # type: ignore[no-any-return]
            model,
            group,
            servers=plan.servers,
            asynchronous=plan.asynchronous,
            staleness=plan.staleness,
            server_dtype=plan.masters_of_servers,
            **options,
        )
    if plan.dp == 1 and not plan.zero and plan.offload == "none":
        return Single(model, precision=precision, **options)
    return make_data_axis(
        model, group, plan, seed=seed, device=device, store=store, precision=precision, **options
    )


def make_local_steps(model: GPT, group: Group, plan: "Plan", **options: Any) -> Strategy:
    """The strategy of ranks that meet seldom."""
    outer: Any = load("outers")[plan.outer]
    given = {"lr": plan.outer_lr, "momentum": plan.outer_momentum}
    options |= {
        "every": plan.local_steps,
        "outer": outer._replace(
            **{name: value for name, value in given.items() if value is not None}
        ),
    }
    if plan.asynchronous:
        return cast(
            Strategy,
            load("asynchronous")(
                model, group, servers=plan.servers, staleness=plan.staleness, **options
            ),
        )
    named = plan.outer_compress
    options["scheme"] = Scheme(plan.algorithm) if named == "none" else load("compress")(named)
    streaming = {"fragments": plan.fragments, "delay": plan.delay, "mix": plan.mix}
    if streaming == {"fragments": 1, "delay": 0, "mix": 0}:
        return cast(Strategy, load("local-steps")(model, group, **options))
    return cast(Strategy, load("streaming")(model, group, **streaming, **options))


def make_store(plan: "Plan", folder: str | Path | None, *, device: str, recorder: Recorder) -> Any:
    """Where the chunks of ZeRO lie, as the plan's `offload` says; `folder`: for the files of
    "all"."""
    store = load(f"offload={plan.offload}")
    if plan.offload == "all":
        return store(folder, device=device, recorder=recorder)
    return store(recorder=recorder) if plan.offload == "optimizer" else store()


def make_keeper(plan: "Plan", mesh: "Mesh", store: Any, *, recorder: Recorder) -> Any:
    """What keeps the inputs of checkpointed blocks, or None: they stay as they are."""
    if not plan.ways:
        return None
    tp = mesh["tp"]
    own = partial(shard_of, group=tp) if plan.sequence_parallel else None
    return load("kept")(plan.ways, tp=tp, own=own, host=store.host, recorder=recorder)


def make_budget(plan: "Plan", model: Any, mesh: "Mesh", keeper: Any, pipeline: Any) -> Any:
    """What chooses the blocks to compute again, or None where the plan says it; `pipeline`: that of
    the strategy."""
    if plan.activation_memory is None:
        return None
    blocks = dict(model.blocks if isinstance(model.blocks, dict) else enumerate(model.blocks))
    make = load("budget")
    stages = [load("stage")(tuple(blocks))]
    if pipeline is not None:
        edges = [0, *accumulate(pipeline.layers)]
        schedule = pipeline.schedule
        stages = [
            load("stage")(
                tuple(
                    layer
                    for stage in schedule.stages_of(rank)
                    for layer in range(edges[stage], edges[stage + 1])
                ),
                schedule.held(rank),
            )
            for rank in range(plan.pp)
        ]
    return make(
        blocks,
        keeper,
        plan.activation_memory,
        stages=stages,
        rank=mesh["pp"].rank,
        world=mesh.world,
        memory=account.current(),
    )


def make_data_axis(
    model: GPT,
    group: Group,
    plan: "Plan",
    *,
    seed: int,
    device: str,
    store: Any = None,
    **options: Any,
) -> DataAxis:
    """DDP or ZeRO, to train the replicas of a model or of a part of it.

    Args:    model: drawn; with ZeRO-3 not yet, and each rank draws its chunks alone. group: the
             ranks that share it.
             store: where ZeRO's chunks lie; options: further ones of the strategy.
    """
    options["algorithm"] = plan.algorithm
    if plan.compress != "none":
        options["scheme"] = load("compress")(plan.compress)
    # on one rank: gradients by buckets
    stage = plan.zero or (2 if plan.offload == "optimizer" else 0)
    if stage:
        options |= {"shard": plan.shard, "store": store}
    if stage < 3:
        return cast(
            DataAxis, load(f"zero={stage}")(model, group, bucket_bytes=plan.bucket_bytes, **options)
        )
    tied = model.tokens if model.config.tied else None  # used at both ends: held all step
    units = [child for _, child in model.children() if child is not tied]
    return cast(
        DataAxis,
        load("zero=3")(
            model,
            group,
            units=units,
            seed=seed,
            device=device,
            free_after_forward=not plan.keep_gathered,
            **options,
        ),
    )
