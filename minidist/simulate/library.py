"""Chapter 24 · The library's own collectives, algorithm `native`: NCCL on GPUs, XLA's on a TPU's
torus.

No code of ours sends their messages, so they are modelled. A call goes one of these ways:

    ring     as many rings at once as a node has members. In a node ring c visits the members in the
             zigzag c, c+1, c-1, c+2, …: each ring ends at another device, so each leaves by another
             NIC, and of a full mesh every link is used once. Then the rings go on to the next node.
             A ring carries an equal share of the array.
    tree     all_reduce between nodes: a chain in each node, a double binary tree of the nodes. A
             node sends the array once to one other node, twice to several. Hops:
             2 (members of a node - 1) inside, 2 log2(nodes) between
    switch   all_reduce in one node whose switches add (NVLink 4 and 5; NCCL's NVLS): every device
             sends its array to the switch once, and gets the sum once.
    switches all_reduce between such nodes (NVLS with trees): the switch in each node, the tree
             between.
    pairs    all_to_all: every rank to every other at once.

and by one of NCCL's three protocols (a switch only by Simple):

    LL       each 8 bytes hold 4 of data and a flag: the shortest latency, about a third of the
             bandwidth inside a node and an eighth between nodes
    LL128    each 128 bytes hold 120 of data and a flag; not across PCIe
    Simple   chunks, and a flag for each: all of the bandwidth, the longest latency

What a call takes, in seconds:

    start + base + hops · latency + bytes on the busiest link / (its bandwidth · share)
          + fill · stages · chunk / bandwidth           Simple only

`start` is the wait until the last rank's kernel runs. A chunk passes all hops before the pipeline
is full: `fill` is how many chunks of time each stage of it costs. A chunk is a device's part of the
array, at most 1 MiB in each of 24 channels.

NCCL does not measure. It chooses by a table of its own, with latencies and shares that it expects
(`Library.expected`), and so does `Library.taken`. `Library.seconds` says what the chosen way takes.
Some of its numbers come from published measurements: start, fill and LL128's share of a wire
(clusters.toml); and the constants below for LL128 in trees, for switches between nodes, and for the
latency of a ring between nodes. Lesson 24's CALIBRATION.md tells how far both are from measured
times.

Not modelled: switches that add between nodes (SHARP), and PXN. A node whose devices are linked pair
by pair, and no others: every device sends each other its share at once. On a torus a group that
fills a box of it sends a share of the array both ways along every dim, dims in turn: all its links
are busy. Other groups are rings through their members in order.

Source: NVIDIA NCCL, src/graph/tuning.cc, 2016-2026; Hu et al. 2025, Demystifying NCCL, arXiv
2507.04786; Walecki 1890 (the zigzags, in Lucas 1892); Jouppi et al. 2023.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import fsum, prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minidist.simulate.cluster import Cluster
    from minidist.simulate.messages import Operands


class Latency(NamedTuple):
    """Seconds before the first hop, and of a hop inside a node and between nodes as multiples of
    the wires' α, which is LL's latency in a ring."""

    base: float
    inside: float
    between: float

    def seconds(self, load: "Load", times: int = 1) -> float:
        """Return the seconds of all hops, if the array makes them `times` times."""
        return self.base + times * (load.inside * self.inside + load.between * self.between)


class LibraryProtocol(NamedTuple):
    """How a library moves bytes, as NCCL's tables expect it."""

    name: str
    ring: Latency
    tree: Latency
    near: float  # share of the bandwidth of links inside a node
    far: float  # and between nodes
    by_size: tuple[float, ...]  # share that a tree reaches, of arrays of 64, 128, 256, … bytes


