"""Compute what lesson 24's tables, figures and tests share: the notes' machines, their table by
size, hardware.

superpods(folder)                  256 devices as N4 §3 compares them
claims(folder), advised()          what the notes claim, and what is computed
efficiencies(), worth()            N1:100 and N2 §10.6, computed
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from minidist.nn import GPTConfig
from minidist.observe.events import GroupCall
from minidist.parallel.hybrid.plan import Plan
from minidist.plan.explain import TABLE
from minidist.plan.ranking import (
    AFFORDABLE,
    Choice,
    Ranking,
    plan_for,
    replay_seconds,
    replayed,
)
from minidist.simulate.cluster import Cluster
from minidist.simulate.models import model
from minidist.simulate.one_rank import run_rank
from minidist.simulate.simulate import simulate
from minidist.simulate.walk import call_cost

GIB = 1 << 30

# ------------------------------------------------------------------------------- 256 devices, N4 §3

SUPERPODS = """
# DGX A100 and DGX H100 SuperPODs of 32 nodes with the bandwidths of the data sheets: nothing is lost on the way.
[wire.nvlink4-paper]
bandwidth = 450e9
share = 1.0
alpha = 0.6e-6
in_switch = 1.0
source = { bandwidth = "NVIDIA H100 datasheet, 2023", alpha = "NCCL", share = "1: on paper", in_switch = "1: on paper" }
[wire.nvlink3-paper]
bandwidth = 300e9
share = 1.0
alpha = 0.6e-6
source = { bandwidth = "NVIDIA A100 datasheet, 2021", alpha = "NCCL", share = "1: on paper" }
[wire.hdr-paper]
bandwidth = 25e9
share = 1.0
alpha = 2.7e-6
source = { bandwidth = "HDR", alpha = "NCCL", share = "1: on paper" }
[wire.nvlink4-outside]
bandwidth = 225e9
share = 1.0
alpha = 1.0e-6
source = { bandwidth = "DGX H100: 72 of 144 NVLinks of 25 GB/s leave a node", alpha = "assumed", share = "1: on paper" }
"""
DEVICE = """
[cluster.{name}]
device = "{name}"
peak = {{ bfloat16 = {peak} }}
memory_bytes = 85_899_345_920
memory_bandwidth = 2e12
memory_kind = "HBM"
per_node = {per_node}
inside = "{inside}"
kind = "switch"
{network}
source = {{ peak = "datasheet" }}
"""
PODS = {
    "a100": (312e12, 8, "nvlink3-paper", 'network = "hdr-paper"\nnics = 8'),
    "h100": (989.4e12, 8, "nvlink4-paper", 'network = "nvlink4-outside"\nnics = 8'),
    "h100-one": (989.4e12, 256, "nvlink4-paper", ""),
}


def superpods(folder: Path) -> dict[str, Cluster]:
    """Return 256 devices: A100 over HDR; H100 with NVLink between nodes; H100 on one switch that
    adds."""
    path = folder / "pods.toml"
    path.write_text(
        SUPERPODS
        + "".join(
            DEVICE.format(name=name, peak=peak, per_node=per_node, inside=inside, network=network)
            for name, (peak, per_node, inside, network) in PODS.items()
        ),
        encoding="utf-8",
    )
    return {
        name: Cluster.parse(f"{path}:{name}:{256 // pod[1]}x{pod[1]}") for name, pod in PODS.items()
    }


def bisection(cluster: Cluster) -> float:
    """Return the bytes per second, both directions, between the two halves when each device sends
    to its peer."""
    half = cluster.size // 2
    narrowest = dict[str, float]()
    for place in range(half):
        for src, dst in ((place, place + half), (place + half, place)):
            links = [cluster.links[number] for number in cluster.route(src, dst)]
            out = next(link for link in links if "nic" in link.name)
            narrowest[out.name] = out.bandwidth
    return sum(narrowest.values())


def reduce_bandwidth(cluster: Cluster, nbytes: int = 64 * GIB, *, on_paper: bool = False) -> float:
    """Return how many bytes of an array per second all devices add up.

    On paper: as if the busiest link were never idle.
    """
    cost = call_cost(
        GroupCall("dp", "all_reduce", "native", nbytes, itemsize=2),
        tuple(range(cluster.size)),
        cluster,
    )
    busiest = max(moved / cluster.links[link].bandwidth for link, moved in cost.link_bytes.items())
    return nbytes / (busiest if on_paper else cost.seconds)


class Claim(NamedTuple):
    """A claim of the notes, and what was computed.

    Attributes: says: of the notes; found: computed; unit: of both.
    """

    what: str
    says: str
    found: float
    unit: str


def claims(folder: Path) -> Iterator[Claim]:
    """Yield N4 §3's claims of A100 and H100, and N4:104's of an embedding table."""
    pods = superpods(folder)
    bisections = bisection(pods["h100"]) / bisection(pods["a100"])
    sums = [reduce_bandwidth(pods[name], on_paper=True) for name in ("a100", "h100-one")]
    sold = [reduce_bandwidth(Cluster.parse(f"{name}:32x8")) for name in ("a100-80g", "h100")]
    a100, h100 = (Cluster.parse(f"{name}:1x8") for name in ("a100-80g", "h100"))
    yield Claim("bisection of 256, H100 over A100", "9", bisections, "times")
    yield Claim("reduce bandwidth of 256, one switch that adds", "4.5", sums[1] / sums[0], "times")
    yield Claim("the same, as sold: a 400 Gb/s card a device", "4.5", sold[1] / sold[0], "times")
    yield Claim(
        "dense bf16 of a device",
        "1.5",
        h100.device.peak("bfloat16") / a100.device.peak("bfloat16"),
        "times",
    )
    yield Claim(
        "NVLink of a device",
        "",
        h100.topology.bandwidth(0, 4) / a100.topology.bandwidth(0, 4),
        "times",
    )
    gathered, added = embedding_seconds()
    yield Claim(
        "all-gather of llama3-70b's embedding table on 8 H100s", "gather it", 1e3 * gathered, "ms"
    )
    yield Claim("8,192 tokens looked up in parts, and added up", "", 1e3 * added, "ms")


def embedding_seconds(tokens: int = 8192) -> tuple[float, float]:
    """Return the seconds for llama3-70b's table, divided over 8 H100s: gathered; or looked up in
    parts whose rows are added up."""
    cluster = Cluster.parse("h100:1x8")
    config = model("llama3-70b")
    table = config.vocabulary * config.width * 2
    calls = (
        GroupCall("tp", "all_gather", "native", table // 8, itemsize=2),
        GroupCall("tp", "all_reduce", "native", tokens * config.width * 2, itemsize=2),
    )
    gathered, added = (call_cost(call, tuple(range(8)), cluster).seconds for call in calls)
    return gathered, added


# ---------------------------------------------------------------------- the table by size, N2 §12.1


class Row(NamedTuple):
    """One row of the notes' table, for one model of its size.

    Attributes: name, cluster, batch; best: of all plans; advised: the best of those that the row
    advises, or None.
    """

    notes: str
    name: str
    cluster: str
    batch: int
    best: Choice
    advised: Choice | None


CASES = (
    ("llama2-7b", "h100:1x8", 64),
    ("llama2-70b", "h100:8x8", 256),
    ("gpt3-175b", "a100-80g:16x8", 256),
    ("megatron-1t", "a100-80g:32x8", 256),
)
"""A model of each row's size, on machines that the row names."""


