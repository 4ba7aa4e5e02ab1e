"""Energy counters of the hardware: RAPL for processors (by the powercap tree), NVML for GPUs.

    counters = open_counters("cuda", gpu=bus_id)
    counters.read()     # microjoules so far: {"GPU-8f3c…": 1200000, "5c1e…/package-0": 640000}

/sys/class/powercap holds one folder per zone; this example has two sockets:

    intel-rapl:0        package-0   a socket: its cores, caches and memory controller   counted
    intel-rapl:0:0      core        inside package-0                                    not counted again
    intel-rapl:0:1      dram        memory modules, outside the package                 counted
    intel-rapl:1        package-1   the other socket                                    counted
    intel-rapl:2        psys        the whole board, packages included                  not counted again
    intel-rapl-mmio:0   package-0   the same counter by another register                not counted again

The counter of a zone is `energy_uj`. At `max_energy_range_uj` it restarts at 0, after minutes at
full power (65 kJ and 500 W: 131 s). A rank reads it at the end of each step, so a step must not
last longer than these minutes.

Source: Khan et al. 2018, RAPL in Action (what each zone holds); Linux,
Documentation/power/powercap/powercap.rst.
"""

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

POWERCAP = Path("/sys/class/powercap")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class EnergyCounter(Protocol):
    """An energy counter. name: equal on all ranks that read this counter, and different from every
    other counter's; source: "rapl" or "nvml"."""

    name: str
    source: str

    def read(self) -> int:
        """Return the microjoules since the counter was opened."""

    def close(self) -> None:
        """Release the counter."""


class RaplZone:
    """The energy counter of one zone of the powercap tree.

    Args:    folder: of the zone; name: of the counter.
    Cost:    a read is one system call.
    Raises:  OSError if a file cannot be read; ValueError if one does not hold a number.
    """

    source = "rapl"

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._total = 0
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._file = os.open(folder / "energy_uj", os.O_RDONLY)
        try:
            self._last = self._now()
        except BaseException:
            self.close()
            raise

    def read(self) -> int:
        """Return the microjoules since this object was made; if the zone can no longer be read, the
        last value."""
        with suppress(OSError, ValueError):
            now = self._now()
            self._total += now - self._last + (self._range if now < self._last else 0)
            self._last = now
        return self._total

    def close(self) -> None:
        os.close(self._file)

    def _now(self) -> int:
        return int(os.pread(self._file, 32, 0))  # at offset 0 the kernel reads the counter anew


class NvmlGpu:
    """The energy counter of one GPU. The driver counts millijoules since it was loaded, in 64 bits
    (Volta and later).

    Args:    bus_id: of the GPU on the PCI bus, as CUDA gives it.
    Raises:  ImportError without pynvml; pynvml.NVMLError if the driver or the GPU has no such
             counter.
    """

    source = "nvml"

    def __init__(self, bus_id: str) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        self.name = str(pynvml.nvmlDeviceGetUUID(self._gpu))
        self._start = self._total = self._now()

    def read(self) -> int:
        """Return the microjoules since this object was made; if the GPU can no longer be read, the
        last value."""
        with suppress(self._nvml.NVMLError):
            self._total = self._now()
        return 1000 * (self._total - self._start)

    def close(self) -> None:
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _now(self) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu))


class EnergyCounters:
    """The counters that one rank reads.

    Attributes: counters: empty if nothing can be read; problem: one line, if the host has counters
                that this process cannot read.
    """

    def __init__(self, counters: list[EnergyCounter], problem: str | None = None) -> None:
        self.counters = counters
        self.problem = problem

    @property
    def source(self) -> str:
        """Kinds of the counters: "rapl", "nvml" or "nvml + rapl"; "estimate" without counters."""
        return " + ".join(sorted({counter.source for counter in self.counters})) or "estimate"

    def read(self) -> dict[str, int]:
        """Return {counter: microjoules since it was opened}."""
        return {counter.name: counter.read() for counter in self.counters}

    def close(self) -> None:
        """Release all counters; a second call does nothing."""
        for counter in self.counters:
            counter.close()
        self.counters = []


def open_counters(
    device: str = "cpu", *, gpu: str | None = None, powercap: Path = POWERCAP
) -> EnergyCounters:
    """Return the counters of this host's packages, and with device "cuda" also of one GPU.

    If the GPU's counter cannot be read, a rank on a GPU gets no counter: the packages are the
    smaller part of its energy.

    Args:    gpu: the GPU's bus id; powercap: the tree of RAPL's zones.
    """
    gpus: list[EnergyCounter] = []
    if device == "cuda":
        try:
            gpus.append(NvmlGpu(gpu or ""))
        except ImportError:
            return EnergyCounters(
                [], "the GPU's energy counter is read by pynvml; pip install nvidia-ml-py"
            )
        except Exception as error:  # pynvml.NVMLError, of a module that need not be there
            return EnergyCounters([], f"the GPU's energy counter cannot be read ({error})")
    zones: list[EnergyCounter] = []
    try:
        for name, folder in rapl_zones(powercap).items():
            zones.append(RaplZone(folder, f"{host_id()}/{name}"))
    except (OSError, ValueError) as error:
        for zone in zones:
            zone.close()
        reason = error.strerror if isinstance(error, OSError) else error
        return EnergyCounters(
            gpus,
            f"the processors' energy counters in {powercap} cannot be read ({reason}); since "
            f"2020 only root may, unless root allows it: chmod a+r {powercap}/*/energy_uj",
        )
    return EnergyCounters(gpus + zones)


def rapl_zones(powercap: Path) -> dict[str, Path]:
    """Return the zones to count: packages and their memory modules, so that each joule counts once.

    Returns: {"package-0": folder, "package-0/dram": folder, …}; empty without a tree.
    Raises:  OSError if the name of a zone cannot be read.
    """
    found: dict[str, Path] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        name = (zone / "name").read_text().strip()
        depth = zone.name.count(":")
        if depth == 1 and name.startswith("package"):
            found.setdefault(name, zone)
        elif depth == 2 and name == "dram":
            package = (powercap / zone.name.rpartition(":")[0] / "name").read_text().strip()
            found.setdefault(f"{package}/dram", zone)
    return found


def host_id() -> str:
    """Return an id of this host: equal for all processes of its kernel, also in containers."""
    try:
        return BOOT_ID.read_text().strip()[:13]
    except OSError:
        return platform.node()
