"""Chapter 24 · Clusters: devices, nodes and wires as data (clusters.toml, or a file of yours).

    cluster = Cluster.parse("h100:128x8")           # 128 nodes of 8; "h100:1024" is the same,
                                                    "tpu-v4:8x8x8" a torus
    cluster.device.peak("bfloat16")                 # 989.4e12 FLOP/s
    cluster.route(0, 9)                             # numbers of links; cluster.links[number] is a
                                                    Link

Places are numbered node by node. `here` is this machine as `minidist bench calibrate` measured it
(simulate/here.py).

notes: N2 §10.6, N4 §1, §3.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from minidist.console import meant
from minidist.errors import ConfigError
from minidist.reading import NotNegative, Positive, read_toml, require
from minidist.simulate.device import Device, Tier
from minidist.simulate.names import known_name, suggestion
from minidist.simulate.topology import WIRE_NUMBERS, Link, Topology, Wire, most_even

MOST_BYTES = 16 << 20  # of a file of clusters
Places = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class _WireEntry(msgspec.Struct):
    alpha: NotNegative
    bandwidth: Positive
    share: Positive = 1.0
    in_switch: NotNegative = 0.0
    start: NotNegative = 0.0
    ll128: Positive = 0.92
    fill: NotNegative = 0.0


class _TierEntry(msgspec.Struct):
    alpha: NotNegative
    bandwidth: Positive
    bytes: Positive | None = None


class _ClusterEntry(msgspec.Struct):
    """A cluster, whose missing keys `Cluster.parse` names; Topology and Device say what they
    mean. like: another cluster, whose keys it takes where it has none of its own."""

    like: str | None = None
    device: str = ""
    peak: dict[str, Positive] = {}
    memory_bytes: Positive = 1.0
    memory_bandwidth: Positive = 1.0
    per_node: Places = 1
    inside: str = ""
    network: str | None = None
    uplink: str | None = None
    host: str | None = None
    below: str | None = None
    host_bytes: Positive | None = None
    host_bandwidth: Positive | None = None
    memory_kind: str = ""
    reach: dict[str, Positive] = {}
    units: Annotated[int, msgspec.Meta(ge=0, le=2**16)] = 0
    kind: Literal["switch", "mesh", "pcie", ""] = ""
    nics: Places = 1
    rails: bool = True
    nodes_per_leaf: Places = 1
    spines: Places = 1
    per_switch: Places = 1
    oversubscription: Positive = 1.0
    routing: str = ""
    torus_dims: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0
    most: Places | None = None
    watts: Positive | None = None
    idle_watts: NotNegative | None = None
    node_watts: Positive | None = None
    price_an_hour: NotNegative | None = None
    source: dict[str, str] = {}


class _ClusterFile(msgspec.Struct):
    wire: dict[str, _WireEntry] = {}
    tier: dict[str, _TierEntry] = {}
    cluster: dict[str, _ClusterEntry] = {}


POWER = 0.2
"""The best product of a device with w times the watts is w**POWER times as fast. Bekman, Machine
Learning Engineering, 2026: an A100 of 300 W reaches 253 TFLOP/s, one of 400 W 271 (0.24); an H100
of 700 W 795, a GH200 of 900 W 829 (0.17)."""

OWN_FILE = Path(__file__).with_name("clusters.toml")


@dataclass(frozen=True)
class Cluster:
    """Some nodes of some devices, and what connects them.

    Attributes: name        "h100"; spec "h100:128x8"
                nodes, per_node, size
                tiers       memory beyond the device, by name: host, disk, cxl2
                below       the tier below the host's memory, where files of offloading lie
                host_watts  of a node without its devices, a device; None where no source states it
                overlaps    whether calls run beside computation; not where the ranks themselves
                            fill all cores
                call, pair  seconds of each call of all ranks, and of two, beside those of its
                            messages; 0 but on `here`
                alone       the device while no other rank computes, where they share cores, caches
                            or memory (`here`): `device` is as fast as while all compute. None: the
                            others do not matter
    """

    name: str
    spec: str
    device: Device
    nodes: int
    per_node: int
    topology: Topology
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    host_watts: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    overlaps: bool = True
    call: float = 0.0
    pair: float = 0.0
    alone: Device | None = None
    below: str = "disk"

    @classmethod
    def parse(cls, text: str, file: str | Path | None = None) -> "Cluster":
        """Return the cluster that a text names: NAME:NODESxDEVICES, NAME:DEVICES, or FILE:NAME:…; a
        torus: NAME:AxBxC.

        Upper and lower case are alike in NAME.
        Raises: ConfigError with the nearest name that there is, or the nearest count that fits.
        """
        if text.split(":")[0].lower() == "here":
            from minidist.simulate.here import from_text

            return from_text(text)
        path, name, shape = _parts(text)
        tables = _tables(path or file)
        known = sorted(tables["cluster"])
        found = known_name(name, known)
        if found is None:
            near = suggestion(name, known)
            raise ConfigError(
                f"no cluster {name!r}{near}; choose from {', '.join(known)}, or give "
                f"a file of yours"
            )
        spec = ":".join([*([path] if path else []), found, shape])
        try:
            return _build(found, spec, tables["cluster"][found], tables, shape)
        except KeyError as error:
            raise ConfigError(
                f"cluster {name} lacks {error.args[0]!r}; {OWN_FILE.name} shows what one needs"
            ) from None

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return self.nodes * self.per_node

    @property
    def links(self) -> list[Link]:
        """Return the links that routes have used so far."""
        return self.topology.links

    def call_seconds(self, size: int) -> float:
        """Return the seconds that a call of so many ranks takes beside its messages: between those
        of two ranks and of all."""
        return (
            self.pair + (self.call - self.pair) * (size - 2) / (self.size - 2)
            if self.size > 2
            else self.call
        )

    def node_of(self, place: int) -> int:
        """Return the node that a place is in."""
        return place // self.per_node

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """Return numbers of the links from place `src` to place `dst`."""
        return self.topology.route(src, dst)

    def slowed(self, links: Mapping[str, float]) -> "Cluster":
        """Return the same cluster, in which a byte takes longer on some links: {"node3.nic0-out":
        4.0, "leaf0.*": 2.0}."""
        return replace(self, topology=replace(self.topology, slow={**self.topology.slow, **links}))

    def rewired(self, wires: Mapping[str, Mapping[str, float]]) -> "Cluster":
        """Return the same cluster with other numbers of a wire (a profile's): {"nvlink4": {"alpha":
        1e-6}}."""

        def changed(wire: Wire) -> Wire:
            given = wires.get(wire.name, {})
            numbers: dict[str, Any] = {key: given[key] for key in WIRE_NUMBERS if key in given}
            return wire._replace(**numbers)

        between = self.topology.between
        return replace(
            self,
            topology=replace(
                self.topology,
                inside=changed(self.topology.inside),
                between=None if between is None else changed(between),
            ),
        )

    def move_seconds(self, lane: str, nbytes: int) -> float:
        """Return seconds of a copy between device and host, or between host and what lies below it
        (the lane names "disk", whatever it is)."""
        tier = self.tiers.get(self.below if "disk" in lane else "host")
        tier = tier or self.tiers.get("host")
        if tier is None:
            raise ConfigError(
                f"cluster {self.name} has no memory beyond the device; add `host`, or do not "
                "offload"
            )
        return tier.alpha + nbytes / tier.bandwidth


def names(file: str | Path | None = None) -> list[str]:
    """Return the clusters that there are."""
    return sorted(_tables(file)["cluster"])


def _parts(text: str) -> tuple[str | None, str, str]:
    """Return FILE, NAME and the shape of "FILE:NAME:16x8"."""
    *path, name, shape = ["", *text.split(":")] if ":" in text else ["", text, ""]
    if not name or not shape:
        raise ConfigError(
            f"cluster {text!r}: write NAME:NODESxDEVICES, such as {text.strip(':') or 'h100'}:16x8"
        )
    return ":".join(path).lstrip(":") or None, name, shape


def _tables(file: str | Path | None) -> dict[str, dict[str, Any]]:
    """Return wires, tiers and clusters of a user's file, before those of minidist's own."""
    tables: dict[str, dict[str, Any]] = {"wire": {}, "tier": {}, "cluster": {}}
    for path in [OWN_FILE, *([Path(file)] if file else [])]:
        try:
            read = require(read_toml(path, most=MOST_BYTES), _ClusterFile)
        except OSError as error:
            raise ConfigError(f"cluster file {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"cluster file {path}: {error}") from error
        for kind, table in tables.items():
            table.update(read.get(kind, {}))
    return {**tables, "cluster": _inherited(tables["cluster"])}


def _inherited(clusters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the clusters, with the keys of another where one says `like = "NAME"`."""
    known = {name: entry for name, entry in clusters.items() if "like" not in entry}
    found = {}
    for name, entry in clusters.items():
        if "like" in entry:
            if entry["like"] not in known:
                raise ConfigError(
                    f"cluster {name} is like {entry['like']!r}{meant(entry['like'], known)}; "
                    f"choose one that is like no other: {', '.join(sorted(known))}"
                )
            entry = _varied(known[entry["like"]], entry)
        found[name] = entry
    return found


