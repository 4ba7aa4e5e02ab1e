"""The parts of this machine: sockets, cores, caches, memory, GPUs; read from Linux's /sys as far as
it has them.

parts = machine_parts()
parts.sockets[0].cores[0].caches    # (("L1d", 49152), ("L1i", 32768), ("L2", 2097152)) of one core
parts.sockets[0].shared             # (("L3", 34603008, 1),): caches of several cores, their number
"""

import os
import platform
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from minidist.device import cores
from minidist.observe.machine import processor

SYSTEM = Path("/sys/devices/system")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class ProcessorCore:
    """A core. threads: its processors, by the system's numbers; caches: (name, bytes) of its own
    caches, not shared with other cores."""

    threads: tuple[int, ...]
    caches: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ProcessorSocket:
    """A processor socket. shared: caches of several cores: (name, bytes, number); memory: bytes
    attached to the socket, 0: unknown."""

    number: int
    cores: tuple[ProcessorCore, ...]
    shared: tuple[tuple[str, int, int], ...]
    memory: int


@dataclass(frozen=True)
class InstalledGpu:
    """A GPU of this machine. memory: bytes."""

    name: str
    memory: int


@dataclass(frozen=True)
class MachineParts:
    """A machine. memory, free: bytes; usable: processors that this process may use."""

    host: str
    processor: str
    sockets: tuple[ProcessorSocket, ...]
    memory: int
    free: int
    usable: tuple[int, ...]
    gpus: tuple[InstalledGpu, ...]


def machine_parts(system: Path = SYSTEM) -> MachineParts:
    """Return the parts of this machine. Args: system: the folder that has cpu/ and node/."""
    memory = psutil.virtual_memory()
    sockets = _sockets(system)
    usable = cores.usable()
    threads = [thread for socket in sockets for core in socket.cores for thread in core.threads]
    return MachineParts(
        platform.node(),
        processor(),
        sockets,
        memory.total,
        memory.available,
        tuple(sorted(threads if usable is None else usable)),
        _gpus(),
    )


def _sockets(system: Path) -> tuple[ProcessorSocket, ...]:
    """Return the sockets by /sys; without /sys one socket with the number of cores that the system
    reports."""
    try:
        names = os.listdir(system / "cpu")
    except OSError:
        names = []
    threads = sorted(
        int(name[3:])
        for name in names
        if re.fullmatch("cpu[0-9]+", name) and (system / "cpu" / name / "topology").is_dir()
    )
    if not threads:
        counted = tuple(ProcessorCore((thread,), ()) for thread in range(os.cpu_count() or 1))
        return (ProcessorSocket(0, counted, (), 0),)
    places = {
        thread: (_number(system, thread, "physical_package_id"), _number(system, thread, "core_id"))
        for thread in threads
    }
    beside = _memory_beside(system)
    found = []
    for number in sorted({socket for socket, _ in places.values()}):
        core_of = {thread: core for thread, (socket, core) in places.items() if socket == number}
        found.append(_socket(system, number, core_of, beside))
    return tuple(found)


def _socket(
    system: Path, number: int, core_of: dict[int, int], beside: dict[int, tuple[int, list[int]]]
) -> ProcessorSocket:
    """Return one socket. Args: core_of: {thread: its core's number}; beside: as _memory_beside
    returns it."""
    caches = {
        (name, tuple(sharing)): nbytes
        for thread in core_of
        for name, nbytes, sharing in _caches(system, thread)
    }
    found = []
    own = set[tuple[str, tuple[int, ...]]]()
    for core in sorted(set(core_of.values())):
        threads = tuple(thread for thread, of in core_of.items() if of == core)
        mine = {key for key in caches if set(key[1]) <= set(threads)}
        own |= mine
        sizes = Counter({name: caches[name, sharing] for name, sharing in mine})
        found.append(ProcessorCore(threads, tuple(sorted(sizes.items()))))
    shared = Counter(
        (name, nbytes) for (name, sharing), nbytes in caches.items() if (name, sharing) not in own
    )
    memory = sum(nbytes for nbytes, threads in beside.values() if set(threads) & set(core_of))
    counted = tuple((*cache, count) for cache, count in sorted(shared.items()))
    return ProcessorSocket(number, tuple(found), counted, memory)


def _number(system: Path, thread: int, name: str) -> int:
    with suppress(OSError, ValueError):
        return max(0, int((system / f"cpu/cpu{thread}/topology/{name}").read_text()))
    return thread if name == "core_id" else 0


def _caches(system: Path, thread: int) -> list[tuple[str, int, list[int]]]:
    """Return (name, bytes, threads that share it) of each cache of a thread."""
    found = []
    for folder in sorted((system / f"cpu/cpu{thread}/cache").glob("index*")):
        with suppress(OSError, ValueError, KeyError):
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
            name = f"L{level}" + {"Data": "d", "Instruction": "i"}.get(kind, "")
            nbytes = int(size[:-1]) * UNITS[size[-1]] if size[-1:] in UNITS else int(size)
            found.append((name, nbytes, threads_in((folder / "shared_cpu_list").read_text())))
    return found


def _memory_beside(system: Path) -> dict[int, tuple[int, list[int]]]:
    """Return {NUMA node: (bytes, its threads)}."""
    found = {}
    for folder in (system / "node").glob("node[0-9]*"):
        with suppress(OSError, ValueError, StopIteration):
            line = next(
                line for line in (folder / "meminfo").read_text().splitlines() if "MemTotal" in line
            )
            found[int(folder.name[4:])] = (
                int(line.split()[-2]) << 10,
                threads_in((folder / "cpulist").read_text()),
            )
    return found


def threads_in(text: str) -> list[int]:
    """Return the numbers in a list of the kernel's format. Raises: ValueError.

    >>> threads_in("0-2,8")
    [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _gpus() -> tuple[InstalledGpu, ...]:
    """Return the GPUs that CuPy sees; none without CuPy or if it fails (doctor's table says
    why)."""
    try:
        import cupy

        runtime = cupy.cuda.runtime
        found = [runtime.getDeviceProperties(index) for index in range(runtime.getDeviceCount())]
    except (ImportError, OSError, RuntimeError, AttributeError):
        return ()
    return tuple(InstalledGpu(each["name"].decode(), int(each["totalGlobalMem"])) for each in found)
