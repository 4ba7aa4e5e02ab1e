"""Chapter 24 · Links and routes: which wires a message from one place to another goes through.

    place     one device of the cluster; place = node * per_node + local
    link      a wire in one direction, or the port of a switch; several messages at once share its
              bandwidth
    route     the links from one place to another, in order

Inside a node                                        Between nodes

    switch   out(src) → in(dst)                      fat tree   nic-out → [up(leaf, spine) →
                                                                down(spine, leaf)]
    mesh     pair(src, dst)                                     → nic-in
    pcie     up(src) → [root-up → root-down]         torus      a link a hop, the shorter way round
             → down(dst)                                        each dim

PCIe devices and NICs (HCAs) lie below PCIe switches (PLX), and these below the processors. So to
another node a message goes up(src) → [root-up → root-down] → hca-down → the network → hca-up →
[root-up → root-down] → down(dst).

A device uses NIC local * nics // per_node. With rails, equal NICs of all nodes meet at one leaf;
else all NICs of a node do. A leaf's uplinks have the bandwidth of its NICs, divided by the
oversubscription. Static routing sends all messages of a pair through one spine, which a hash of the
pair chooses; adaptive routing spreads them over all spines evenly, so that the spines are one link
as wide as all.

notes: N4 §1, §3.    Source: Leiserson 1985 (fat tree); Jouppi et al. 2023 (TPU v4, 3-D torus).
"""

import zlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from math import fsum, prod
from typing import NamedTuple

from minidist.errors import ConfigError


class Wire(NamedTuple):
    """A class of links, all alike."""

    name: str  # "nvlink4", "ib-ndr", …
    alpha: float  # seconds that a message of no bytes takes
    bandwidth: float  # bytes a second, in one direction, that messages reach
    overhead: float = 0.0  # o, γ, κ of comm/cost/link_model.py: seconds, and seconds a byte
    gamma: float = 0.0
    crowd: float = 0.0
    # share of the bandwidth at which its switch adds arrays up; 0: it does not
    in_switch: float = 0.0
    # of a library's calls in a node (simulate/library.py): the wait for the last rank, the share of
    # the bandwidth that LL128 reaches in a ring, and what filling a pipeline's stage costs, in chunks
    start: float = 0.0
    ll128: float = 0.92
    fill: float = 0.0


WIRE_NUMBERS = ("alpha", "bandwidth", "in_switch", "start", "ll128", "fill")
"""What a file of clusters or a profile may say of a wire."""


class Link(NamedTuple):
    """One wire in one direction."""

    name: str  # "node3.nic0-out", …
    alpha: float  # seconds
    bandwidth: float  # bytes a second
    wire: str  # the name of its Wire
    overhead: float = 0.0
    gamma: float = 0.0
    crowd: float = 0.0


Key = tuple[str, ...] | tuple[Hashable, ...]


