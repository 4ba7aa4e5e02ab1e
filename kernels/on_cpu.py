"""The CPU build: a .cu built by g++ and run with every memory access checked. For learning and
tests, not for speed.

    softmax(x, version=2)                               # NumPy arrays: it runs here
    with watch(seed=3, count=True) as seen:
        softmax(x, version=2)
    seen[0].loads.sectors                          # 32-byte sectors that the warps' loads touched

It finds these errors, each a KernelError that names kernel, block, thread, array and line: an index
out of bounds, a read of shared memory that was not written, a race (two threads, one of them
writing, without a barrier between), a barrier that some threads of the block do not reach, a
shuffle from an inactive lane, a misaligned vector load, a kernel that does not end.

cuda_on_cpu/cuda_on_cpu.h defines CUDA's keywords for g++. runtime.cpp runs a block's threads as
fibres, in a random order by a seed. g++ -fsanitize=thread (only its instrumentation, not its
library) turns every load and store into a call, and memory.cpp checks it. Arrays are copied between
guards before the launch, and back after it. Compiled files stay in the user's cache folder, by the
content of the source.

Cost: 20 to 40 ns per load or store, 0.5 µs per thread at a barrier, shuffle or atomic; 96 bytes of
notes per checked element of an argument or byte of shared memory.
"""

import contextlib
import ctypes
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from minidist.errors import KernelError
from minidist.kernels import tools
from minidist.kernels.cache import folder, missing, place
from minidist.kernels.loader import HERE, KernelParameter, Source, Table, address_of, compile_error

HEADERS = HERE / "cuda_on_cpu"
# No fortified longjmp, because it refuses to jump from the stack of one fibre to that of another.
_RUNTIME_FLAGS = ("-std=c++20", "-O2", "-U_FORTIFY_SOURCE", "-fPIC", "-fvisibility=hidden")
# No SRA: a float4 stays one access. No loop patterns: a loop does not become a memset, which is not
# checked.
_KERNEL_FLAGS = (
    "-std=c++20",
    "-O1",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-fsanitize=thread",
    "-fno-tree-sra",
    "-fno-tree-loop-distribute-patterns",
    "-ffp-contract=off",
    "-Wno-unknown-pragmas",
)
_GUARD = 4096  # unused bytes, at least, before and after each array
_ALIGN = 256  # of an array that cudaMalloc gave
_MOST_STEPS = 2**31  # of a launch, about a minute
# libraries loaded, and launches: a library's shared memory exists once
_one_at_a_time = threading.Lock()


# ------------------------------------------------------------------------------------------ reports


class _Array(ctypes.Structure):  # runtime.h: Array
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("itemsize", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int64),
    ]


class _Launch(ctypes.Structure):  # runtime.h: Launch
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint64),
        ("args", ctypes.c_void_p),
        ("arrays", ctypes.POINTER(_Array)),
        ("arrays_count", ctypes.c_uint64),
        ("shared", ctypes.POINTER(_Array)),
        ("shared_count", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("most_steps", ctypes.c_uint64),
    ]


class Traffic(ctypes.Structure):  # runtime.h: Traffic
    """Loads or stores: bytes requested by threads, requests of warps, 32-byte sectors touched;
    `shared`: bytes."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("bytes", "requests", "sectors", "shared")]


class _Report(ctypes.Structure):  # runtime.h: Report
    _fields_ = [
        ("error", ctypes.c_char * 1024),
        ("where", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
        ("loads", Traffic),
        ("stores", Traffic),
        ("barriers", ctypes.c_uint64),
    ]


@dataclass
class Seen:
    """The record of one launch. loads and stores are counted inside `watch(count=True)`."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    barriers: int
    loads: Traffic
    stores: Traffic


@dataclass
class _Watch:
    seed: int = 0
    count: bool = False
    seen: list[Seen] = field(default_factory=list)


_watching: ContextVar[_Watch | None] = ContextVar("watching", default=None)


@contextlib.contextmanager
def watch(*, seed: int = 0, count: bool = False) -> Iterator[list[Seen]]:
    """Context manager: the launches on the CPU inside the block. Args: seed: of the order of
    threads and blocks."""
    watching = _Watch(seed, count)
    token = _watching.set(watching)
    try:
        yield watching.seen
    finally:
        _watching.reset(token)


# ----------------------------------------------------------------------------------------- building


def compiler() -> str | None:
    """Return the path of g++, or None if there is none."""
    return shutil.which("g++")


@cache
def _version(path: str) -> str:
    return tools.run([path, "--version"], check=True).stdout


def _built(stem: str, suffix: str, *parts: str) -> tuple[Path, str]:
    """Return the path of the file built from these texts, and the compiler that builds it. Raises:
    KernelError."""
    path = compiler()
    if path is None:
        raise KernelError(
            "kernels on NumPy arrays are built by g++, which is not on this machine; "
            "install it (apt install g++), or use a GPU"
        )
    return place(stem, suffix, _version(path), *parts), path


