"""From a .cu to a kernel that runs: read it, check a launch, run it on the GPU or in the CPU build.

    SOURCE = Source("softmax.cu", ["softmax_v1<float>", "softmax_v1<__half>"])
    launch(SOURCE, "softmax_v1<float>", grid=rows, block=128, args=(x, y, rows, columns))

The arrays choose the device. With CuPy arrays the kernel runs on their GPU, compiled by CuPy's
RawModule, which caches compiled code on disk and picks the architecture of the device. With NumPy
arrays it runs on the CPU, from the same source built by g++ (on_cpu.py): slowly, but with every
memory access checked. No argument is copied or converted.

The parameters of a kernel are read from its source. So a wrong dtype, a missing argument or a
number that does not fit is an error that names the argument, not a wrong result.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from minidist.device.backend import Array, array_module, device_of, dtype_name, is_array
from minidist.errors import DtypeError, KernelError, ShapeError

HERE = Path(__file__).parent
STANDARD = "--std=c++17"

# The C names of the dtypes, as kernels' templates and parameters spell them.
C_TYPES = {
    np.dtype(kind): name
    for kind, name in (
        (np.float32, "float"),
        (np.float64, "double"),
        (np.float16, "__half"),
        (ml_dtypes.bfloat16, "__nv_bfloat16"),
        (ml_dtypes.float8_e4m3fn, "__nv_fp8_e4m3"),
        (ml_dtypes.float8_e5m2, "__nv_fp8_e5m2"),
        (np.int8, "signed char"),
        (np.uint8, "unsigned char"),
        (np.int16, "short"),
        (np.uint16, "unsigned short"),
        (np.int32, "int"),
        (np.uint32, "unsigned"),
        (np.int64, "long long"),
        (np.uint64, "unsigned long long"),
        (np.bool_, "bool"),
    )
}
_DTYPES = {name: kind for kind, name in C_TYPES.items()}
_LIMITS = {
    kind: (int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    for kind in C_TYPES
    if kind.kind in "iu"
}
_PLAIN = (int, float, bool)  # numbers that need no look

FLOATS = ("float", "__half", "__nv_bfloat16")  # the types that most kernels take

OLDEST = 80  # GPUs that the kernels are written for, by compute capability: sm_80
MOST_THREADS = 1024
MOST_BLOCK_Z = 64
MOST_GRID = 2**31 - 1
MOST_GRID_YZ = 65535
MOST_SHARED = 227 * 1024  # bytes a block, of sm_90 and sm_100; sm_80 has 163 KiB

_KERNEL = re.compile(
    r"(?:template\s*<(?P<template>[^>]*)>\s*)?__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?"
    r"(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)


def c_type(array: Array) -> str:
    """Return the C name of an array's element type: float32 -> "float". Raises: DtypeError for a
    dtype no kernel knows."""
    if array.dtype not in C_TYPES:
        raise DtypeError(
            f"no kernel takes dtype {dtype_name(array.dtype)}; "
            f"they know {', '.join(dtype_name(kind) for kind in C_TYPES)}"
        )
    return C_TYPES[array.dtype]


def aligned(*arrays: Array) -> bool:
    """Return whether 16-byte loads fit: each array, and each row along its last dim, begins at a
    multiple of 16 bytes."""
    return all(
        array.shape[-1] * array.dtype.itemsize % 16 == 0 and address_of(array) % 16 == 0
        for array in arrays
    )


def begin_aligned(*arrays: Array) -> bool:
    """Return whether each array begins at a multiple of 16 bytes; the length of its rows does not
    matter."""
    return all(address_of(array) % 16 == 0 for array in arrays)


def version_for(name: str, wanted: int | None, *arrays: Array, packed: int = 2) -> int:
    """Return the version to run: the wanted one, or the last that fits. From `packed` on, versions
    load 16 bytes at a time.

    Raises:  KernelError if the wanted version loads 16 bytes at a time and an array does not fit.
    """
    fits = aligned(*arrays)
    if wanted is not None and wanted >= packed and not fits:
        raise KernelError(
            f"{name}_v{wanted} loads 16 bytes at a time, and rows of shapes "
            f"{', '.join(str(array.shape) for array in arrays)} do not fit; take version "
            f"{packed - 1}"
        )
    return wanted or (packed if fits else packed - 1)


def address_of(array: Array) -> int:
    """Return the address of an array's first element, in the memory of its device."""
    return int(
        array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    )