def advised() -> Iterator[Row]:
    """Yield the table row by row: the best of all plans, and the best that follows the advice. Both
    are replayed where that is affordable. No mixture of experts."""
    for (name, cluster, batch), (_, size, advice) in zip(CASES, TABLE, strict=True):
        ranking = plan_for(model(name, context=2048), cluster, batch=batch, confirm=None)
        every = (ranking.choice(place) for place in range(len(ranking)))
        follows = (choice for choice in every if _follows(size, choice.plan))
        fitting = (choice for each in follows if (choice := _known(each, ranking)).fits)
        yield Row(f"{size}: {advice}", name, cluster, batch, ranking.best, next(fitting, None))


def _known(choice: Choice, ranking: Ranking) -> Choice:
    """Return the choice, replayed if that is affordable."""
    if replay_seconds(choice.plan, ranking.config) > AFFORDABLE:
        return choice
    return replayed(choice, ranking)


def _follows(size: str, plan: Plan) -> bool:
    """Return whether a plan is what the row of this size advises."""
    if size == "< 10B":
        return plan.dp == plan.size and plan.zero == 2
    if size == "> 1T":
        return plan.offload != "none"
    return min(plan.dp, plan.pp, plan.tp) > 1


# --------------------------------------------------- efficiency by bandwidth and model size, N1:100