def _compile(source: Source, command: Sequence[str]) -> None:
    done = tools.run(command)
    if done.returncode:
        raise compile_error(source, "g++", done.stderr)


def _runtime(source: Source) -> Path:
    """Return the object file of the scheduler and the checks, which is linked into each library."""
    files = sorted(HEADERS.glob("*.cpp"))
    texts = [path.read_text(encoding="utf-8") for path in (*files, *sorted(HEADERS.glob("*.h")))]
    path, command = _built("runtime", ".o", *_RUNTIME_FLAGS, *texts)
    with missing(path) as new:
        if new is not None:
            _compile(
                source,
                [command, *_RUNTIME_FLAGS, "-r", "-nostdlib", *map(str, files), "-o", str(new)],
            )
    return path


def _cpp(source: Source) -> str:
    """Return the .cu as C++: CUDA's keywords before it, a table of its kernels after it.

    `extern __shared__ float tile[];` becomes a pointer; a namespace of its own keeps templates'
    shared arrays separate.
    """
    body = re.sub(
        r"extern\s+__shared__\s+(?:__align__\(\d+\)\s*)?([\w\s]+?)\s+(\w+)\s*\[\s*\]\s*;",
        r"\1* const \2 = reinterpret_cast<\1*>(cuda_on_cpu::dynamic_shared());",
        source.text,
    )
    table = "".join(
        f'    {{"{name}", cuda_on_cpu::Call<{name}>::call}},\n' for name in source.kernels
    )
    return (
        f'#include "cuda_on_cpu.h"\nnamespace {{\n{body}\n}}\n'
        f'#line 1 "the list of kernels in {source.path.stem}.py"\n'
        f'extern "C" {{\nextern const cuda_on_cpu::Kernel cuda_kernels[];\n'
        f"const cuda_on_cpu::Kernel cuda_kernels[] = {{\n{table}    {{nullptr, nullptr}}}};\n}}\n"
    )


def build(source: Source) -> Path:
    """Return the library of a source, built unless it is in the cache. Raises: KernelError with
    file and line."""
    text = _cpp(source)
    runtime = _runtime(source)
    path, command = _built(source.path.stem, ".so", *_KERNEL_FLAGS, runtime.name, text)
    with missing(path) as new:
        if new is not None:
            with tempfile.TemporaryDirectory() as work:
                whole = Path(work) / source.path.name
                unlinked = Path(work) / "kernels.o"
                whole.write_text(text, encoding="utf-8")
                _compile(
                    source,
                    [
                        command,
                        *_KERNEL_FLAGS,
                        f"-I{HEADERS}",
                        "-x",
                        "c++",
                        "-c",
                        str(whole),
                        "-o",
                        str(unlinked),
                    ],
                )
                _compile(
                    source,
                    [
                        command,
                        "-shared",
                        "-Wl,-z,defs",
                        str(unlinked),
                        str(runtime),
                        "-o",
                        str(new),
                    ],
                )
    return path


@cache
def _built_once(source: Source, compiler: str | None, folder: Path) -> Path:
    """Return `build` by this compiler and in this cache folder, remembered: a launch need not read
    and hash all sources again."""
    return build(source)


def _symbols(path: Path) -> list[tuple[str, int, int]]:
    """Return a library's symbols: name, address, bytes."""
    table = tools.run(["nm", "-C", "--format=sysv", str(path)], check=True).stdout
    rows = [
        [cell.strip() for cell in line.rsplit("|", 6)]
        for line in table.splitlines()
        if line.count("|") >= 6
    ]
    return [
        (row[0], int(row[1], 16), int(row[4] or "0", 16))
        for row in rows
        if row[1] and row[2] in "bBdDT"
    ]


class _Library:
    """A built source: its code, and its __shared__ variables as the symbol table names them."""

    def __init__(self, source: Source) -> None:
        self.path = build(source)
        self.code = ctypes.CDLL(str(self.path))
        symbols = _symbols(self.path)
        entry = ctypes.cast(self.code.cuda_on_cpu_launch, ctypes.c_void_p).value or 0
        base = entry - next(start for name, start, _ in symbols if name == "cuda_on_cpu_launch")
        variables = [
            (name.rpartition(")::")[2], base + start, nbytes)
            for name, start, nbytes in symbols
            if name.startswith("(anonymous namespace)::") and ")::" in name.partition("::")[2]
        ]
        self.shared = (_Array * len(variables))(
            *(
                _Array(start, nbytes, 4, name.encode(), 1)
                for name, start, nbytes in variables
                if not name.startswith("cuda_on_cpu_gap")
            )
        )

    def line(self, offset: int) -> str:
        """Return " at file:line" of an address in the code, and of its caller; an empty string if
        it is not known."""
        tool = shutil.which("addr2line")
        if not offset or tool is None:
            return ""
        found = tools.run([tool, "-i", "-e", str(self.path), hex(offset)]).stdout.splitlines()
        places = [Path(place.split(" ")[0]).name for place in found if "?" not in place]
        own = [
            place for place in places if not place.startswith(("cuda_on_cpu.h", "the list"))
        ] or places
        return f" at {', called from '.join(own)}" if own else ""


