"""The division of a model as a plan says; it returns the strategy that trains this rank's part.

    parallelize      everything: with the data axis only, or divided and then composed
    divide           tensor, experts, context: the inside of the layers
    compose          the pipeline's stages, the weights, and the data axis around all of it
    replicate        the data axis without any other

Read it from the top: each call names the class of a chapter; a Trainer constructs the same classes
that the chapters show. A chapter's module is imported when a plan needs it, so a process loads only
the chapters that it trains by.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import on_gpu
from minidist.nn import GPT
from minidist.parallel.memory.offload_costs import require_disk, require_memory
from minidist.parallel.step.model_axis import ModelAxis
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Key, Part, loss_of
from minidist.parallel.step.strategy import DataAxis, Strategy
from minidist.parallel.zero.shards import ShardStore

if TYPE_CHECKING:
    from minidist.parallel.experts.expert_parallel import ExpertParallel
    from minidist.parallel.hybrid.hybrid_step import Hybrid
    from minidist.parallel.hybrid.mesh import Mesh
    from minidist.parallel.hybrid.plan import Plan
    from minidist.parallel.pipeline.instructions import Schedule
    from minidist.parallel.pipeline.stages import StageModel

SAME = "same"
"""Servers are on the workers' device, and keep the workers' dtype."""


def no_dropout(part: Part) -> None:
    """Return the key of a model without dropout: None."""


def parallelize(
    model: GPT,
    mesh: "Mesh",
    plan: "Plan",
    *,
    seed: int,
    key: Key = no_dropout,
    device: str = "cpu",
    precision: Precision | None = None,
    recorder: Recorder | None = None,
    store: ShardStore | None = None,
) -> Strategy:
    """Draw this rank's part of a GPT, and return the strategy that trains it.

    Args:    model: not yet drawn; it is divided in place. mesh: of the plan's axes. key: of rows,
             for dropout. store: the place of ZeRO's chunks (default: on the device).
    Raises:  PlanError for what does not fit the model; MismatchError if replicas do not start
             equal.
    """
    options: dict[str, Any] = {
        "seed": seed,
        "key": key,
        "device": device,
        "precision": precision,
        "recorder": recorder,
        "store": store,
    }
    if plan.composed:
        return compose(model, mesh, plan, divide(model, mesh, plan), **options)
    return replicate(model, mesh["dp"], plan, **options)


# ------------------------------------------------------------------------- several axes, from inside


def divide(model: GPT, mesh: "Mesh", plan: "Plan") -> list[ModelAxis]:
    """Divide a GPT's matrices, experts and tokens between the ranks of a mesh, in place."""
    axes: list[ModelAxis] = []
    if plan.tp > 1 and not plan.sequence_parallel:
        from minidist.parallel.tensor.tensor_parallel import TensorParallel

        axes.append(TensorParallel(model, mesh["tp"]))
    elif plan.tp > 1:
        from minidist.parallel.context.sequence_parallel import SequenceParallel

        axes.append(SequenceParallel(model, mesh["tp"]))
    if plan.ep > 1:
        axes.append(divide_experts(model, mesh))
    if plan.cp > 1:
        from minidist.parallel.context.context_parallel import ContextParallel

        axes.append(ContextParallel(model, mesh["cp"], plan.attention))
    return axes


def divide_experts(model: GPT, mesh: "Mesh") -> "ExpertParallel":
    """Divide the experts of a GPT's mixtures between the ranks of ep, in place."""
    from minidist.parallel.experts.expert_parallel import ExpertParallel

    ranks = np.moveaxis(
        np.reshape(mesh.world.nodes, tuple(mesh.shape.values())), list(mesh.shape).index("ep"), -1
    )
    return ExpertParallel(
        model,
        mesh["ep"],
        sharers=mesh.experts,  # not all ranks of dp, ep and cp
        among=mesh["ep", "tp"],
        nodes=ranks.reshape(-1, mesh.shape["ep"]).tolist(),
    )


