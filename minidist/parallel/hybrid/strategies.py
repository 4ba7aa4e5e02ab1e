"""Makes what a plan names: its precision, the place of its state, and the strategy that runs its
steps.

Each function imports a chapter's module where the plan asks for it, so a process loads only the
chapters that it trains by.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.autograd.ops.collectives import shard_of
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import Array, dtype_name, on_gpu
from minidist.nn import GPT, DropoutKey, GPTConfig
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Key, Loss
from minidist.parallel.step.strategy import DataAxis, Strategy
from minidist.parallel.zero.shards import ShardStore

if TYPE_CHECKING:
    from minidist.parallel.hybrid.hybrid_step import Hybrid
    from minidist.parallel.hybrid.mesh import Mesh
    from minidist.parallel.hybrid.plan import Plan
    from minidist.parallel.memory.activation_budget import ActivationBudget
    from minidist.parallel.memory.kept_inputs import InputKeeper
    from minidist.parallel.pipeline.pipeline import Pipeline

SAME = "same"
"""Servers are on the workers' device, and keep the workers' dtype."""


def make_model(plan: "Plan", config: GPTConfig, mesh: "Mesh") -> tuple[Precision, GPT]:
    """Return the plan's precision, and the model in it, not yet drawn. The ranks of a stage of
    `mesh` share fp8's scales."""
    if plan.precision == "fp32":
        return Precision(), GPT(config)
    from minidist.parallel.precision.mixed_precision import MixedPrecision

    precision = MixedPrecision(plan.precision, masters=config.dtype)
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
    store: ShardStore,
    precision: Precision,
    key: Callable[[Array, int], DropoutKey | None],
    recorder: Recorder,
    loss: Loss,
) -> Strategy:
    """Draw the model, and return the strategy of a plan that has only the data axis; `group`: its
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
        from minidist.parallel.data.data_parallel import DataParallel

        return DataParallel(
            model,
            plan.replicas,
            gpus=gpus,
            recorders=[recorder, *(Silent() for _ in range(plan.replicas - 1))],
            forward=lambda replica, inputs, first: replica(inputs, key=key(inputs, first)),
        )
    if plan.local_steps is not None:
        return make_local_steps(model, group, plan, **options)
    if plan.strategy == "parameter-server":
        from minidist.parallel.data.parameter_server import ParameterServer

        return ParameterServer(
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
    """Return the strategy of ranks that meet every few steps. Args: options: further ones of the
    strategy."""
    from minidist.parallel.compress.outer import OUTERS

    given = {"lr": plan.outer_lr, "momentum": plan.outer_momentum}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options["every"] = plan.local_steps
    options["outer"] = OUTERS[plan.outer]._replace(**changes)
    if plan.asynchronous:
        from minidist.parallel.compress.async_local_steps import AsyncLocalSteps

        return AsyncLocalSteps(
            model, group, servers=plan.servers, staleness=plan.staleness, **options
        )
    options["scheme"] = make_scheme(plan.outer_compress) or Scheme(plan.algorithm)
    if (plan.fragments, plan.delay, plan.mix) == (1, 0, 0):
        from minidist.parallel.compress.local_steps import LocalSteps

        return LocalSteps(model, group, **options)
    from minidist.parallel.compress.streaming import StreamingLocalSteps

    return StreamingLocalSteps(
        model, group, fragments=plan.fragments, delay=plan.delay, mix=plan.mix, **options
    )


def make_scheme(text: str) -> Scheme | None:
    """Return the scheme of "NAME:option=value"; None for "none": arrays travel as they are."""
    if text == "none":
        return None
    from minidist.parallel.compress.compress import scheme_of

    return scheme_of(text)


def make_store(
    plan: "Plan", folder: str | Path | None, *, device: str, recorder: Recorder
) -> ShardStore:
    """Return the place of ZeRO's chunks, by the plan's `offload`; `folder`: for the files of
    "all"."""
    match plan.offload:
        case "none":
            return ShardStore()
        case "optimizer":
            from minidist.parallel.memory.offload import OnHost

            return OnHost(recorder=recorder)
        case _:
            from minidist.parallel.memory.offload_disk import OnDisk

            return OnDisk(folder, device=device, recorder=recorder)


def make_keeper(
    plan: "Plan", mesh: "Mesh", store: ShardStore, *, recorder: Recorder
) -> "InputKeeper | None":
    """Return what keeps the inputs of checkpointed blocks; None: blocks keep them themselves."""
    if not plan.ways:
        return None
    from minidist.parallel.memory.kept_inputs import InputKeeper

    tp = mesh["tp"]
    own = partial(shard_of, group=tp) if plan.sequence_parallel else None
    return InputKeeper(plan.ways, tp=tp, own=own, host=store.host, recorder=recorder)


def make_budget(
    plan: "Plan",
    model: Any,
    mesh: "Mesh",
    keeper: "InputKeeper | None",
    pipeline: "Pipeline | None",
) -> "ActivationBudget | None":
    """Return what chooses the blocks to compute again; None where the plan names them. Args:
    pipeline: the strategy's."""
    if plan.activation_memory is None:
        return None
    from minidist.parallel.memory.activation_budget import ActivationBudget, Stage

    blocks = dict(model.blocks if isinstance(model.blocks, dict) else enumerate(model.blocks))
    stages = [Stage(tuple(blocks))]
    if pipeline is not None:
        edges = [0, *accumulate(pipeline.layers)]
        schedule = pipeline.schedule
        stages = [
            Stage(
                tuple(
                    layer
                    for stage in schedule.stages_of(rank)
                    for layer in range(edges[stage], edges[stage + 1])
                ),
                schedule.held(rank),
            )
            for rank in range(plan.pp)
        ]
    return ActivationBudget(
        blocks,
        keeper,
        plan.activation_memory,
        stages=stages,
        rank=mesh["pp"].rank,
        world=mesh.world,
        memory=account.current(),
    )


