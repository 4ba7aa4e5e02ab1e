"""The metrics.json of `minidist train`: everything that a run measured, and its formulas."""

import argparse
import platform
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from minidist.cli.train import axis_traffic, central_traffic, seldom_traffic
from minidist.cli.train.arguments import add_arguments
from minidist.cli.train.saving import Saver
from minidist.cli.train.settings import Settings, as_arguments
from minidist.cli.train.steps import Course
from minidist.cli.train.verify import Weights
from minidist.comm.cost.volume import FORMULAS, Case
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.device import cores
from minidist.launch import detect
from minidist.launch.limits import limit_here
from minidist.observe.machine import machine
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.hybrid.hybrid_costs import data_collectives, moved_in_a_step
from minidist.parallel.step.replicas import weights_digest
from minidist.parallel.step.step import Batch
from minidist.parallel.step.strategy import Collective

Metrics = dict[str, Any]


def result_metrics(
    trainer: Trainer,
    settings: Settings,
    course: Course,
    saver: Saver | None,
    weights: Weights,
    *,
    threads: int,
) -> Metrics:
    """Return the metrics.json of the training itself: everything known without further work.

    Args:    threads: BLAS threads per rank.
    """
    args = settings.args
    count = sum(array.size for array in weights.values())
    tokens = args.batch * args.context
    return {
        "parameters": count,
        "parameter_bytes": count * next(trainer.model.parameters()).dtype.itemsize,
        "weights_sha256": weights_digest(weights),
        "plan": trainer.plan.as_dict(),
        "size": trainer.survivors().size,
        "transport": trainer.world.transport.name,
        "threads": threads,
        "device": args.device,
        "optimizer_moments": len(trainer.optimizer.state_names),
        "skipped_steps": trainer.precision.skipped,
        "losses": course.losses,
        "validation_loss": None,
        "step_seconds": course.step_seconds,
        "tokens_per_second": tokens / course.step_seconds if course.step_seconds else 0.0,
        "steps": trainer.steps_here,
        "resumed_from": course.steps_before if settings.resume else None,
        "checkpoint": saver and saver.record(),
        "vocabulary": settings.text.symbols,
        **({} if course.adapt is None else {"adapt": course.adapt}),
        "config": asdict(settings.config),
        "data_left_out": settings.text.left_out,
        "options": {
            name: value
            for name, value in vars(args).items()
            if value is None or isinstance(value, (str, int, float))
        },
    }


def run_metrics(trainer: Trainer, settings: Settings, memory: dict[str, Any]) -> Metrics:
    """Return the rest of metrics.json: formulas, the machine, the ranks. Every rank calls it.

    Args:    memory: this rank's account after the last step; later work used memory of its own.
    Cost:    gathers of small records, counted under `control`.
    """
    args = settings.args
    world = trainer.survivors()
    here = machine()
    return {
        "memory_limit_bytes": limit_here(),
        "formula": gradient_formula(trainer, settings.training_batch(0)),
        **expert_record(trainer),
        **budget_record(trainer),
        "stage_layers": axis_traffic.stage_layers(trainer),
        "machine": here | {"command": command_line(args, world.size)},
        "versions": {
            "python": here["python"],
            **{
                name: here["versions"][name]
                for name in ("minidist", "numpy", "mpi4py")
                if name in here["versions"]
            },
        },
        "ranks": rank_records(trainer, world, memory),
    }


