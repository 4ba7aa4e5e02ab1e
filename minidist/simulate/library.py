"""Chapter 24 · The library's own collectives, algorithm `native`: NCCL on GPUs, XLA's on a TPU's
torus.

No code of ours sends their messages, so they are modelled, as NCCL's own tuner models them
(Source):

    ring   as many rings at once as a node has members. In a node ring c visits the members in the
           zigzag c, c+1, c-1, c+2, …: each ring ends at another device, so each leaves by another
           NIC, and of a full mesh every link is used once. Then the rings go on to the next node. A
           ring carries an equal share of the array:

           seconds = base + sum of the latencies of its hops + bytes on the busiest link / its
           bandwidth

    tree   all_reduce of short arrays between nodes: a chain in each node, a double binary tree of
           the nodes. A node sends and receives the array twice. Hops:
           2 (members of a node - 1) inside, 2 log2(nodes) between

    switch all_reduce in one node whose switches add (NVLink 4 and 5; NCCL's NVLS): every device
           sends its array to the switch once, and gets the sum once.

    pairs  all_to_all: every rank to every other at once.

Each of ring and tree has NCCL's three protocols: LL (the shortest latency, a quarter of the
bandwidth), LL128 and Simple. The fastest of all is taken, as NCCL does. Latencies are those of LL,
the α of the wires, times NCCL's own ratios. Not modelled: switches that add between nodes (NVLS
with trees, SHARP), and PXN.

A node whose devices are linked pair by pair, and no others: every device sends each other its share
at once.

On a torus a group that fills a box of it sends a share of the array both ways along every dim, dims
in turn: all its links are busy. Other groups are rings through their members in order.

Source: NVIDIA NCCL, src/graph/tuning.cc, 2016-2022; Walecki 1890 (the zigzags, in Lucas 1892);
Jouppi et al. 2023.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import fsum, prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minidist.simulate.cluster import Cluster
    from minidist.simulate.messages import Operands


class LibraryProtocol(NamedTuple):
    """How a library moves bytes. Latencies are multiples of the wires' α."""

    name: str
    base: float  # seconds before the first hop
    inside: float  # latency of a hop inside a node
    between: float  # and between nodes
    share: float  # of the bandwidth
    tree_inside: float
    tree_between: float
    tree_base: float


