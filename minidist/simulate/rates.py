"""Chapter 24 · Seconds of a kernel: matrix products by size, everything else by the bytes it reads
and writes.

    matmul, attention   launch + max(FLOPs / (peak · share · size factor), bytes / (bandwidth ·
                        share), shortest) + cold · bytes of a matmul, + matrix · matrices of a stack
    memory              launch + max(bytes / (bandwidth · share), shortest) + loop · inner loops, of
                        a view with gaps
    host                bytes / (the device's part of the host's bandwidth · share): what offloading
                        computes there
    python              python

    size factor of (m, k) @ (k, n)      1 / (1 + half · (1/m + 1/k + 1/n)): a product whose three
                                        sides are all 3·half long runs at half the speed of a large
                                        one

The constants are defaults with their sources, or a profile's: fitted to measured step times
(`minidist calibrate`), or to this machine (`minidist bench calibrate`).

notes: N2 §10.6, N2:35.    Source: Williams, Waterman & Patterson 2009 (roofline).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import fsum
from pathlib import Path
from typing import Any, Protocol

import msgspec

from minidist.console import meant
from minidist.errors import ConfigError
from minidist.files import whole
from minidist.reading import NotNegative, Positive, read_json, require
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import DEFAULT, Device, Efficiency

FORMAT = 1
MOST_BYTES = 16 << 20  # of a profile
DIVISORS = ("matmul_share", "attention_share", "memory_share", "cache_factor", "slowdown")


class Priceable(Protocol):
    """A kernel as simulate/trace.py has it; `size` of a matmul is (batch, m, k, n)."""

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
    """

    device: Device
    efficiency: Efficiency
    slowdown: float = 1.0

    @classmethod
    def of(cls, device: Device, profile: "CostProfile | None" = None) -> "Rates":
        """Return the rates of a device."""
        if profile is None:
            return cls(device, device.efficiency)
        return cls(device, profile.rates, profile.slowdown)

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
        busy = max(
            rates.shortest, kernel.nbytes / (device.memory_bandwidth * rates.memory_share * faster)
        )
        if kernel.kind == "attention":
            busy = max(busy, kernel.flops / (device.peak(kernel.dtype) * rates.attention_share))
        elif kernel.kind == "matmul":
            small = (
                kernel.nbytes <= rates.small_bytes * kernel.size[0] if rates.small_bytes else False
            )
            slower = 1.0
            if not small:
                slower += rates.half * fsum(1.0 / max(side, 1) for side in kernel.size[-3:])
            busy = max(
                busy, kernel.flops * slower / (device.peak(kernel.dtype) * rates.matmul_share)
            )
            busy += rates.cold * kernel.nbytes + (
                rates.matrix * kernel.size[0] if kernel.size[0] > 1 else 0.0
            )
        elif kernel.kind == "memory":
            busy += rates.loop * kernel.size[0] if kernel.size else 0.0
        else:
            raise ConfigError(
                f"a kernel is matmul, attention, memory, host or python, not {kernel.kind!r}"
            )
        return self.slowdown * (rates.launch + busy)

    def segment(self, kernels: Iterable[tuple[Priceable, int]]) -> float:
        """Return seconds of kernels that follow each other: (kernel, how often)."""
        return fsum(times * self.seconds(kernel) for kernel, times in kernels)


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