# ------------------------------------------------------------------------------------------ sources


@dataclass(frozen=True)
class KernelParameter:
    """One parameter of a kernel: an array (`pointer`) of elements, or a number, of dtype `kind`;
    `const`: only read.

    `table`: an array of pointers to such arrays, `float* const* weights`, or only read, `const
    float* const* weights`.
    """

    name: str
    kind: np.dtype
    pointer: bool
    const: bool
    table: bool = False


class Places:
    """Addresses of arrays, as numbers and, for a kernel, as a uint64 array on the device of the
    arrays."""

    def __init__(self, where: tuple[int, ...], module: Any) -> None:
        self.where = where
        self._module = module

    @cached_property
    def array(self) -> Array:
        """The addresses on the device; made at the first use."""
        return self._module.asarray(np.array(self.where, np.uint64))


class Table:
    """Arrays of one dtype and any shapes, for a kernel's `T* const*`: many tensors in one launch.
    Made once.

    Args:    earlier: the addresses of an earlier table; they are used again if no array has moved.
    """

    def __init__(self, arrays: Sequence[Array], earlier: Places | None = None) -> None:
        self.arrays = tuple(arrays)
        self.fitted: set[KernelParameter] = set()  # parameters that the arrays were checked against
        where = tuple(map(address_of, arrays))
        same = earlier is not None and earlier.where == where
        self.places = earlier if earlier and same else Places(where, array_module(*arrays))

    @property
    def addresses(self) -> Array:
        """The address of each array: uint64, on the device of the arrays."""
        return self.places.array


class Source:
    """A .cu file and its kernels in use.

    Args:    path: in this folder; kernels: names, with template arguments; since: the oldest GPUs
             that run them, by compute capability: 89 for sm_89.
    """

    def __init__(self, path: str | Path, kernels: Sequence[str], since: int = OLDEST) -> None:
        self.path = HERE / path
        self.since = since
        self.kernels = tuple(kernels)
        self._parameters: dict[str, list[KernelParameter]] = {}
        self._functions: dict[tuple[str, int], Any] = {}

    @cached_property
    def text(self) -> str:
        """The source with its #includes ("…") expanded; #line directives keep the file and number
        of each line."""
        return _expand(self.path, set())

    @cached_property
    def _declared(self) -> dict[str, re.Match[str]]:
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", self.text, flags=re.DOTALL)
        return {found["name"]: found for found in _KERNEL.finditer(code)}

    def parameters(self, kernel: str) -> list[KernelParameter]:
        """Return the parameters of an instance, "softmax_v1<float>", from its declaration. Raises:
        KernelError."""
        if kernel not in self._parameters:
            self._parameters[kernel] = self._parse(kernel)
        return self._parameters[kernel]

    def _parse(self, kernel: str) -> list[KernelParameter]:
        name, _, given = kernel.rstrip(">").partition("<")
        if name not in self._declared or kernel not in self.kernels:
            raise KernelError(
                f"{self.path.name} has no kernel {kernel}; it has {', '.join(self.kernels)}"
            )
        declared = self._declared[name]
        names = [
            part.split()[-1] for part in (declared["template"] or "").split(",") if part.strip()
        ]
        types = dict(zip(names, (part.strip() for part in given.split(",")), strict=False))
        return [
            self._parameter(text, types)
            for text in declared["parameters"].split(",")
            if text.strip()
        ]

    def _parameter(self, text: str, types: dict[str, str]) -> KernelParameter:
        words = re.sub(r"\b__restrict__\b", "", text).replace("*", " * ").split()
        spelled = " ".join(word for word in words[:-1] if word not in ("*", "const"))
        spelled = types.get(spelled, spelled)
        if spelled not in _DTYPES:
            raise KernelError(
                f"{self.path.name}: parameter {text.strip()!r} has a type that the loader does "
                f"not know; write one of {', '.join(_DTYPES)}"
            )
        return KernelParameter(
            words[-1], _DTYPES[spelled], "*" in words, words[0] == "const", words.count("*") == 2
        )

    @cached_property
    def module(self) -> Any:
        """Return CuPy's module of the source, not compiled yet."""
        import cupy  # noqa: PLC0415 - a CuPy array came in, so CuPy is here

        return cupy.RawModule(code=self.text, options=(STANDARD,), name_expressions=self.kernels)

    def function(self, kernel: str) -> Any:
        """Return CuPy's function of an instance on the current device, compiled at the first use.
        Raises: KernelError.
        """
        from cupy.cuda import Device, compiler, runtime  # noqa: PLC0415 - a CuPy array came in, so CuPy is here

        key = kernel, runtime.getDevice()
        if key not in self._functions:
            if (
                self.since > OLDEST
                and (found := int(Device(key[1]).compute_capability)) < self.since
            ):
                raise KernelError(
                    f"{self.path.name}: needs a GPU of sm_{self.since} or newer; device {key[1]} "
                    f"is sm_{found}"
                )
            try:
                self._functions[key] = self.module.get_function(kernel)
            except compiler.CompileException as error:
                raise compile_error(self, "NVRTC", str(error)) from error
        return self._functions[key]