SIZES = ((24, 1024, 16), (24, 2048, 16), (32, 4096, 32))
"""Layers, width, heads: 0.4, 1.3 and 6.7 billion weights."""
GBPS = (1, 4, 8, 16, 64)
"""Gigabytes a second that a network card reaches; eight of them in a node."""


def sized(layers: int, width: int, heads: int) -> GPTConfig:
    """Return a model of this size with sequences of 2,048 tokens."""
    return GPTConfig(
        vocabulary=51200,
        context=2048,
        layers=layers,
        width=width,
        heads=heads,
        positions="rotary",
        tied=True,
    )


def efficiencies(
    config: GPTConfig, gbps: Sequence[float] = GBPS, *, passes: int = 1
) -> list[float]:
    """Return the tokens per second and device of 64 H100s in 8 nodes, over those of 8 in one node.

    The batch has one sequence per device and pass.
    """
    traces = cache(run_rank)  # the network's bandwidth changes when things happen, not what

    def speed(nodes: int, bandwidth: float) -> float:
        cluster = Cluster.parse(f"h100:{nodes}x8").rewired(
            {"ib-ndr": {"bandwidth": bandwidth * 1e9}}
        )
        plan = Plan(dp=8 * nodes, zero=1, accumulate=passes, precision="bf16")
        found = simulate(plan, config, cluster, batch=8 * nodes * passes, traces=traces)
        return found.tokens_per_second / cluster.size

    alone = speed(1, 1.0)
    return [speed(8, bandwidth) / alone for bandwidth in gbps]


# -------------------------------------------------------------------- what hardware gives, N2 §10.6


def doubled(cluster: Cluster) -> dict[str, Cluster]:
    """Return clusters by name, each with one part of the notes' chart doubled."""
    device = cluster.device
    topology = cluster.topology
    faster = {name: 2 * peak for name, peak in device.peaks.items()}
    wires = {
        name: cluster.rewired({wire.name: {"bandwidth": 2 * wire.bandwidth}})
        for name, wire in (("NVLink", topology.inside), ("InfiniBand", topology.between))
        if wire is not None
    }
    host = cluster.tiers["host"]._replace(bandwidth=2 * cluster.tiers["host"].bandwidth)
    return {
        "FLOP/s": replace(cluster, device=replace(device, peaks=faster)),
        "HBM bandwidth": replace(
            cluster, device=replace(device, memory_bandwidth=2 * device.memory_bandwidth)
        ),
        "HBM capacity": replace(
            cluster, device=replace(device, memory_bytes=2 * device.memory_bytes)
        ),
        **wires,
        "CPU link": replace(cluster, tiers={**cluster.tiers, "host": host}),
    }


JOBS = (
    ("llama3-8b", "h200:1x8", 64),
    ("llama2-70b", "h200:8x8", 256),
    ("gpt3-175b", "h200:16x8", 256),
)


def worth() -> dict[str, dict[str, float]]:
    """Return {job: {hardware: how many times as fast the best plan is with twice of it}}.

    The best plan may be another than before.
    """
    found: dict[str, dict[str, float]] = {}
    for name, spec, batch in JOBS:
        config = model(name, context=2048)
        cluster = Cluster.parse(spec)

        def seconds(machines: Cluster, config: GPTConfig = config, batch: int = batch) -> float:
            return plan_for(config, machines, batch=batch).best.step_seconds

        today = seconds(cluster)
        found[f"{name} on {spec}"] = {
            part: today / seconds(more) for part, more in doubled(cluster).items()
        }
    return found


def told(choice: Choice | None) -> list[Any]:
    """Return a choice as cells: plan, seconds, and by what they are known."""
    if choice is None:
        return ["none fits", ""]
    return [choice.text, f"{choice.known_seconds:.3g} s, {choice.known_by}"]
