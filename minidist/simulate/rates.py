"""Chapter 24 · Seconds of a kernel: matrix products by size, everything else by the bytes it reads
and writes.

    matmul              launch + shortest + max(FLOPs of its waves / (best · share), bytes /
                        (bandwidth · share)) + cold · bytes + matrix · matrices of a stack
    attention           launch + shortest + max(FLOPs / (best · share), bytes / (bandwidth · share))
                        + bytes of its scores, if they pass through memory, / (bandwidth · share)
    loss, memory        launch + shortest + bytes / (bandwidth · share); of a loss + bytes of its
                        logits, if they pass through memory; of a view with gaps + loop · inner
                        loops
    host                bytes / (the device's part of the host's bandwidth · share): what offloading
                        computes there
    python              python

    best                FLOP/s of a benchmark's best product: peak · reach (clusters.toml)
    waves               a GPU computes a product in tiles, one on each of its units at a time. Units
                        without a tile wait, and a tile that hangs over the edge computes for
                        nothing:

        216 tiles on 108 units      ████████ ████████               2 waves, full
        220 tiles on 108 units      ████████ ████████ ▏             3 waves: a third is lost

                        Each tile also takes `half` of k to begin and to end. Of the tile sizes, the
                        one that is fastest. On a device without units: FLOPs · (1 + half · (1/m +
                        1/k + 1/n))

All these are seconds of the device. Efficiency (device.py) explains each constant: `launch` is the
device's pause between two kernels, not the host's work. A kernel of at most cache_bytes reads and
writes cache_factor times as fast. On a device without units, products of small matrices
(small_bytes) lose nothing by `half`.

The host of a GPU needs `host` seconds to launch a kernel, and runs ahead of the device
(observe/replay.py): `issue`. That calls cost it anything was not seen: 24
layers of vTrain's A100s take 3.55 ms a layer and microbatch with 0 calls a layer, and 3.56 with 6.

The constants are defaults with their sources, or a profile's: fitted to measured step times
(`minidist calibrate`), or to this machine (`minidist bench calibrate`).

notes: N2 §10.6, N2:35.    Source: Williams, Waterman & Patterson 2009 (roofline); NVIDIA, Matrix
Multiplication Background User's Guide, 2023 (tiles and waves).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil, fsum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from minidist.console import meant
from minidist.errors import ConfigError
from minidist.files import whole
from minidist.reading import NotNegative, Positive, read_json, require
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import DEFAULT, Device, Efficiency
from minidist.simulate.sure import PUBLISHED, Sureness, of_fit

FORMAT = 2
TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.95, (64, 128): 0.8, (128, 64): 0.8}
"""The tile sizes of a product, and how fast they are compared with the largest."""
SHORTEST_PART = 512
"""k of the parts into which a product of few tiles is divided, so that more units have work."""
MOST_BYTES = 16 << 20  # of a profile
DIVISORS = ("matmul_share", "attention_share", "memory_share", "cache_factor", "slowdown")


class Priceable(Protocol):
    """A kernel as simulate/trace.py has it; `size` of a matmul is (matrices, m, k, n)."""

    @property
    def kind(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def flops(self) -> float: ...
    @property
    def nbytes(self) -> float: ...
    @property
    def size(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Rates:
    """Seconds of kernels on one device; of a profile's constants, or the defaults.

    Attributes: slowdown   by which everything takes longer (a profile's; ranks that share cores)
                sure       what steps are known to by them
    """

    device: Device
    efficiency: Efficiency
    slowdown: float = 1.0
    sure: Sureness = PUBLISHED

    @classmethod
    def of(cls, device: Device, profile: "CostProfile | None" = None) -> "Rates":
        """Return the rates of a device."""
        if profile is None:
            return cls(device, device.efficiency)
        return cls(device, profile.rates, profile.slowdown, of_fit(profile.fit))

    def seconds(self, kernel: Priceable) -> float:
        """Return seconds of one kernel. Raises: ConfigError if the device has no rate for the
        dtype."""
        device = self.device
        rates = self.efficiency
        if kernel.kind == "python":
            return self.slowdown * rates.python
        faster = rates.cache_factor if kernel.nbytes <= rates.cache_bytes else 1.0
        if kernel.kind == "host":
            if device.host_bandwidth is None:
                raise ConfigError(
                    f"no source states the bandwidth of {device.name}'s host memory; do not offload"
                )
            return self.slowdown * kernel.nbytes / (device.host_bandwidth * rates.memory_share)
        busy = kernel.nbytes / (device.memory_bandwidth * rates.memory_share * faster)
        if kernel.kind == "attention":
            busy = max(busy, kernel.flops / (device.best(kernel.dtype) * rates.attention_share))
            busy += self._passing(rates.scores, kernel)
        elif kernel.kind == "loss":
            busy += self._passing(rates.logits, kernel)
        elif kernel.kind == "matmul":
            flops = self._flops_of_waves(kernel) if device.units else self._slowed_flops(kernel)
            busy = max(busy, flops / (device.best(kernel.dtype) * rates.matmul_share))
            busy += rates.cold * kernel.nbytes + (
                rates.matrix * kernel.size[0] if kernel.size[0] > 1 else 0.0
            )
        elif kernel.kind == "memory":
            busy += rates.loop * kernel.size[0] if kernel.size else 0.0
        else:
            raise ConfigError(
                f"a kernel is matmul, attention, loss, memory, host or python, not {kernel.kind!r}"
            )
        return self.slowdown * (rates.launch + rates.shortest + busy)

    def _passing(self, nbytes: float, kernel: Priceable) -> float:
        """Return the seconds in which all scores or logits of a kernel pass through memory, `nbytes`
        for each."""
        if not nbytes:
            return 0.0
        bandwidth = self.device.memory_bandwidth * self.efficiency.memory_share
        return nbytes * kernel.size[0] / bandwidth

    def _flops_of_waves(self, kernel: Priceable) -> float:
        """Return the FLOPs that all units could do while they compute a product in waves."""
        units = self.device.units
        count, m, k, n = kernel.size
        least = float("inf")
        for (rows, columns), speed in TILES.items():
            tiles = count * ceil(m / rows) * ceil(n / columns)
            parts = max(1, min(units // tiles, k // SHORTEST_PART)) if tiles else 1
            waves = ceil(tiles * parts / units)
            wave = units * 2.0 * rows * columns * (k / parts + self.efficiency.half) / speed
            least = min(least, waves * wave)
        return least

    def _slowed_flops(self, kernel: Priceable) -> float:
        """Return the FLOPs of a large product that takes as long as this one."""
        rates = self.efficiency
        if rates.small_bytes and kernel.nbytes <= rates.small_bytes * kernel.size[0]:
            return kernel.flops
        return kernel.flops * (
            1.0 + rates.half * fsum(1.0 / max(side, 1) for side in kernel.size[-3:])
        )

    def segment(self, kernels: Iterable[tuple[Priceable, int]]) -> float:
        """Return seconds of kernels that follow each other: (kernel, how often)."""
        return fsum(times * self.seconds(kernel) for kernel, times in kernels)

    def issue(self, kernels: Iterable[tuple[Priceable, int]]) -> float:
        """Return the seconds in which the host launches kernels; what it computes itself is none."""
        if not self.device.units:  # a processor, or a device that runs a step as one program
            return 0.0
        return (
            self.slowdown
            * self.efficiency.host
            * sum(times for kernel, times in kernels if kernel.kind != "host")
        )


# ---------------------------------------------------------------- profiles


class _WireNumbers(msgspec.Struct):
    alpha: NotNegative = 0.0
    bandwidth: Positive = 1.0


class _ProfileFile(msgspec.Struct):
    """What save() writes."""

    cluster: str | None = None
    rates: dict[str, Any] = {}
    wires: dict[str, _WireNumbers] = {}
    slowdown: Any = 1.0
    fit: dict[str, Any] = {}


@dataclass(frozen=True)
class CostProfile:
    """Constants that were fitted, for `--profile`.

    Attributes: cluster   the name of the cluster they were fitted on
                wires     {"nvlink4": {"alpha": seconds, "bandwidth": bytes a second}}
                slowdown  by which everything takes longer that is in no part of the model; 1 if
                          nothing does
                fit       how well they fit, for readers
    """

    cluster: str
    rates: Efficiency = DEFAULT
    wires: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    slowdown: float = 1.0
    fit: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the wires of this profile."""
        return cluster.rewired(self.wires)

    def save(self, path: str | Path) -> None:
        """Write it as JSON; a reader finds the old file or the new one. Raises: OSError."""
        with whole(Path(path)) as draft:
            draft.write_text(
                json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8"
            )

    @classmethod
    def load(cls, path: str | Path) -> "CostProfile":
        """Return what save() wrote; rates that it does not name keep their defaults. Raises:
        ConfigError."""
        try:
            value = read_json(path, most=MOST_BYTES)
        except (OSError, ConfigError) as error:
            raise ConfigError(
                f"cost profile {path}: {getattr(error, 'strerror', None) or error}"
            ) from error
        if isinstance(value, dict) and value.get("format") == FORMAT - 1:
            raise ConfigError(
                f"cost profile {path} was fitted to an older cost model, which had no host; fit "
                "again: `minidist calibrate --from runs.csv`"
            )
        if isinstance(value, dict) and value.get("format") == FORMAT:
            try:
                require(value, _ProfileFile)
            except ConfigError as error:
                raise ConfigError(f"cost profile {path}: {error}") from error
        if not isinstance(value, dict) or value.get("format") != FORMAT or "cluster" not in value:
            raise ConfigError(
                f"{path} is not a cost profile; `minidist calibrate --from runs.csv` writes one"
            )
        return cls(
            str(value["cluster"]),
            _rates(path, value.get("rates", {})),
            value.get("wires", {}),
            _positive(path, "slowdown", value.get("slowdown", 1.0)),
            value.get("fit", {}),
        )


def _rates(path: str | Path, given: Mapping[str, Any]) -> Efficiency:
    known = [each.name for each in fields(Efficiency)]
    for name in given:
        if name not in known:
            raise ConfigError(
                f"cost profile {path}: no rate {name!r}{meant(name, known)}; choose from "
                f"{', '.join(known)}"
            )
    return replace(DEFAULT, **{name: _positive(path, name, value) for name, value in given.items()})


def _positive(path: str | Path, name: str, value: Any) -> float:
    least = 1e-12 if name in DIVISORS else 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e300:
        above = "above 0" if least else "from 0 up"
        raise ConfigError(f"cost profile {path}: {name} is {value!r}, not a number {above}")
    return float(value)