def _expand(path: Path, seen: set[Path]) -> str:
    seen.add(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(f"{path}: cannot be read: {error.strerror}") from error
    lines = [f'#line 1 "{path.name}"']
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if found is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        other = path.parent / found[1] if (path.parent / found[1]).exists() else HERE / found[1]
        if other not in seen:
            lines.append(_expand(other, seen))
        lines.append(f'#line {number + 1} "{path.name}"')
    return "\n".join(lines) + "\n"


def compile_error(source: Source, compiler: str, log: str) -> KernelError:
    """Return the first error in a compiler's log as one line, with file and line number."""
    found = re.search(
        r"^(\S+?)(?:\((\d+)\)|:(\d+)(?::\d+)?): (?:catastrophic |fatal )?error:? *(?:#\d+\S*: )?(.*)$",
        log,
        re.MULTILINE,
    )
    if found is None:
        first = next((line for line in log.splitlines() if line.strip()), "it says nothing")
        return KernelError(f"{source.path.name}: {compiler} does not compile it: {first.strip()}")
    file, one, other, message = found.groups()
    return KernelError(f"{Path(file).name}:{one or other}: {message.strip()} ({compiler})")


# ------------------------------------------------------------------------------------------- launch


def launch(
    source: Source,
    kernel: str,
    *,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    args: Sequence[Any],
    shared: int = 0,
) -> None:
    """Run a kernel over its arguments: arrays, all NumPy or all CuPy, and numbers. Outputs are
    written in place.

    Args:    grid, block: blocks, and threads a block, along x, y, z. shared: bytes of `extern
             __shared__` memory.
             args: None is a null pointer; a Table is an array of pointers.
    Raises:  KernelError: no such kernel, a compile error, a launch beyond the limits, a broken rule
             (CPU build); DtypeError, ShapeError: an argument does not fit its parameter, or is not
             contiguous.
    """
    xp = array_module(
        *args, *(arg.arrays[0] for arg in args if isinstance(arg, Table) and arg.arrays)
    )
    if hasattr(xp, "record_launch"):  # arrays without data
        xp.record_launch(kernel, zip(source.parameters(kernel), args, strict=True))
        return
    values = _bind(source, kernel, args)
    sizes = _check_sizes(kernel, grid, block, shared)
    if xp is np:
        from minidist.kernels import on_cpu  # noqa: PLC0415 - it needs g++ and fcntl, which a machine with a GPU may lack

        on_cpu.run(source, kernel, *sizes, values, shared)
    else:
        _run_on_gpu(source, kernel, *sizes, values, shared)


def _bind(source: Source, kernel: str, args: Sequence[Any]) -> list[tuple[KernelParameter, Any]]:
    """Return each parameter with its argument, checked; numbers as NumPy scalars of the parameter's
    type."""
    parameters = source.parameters(kernel)
    if len(args) != len(parameters):
        raise ShapeError(
            f"{kernel} takes {len(parameters)} arguments "
            f"({', '.join(p.name for p in parameters)}), not {len(args)}"
        )
    values = [
        (p, _fit_array(kernel, p, a) if p.pointer else _fit_number(kernel, p, a))
        for p, a in zip(parameters, args, strict=True)
    ]
    _check_one_device(
        kernel,
        [
            next(iter(value.arrays), None) if p.table else value
            for p, value in values
            if p.pointer and value is not None
        ],
    )
    return values


def _check_one_device(kernel: str, arrays: Sequence[Array | None]) -> None:
    """Raise KernelError if the arrays lie on several devices."""
    places = {_device(array) for array in arrays if array is not None}
    if len(places) > 1:
        raise KernelError(
            f"{kernel}: its arrays lie on several devices, {' and '.join(sorted(places))}; "
            f"move them to one"
        )


def _device(array: Array) -> str:
    """Return "cpu", or "cuda 1"."""
    if isinstance(array, np.ndarray):
        return "cpu"
    number = getattr(array.data, "device_id", None)
    return device_of(array) if number is None else f"{device_of(array)} {number}"


def _fit_array(kernel: str, parameter: KernelParameter, array: Any) -> Any:
    if array is None:
        return None
    if parameter.table:
        if not isinstance(array, Table):
            raise DtypeError(
                f"{kernel}: {parameter.name} is a Table of arrays, not {type(array).__name__}"
            )
        if parameter not in array.fitted:
            single = replace(parameter, table=False)
            for each in array.arrays:
                _fit_array(kernel, single, each)
            _check_one_device(kernel, array.arrays)
            array.fitted.add(parameter)
        return array
    if not is_array(array):
        raise DtypeError(f"{kernel}: {parameter.name} is an array, not {type(array).__name__}")
    if array.dtype != parameter.kind:
        raise DtypeError(
            f"{kernel}: {parameter.name} is an array of {dtype_name(parameter.kind)}, "
            f"not {dtype_name(array.dtype)}"
        )
    if not array.flags.c_contiguous:
        raise ShapeError(
            f"{kernel}: {parameter.name}, of shape {array.shape}, is not contiguous; "
            f"pass xp.ascontiguousarray({parameter.name})"
        )
    return array


def _fit_number(kernel: str, parameter: KernelParameter, number: Any) -> Any:
    kind = parameter.kind
    if type(number) not in _PLAIN and is_array(number) and number.ndim:
        raise DtypeError(
            f"{kernel}: {parameter.name} is a number, not an array of shape {number.shape}"
        )
    if kind in _LIMITS and not (
        _LIMITS[kind][0] <= number <= _LIMITS[kind][1] and number == int(number)
    ):
        raise DtypeError(f"{kernel}: {parameter.name} = {number} does not fit {dtype_name(kind)}")
    return kind.type(number)


def _check_sizes(
    kernel: str, grid: int | tuple[int, ...], block: int | tuple[int, ...], shared: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return grid and block in three dims. Raises: KernelError beyond CUDA's limits."""
    grids, blocks = ((*((n,) if isinstance(n, int) else n), 1, 1)[:3] for n in (grid, block))
    threads = math.prod(blocks)
    if min(blocks) < 1 or threads > MOST_THREADS or blocks[2] > MOST_BLOCK_Z:
        raise KernelError(
            f"{kernel}: a block of {blocks} threads; from 1 to {MOST_THREADS} in all are possible, "
            f"at most {MOST_BLOCK_Z} along z"
        )
    if min(grids) < 1 or grids[0] > MOST_GRID or max(grids[1:]) > MOST_GRID_YZ:
        raise KernelError(
            f"{kernel}: a grid of {grids} blocks; from 1 to {MOST_GRID} along x and to "
            f"{MOST_GRID_YZ} along y and z are possible (an empty array needs no launch)"
        )
    if not 0 <= shared <= MOST_SHARED:
        raise KernelError(
            f"{kernel}: {shared} bytes of shared memory; from 0 to {MOST_SHARED} are possible"
        )
    return grids, blocks


def _run_on_gpu(
    source: Source,
    kernel: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    values: Sequence[tuple[KernelParameter, Any]],
    shared: int,
) -> None:
    function = source.function(kernel)
    if shared > 48 * 1024:
        function.max_dynamic_shared_size_bytes = shared
    passed = (value.addresses if isinstance(value, Table) else value for _, value in values)
    function(
        grid,
        block,
        tuple(np.uint64(0) if value is None else value for value in passed),
        shared_mem=shared,
    )
