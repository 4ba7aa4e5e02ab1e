"""Compiling every kernel for its GPUs, on a machine without one: registers, shared memory, spills.

    python -m minidist.kernels                       # the table

NVRTC compiles if its wheels are installed (extra test-kernels; CuPy uses it too), else nvcc. Both
parse the same text and run the same ptxas; NVRTC is much faster.
"""

import ctypes
import importlib
import importlib.util
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minidist.errors import KernelError
from minidist.kernels import tools
from minidist.kernels.cache import missing, place
from minidist.kernels.loader import HERE, STANDARD, Source, compile_error

OPTIONS = (STANDARD, "-ftz=true")  # CuPy adds the second itself
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")  # A100, H100 and H200, B200


@dataclass(frozen=True)
class ResourceUsage:
    """A kernel's resources on an architecture: registers per thread, bytes of static shared memory
    per block, spills."""

    kernel: str
    architecture: str
    registers: int
    shared: int
    spill_stores: int  # bytes
    spill_loads: int
    stack: int


def sources() -> list[Source]:
    """Return the Sources of all modules in this folder."""
    found = []
    for path in sorted(HERE.glob("*.py")):
        if path.stem not in ("__init__", "__main__") and path.with_suffix(".cu").exists():
            module = importlib.import_module(f"minidist.kernels.{path.stem}")
            found += [value for value in vars(module).values() if isinstance(value, Source)]
    return found


def architectures(source: Source) -> list[str]:
    """Return the ARCHITECTURES that run the kernels of a source."""
    return [name for name in ARCHITECTURES if int(name.removeprefix("sm_")) >= source.since]


def one_of_each(source: Source, turn: int) -> list[str]:
    """Return one instance of each kernel of a source, another one at each turn:
    "softmax_v1<float>", "softmax_v2<float>", …"""
    instances: dict[str, list[str]] = {}
    for kernel in source.kernels:
        instances.setdefault(kernel.partition("<")[0], []).append(kernel)
    return [several[turn % len(several)] for several in instances.values()]


def compile_for(
    source: Source, architecture: str, kernels: Sequence[str] = ()
) -> list[ResourceUsage]:
    """Return the resources of each kernel of a source, or of `kernels`. Raises: KernelError with
    file and line.

    Cost: 50 ms per kernel by NVRTC, unless it is in the cache.
    """
    kernels = kernels or source.kernels
    path = place(
        f"{source.path.stem}-{architecture}", ".log", _compiler(), *OPTIONS, source.text, *kernels
    )
    with missing(path) as new:
        if new is not None:
            log = _by_nvrtc if _wheels() else _by_nvcc
            new.write_text(log(source, architecture, kernels), encoding="utf-8")
    return _usages(path.read_text(encoding="utf-8"), architecture)


def _usages(log: str, architecture: str) -> list[ResourceUsage]:
    """Return the resources in the log of ptxas -v; `name` lines before it give the kernels'
    names."""
    names = dict(re.findall(r"^name (\S+) (.*)$", log, re.MULTILINE))
    found = []
    for part in log.split("Compiling entry function '")[1:]:
        mangled = part.partition("'")[0]

        def number(pattern: str, part: str = part) -> int:
            match = re.search(pattern, part)
            return int(match[1]) if match else 0

        found.append(
            ResourceUsage(
                names.get(mangled, mangled),
                architecture,
                number(r"Used (\d+) registers"),
                number(r"(\d+) bytes smem"),
                number(r"(\d+) bytes spill stores"),
                number(r"(\d+) bytes spill loads"),
                number(r"(\d+) bytes stack frame"),
            )
        )
    return sorted(found, key=lambda usage: usage.kernel)


# ---------------------------------------------------------------------------------------- compilers


def available() -> bool:
    """Return whether there is a compiler for GPUs on this machine."""
    return bool(_wheels() or shutil.which("nvcc"))


def _compiler() -> str:
    wheels = _wheels()
    if wheels:
        return str(sorted(path.name for path in wheels[0].iterdir()))
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise KernelError(
            "compiling kernels for a GPU needs NVRTC or nvcc, and this machine has neither; "
            "pip install -e '.[test-kernels]'"
        )
    return tools.run([nvcc, "--version"], check=True).stdout


@cache
def _wheels() -> tuple[Path, Path] | None:
    """Return the folders of NVRTC's libraries and of CUDA's headers, as the wheels install them;
    None without both."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or []:
        for toolkit in sorted(Path(folder).glob("cu*")):
            if (
                list((toolkit / "lib").glob("libnvrtc.so.*"))
                and (toolkit / "include" / "cuda_fp16.h").exists()
            ):
                return toolkit / "lib", toolkit / "include"
    return None


@cache
def _nvrtc(folder: Path) -> ctypes.CDLL:
    """Return the NVRTC library. Its builtins library, which it loads itself, must be loaded before,
    with global symbols."""
    ctypes.CDLL(str(next(folder.glob("libnvrtc-builtins.so.*"))), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))


def _by_nvrtc(source: Source, architecture: str, kernels: Sequence[str]) -> str:
    """Compile by NVRTC; return the log, after a line "name MANGLED kernel" for each kernel. Raises:
    KernelError."""
    wheels = _wheels()
    assert wheels is not None
    library = _nvrtc(wheels[0])
    program = ctypes.c_void_p()
    options = [
        f"--gpu-architecture={architecture}",
        *OPTIONS,
        f"-I{wheels[1]}",
        "--ptxas-options=-v",
    ]
    library.nvrtcCreateProgram(
        ctypes.byref(program), source.text.encode(), source.path.name.encode(), 0, None, None
    )
    try:
        names = [name.encode() for name in kernels]
        for name in names:
            library.nvrtcAddNameExpression(program, name)
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = library.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        if failed:
            raise compile_error(
                source, f"NVRTC, {architecture}", log.value.decode(errors="replace")
            )
        mangled = ctypes.c_char_p()
        lines = []
        for name in names:
            library.nvrtcGetLoweredName(program, name, ctypes.byref(mangled))
            lines.append(f"name {(mangled.value or b'').decode()} {name.decode()}\n")
        return "".join(lines) + log.value.decode(errors="replace")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _by_nvcc(source: Source, architecture: str, kernels: Sequence[str]) -> str:
    """Compile by nvcc; return the log; kernels keep their mangled names. Raises: KernelError."""
    used = ", ".join(f"(void*){name}" for name in kernels)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / source.path.name
        path.write_text(f"{source.text}\nvoid* used[] = {{{used}}};\n", encoding="utf-8")
        options = [option.replace("--", "-") for option in OPTIONS]
        done = tools.run(
            [
                "nvcc",
                *options,
                "-cubin",
                f"-arch={architecture}",
                "-Xptxas",
                "-v",
                str(path),
                "-o",
                str(path.with_suffix(".cubin")),
            ]
        )
    if done.returncode:
        raise compile_error(source, f"nvcc, {architecture}", done.stderr)
    return done.stderr
