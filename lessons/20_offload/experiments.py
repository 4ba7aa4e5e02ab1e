"""The runs of lesson 20 and its figure: a model trained with three stores; a disk that takes
its time."""

import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.device import account
from minidist.lessons.lab import hashed_batch
from minidist.nn import GPTConfig, Linear, Module
from minidist.observe.overlap import Overlap, measure, moves
from minidist.observe.timeline import Timeline
from minidist.optim import AdamW
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.hybrid.hybrid_costs import moved_in_a_step
from minidist.parallel.memory.offload_disk import OnDisk
from minidist.parallel.memory.transfer_lanes import Pace
from minidist.parallel.step.replicas import weights_digest
from minidist.parallel.zero.shards import ShardStore
from minidist.parallel.zero.zero3 import Zero3
from minidist.simulate.cluster import Cluster
from minidist.simulate.models import model
from minidist.simulate.one_rank import run_rank
from minidist.simulate.simulate import simulate
from minidist.simulate.trace import RankTrace

CONFIG = GPTConfig(vocabulary=64, context=8, layers=8, width=48, heads=4)
SHORT = GPTConfig(vocabulary=64, context=8, layers=4, width=48, heads=4)  # for many ranks
SEQUENCES = 2
PLANS: dict[str, dict[str, Any]] = {
    "one device": {},
    "optimizer on the host": {"offload": "optimizer", "bucket_bytes": 1 << 16},
    "all on disk": {"offload": "all", "zero": 3},
}
AXES: dict[str, dict[str, Any]] = {
    "pp=2, tp=2": {"dp": 1, "pp": 2, "tp": 2, "microbatches": 2, "sequence_parallel": True},
    "dp=4, copies of 2": {"dp": 4, "shard": 2},
}
MACHINES = {
    "H100, PCIe 5": "h100:1x8",
    "H100, PCIe 6": "h100-pcie6:1x8",
    "H100, PCIe 5, Grace's memory": "h100:1x8",
    "Grace Hopper": "gh200:2x4",
    "H100, CXL for the disk": "h100-cxl:1x8",
    "PCIe server, 4 lanes up": "a100-pcie:1x8",
}
SIMULATED = {"none": 2, "optimizer": 2, "all": 3}  # --offload, and the stage of ZeRO
MEMORY = ("parameters", "gradients", "optimizer", "activations", "workspace")


