"""The makers of the further parts of a plan: its precision and model, the place of its state, and
the objects that keep or choose activations.

Each function imports a chapter's module when the plan needs it, so a process loads only the
chapters that it trains by.
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.autograd.ops.collectives import shard_of
from minidist.device import account
from minidist.device.backend import dtype_name
from minidist.nn import GPT, GPTConfig
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.zero.shards import ShardStore

if TYPE_CHECKING:
    from minidist.parallel.hybrid.mesh import Mesh
    from minidist.parallel.hybrid.plan import Plan
    from minidist.parallel.memory.activation_budget import ActivationBudget
    from minidist.parallel.memory.kept_inputs import InputKeeper
    from minidist.parallel.pipeline.stages import StageModel


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
    """Return the object that keeps the inputs of checkpointed blocks; None: blocks keep them
    themselves."""
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
    pipeline: "StageModel | None",
) -> "ActivationBudget | None":
    """Return the object that chooses the blocks to compute again; None if the plan names them.
    Args: pipeline: the strategy's.
    """
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