def _varied(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a cluster that is `like` another one: its own, and the other's for the
    rest. If it has other watts, its products have another speed; the rest of a node keeps its
    watts."""
    source = {**base.get("source", {}), **own.get("source", {})}
    whole = {**base, **own, "source": source}
    if "watts" in own and "watts" in base:
        if "reach" not in own:
            clock = (own["watts"] / base["watts"]) ** POWER
            whole["reach"] = {
                dtype: share * clock for dtype, share in base.get("reach", {}).items()
            }
        if "node_watts" in base and "node_watts" not in own:
            beside = base["node_watts"] / base["per_node"] - base["watts"]
            whole["node_watts"] = whole["per_node"] * (own["watts"] + beside)
    return whole


def _build(
    name: str, spec: str, entry: Mapping[str, Any], tables: Mapping[str, Any], shape: str
) -> Cluster:
    per_node = int(entry["per_node"])
    numbers = _numbers(spec, shape)
    torus = _torus(entry, numbers)
    if torus:
        per_node = per_node if prod(torus) % per_node == 0 else 1
        nodes = prod(torus) // per_node
    else:
        nodes, per_node = _nodes(spec, numbers, per_node)
    inside = _wire(entry["inside"], tables)
    between = _wire(entry["network"], tables) if "network" in entry else None
    if nodes > 1 and between is None and not torus:
        raise ConfigError(
            f"cluster {name} has no network between nodes; choose {name}:1x{per_node}"
        )
    options = {
        key: entry[key]
        for key in (
            "nics",
            "rails",
            "nodes_per_leaf",
            "spines",
            "oversubscription",
            "routing",
            "per_switch",
        )
        if key in entry
    }
    uplink = _wire(entry["uplink"], tables) if "uplink" in entry else None
    topology = Topology(
        per_node, inside, entry.get("kind", ""), between, torus=torus, uplink=uplink, **options
    )
    node_watts = entry.get("node_watts")
    watts = entry.get("watts")
    device = Device(
        entry["device"],
        entry["peak"],
        int(entry["memory_bytes"]),
        float(entry["memory_bandwidth"]),
        entry.get("memory_kind", ""),
        watts,
        entry.get("idle_watts"),
        entry.get("price_an_hour"),
        host_bandwidth=entry["host_bandwidth"] / entry["per_node"]
        if "host_bandwidth" in entry
        else None,
        reach=entry.get("reach", {}),
        units=int(entry.get("units", 0)),
    )
    tiers = {
        key: Tier(key, tier["bandwidth"], tier["alpha"], tier.get("bytes"))
        for key, tier in tables["tier"].items()
    }
    if "host" in entry:
        host = _wire(entry["host"], tables)
        bandwidth = host.bandwidth
        if uplink is not None:  # all devices below a PCIe switch move at once
            bandwidth = min(bandwidth, uplink.bandwidth / min(topology.per_switch, per_node))
        tiers["host"] = Tier("host", bandwidth, host.alpha, entry.get("host_bytes"))
    below = entry.get("below", "disk")
    if below not in tiers:
        raise ConfigError(
            f"cluster {name}: no tier {below!r}{meant(below, tiers)}; there are {', '.join(tiers)}"
        )
    return Cluster(
        name,
        spec,
        device,
        nodes,
        per_node,
        topology,
        tiers,
        None if node_watts is None or watts is None else node_watts / entry["per_node"] - watts,
        entry.get("source", {}),
        below=below,
    )


def _numbers(spec: str, shape: str) -> tuple[int, ...]:
    parts = shape.lower().split("x")
    known = all(re.fullmatch("[0-9]{1,12}", part) for part in parts)
    numbers = tuple(map(int, parts)) if known else ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(
            f"cluster {spec!r}: {shape!r} is no shape; write nodes x devices, such as 16x8, or "
            "devices"
        )
    return numbers


def _torus(entry: Mapping[str, Any], numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims of a torus; () where the cluster is none."""
    dims = int(entry.get("torus_dims", 0))
    if not dims:
        return ()
    if len(numbers) not in (1, dims):
        raise ConfigError(
            f"a torus here has {dims} dims; write {'x'.join('4' * dims)}, or the number of devices"
        )
    most = entry.get("most")
    if most and prod(numbers) > most:
        raise ConfigError(
            f"{prod(numbers)} devices are more than the {most} of one torus; choose {most} or fewer"
        )
    return numbers if len(numbers) == dims else most_even(numbers[0], dims)


def _nodes(spec: str, numbers: tuple[int, ...], usual: int) -> tuple[int, int]:
    """Return nodes and devices a node: as given, or as many full nodes as the devices need."""
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    if len(numbers) > 2:
        raise ConfigError(
            f"cluster {spec!r}: write nodes x devices, such as {numbers[0]}x{numbers[1]}"
        )
    (devices,) = numbers
    if devices > usual and devices % usual:
        raise ConfigError(
            f"{devices} devices do not fill nodes of {usual}; choose {devices // usual * usual} or "
            f"{-(-devices // usual) * usual}, or write nodes x devices"
        )
    return max(1, devices // usual), min(devices, usual)


def _wire(name: str, tables: Mapping[str, Any]) -> Wire:
    entry = tables["wire"].get(name)
    if entry is None:
        raise ConfigError(
            f"no wire {name!r}{meant(name, tables['wire'])}; there are {', '.join(tables['wire'])}"
        )
    return Wire(
        name,
        float(entry["alpha"]),
        float(entry["bandwidth"]) * float(entry.get("share", 1.0)),
        **{key: float(entry[key]) for key in WIRE_NUMBERS[2:] if key in entry},
    )