def batch_of(
    step: int, config: GPTConfig = CONFIG, sequences: int = SEQUENCES
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a step, the same on every rank."""
    return hashed_batch(f"lesson 20, step {step}", config, sequences)


def train(
    group: Group,
    plan: dict[str, Any],
    *,
    steps: int = 3,
    config: GPTConfig = CONFIG,
    watch: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train a plan on the ranks of `group` with an account of its own; return results, and what lay
    where and moved.

    With `watch` also the accounts at every module and gradient of the last step.
    """
    with account.use(account.MemoryAccount()) as memory:
        trainer = Trainer(Plan(**{"dp": group.size, **plan}), config, group, seed=1, **options)
        try:
            moments = Moments(trainer) if watch else None
            losses = []
            for step in range(steps):
                if moments is not None:
                    moments.on = step == steps - 1
                if step == 1:
                    memory.reset_peak()  # the first has drawn the weights
                losses.append(trainer.step(batch_of(step, config)))
            return {
                "losses": losses,
                "digest": trainer.weights_sha256(),
                "weights": trainer.state_dict(),
                "device": memory.snapshot(),
                "host": trainer.store.host.snapshot(),
                "disk": trainer.store.disk_bytes(),
                "moments": moments.seen if moments else [],
                "moved": {
                    way: nbytes // steps for way, nbytes in trainer.store.traffic.step.items()
                },
                "formula": moved_in_a_step(trainer) if trainer.plan.offload != "none" else {},
                "parameters": sum(p.size for p in trainer.model.parameters()),
            }
        finally:
            trainer.close()


class Moments:
    """Device, host and disk, asked at every module on the way forward and every gradient on the way
    back."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.on = False
        self.seen: list[dict[str, Any]] = []
        for module in trainer.model.modules():
            module.register_forward_hook(lambda module, *rest: self.look("forward"))
            module.register_backward_hook(lambda module: self.look("backward"))
        walk = trainer.optimizer.update

        def update(*args: Any) -> None:
            walk(*args)
            self.look("optimizer")

        trainer.optimizer.update = update  # type: ignore[method-assign, assignment]

    def look(self, phase: str) -> None:
        """Take one sample."""
        if self.on:
            store = self.trainer.store
            self.seen.append(
                {
                    "phase": phase,
                    "device": self.trainer.account.now,
                    "host": store.host.now,
                    "disk": disk_by_category(store),
                }
            )


def disk_by_category(store: ShardStore) -> dict[str, int]:
    """Return the bytes on disk by category."""
    held = dict.fromkeys(MEMORY, 0)
    for record in store.disk.records if isinstance(store, OnDisk) else ():
        for key, region in record.regions.items():
            held[key if key in held else {"weights": "parameters"}.get(key, "optimizer")] += (
                region.nbytes
            )
    return held


# ------------------------------------------------------------------------------------- a slow disk

COMPUTE = 12e-3
ACCESS = 4e-3
"""Seconds that a unit computes in each direction, and that the disk takes for a read or a write."""


class Slow(Module):
    """A layer that sleeps COMPUTE seconds each way.

    Two cores, or one, are therefore enough for the picture.
    """

    def __init__(self) -> None:
        self.linear = Linear(16, 16, bias=False, std=0.3, dtype="float64")

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(COMPUTE)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda dy: time.sleep(COMPUTE))
        return y


class Stack(Module):
    """Eight layers of class Slow."""

    def __init__(self) -> None:
        self.layers = [Slow() for _ in range(8)]
        self.assign_names()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, inputs: np.ndarray, targets: np.ndarray, divisor: float) -> Tensor:
        y = self(Tensor(inputs))
        return ops.sum(y * y) * (1.0 / divisor)


def over_a_slow_disk(
    group: Group, store_class: type[OnDisk] = OnDisk, *, buffers: int = 4
) -> dict[str, Any]:
    """Run two steps; return the second's seconds, its spans, and the share of its moves that lay
    under computation."""
    timeline = Timeline(0)
    pace = Pace(latency=ACCESS)
    with account.use(account.MemoryAccount()):
        store = store_class(buffers=buffers, recorder=timeline, pace_read=pace, pace_write=pace)
        strategy = Zero3(Stack(), group, store=store, seed=3, recorder=timeline)
        optimizer = AdamW(strategy.parameters, 1e-2)
        for step in range(2):
            with timeline.span("step", step=step):
                strategy.step((np.eye(16), np.zeros(16)), optimizer, clip=1.0)
        digest = weights_digest(strategy.state_dict())
        store.close()
    begin = next(
        span.start
        for span in timeline.spans
        if span.name == "forward" and span.details["step"] == 1
    )
    end = next(
        span.stop
        for span in timeline.spans
        if span.name == "backward" and span.details["step"] == 1
    )
    stop = next(
        span.stop for span in timeline.spans if span.name == "step" and span.details["step"] == 1
    )

    def passes(line: Timeline) -> list[Any]:
        return [span for span in moves(line) if begin <= span.start < end]

    overlap: Overlap = measure(timeline, of=passes)
    spans = [
        asdict(span)
        for span in timeline.spans
        # the step's spans, and the writes after the step
        if begin <= span.start <= stop or (span.start > stop and span.name.startswith("write"))
    ]
    return {
        "seconds": stop - begin,
        "passes": end - begin,
        "share": overlap.share,
        "digest": digest,
        "reads": sum(span.name.startswith("read") for span in passes(timeline)),
        "writes": sum(span.name.startswith("write") for span in passes(timeline)),
        "spans": spans,
        "begin": begin,
    }


def machine(name: str) -> Cluster:
    """Return one of MACHINES."""
    cluster = Cluster.parse(MACHINES[name])
    if "Grace's memory" in name:
        grace = Cluster.parse(MACHINES["Grace Hopper"]).device
        device = replace(cluster.device, host_bandwidth=grace.host_bandwidth)
        cluster = replace(cluster, device=device)
    return cluster


def on_machines() -> dict[str, list[float]]:
    """Return the simulated seconds of a step of two blocks of llama2-7b on each of MACHINES, for
    each of SIMULATED."""
    config = replace(model("llama2-7b", context=2048), layers=2)
    ran: dict[tuple[Any, ...], RankTrace] = {}  # the ranks do the same on every machine

    def trace(plan: Plan, config: GPTConfig, rank: int, **options: Any) -> RankTrace:
        key = (plan, rank, *sorted(options.items()))
        if key not in ran:
            ran[key] = run_rank(plan, config, rank, **options)
        return ran[key]

    plans = [
        Plan(dp=8, zero=zero, precision="bf16", offload=offload, checkpoint_blocks="all")
        for offload, zero in SIMULATED.items()
    ]
    return {
        name: [
            simulate(plan, config, machine(name), batch=64, traces=trace).step_seconds
            for plan in plans
        ]
        for name in MACHINES
    }
