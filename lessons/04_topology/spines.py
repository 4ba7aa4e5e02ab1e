"""Show several spines, and where ranks lie: lesson 04 on virtual machines, by the routes of
minidist/simulate/topology.py.

busy = slowest(fabric("static"), pairs)         # the slowest message's time over its time on an
                                                idle network
places = dealt("tp inside", plan)               # the machine and device of each rank
"""

import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minidist.lessons.page import Page
from minidist.observe.events import GroupCall
from minidist.simulate.cluster import Cluster
from minidist.simulate.placement import RankPlaces
from minidist.simulate.topology import Topology, Wire
from minidist.simulate.walk import call_cost

# machines of one device; four a leaf; spines above the leaves
MACHINES = 16
LEAF = 4
SPINES = 4
WIRE = Wire("cable", 1e-6, 50e9)
DRAWN = 200  # random permutations
PLAN = {"dp": 2, "tp": 4}
MIB = 1 << 20

Pairs = Sequence[tuple[int, int]]  # src, dst: messages of equal length at the same time


# ----------------------------------------------------------------------------------- several spines


def fabric(routing: str, oversubscription: float = 1.0) -> Topology:
    """Return leaves and spines; a leaf's cables upwards have the total width of its cables
    downwards, divided by `oversubscription`."""
    return Topology(
        1,
        WIRE,
        between=WIRE,
        rails=False,
        nodes_per_leaf=LEAF,
        spines=SPINES,
        routing=routing,
        oversubscription=oversubscription,
    )


def slowest(topology: Topology, pairs: Pairs) -> float:
    """Return the slowest message's time as a multiple of its time on an idle network: the busiest
    link's load over its width."""
    load: Counter[int] = Counter()
    for src, dst in pairs:
        load.update(topology.route(src, dst))
    return max(
        count * WIRE.bandwidth / topology.links[link].bandwidth for link, count in load.items()
    )


def shift(distance: int) -> Pairs:
    """Pair each machine with the machine `distance` further on; 1 is a step of a ring."""
    return [(src, (src + distance) % MACHINES) for src in range(MACHINES)]


def permutations(count: int, seed: int = 4) -> Iterable[Pairs]:
    """Yield `count` random permutations: each machine sends to one machine and receives from
    one."""
    chance = random.Random(seed)
    for _ in range(count):
        to = chance.sample(range(MACHINES), MACHINES)
        yield [(src, dst) for src, dst in enumerate(to) if src != dst]


def traffic() -> dict[str, list[Pairs]]:
    """Return kinds of traffic by name: a list of what is sent at once, step by step."""
    return {
        "a ring's step, machine to next machine": [shift(1)],
        "every machine to the one a leaf further on": [shift(LEAF)],
        "all-to-all, step by step": [shift(distance) for distance in range(1, MACHINES)],
        f"{DRAWN} random permutations": list(permutations(DRAWN)),
    }


def routed(page: Page) -> None:
    """Compare static routing, adaptive routing, and half as many cables upwards."""
    if not page.writes:
        return
    ways = (fabric("static"), fabric("adaptive"), fabric("adaptive", 2.0))
    rows = []
    for name, steps in traffic().items():
        found = [[slowest(topology, pairs) for pairs in steps] for topology in ways]
        rows.append(
            [
                name,
                *(
                    f"{statistics.mean(times):.2f}"
                    + (f", worst {max(times):g}" if len(times) > 1 else "")
                    for times in found
                ),
            ]
        )
    page.table(
        f"{MACHINES} machines, {LEAF} a leaf, {SPINES} spines: the slowest message, in times of "
        "one alone",
        ["", "static", "adaptive", "adaptive, 2:1"],
        rows,
        note="static: a hash of (source, destination) picks the spine; adaptive: every message "
        "over all spines",
    )


# ---------------------------------------------------------------------------------------- placement


class Dealt(NamedTuple):
    """Attributes: places: device of each rank, four a machine."""

    name: str
    places: Sequence[int]


def dealings() -> list[Dealt]:
    """Return several placements of PLAN's eight ranks on two machines of four devices."""
    ranks = range(8)
    return [
        Dealt(
            "tp inside: machine by machine, tp innermost",
            RankPlaces(PLAN, order=["dp", "tp"]).places,
        ),
        Dealt(
            "dp inside: machine by machine, dp innermost",
            RankPlaces(PLAN, order=["tp", "dp"]).places,
        ),
        Dealt(
            "tp innermost, but ranks dealt in turn", [rank % 2 * 4 + rank // 2 for rank in ranks]
        ),
    ]


def across(axis: str, places: Sequence[int], cluster: Cluster) -> tuple[float, float]:
    """All-reduce a MiB in every group of an axis; return the bytes between machines in MiB, and the
    seconds of the slowest group."""
    groups = {RankPlaces(PLAN).members(axis, rank) for rank in range(8)}
    costs = [
        call_cost(
            GroupCall(axis, "all_reduce", "ring", MIB, itemsize=4),
            tuple(places[rank] for rank in group),
            cluster,
        )
        for group in groups
    ]
    crossed = sum(
        nbytes
        for cost in costs
        for link, nbytes in cost.link_bytes.items()
        if cluster.links[link].name.endswith("-out")
    )
    return crossed / MIB, max(cost.seconds for cost in costs)


def placed(page: Page) -> None:
    """Show the same plan placed in three ways."""
    if not page.writes:
        return
    cluster = Cluster.parse("h100:2x4")
    rows = []
    for name, places in dealings():
        (tp, tp_seconds), (dp, dp_seconds) = (
            across(axis, places, cluster) for axis in ("tp", "dp")
        )
        rows.append(
            [
                name,
                f"{tp:.2f} n",
                f"{1e6 * tp_seconds:.0f} µs",
                f"{dp:.2f} n",
                f"{1e6 * dp_seconds:.0f} µs",
            ]
        )
    page.table(
        "dp=2, tp=4 on two machines of four: a ring all-reduce of n = 1 MiB in every group of "
        "an axis",
        ["ranks lie", "tp: across", "takes", "dp: across", "takes"],
        rows,
        note="tp makes such a call several times a layer and waits; dp makes one a step, beside "
        "backward",
    )
