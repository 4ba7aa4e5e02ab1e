"""Chapter 24 · `here`: this machine as a cluster, as `minidist bench calibrate` measured it.

    minidist bench calibrate -n 2,4             once: links, and computation
    Cluster.parse("here:4")                     four ranks as processes of this machine

    link            between ranks             α, o, β, γ, κ of the link class, of as many ranks or
                                              the next fewer
    call, pair      in a training step        what a call of all, or of two, takes beside its
                                              messages, of the same
    device          one rank's processor      rates measured with as many at once; slower in
                                              training

More ranks than cores take turns: while all compute, each has a core for cores/ranks of the time, so
every rate is divided by ranks/cores. While some wait, which they do asleep, the others are faster,
up to the rates of a rank alone (shared_cores.py). So it is where each has a core, but they share
caches, memory, or two threads of one core.

Where ranks fill the cores, a call in the background takes its time from computation, so that
nothing is gained by it: it counts as if its rank waited for it (`without_overlap`).
Ranks of `here` are on one host.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from minidist.autograd.tensor import Tensor
from minidist.comm.cost.link_model import (
    ComputationCost,
    LinkCost,
    Profile,
    load_profile,
    profile_path,
)
from minidist.console import meant, memory_bytes
from minidist.errors import ConfigError
from minidist.observe.events import Await, Event, Start
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import Device, Efficiency
from minidist.simulate.topology import Topology, Wire
from minidist.simulate.trace import RankTrace

ROUNDS = 9
"""How often `rough_device` measures each figure."""

TRANSPORTS = ("shm", "tcp", "mpi", "threads")
"""Link classes, the one that `auto` takes between ranks of a host first."""


def here(
    ranks: int, transport: str = "shm", profile: Profile | None = None, cores: int | None = None
) -> Cluster:
    """Return this machine for so many ranks.

    Args:    transport: the link class; profile, cores: of the machine (its own).
    Raises:  ConfigError if the machine was not calibrated, or not this link class.
    """
    profile = profile or load_profile()
    if profile is None or not profile.computation:
        raise ConfigError(
            f"this machine was not measured for `here` ({profile_path()}); run `minidist bench "
            f"calibrate` first, which takes some minutes"
        )
    if ranks < 1:
        raise ConfigError(f"here:{ranks}: choose one rank or more")
    link = profile.link(transport, [0] * ranks)
    if link is None and ranks > 1:
        known = ", ".join(sorted({cost.link for cost in profile.links})) or "none"
        raise ConfigError(
            f"links of {transport} were not measured (only {known}); run `minidist bench calibrate "
            f"--only {transport},computation -n {ranks}`"
        )
    cores = cores or cores_here()
    slowdown = 1.0 if link is None else link.slowdown
    device = device_of(profile.computation, ranks, cores, profile.machine, slowdown)
    alone = device_of(profile.computation, 1, cores, profile.machine, min(1.0, slowdown))
    topology = Topology(ranks, _wire(transport, link))
    return Cluster(
        "here",
        f"here:{ranks}",
        device,
        1,
        ranks,
        topology,
        overlaps=ranks < cores,
        call=0.0 if link is None else link.call,
        pair=0.0 if link is None else link.pair,
        alone=alone if ranks > 1 else None,
    )


def device_of(
    measured: Sequence[ComputationCost],
    ranks: int,
    cores: int,
    machine: Mapping[str, Any],
    slowdown: float = 1.0,
) -> Device:
    """Return one rank's processor, where `ranks` compute at once, and train that much slower than
    they compute."""
    at_once = min(ranks, cores)
    fewer = [cost for cost in measured if cost.ranks <= at_once]
    cost = (
        max(fewer, key=lambda cost: cost.ranks)
        if fewer
        else min(measured, key=lambda cost: cost.ranks)
    )
    turns = slowdown * max(1.0, ranks / cores)
    efficiency = Efficiency(
        matmul_share=1.0,
        half=cost.half,
        attention_share=1.0,
        memory_share=1.0,
        launch=cost.launch * turns,
        shortest=0.0,
        cache_bytes=cost.cache_bytes,
        cache_factor=cost.cache_factor,
        small_bytes=cost.small_bytes,
        python=cost.python * turns,
        loop=cost.loop * turns,
        matrix=cost.matrix * turns,
        cold=cost.cold * turns,
    )
    peaks = {name: peak / turns for name, peak in cost.peaks.items()}
    return Device(
        str(machine.get("processor", "this processor")),
        peaks,
        memory_bytes() // ranks,
        cost.bandwidth / turns,
        kind="cpu",
        efficiency=efficiency,
    )


def rough_device(room: int) -> Device:
    """Return this rank's processor as some 20 ms of products, copies and ops show it: for plans that
    are compared with a measured one, to whose seconds the rates are scaled.

    Args:    room: bytes of memory.
    """
    small, large = 48, 256
    x = Tensor(np.ones(8, np.float32), requires_grad=True)
    whole = np.ones(1 << 23, np.float32)
    other = np.empty_like(whole)
    rates = {}
    for side in (small, large):
        a = np.ones((side, side), np.float32)
        rates[side] = 2 * side**3 / _shortest(partial(np.matmul, a, a))
    # rate of a product = peak / (1 + 3 half / side), as Rates has it
    slope = rates[small] / small - rates[large] / large
    half = max(0.0, rates[large] - rates[small]) / 3 / slope if slope > 0 else 0.0
    peak = rates[large] * (1 + 3 * half / large)
    b = np.ones((large, large))
    double = 2 * large**3 / _shortest(partial(np.matmul, b, b))
    launch = _shortest(partial(np.add, x.data, x.data))
    return Device(
        "this processor",
        {"float32": peak, "float64": double},
        room,
        2 * whole.nbytes / _shortest(partial(np.copyto, other, whole)),
        kind="cpu",
        efficiency=Efficiency(
            matmul_share=1.0,
            half=half,
            attention_share=1.0,
            memory_share=1.0,
            launch=launch,
            shortest=0.0,
            python=max(0.0, _shortest(lambda: x + x) - launch),
        ),
    )


def _shortest(work: Callable[[], Any]) -> float:
    """Return the seconds of the quickest of ROUNDS calls."""
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def _wire(name: str, cost: LinkCost | None) -> Wire:
    if cost is None:
        return Wire(name, 0.0, 1e9)  # of one rank: nothing crosses it
    return Wire(
        name,
        cost.alpha,
        1 / max(cost.beta, 1e-15),
        min(cost.overhead, cost.alpha),
        cost.gamma,
        cost.crowd,
    )


def without_overlap(trace: RankTrace) -> RankTrace:
    """Return the trace with a wait behind the start of every collective; messages (send, recv) stay
    as they are."""
    events: list[Event] = []
    places = []
    for event in trace.events:
        places.append(len(events))
        events.append(event)
        if isinstance(event, Start) and event.call.verb not in ("send", "recv"):
            events.append(Await(event.id))
    return replace(trace, events=events, steps=[places[step] for step in trace.steps])


def from_text(text: str) -> Cluster:
    """Return the cluster of "here" (as many ranks as cores), "here:4" or "here:tcp:4". Raises:
    ConfigError."""
    _, *words = text.split(":")
    transport = words.pop(0) if len(words) == 2 else TRANSPORTS[0]
    if transport not in TRANSPORTS:
        raise ConfigError(
            f"{text!r}: no link class {transport!r}{meant(transport, TRANSPORTS)}; choose from "
            f"{', '.join(TRANSPORTS)}"
        )
    try:
        ranks = int(*words) if words else cores_here()
    except ValueError:
        raise ConfigError(
            f"{text!r}: write here:RANKS, such as here:4; this machine has one node"
        ) from None
    return here(ranks, transport)


def cores_here() -> int:
    """Return cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