_LL = LibraryProtocol(
    "LL",
    Latency(6.6e-6, 1.0, 1.0),
    Latency(6.8e-6, 1.0, 5.0 / 2.7),
    0.37,  # llMaxBws / what the rings reach: 87.7 / 240, 141 / 371, 282 / 722 GB/s
    0.12,  # 22.5 / 184, 45 / 368 GB/s
    (*[1.0] * 4, 0.9, 0.8, *[0.7] * 4, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
)
_LL128 = LibraryProtocol(
    "LL128",
    Latency(14.0e-6, 1.9 / 0.6, 4.0 / 2.7),
    Latency(14.0e-6, 1.25 / 0.6, 8.5 / 2.7),
    0.92,
    0.92,
    (*[1.0] * 5, 0.9, *[0.8] * 3, 0.7, *[0.6] * 6, 0.8, *[0.9] * 4),
)
_SIMPLE = LibraryProtocol(
    "Simple",
    Latency(8.4e-6, 3.4 / 0.6, 14.0 / 2.7),
    Latency(8.4e-6, 4.0 / 0.6, 14.0 / 2.7),
    1.0,
    1.0,
    (*[0.9] * 7, 0.8, 0.7, 0.6, 0.6, *[0.5] * 4, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, *[0.9] * 3),
)
PROTOCOLS = (_LL, _LL128, _SIMPLE)
"""baseLatencies, hwLatencies (NVLink and network) and treeCorrectionFactor of tuning.cc."""
TREE_SHARE = 0.92  # of the bandwidth that a tree reaches (tuning.cc)
TREE_LL128 = (0.72, 0.42)
"""Share that LL128 reaches in a tree of two nodes, and of more, measured; a ring between nodes
reaches what NCCL expects."""
RING_PLATEAU = 1.4
"""By which a ring's latency grows where it leaves the node: tuning.cc has it for Simple, and a table
of rings shows it for LL128."""
SWITCH = Latency(25e-6, 0.0, 20.9 / 2.7)
"""NCCL's expectation of NVLS, and of NVLS with trees."""
SWITCH_EXPECTED = (
    0.9  # of in_switch: NCCL expects 5 / 6 · 0.8 = 0.67 of NVLink 4, and 0.74 is reached
)
SWITCH_HOP = 41.0 / 2.7
"""Multiple of α of a hop between nodes with such switches, measured: `switches` on 2, 4, 8 nodes."""
SWITCHES_SHARE = 0.91
"""The share of a switch's bandwidth that is left where it also sends to other nodes. Measured: an
array at 250 GB/s on 16 devices and 274 on 8 (bus bandwidth 469 and 480)."""
CHUNKS = 24 << 20  # bytes of a device that are under way at once: 24 channels of 1 MiB
ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""How often the array goes round a ring; other verbs send it once along a chain."""


_PerByte = defaultdict[int, float]


class Load(NamedTuple):
    """What an algorithm puts on links, divided by the bytes of the array."""

    per_byte: dict[int, float]  # bytes on each link, by its number
    near: float  # seconds on the busiest link inside a node, of all its bandwidth
    far: float  # and between nodes
    inside: float  # α of all hops inside nodes, and between
    between: float
    stages: int  # that a chunk passes one after the other

    def seconds(self, near: float, far: float) -> float:
        """Return the seconds of a byte, where these shares of the bandwidths are reached."""
        return max(self.near / near, self.far / far)


class Chosen(NamedTuple):
    """A way, its load, how often the array goes, and the protocol."""

    name: str
    load: Load
    times: int
    protocol: LibraryProtocol


class LibraryWay(NamedTuple):
    """How a call is carried out."""

    name: str
    protocol: str
    load: Load
    nbytes: int  # of the array, as often as it goes round
    seconds: float  # of the call


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
        way = self.taken(verb, operands)
        total = self._total(verb, operands)
        sent = (
            total if verb in ("broadcast", "scatter", "gather", "all_gather") else total * self.size
        )
        return (
            way.seconds,
            {number: round(share * way.nbytes) for number, share in way.load.per_byte.items()},
            sent,
        )

    def taken(self, verb: str, operands: "Operands") -> "LibraryWay":
        """Return the way that the library takes, of any verb but all_to_all."""
        chosen = self.chosen(verb, operands)
        total = self._total(verb, operands)
        return LibraryWay(
            chosen.name,
            chosen.protocol.name,
            chosen.load,
            chosen.times * total,
            self.seconds(chosen, total),
        )

    def chosen(self, verb: str, operands: "Operands", only: str = "") -> Chosen:
        """Return the fastest way and protocol by NCCL's expectations; `only`: of this way, as with
        NCCL_ALGO."""
        total = self._total(verb, operands)
        pcie = self.cluster.topology.kind == "pcie"
        protocols = [each for each in PROTOCOLS if each is not _LL128 or not pcie]
        return min(
            (
                Chosen(*way, protocol)
                for way in self._ways(verb)
                if only in ("", way[0])
                for protocol in ((_SIMPLE,) if "switch" in way[0] else protocols)
            ),
            key=lambda chosen: self.expected(chosen, total),
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
        wire = self.cluster.topology.inside
        if verb == "all_reduce" and min(map(len, self.nodes)) > 2 and wire.in_switch:
            name = "switch" if len(self.nodes) == 1 else "switches"
            if name not in self._loads:
                self._loads[name] = self._in_switch()
            ways.append((name, self._loads[name], 1))
        return ways

    def expected(self, chosen: Chosen, nbytes: int) -> float:
        """Return the seconds that NCCL's tables expect of an array: what it chooses by."""
        protocol = chosen.protocol
        load = chosen.load
        if "switch" in chosen.name:
            share = self.cluster.topology.inside.in_switch * SWITCH_EXPECTED
            return SWITCH.seconds(load) + nbytes * load.seconds(share, 1.0)
        byte = load.seconds(protocol.near, protocol.far)
        if chosen.name == "tree":
            return protocol.tree.seconds(load) + nbytes * byte / _tree_share(protocol, nbytes)
        hops = protocol.ring.seconds(load, chosen.times)
        if load.between and protocol is _SIMPLE:
            hops *= RING_PLATEAU
        return hops + chosen.times * nbytes * byte

    def seconds(self, chosen: Chosen, nbytes: int) -> float:
        """Return the seconds that a way takes, by published measurements."""
        protocol = chosen.protocol
        load = chosen.load
        wire = self.cluster.topology.inside
        fill = 0.0
        if protocol is _SIMPLE:
            chunk = min(nbytes / max(map(len, self.nodes)), CHUNKS)
            fill = wire.fill * load.stages * chunk / wire.bandwidth
        if "switch" in chosen.name:
            hops = SWITCH._replace(between=SWITCH_HOP).seconds(load)
            share = wire.in_switch * (1.0 if chosen.name == "switch" else SWITCHES_SHARE)
            return wire.start + hops + nbytes * load.seconds(share, 1.0) + fill
        near = protocol.near
        far = protocol.far
        if protocol is _LL128:
            near = wire.ll128
            if chosen.name == "tree":
                near = far = TREE_LL128[len(self.nodes) > 2]
        byte = load.seconds(near, far)
        if chosen.name == "tree":
            share = TREE_SHARE if protocol is _SIMPLE else _tree_share(protocol, nbytes)
            return wire.start + protocol.tree.seconds(load) + nbytes * byte / share + fill
        hops = protocol.ring.seconds(load, chosen.times)
        if load.between:
            hops *= RING_PLATEAU
        return wire.start + hops + chosen.times * nbytes * byte + fill

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
        once from it; and where the nodes are several, of the tree between them."""
        per_byte = _PerByte(float)
        for node in self.nodes:
            for src, dst in pairwise([*node, node[0]]):
                for link in self.cluster.route(src, dst):
                    per_byte[link] = 1.0
        between = self._between(per_byte)
        return self._load(per_byte, 0.0, between, 3 + self._levels)

    def _tree(self) -> Load:
        """Return the load of a chain inside each node and a double binary tree between them."""
        per_byte = _PerByte(float)
        width = min(map(len, self.nodes))
        between = self._between(per_byte)
        for node in self.nodes:
            for number in range(width):
                for src, dst in pairwise(zigzag(node, number)):
                    for link in (*self.cluster.route(src, dst), *self.cluster.route(dst, src)):
                        per_byte[link] += 1.0 / width
        node = max(self.nodes, key=len)
        inside = fsum(self.cluster.topology.alpha(src, dst) for src, dst in pairwise(node))
        return self._load(per_byte, 2 * inside, between, 1 + self._levels)

    @property
    def _levels(self) -> int:
        """Return how often a tree crosses the network, up and down."""
        return 2 * (len(self.nodes) - 1).bit_length()

    def _between(self, per_byte: _PerByte) -> float:
        """Add what the double binary tree sends between nodes; return α of its hops."""
        if len(self.nodes) == 1:
            return 0.0
        width = min(map(len, self.nodes))
        sent = 1.0 if len(self.nodes) == 2 else 2.0  # of the array, by each node
        for number in range(width):
            heads = [node[number] for node in self.nodes]
            for src, dst in pairwise([*heads, heads[0]]):
                for link in self.cluster.route(src, dst):
                    per_byte[link] += sent / width
        return self._levels * self.cluster.topology.alpha(self.nodes[0][0], self.nodes[1][0])

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
        hop = _SIMPLE.ring.between if len(self.nodes) > 1 else _SIMPLE.ring.inside
        start = self.cluster.topology.inside.start + _SIMPLE.ring.base
        return start + hop * alpha + busiest, dict(loads), sent

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

    def _load(self, per_byte: _PerByte, inside: float, between: float, stages: int = 1) -> Load:
        links = self.cluster.links
        wire = self.cluster.topology.inside.name
        busy = {True: 0.0, False: 0.0}
        for number, share in per_byte.items():
            near = links[number].wire == wire
            busy[near] = max(busy[near], share / links[number].bandwidth)
        return Load(dict(per_byte), busy[True], busy[False], inside, between, stages)


def _tree_share(protocol: LibraryProtocol, nbytes: int) -> float:
    """Return the share of the bandwidth that a tree reaches with an array of this length."""
    size = max(nbytes >> 6, 1).bit_length() - 1
    return TREE_SHARE * (protocol.by_size[size] if size < len(protocol.by_size) else 1.0)


def zigzag(node: Sequence[int], start: int) -> list[int]:
    """Return c, c+1, c-1, c+2, …: over all starts c, an even number of devices uses each pair once
    in each direction."""
    size = len(node)
    return [
        node[(start + (step + 1) // 2 * (1 if step % 2 else -1)) % size] for step in range(size)
    ]