def compose(
    model: GPT,
    mesh: "Mesh",
    plan: "Plan",
    axes: list[ModelAxis],
    *,
    seed: int,
    key: Key = no_dropout,
    device: str = "cpu",
    precision: Precision | None = None,
    recorder: Recorder | None = None,
    store: ShardStore | None = None,
) -> "Hybrid":
    """Take this rank's stages of a model that `axes` divide, draw its weights, and return the
    strategy that trains them as replicas. Args, Raises: as parallelize."""
    from minidist.parallel.hybrid.hybrid_step import Hybrid, lay_out, own_loss
    from minidist.parallel.hybrid.pipedream_step import HybridPipeDream

    precision = precision or Precision()
    recorder = recorder or Silent()
    store = store or ShardStore()
    common: dict[str, Any] = {"device": device, "precision": precision, "recorder": recorder}
    pipeline = None
    if plan.pp > 1:
        stage_seed = None if plan.zero == 3 else seed  # ZeRO-3 draws only its chunks
        pipeline = make_pipeline(model, mesh, plan, axes, seed=stage_seed, key=key, **common)
        axes = [pipeline, *axes]
    elif plan.zero < 3:
        model.initialize(seed, device=device)
    lay_out(model, axes, pipeline)
    if plan.offload == "all":
        require_disk(plan, model, store, f"rank {mesh.world.rank}")
    loss = own_loss(model, axes, key)
    data_axis = make_data_axis(
        model, mesh.copies, plan, seed=seed, store=store, loss=loss, **common
    )
    if plan.ep > 1:  # a rank without rows computes other ranks' tokens
        data_axis.computes_without_rows = True
    if plan.zero < 3:  # with ZeRO-3 no rank holds weights whole
        for axis in axes:
            axis.check_shared(when="before the first step")
    strategy = HybridPipeDream if plan.updates_each_microbatch else Hybrid
    return strategy(model, mesh, plan, axes, data_axis, pipeline, recorder=recorder, store=store)


def make_pipeline(
    model: GPT,
    mesh: "Mesh",
    plan: "Plan",
    axes: list[ModelAxis],
    *,
    seed: int | None,
    device: str,
    **options: Any,
) -> "StageModel":
    """Take this rank's stages of a model, and return the object that runs them."""
    from minidist.parallel.context.token_shard import all_tokens
    from minidist.parallel.hybrid.hybrid_step import tokens_of
    from minidist.parallel.hybrid.layer_timing import stage_layers
    from minidist.parallel.hybrid.token_stages import TokenStages
    from minidist.parallel.pipeline.schedules import make_schedule
    from minidist.parallel.pipeline.stages import Stages

    schedule = make_schedule(plan.schedule, plan.pp, plan.pieces, chunks=plan.stages_per_rank)
    layers = stage_layers(
        plan.stage_layers, model.config, schedule.stages, mesh.world, device=device
    )
    make_stages: Any = Stages
    tokens, carried = tokens_of(axes)
    if carried is not all_tokens:
        make_stages = partial(TokenStages, tokens=tokens, carried=carried)
    pipeline: StageModel = stage_class(schedule)(
        model,
        mesh["pp"],
        schedule,
        seed=seed,
        layers=layers,
        device=device,
        make_stages=make_stages,
        tp=mesh["tp"],
        alone=False,
        **options,
    )
    return pipeline


