"""Rewrite a checkpoint for another plan, in one process: the ranks of that plan are threads, which
load and save."""

from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from minidist.comm.group import Group
from minidist.errors import CheckpointError, PlanError
from minidist.launch import run
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.hybrid import OPTIMIZERS, Plan, Trainer
from minidist.parallel.state.manifest import read_manifest, require_told
from minidist.survive.whole import config_of, sizes_of

LIMIT = 86400.0  # seconds that the rewriting may take

SET_BY_SAVE = ("steps_done", "seed", "optimizer", "config", "plan", "state", "ranks")
"""Entries of the manifest's "about" that Trainer.save sets itself."""


def reshard(folder: Path, target: Path, plan: Plan) -> None:
    """Write the checkpoint `folder` to `target` as the ranks of `plan` would.

    The precision does not change.

    Raises:  PlanError if the plan does not fit the model; CheckpointError if it cannot be read or
             written.
    """
    manifest = read_manifest(folder)
    about = manifest["about"]
    require_told(folder, about, "plan", "optimizer")
    config = config_of(folder, about, sizes_of(manifest["shards"]).values())
    plan = replace(plan, precision=about["plan"]["precision"])
    with suppress(PlanError):  # a plan that sums no gradients keeps nothing of a scheme
        plan = replace(plan, compress=about["plan"]["compress"])
    plan.require(plan.size, config)
    plan.require_model(config)
    optimizer = next(
        (
            name
            for name, kind in OPTIMIZERS.items()
            if about["optimizer"] == getattr(kind, "__name__", "")
        ),
        None,
    )
    if optimizer is None:
        raise CheckpointError(
            f"{folder}: was trained by {about['optimizer']}, which is no optimizer of minidist; "
            "load it with a Trainer of that optimizer"
        )
    kept = {name: value for name, value in about.items() if name not in SET_BY_SAVE}
    if isinstance(kept.get("options"), dict):
        kept["options"] |= options_of(plan)
    run(
        _load_and_save,
        str(folder),
        str(target),
        plan,
        config,
        optimizer,
        kept,
        size=plan.size,
        limit=LIMIT,
    )


def options_of(plan: Plan) -> dict[str, Any]:
    """Return the options of minidist train that describe this plan.

    Options that belong to other plans have their defaults.
    """
    cut = ",".join(f"{axis}={size}" for axis, size in plan.axes.items() if size > 1) or "dp=1"
    parts = (
        "zero",
        "shard",
        "keep_gathered",
        "schedule",
        "microbatches",
        "stages_per_rank",
        "stage_layers",
        "attention",
        "sequence_parallel",
        "strategy",
        "accumulate",
        "checkpoint_blocks",
        "keep_activations",
        "activation_memory",
        "offload",
        "servers",
        "server_device",
        "server_dtype",
        "compress",
    )
    defaults = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {
        "plan": cut,
        "replicas": None,
        "devices": "",
        **{name: defaults[name] for name in parts},
    }


def _load_and_save(
    world: Group,
    folder: str,
    target: str,
    plan: Plan,
    config: GPTConfig,
    optimizer: str,
    about: dict[str, Any],
) -> None:
    trainer = Trainer(plan, config, world, optimizer=optimizer, clip=None)
    try:
        trainer.load(folder)
        trainer.save(target, **about)
    finally:
        trainer.close()