def command_line(args: argparse.Namespace, size: int) -> str:
    """Return the command that repeats this run, without options that have their default."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    usual = vars(parser.parse_args([]))
    others = argparse.Namespace(
        **{
            name: value
            for name, value in vars(args).items()
            if name in ("given", "resume", "steps") or usual.get(name) != value
        }
    )
    launcher = detect().launcher
    before = {"mpich": ["mpirun", "-n"], "openmpi": ["mpirun", "-n"], "slurm": ["srun", "-n"]}.get(
        launcher
    )
    words = ["minidist", "train", *([] if before else ["-n", str(size)]), *as_arguments(others)]
    return shlex.join([*before, str(size), *words] if before else words)


def rank_records(
    trainer: Trainer, world: Group, memory: dict[str, Any]
) -> list[dict[str, Any]] | None:
    """Return, on rank 0, each rank's coordinates, bytes and messages sent in training steps, and
    memory by category.

    If one process drives several devices: the same for every device.
    """
    if trainer.plan.strategy == "data-parallel":
        return central_traffic.device_records(trainer)
    return gather_records(
        world,
        {
            "rank": world.world_rank,
            "coordinates": {
                axis: place
                for axis, place in trainer.mesh.coordinates.items()
                if axis == "dp" or trainer.mesh.shape[axis] > 1
            },
            "sent_bytes": world.ledger.sent_bytes("step"),
            "messages": world.ledger.messages("step"),
            "sent_to": {str(rank): axes for rank, axes in world.ledger.sent_to("step").items()},
            "sent_to_nodes": sent_to_nodes(world),
            "host": platform.node(),
            "cores": cores.usable(),
            "memory": memory,
            "shared_bytes": world.transport.shared_bytes,
            **offload_record(trainer),
            **({} if trainer.keeper is None else {"kept_inputs": trainer.keeper.record()}),
        },
    )


def budget_record(trainer: Trainer) -> dict[str, Any]:
    """Return the choice of an activation budget for each layer: "none", "scores" or "all".

    None before it chose.
    """
    return {} if trainer.budget is None else {"activation_choice": trainer.budget.chosen}


def expert_record(trainer: Trainer) -> dict[str, Any]:
    """Return, by layer, the number of tokens of the run that chose each expert, and that it
    processed. All ranks call it.

    For experts on several nodes also the placement that the newest choices suggest, and the number
    of copies per token that left its node: "now", as the experts are placed, and "placed", with the
    suggested placement.
    """
    if trainer.config.mixture is None:
        return {}
    loads = trainer.loads.whole(trainer.mesh["pp"])
    record = {"chosen": loads[:, 0].tolist(), "taken": loads[:, 1].tolist()}
    if (found := trainer.loads.placed(trainer.mesh["pp"])) is not None:
        order = found[0]
        (tokens, now, placed) = found[1].T
        record |= {
            "placement": order.tolist(),
            "copies": {"now": (now / tokens).tolist(), "placed": (placed / tokens).tolist()},
        }
    return {"experts": record}


def sent_to_nodes(world: Group) -> dict[str, int]:
    """Return the bytes that this rank sent to ranks of other nodes in training steps, by axis.

    Empty on one node.
    """
    nodes = dict(zip(world.world_ranks, world.nodes, strict=True))
    sent = Counter[str]()
    for rank, axes in world.ledger.sent_to("step").items():
        if nodes.get(rank) != nodes[world.world_rank]:
            sent.update(axes)
    return dict(sent)


def offload_record(trainer: Trainer) -> dict[str, Any]:
    """Return this rank's host memory, disk bytes and moves in training steps.

    Empty if the plan offloads nothing.
    """
    if trainer.plan.offload == "none":
        return {}
    return {
        "host_memory": trainer.store.host.snapshot(),
        "disk_bytes": trainer.store.disk_bytes(),
        "moved_bytes": dict(trainer.store.traffic.step),
        "moved_formula": {
            way: trainer.steps_here * nbytes for way, nbytes in moved_in_a_step(trainer).items()
        },
    }


def gradient_formula(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    """Return bytes and messages of all ranks and steps by formula, for gradients and, under ZeRO,
    weights."""
    plan = trainer.plan
    if plan.strategy != "ddp":
        return central_traffic.formula(trainer, batch)
    if plan.local_steps is not None:
        return seldom_traffic.formula(trainer)
    if plan.composed:
        calls = data_collectives(trainer, len(batch[0]))
        return axis_traffic.formula(trainer, _data_formula(trainer, calls), batch)
    data = _data_formula(trainer, trainer.strategy.traffic(plan.accumulate))
    return {name: data[name] for name in ("sent_bytes", "messages", "buckets")} | (
        {"plain": data["plain"]} if plan.compress != "none" else {}
    )


def _data_formula(trainer: Trainer, calls: Sequence[Collective]) -> dict[str, Any]:
    """Return bytes and messages of one group of the data axis in all steps, from the `calls` of one
    step; bytes also by axis.

    "plain": bytes by axis without a scheme. If the bytes of a scheme depend on the data, its axis
    is left out and the sum is None.
    """
    plan = trainer.plan
    steps = trainer.steps_here
    axes = dict[str, int]()
    messages = 0
    plain = dict[str, int]()
    unknown = set[str]()
    compressed = False
    for call in calls:  # the sum over ranks does not depend on the sizes of their shards
        size = call.group.size
        times = 1 if call.once else plan.copies // call.group.size
        case = Case(size=size, nbytes=call.nbytes, blocks=[call.nbytes] + [0] * (size - 1))
        formula = FORMULAS[call.verb, plan.algorithm]
        axis = call.group.axis.split(".")[0]
        sent = formula.bytes_of(case) if call.sent is None else call.sent
        plain[axis] = plain.get(axis, 0) + steps * times * formula.bytes_of(case)
        axes[axis] = axes.get(axis, 0) + steps * times * sent
        compressed |= call.sent is not None
        unknown |= {axis} if sent < 0 else set()
        messages += steps * times * formula.messages_of(case)
    kinds = ("reduce_scatter", "all_gather") if plan.zero >= 2 else ("all_reduce", "reduce_scatter")
    axes = {axis: nbytes for axis, nbytes in axes.items() if axis not in unknown}
    return {
        "sent_bytes": None if unknown else sum(axes.values()),
        "axes": axes,
        "plain": plain,
        "messages": None if compressed else messages,
        "buckets": sum(call.verb in kinds and not call.once for call in calls),
    }