def stage_class(schedule: "Schedule") -> type[Any]:
    """Return the chapter's class that runs a schedule."""
    if schedule.updates:
        from minidist.parallel.pipeline.pipedream import PipeDream

        return PipeDream
    if schedule.name == "naive":
        from minidist.parallel.pipeline.model_parallel import ModelParallel

        return ModelParallel
    from minidist.parallel.pipeline.pipeline import Pipeline

    return Pipeline


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
    """Return DDP, ZeRO or, for one copy, Single, to train the replicas of a model or of a part of it.

    Args:    model: drawn; with ZeRO-3 not yet, and each rank draws only its chunks. group: the
             ranks that share it. store: the place of ZeRO's chunks; options: further ones of the
             strategy.
    """
    options["algorithm"] = plan.algorithm
    scheme = make_scheme(plan.compress)
    if scheme is not None:
        options["scheme"] = scheme
    # offload=optimizer without zero, which only a group of one rank may have: by ZeRO-2, whose
    # gradients leave the device bucket by bucket
    zero = plan.zero or (2 if plan.offload == "optimizer" else 0)
    if not zero and scheme is None and group.size == 1:
        del options["algorithm"]  # one copy: there is no sum over a data axis
        return Single(model, **options)
    if zero:
        options["shard"] = plan.shard
        options["store"] = store
    match zero:
        case 0:
            from minidist.parallel.data.ddp import DDP

            return DDP(model, group, bucket_bytes=plan.bucket_bytes, **options)
        case 1:
            from minidist.parallel.zero.zero1 import Zero1

            return Zero1(model, group, bucket_bytes=plan.bucket_bytes, **options)
        case 2:
            from minidist.parallel.zero.staged_zero2 import StagedZero2
            from minidist.parallel.zero.zero2 import Zero2

            zero2 = StagedZero2 if plan.pp > 1 else Zero2
            return zero2(model, group, bucket_bytes=plan.bucket_bytes, **options)
        case _:
            from minidist.parallel.zero.staged_zero3 import StagedZero3
            from minidist.parallel.zero.zero3 import Zero3

            zero3 = StagedZero3 if plan.pp > 1 else Zero3
            tied = model.tokens if model.config.tied else None  # used at both ends: held all step
            axis = zero3(
                model,
                group,
                units=[child for _, child in model.children() if child is not tied],
                seed=seed,
                device=device,
                free_after_forward=not plan.keep_gathered,
                **options,
            )
            require_memory(plan.device_memory, axis.units, axis.root)
            return axis


# ------------------------------------------------------------------------------- the data axis alone


def replicate(
    model: GPT,
    group: Group,
    plan: "Plan",
    *,
    seed: int,
    key: Key,
    device: str,
    precision: Precision | None,
    recorder: Recorder | None,
    store: ShardStore | None,
) -> Strategy:
    """Draw a model, and return the strategy of a plan that has only the data axis. Args: as
    parallelize; group: its ranks."""
    recorder = recorder or Silent()
    store = store or ShardStore()
    options: dict[str, Any] = {"loss": loss_of(model, key), "recorder": recorder}
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
            forward=lambda replica, inputs, first: replica(
                inputs, key=key(Part(inputs, inputs, first))
            ),
        )
    if plan.local_steps is not None:
        return make_local_steps(model, group, plan, **options)
    if plan.strategy == "parameter-server":
        if plan.asynchronous:
            from minidist.parallel.data.async_parameter_server import AsyncParameterServer

            return AsyncParameterServer(
                model, group, servers=plan.servers, staleness=plan.staleness, **options
            )
        from minidist.parallel.data.parameter_server import ParameterServer

        # bf16 too: server_dtype makes its float32 masters
        wide = plan.masters_of_servers
        return ParameterServer(model, group, servers=plan.servers, server_dtype=wide, **options)
    if plan.offload == "all":
        require_disk(plan, model, store, f"rank {group.rank}")
    return make_data_axis(
        model, group, plan, seed=seed, device=device, store=store, precision=precision, **options
    )


def make_local_steps(model: GPT, group: Group, plan: "Plan", **options: Any) -> Strategy:
    """Return the strategy of ranks that synchronize every few steps. Args: options: further ones of
    the strategy."""
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
    """Return the scheme of "NAME:option=value"; None for "none": arrays are sent as they are."""
    if text == "none":
        return None
    from minidist.parallel.compress.compress import scheme_of

    return scheme_of(text)