PROTOCOLS = (
    LibraryProtocol("LL", 6.6e-6, 1.0, 1.0, 1 / 4, 1.0, 5.0 / 2.7, 6.8e-6),
    LibraryProtocol("LL128", 14.0e-6, 1.9 / 0.6, 4.0 / 2.7, 0.92, 1.25 / 0.6, 8.5 / 2.7, 14.0e-6),
    LibraryProtocol("Simple", 8.4e-6, 3.4 / 0.6, 14.0 / 2.7, 1.0, 28 / 0.6, 28 / 2.7, 0.0),
)
"""NCCL's baseLat, hwLat (NVLink and network) and its shares of the bandwidth."""
TREE_SHARE = 0.9  # of the bandwidth that a tree reaches (tuning.cc)
SWITCH_BASE = 25e-6  # seconds before a switch has the first sum (tuning.cc)
ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""How often the array goes round a ring; other verbs send it once along a chain."""


_PerByte = defaultdict[int, float]


class Load(NamedTuple):
    """Bytes that an algorithm sends over each link, divided by the bytes of the array."""

    per_byte: dict[int, float]  # bytes on each link, by its number
    seconds: float  # on the busiest link
    inside: float  # α of all hops inside nodes, and between
    between: float


class LibraryWay(NamedTuple):
    """How a call is carried out. Attributes: nbytes: of the array, as often as it goes round;
    seconds: of the call."""

    name: str
    load: Load
    nbytes: int
    seconds: float


class Library:
    """The library's collectives among the places `members` of a cluster."""

    def __init__(self, members: Sequence[int], cluster: "Cluster") -> None:
        self.members = members
        self.cluster = cluster
        self.size = len(members)
        nodes: dict[int, list[int]] = {}
        for place in members:
            nodes.setdefault(cluster.node_of(place), []).append(place)
        self.nodes = list(nodes.values())
        self._loads: dict[str, Load] = {}

    def cost(self, verb: str, operands: "Operands") -> tuple[float, dict[int, int], int]:
        """Return seconds, bytes on each link, and bytes handed to the library by all ranks."""
        if verb == "all_to_all":
            return self._all_to_all(operands)
        way = self.fastest(verb, operands)
        total = self._total(verb, operands)
        sent = (
            total if verb in ("broadcast", "scatter", "gather", "all_gather") else total * self.size
        )
        return (
            way.seconds,
            {number: round(share * way.nbytes) for number, share in way.load.per_byte.items()},
            sent,
        )

    def fastest(self, verb: str, operands: "Operands") -> "LibraryWay":
        """Return the way that the library takes, of any verb but all_to_all."""
        total = self._total(verb, operands)
        return min(
            (
                LibraryWay(
                    name, load, times * total, self._seconds(name, load, times, total, protocol)
                )
                for name, load, times in self._ways(verb)
                for protocol in (PROTOCOLS if name != "switch" else PROTOCOLS[-1:])
            ),
            key=lambda way: way.seconds,
        )

    def load(self, verb: str, way: str) -> Load:
        """Return what a way puts on links; where these members have no such way, the load of the
        rings."""
        loads = {name: load for name, load, _ in self._ways(verb)}
        return loads.get(way, loads["ring"])

    def _total(self, verb: str, operands: "Operands") -> int:
        """Return bytes of the whole array: of what goes round."""
        if verb == "barrier":
            return 0
        if verb in ("all_gather", "gather"):
            return sum(operands.block(rank) for rank in range(self.size))
        return operands.nbytes

    def _ways(self, verb: str) -> list[tuple[str, Load, int]]:
        """Return the ways in which the call may be carried out: name, load on links, and how often
        the array goes."""
        kind = "around" if verb in ROUNDS else "chain"
        if kind not in self._loads:
            around = kind == "around"
            self._loads[kind] = (
                around and (self._on_torus() or self._on_mesh()) or self._rings(around)
            )
        ways = [("ring", self._loads[kind], ROUNDS.get(verb, 1))]
        if verb == "all_reduce" and len(self.nodes) > 1 and not self.cluster.topology.torus:
            if "tree" not in self._loads:
                self._loads["tree"] = self._tree()
            ways.append(("tree", self._loads["tree"], 1))
        if (
            verb == "all_reduce"
            and len(self.nodes) == 1
            and self.size > 2
            and self.cluster.topology.inside.in_switch
        ):
            if "switch" not in self._loads:
                self._loads["switch"] = self._in_switch()
            ways.append(("switch", self._loads["switch"], 1))
        return ways

    def _seconds(
        self, name: str, load: Load, times: int, nbytes: int, protocol: LibraryProtocol
    ) -> float:
        if name == "switch":
            return SWITCH_BASE + nbytes * load.seconds
        if name == "tree":
            return (
                protocol.tree_base
                + load.inside * protocol.tree_inside
                + load.between * protocol.tree_between
                + nbytes * load.seconds / (TREE_SHARE * protocol.share)
            )
        return protocol.base + times * (
            load.inside * protocol.inside
            + load.between * protocol.between
            + nbytes * load.seconds / protocol.share
        )

    # --------------------------------------------------------------------------------- what is sent

    def _rings(self, around: bool) -> Load:
        """Return the load of all rings at once, once around; or along each but for its last hop,
        which is a chain."""
        channels = min(map(len, self.nodes)) if len(self.nodes) > 1 else self.size
        share = (self.size - 1) / self.size if around else 1.0  # of the array, on each hop
        per_byte = _PerByte(float)
        alphas = (0.0, 0.0)
        for number in range(channels):
            ring = [place for node in self.nodes for place in zigzag(node, number)]
            hops = [*pairwise(ring), (ring[-1], ring[0])][: None if around else -1]
            for src, dst in hops:
                for link in self.cluster.route(src, dst):
                    per_byte[link] += share / channels
            if not number:
                alphas = self._alphas(hops)
        return self._load(per_byte, share * alphas[0], share * alphas[1])

    def _on_mesh(self) -> Load | None:
        """Return the load in a node whose devices are linked pair by pair: every device sends each
        other its share, over its own link."""
        if self.cluster.topology.kind != "mesh" or len(self.nodes) > 1:
            return None
        per_byte = _PerByte(
            float,
            {
                number: 1 / self.size
                for src in self.members
                for dst in self.members
                for number in self.cluster.route(src, dst)
            },
        )
        return self._load(per_byte, self.cluster.topology.inside.alpha, 0.0)

    def _in_switch(self) -> Load:
        """Return the load where every device sends its array once to the switch, and gets the sum
        once from it."""
        wire = self.cluster.topology.inside
        around = [*pairwise(self.members), (self.members[-1], self.members[0])]
        per_byte = dict.fromkeys(
            {link for src, dst in around for link in self.cluster.route(src, dst)}, 1.0
        )
        busiest = max(1 / self.cluster.links[link].bandwidth for link in per_byte)
        return Load(per_byte, busiest / wire.in_switch, 0.0, 0.0)

    def _tree(self) -> Load:
        """Return the load of a chain inside each node and a double binary tree between them."""
        per_byte = _PerByte(float)
        width = min(map(len, self.nodes))
        for number in range(width):
            heads = [node[number] for node in self.nodes]
            for src, dst in pairwise([*heads, heads[0]]):
                # each node sends to two others, and hears from two
                for link in self.cluster.route(src, dst):
                    per_byte[link] += 2.0 / width
        for node in self.nodes:
            for number in range(width):
                for src, dst in pairwise(zigzag(node, number)):
                    for link in (*self.cluster.route(src, dst), *self.cluster.route(dst, src)):
                        per_byte[link] += 1.0 / width
        node = max(self.nodes, key=len)
        inside = fsum(self.cluster.topology.alpha(src, dst) for src, dst in pairwise(node))
        between = self.cluster.topology.alpha(self.nodes[0][0], self.nodes[1][0])
        return self._load(per_byte, 2 * inside, 2 * (len(self.nodes) - 1).bit_length() * between)

    def _on_torus(self) -> Load | None:
        """Return the load where the members fill a box of the torus: a share of the array goes
        along every dim, both ways."""
        box = self._box()
        if box is None:
            return None
        topology = self.cluster.topology
        per_byte = _PerByte(float)
        dims = [dim for dim in range(len(box)) if box[dim] > 1]
        for first in range(len(dims)):
            left = 1 / (2 * len(dims))
            for dim in dims[first:] + dims[:first]:
                share = left * (box[dim] - 1) / box[dim]
                left /= box[dim]
                for place in self.members:
                    for step in (1, -1):
                        per_byte[topology.torus_link(topology.coordinates(place), dim, step)] += (
                            share
                        )
        return self._load(per_byte, topology.inside.alpha * sum(box[dim] - 1 for dim in dims), 0.0)

    def _box(self) -> tuple[int, ...] | None:
        """Return the sides of the box that the members fill, whole rings of the torus each; None if
        they fill none."""
        torus = self.cluster.topology.torus
        if not torus:
            return None
        seen = [
            {at[dim] for at in map(self.cluster.topology.coordinates, self.members)}
            for dim in range(len(torus))
        ]
        sides = tuple(map(len, seen))
        whole = all(side in (1, length) for side, length in zip(sides, torus, strict=True))
        return sides if whole and prod(sides) == self.size else None

    def _all_to_all(self, operands: "Operands") -> tuple[float, dict[int, int], int]:
        """Return the cost where every part goes its own way; each link carries all that cross
        it."""
        loads: Counter[int] = Counter()
        sent = 0
        for at, src in enumerate(self.members):
            for step in range(1, self.size):
                to = (at + step) % self.size
                nbytes = operands.block(to)
                sent += nbytes
                for number in self.cluster.route(src, self.members[to]):
                    loads[number] += nbytes
        busiest = max(
            nbytes / self.cluster.links[number].bandwidth for number, nbytes in loads.items()
        )
        alpha = max(
            self.cluster.topology.alpha(self.members[0], place) for place in self.members[1:]
        )
        simple = PROTOCOLS[-1]
        far = simple.between if len(self.nodes) > 1 else simple.inside
        return simple.base + far * alpha + busiest, dict(loads), sent

    def _alphas(self, edges: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Return α of all hops of a ring inside nodes, and between."""
        inside = between = 0.0
        for src, dst in edges:
            alpha = self.cluster.topology.alpha(src, dst)
            if (
                self.cluster.node_of(src) == self.cluster.node_of(dst)
                or self.cluster.topology.torus
            ):
                inside += alpha
            else:
                between += alpha
        return inside, between

    def _load(self, per_byte: _PerByte, inside: float, between: float) -> Load:
        links = self.cluster.links
        return Load(
            dict(per_byte),
            max(
                (share / links[number].bandwidth for number, share in per_byte.items()), default=0.0
            ),
            inside,
            between,
        )


def zigzag(node: Sequence[int], start: int) -> list[int]:
    """Return c, c+1, c-1, c+2, …: over all starts c, an even number of devices uses each pair once
    in each direction."""
    size = len(node)
    return [
        node[(start + (step + 1) // 2 * (1 if step % 2 else -1)) % size] for step in range(size)
    ]