@cache
def _library(path: Path, source: Source) -> _Library:
    return _Library(source)


# ------------------------------------------------------------------------------------------ running


class _Arena:
    """The arguments' arrays, copied one after another with guards between them, at the alignment
    they had in their owner."""

    def __init__(self, values: Sequence[tuple[KernelParameter, Any]]) -> None:
        arrays: dict[tuple[int, int], tuple[KernelParameter, np.ndarray]] = {}
        for parameter, value in _arrays(values):
            key = (address_of(value), value.nbytes)
            before = arrays.get(key)
            arrays[key] = (before[0] if before and not before[0].const else parameter, value)
        total = _GUARD
        starts = {}
        for key, (_, array) in arrays.items():
            guard = max(_GUARD, array.nbytes)
            total = -(-(total + guard) // _ALIGN) * _ALIGN + _offset(array) % _ALIGN
            starts[key] = total
            total += array.nbytes + guard
        self._memory = np.empty(total + _ALIGN, np.uint8)
        base = -(-address_of(self._memory) // _ALIGN) * _ALIGN
        self._first = base - address_of(self._memory)
        self._arrays = arrays
        self._starts = starts
        self.base = base
        self.table = (_Array * len(arrays))(
            *(
                _Array(
                    base + starts[key],
                    array.nbytes,
                    array.itemsize,
                    parameter.name.encode(),
                    not parameter.const,
                )
                for key, (parameter, array) in arrays.items()
            )
        )
        for key, (_, array) in arrays.items():
            self._bytes(key)[...] = array.reshape(-1).view(np.uint8)
        for table in (value for _, value in values if isinstance(value, Table)):
            copies = np.array([self.address(array) for array in table.arrays], np.uint64).view(
                np.uint8
            )
            self._bytes((address_of(table.addresses), copies.nbytes))[...] = copies

    def _bytes(self, key: tuple[int, int]) -> np.ndarray:
        return self._memory[self._first + self._starts[key] :][: key[1]]

    def address(self, value: np.ndarray | Table | None) -> int:
        array = value.addresses if isinstance(value, Table) else value
        return 0 if array is None else self.base + self._starts[address_of(array), array.nbytes]

    def copy_back(self) -> None:
        for key, (parameter, array) in self._arrays.items():
            if not parameter.const:
                array.reshape(-1).view(np.uint8)[...] = self._bytes(key)


def _arrays(
    values: Sequence[tuple[KernelParameter, Any]],
) -> Iterator[tuple[KernelParameter, np.ndarray]]:
    """Yield the arguments' arrays and those that tables point to; a table itself is only read."""
    for parameter, value in values:
        if isinstance(value, Table):
            yield replace(parameter, const=True), value.addresses
            yield from (
                (replace(parameter, name=f"{parameter.name}[{i}]"), a)
                for i, a in enumerate(value.arrays)
            )
        elif isinstance(value, np.ndarray) and parameter.pointer:
            yield parameter, value


def _offset(array: np.ndarray) -> int:
    """Return the offset of a view in the array that owns its memory, in bytes."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return address_of(array) - address_of(owner)


def run(
    source: Source,
    kernel: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    values: Sequence[tuple[KernelParameter, Any]],
    shared: int,
) -> None:
    """Run one launch (checked by loader.launch) on the CPU. Raises: KernelError."""
    path = _built_once(source, compiler(), folder())
    watching = _watching.get() or _Watch()
    arena = _Arena(values)
    report = _Report()
    held = [
        np.array([np.uint64(arena.address(value)) if parameter.pointer else value])
        for parameter, value in values
    ]
    pointers = (ctypes.c_void_p * len(held))(*map(address_of, held))
    with _one_at_a_time:
        library = _library(path, source)
        call = _Launch(
            kernel.encode(),
            grid,
            block,
            shared,
            ctypes.cast(pointers, ctypes.c_void_p),
            arena.table,
            len(arena.table),
            library.shared,
            len(library.shared),
            watching.seed,
            watching.count,
            _MOST_STEPS,
        )
        library.code.cuda_on_cpu_launch(ctypes.byref(call), ctypes.byref(report))
    if report.error:
        text = report.error.decode(errors="replace")
        raise KernelError(
            f"{kernel}: "
            + text.replace("{where}", library.line(report.where)).replace(
                "{other}", library.line(report.other)
            )
        )
    arena.copy_back()
    watching.seen.append(
        Seen(kernel, grid, block, shared, report.barriers, report.loads, report.stores)
    )