def make_hybrid(
    model: GPT,
    mesh: "Mesh",
    plan: "Plan",
    *,
    seed: int,
    device: str,
    store: ShardStore,
    precision: Precision,
    key: Key,
    recorder: Recorder,
) -> "Hybrid":
    """Draw this rank's part of the model, and return the strategy of a plan with more axes than
    dp."""
    from minidist.parallel.hybrid.hybrid_step import Hybrid
    from minidist.parallel.hybrid.pipedream_step import HybridPipeDream

    strategy = HybridPipeDream if plan.updates_each_microbatch else Hybrid
    return strategy(
        model,
        mesh,
        plan,
        seed=seed,
        device=device,
        store=store,
        precision=precision,
        key=key,
        recorder=recorder,
    )


def make_data_axis(
    model: GPT,
    group: Group,
    plan: "Plan",
    *,
    seed: int,
    device: str,
    store: ShardStore,
    **options: Any,
) -> DataAxis:
    """Return DDP or ZeRO, to train the replicas of a model or of a part of it.

    Args:    model: drawn; with ZeRO-3 not yet, and each rank draws only its chunks. group: the
             ranks that share it. store: where ZeRO's chunks lie; options: further ones of the
             strategy.
    """
    options["algorithm"] = plan.algorithm
    scheme = make_scheme(plan.compress)
    if scheme is not None:
        options["scheme"] = scheme
    # on one rank: gradients by buckets
    stage = plan.zero or (2 if plan.offload == "optimizer" else 0)
    if stage:
        options["shard"] = plan.shard
        options["store"] = store
    match stage:
        case 0:
            from minidist.parallel.data.ddp import DDP

            return DDP(model, group, bucket_bytes=plan.bucket_bytes, **options)
        case 1:
            from minidist.parallel.zero.zero1 import Zero1

            return Zero1(model, group, bucket_bytes=plan.bucket_bytes, **options)
        case 2:
            from minidist.parallel.zero.zero2 import Zero2

            return Zero2(model, group, bucket_bytes=plan.bucket_bytes, **options)
        case _:
            from minidist.parallel.zero.staged_zero3 import StagedZero3
            from minidist.parallel.zero.zero3 import Zero3

            zero3 = StagedZero3 if plan.pp > 1 else Zero3
            tied = model.tokens if model.config.tied else None  # used at both ends: held all step
            return zero3(
                model,
                group,
                units=[child for _, child in model.children() if child is not tied],
                seed=seed,
                device=device,
                free_after_forward=not plan.keep_gathered,
                **options,
            )