@dataclass
class Topology:
    """Where links lie. Links are numbered when a route first uses them.

    Attributes: slow   factor of the time a byte takes, by the name of a link or a pattern of names:
                       {"node3.*": 2.0}
    """

    per_node: int
    inside: Wire
    kind: str = "switch"  # switch, mesh, pcie; "" where there are no nodes (torus)
    between: Wire | None = None
    nics: int = 1  # a node
    rails: bool = True
    nodes_per_leaf: int = 32
    spines: int = 8
    oversubscription: float = 1.0
    routing: str = "static"  # or adaptive
    torus: tuple[int, ...] = ()  # its dims, else ()
    per_switch: int = 2  # devices below one PCIe switch
    uplink: Wire | None = None  # of a PCIe switch to its processor; None: as inside
    slow: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links: list[Link] = []
        self._numbers: dict[str, int] = {}
        self._routes: dict[tuple[int, int], tuple[int, ...]] = {}

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Return the links from place `src` to place `dst`, by number, in order; () from a place to
        itself."""
        known = self._routes.get((src, dst))
        if known is None:
            hops = (
                ()
                if src == dst
                else self._on_torus(src, dst)
                if self.torus
                else self._hops(src, dst)
            )
            known = self._routes[src, dst] = tuple(hops)
        return known

    def alpha(self, src: int, dst: int) -> float:
        """Return seconds that a message of no bytes takes."""
        return fsum(self.links[number].alpha for number in self.route(src, dst))

    def bandwidth(self, src: int, dst: int) -> float:
        """Return bytes a second of the narrowest link."""
        return min(self.links[number].bandwidth for number in self.route(src, dst))

    def check_slow(self) -> None:
        """Raise ConfigError if a pattern of `slow` meets none of the links that are in use."""
        for pattern in self.slow:
            if not any(fnmatchcase(link.name, pattern) for link in self.links):
                raise ConfigError(
                    f"no link is called {pattern!r}; links are called "
                    f"{', '.join(link.name for link in self.links[:4])}, …"
                )

    # ------------------------------------------------------------------------------------- the hops

    def _hops(self, src: int, dst: int) -> Iterator[int]:
        here = src // self.per_node
        there = dst // self.per_node
        if here == there:
            yield from self._in_node(here, src % self.per_node, dst % self.per_node)
            return
        assert self.between is not None, "Cluster checks that several nodes have a network"
        out = self._nic(src)
        into = self._nic(dst)
        if self.kind == "pcie":
            # with its α, as inside the node: a link's numbers are those of the first route over it
            yield self._link(f"node{here}.up{src % self.per_node}", self.inside)
            yield from self._over_root(here, self._switch(src), self._switch_of_nic(out))
            yield self._link(f"node{here}.hca{out}-down", self.inside, alpha=0.0)
        yield from self._network(here, out, there, into, zlib.crc32(b"%d,%d" % (src, dst)))
        if self.kind == "pcie":
            yield self._link(f"node{there}.hca{into}-up", self.inside, alpha=0.0)
            yield from self._over_root(there, self._switch_of_nic(into), self._switch(dst))
            yield self._link(f"node{there}.down{dst % self.per_node}", self.inside, alpha=0.0)

    def _in_node(self, node: int, src: int, dst: int) -> Iterator[int]:
        if self.kind == "mesh":
            yield self._link(f"node{node}.pair{src}-{dst}", self.inside)
            return
        first, last = ("up", "down") if self.kind == "pcie" else ("out", "in")
        yield self._link(f"node{node}.{first}{src}", self.inside)
        if self.kind == "pcie":
            yield from self._over_root(node, self._switch(src), self._switch(dst))
        yield self._link(f"node{node}.{last}{dst}", self.inside, alpha=0.0)

    def _over_root(self, node: int, above: int, below: int) -> Iterator[int]:
        """Return the links from one PCIe switch of a node to another, by the processors."""
        if above != below:
            uplink = self.uplink or self.inside._replace(alpha=0.0)
            yield self._link(f"node{node}.root-up{above}", uplink)
            yield self._link(f"node{node}.root-down{below}", uplink, alpha=0.0)

    def _switch(self, place: int) -> int:
        """Return the PCIe switch above a device, in its node."""
        return place % self.per_node // self.per_switch

    def _switch_of_nic(self, nic: int) -> int:
        """Return the PCIe switch above a NIC: that of the first device which uses it."""
        first = -(-nic * self.per_node // self.nics)
        return first // self.per_switch

    def _nic(self, place: int) -> int:
        return place % self.per_node * self.nics // self.per_node

    def _network(self, here: int, out: int, there: int, into: int, pair: int) -> Iterator[int]:
        wire = self.between
        assert wire is not None
        yield self._link(f"node{here}.nic{out}-out", wire)
        leaf = self._leaf(here, out)
        other = self._leaf(there, into)
        if leaf != other:
            ports = self.nodes_per_leaf * (1 if self.rails else self.nics)
            width = wire.bandwidth * ports / self.oversubscription
            spine = "s"
            if self.routing == "static":
                width = width / self.spines
                spine = f"{pair % self.spines}"
            yield self._link(f"{leaf}.up{spine}", wire, alpha=0.0, bandwidth=width)
            yield self._link(f"{other}.down{spine}", wire, alpha=0.0, bandwidth=width)
        yield self._link(f"node{there}.nic{into}-in", wire, alpha=0.0)

    def _leaf(self, node: int, nic: int) -> str:
        return f"leaf{node // self.nodes_per_leaf}" + (f".rail{nic}" if self.rails else "")

    def _on_torus(self, src: int, dst: int) -> Iterator[int]:
        """Return the route on a torus: one dim after the other, the shorter way round (up where
        both are as long)."""
        at = list(self.coordinates(src))
        goal = self.coordinates(dst)
        for dim, length in enumerate(self.torus):
            ahead = (goal[dim] - at[dim]) % length
            step = 1 if 2 * ahead <= length else -1
            while at[dim] != goal[dim]:
                yield self.torus_link(tuple(at), dim, step)
                at[dim] = (at[dim] + step) % length

    def torus_link(self, at: tuple[int, ...], dim: int, step: int) -> int:
        """Return the link that leaves the device at these coordinates along `dim`, up (1) or down
        (-1)."""
        return self._link(
            f"chip{'.'.join(map(str, at))}.{'xyzuvw'[dim]}{'+' if step > 0 else '-'}", self.inside
        )

    def coordinates(self, place: int) -> tuple[int, ...]:
        """Return the coordinates of a place on the torus, the last dim innermost."""
        found = []
        for length in reversed(self.torus):
            place, last = divmod(place, length)
            found.append(last)
        return tuple(reversed(found))

    def _link(
        self, name: str, wire: Wire, *, alpha: float | None = None, bandwidth: float | None = None
    ) -> int:
        number = self._numbers.get(name)
        if number is None:
            factor = prod(
                factor for pattern, factor in self.slow.items() if fnmatchcase(name, pattern)
            )
            number = self._numbers[name] = len(self.links)
            self.links.append(
                Link(
                    name,
                    wire.alpha if alpha is None else alpha,
                    (wire.bandwidth if bandwidth is None else bandwidth) / factor,
                    wire.name,
                    wire.overhead,
                    wire.gamma,
                    wire.crowd,
                )
            )
        return number


def most_even(size: int, dims: int) -> tuple[int, ...]:
    """Return the factors of `size` that are nearest to each other: the torus of the fewest hops;
    (4, 4, 8) of 128."""
    if dims == 1:
        return (size,)
    ways = [
        (first, *rest)
        for first in range(1, size + 1)
        if size % first == 0 and first**dims <= size
        for rest in [most_even(size // first, dims - 1)]
    ]
    return min((tuple(sorted(way)) for way in ways), key=lambda way: (sum(way), way))


def corners(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Return all coordinates of a torus, in the order of places."""
    return product(*(range(length) for length in shape))
