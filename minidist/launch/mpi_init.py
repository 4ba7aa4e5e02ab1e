"""Give MPI_Init a time limit, and name the missing ranks: MPI_Init itself waits for every rank of
the job, even for one that has ended.

MPI_Init holds the interpreter lock, so no thread of a rank can watch it. A forked child of each
rank does. It watches until all ranks have joined at the monitor; from then on the monitor notices
every end, even where mpirun does not (lesson 01). mpirun's agent on a host (MPICH's
hydra_pmi_proxy) is the parent of all ranks there, and the rest is known from the kernel:

    a rank that                              is known by
    has ended (an exception, sys.exit, …)    the agent has fewer children than ranks
    is stopped (SIGSTOP)                     its process has been stopped for the patience
    sleeps, computes                         at the limit it has not mapped MPICH's shared memory,
                                             as MPI_Init does
    waits in MPI_Finalize for the others     it has mapped it, and Python has removed its handler
                                             of SIGINT
    is on another host, or of another MPI    at the limit no rank of this host is missing

One rank of the host reports it in one line, and ends the job through mpirun. A rank in MPI_Finalize
is only named, because a program may remove that handler too; the limit ends the job. MPICH's shared
memory has a name in /dev/shm until all ranks have joined; the child also removes the name if the
rank is killed meanwhile.
"""

import contextlib
import fcntl
import math
import os
import platform
import re
import select
import signal
import stat
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from minidist.comm.health.failure import listed
from minidist.comm.health.process_state import (
    PATIENCE,
    ProcessLooks,
    children_of,
    has_ended,
    hears_interrupts,
    parent_of,
    state_of,
)
from minidist.errors import LaunchError
from minidist.launch.children import Forked, flush_output
from minidist.launch.launchers import Launch, detect

SHM = "/dev/shm"
MPICH_BYTES = 1_061_440  # of /dev/shm that MPICH takes for each rank of a host
# bytes that UCX, which MPICH uses, takes for each rank, if UCX_FREE bytes are free
UCX_BYTES = 4_333_568
UCX_FREE = 16 << 20
_LOOK = 0.02  # seconds between two looks
_STOPS = 0.2  # seconds between two looks for ranks that are stopped
_SETTLE = 0.2  # seconds for other ranks to end, or to arrive after all
# seconds that mpirun gets to read a line, and to end the job; between looks for MPI_Finalize
_GRACE = 1.0
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk",
    "T": "stopped",
    "t": "held by a debugger",
}


def mpi_world(launch: Launch) -> Any:
    """Return MPI_COMM_WORLD, if it is the world that mpirun started.

    Raises: LaunchError if each process has become a world of its own (mpi4py belongs to another MPI
            than mpirun, or srun was not given the right --mpi); or if MPI_Init would end the
            process: wrong PMI variables, or too little room in /dev/shm.
    """
    if launch.launcher != "openmpi" and not _is_initialized():
        check_pmi()
        make_room(launch.local_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
        from mpi4py import MPI

        if not MPI.Is_initialized():  # imported by which_mpi.py
            MPI.Init_thread()
    if MPI.COMM_WORLD.size != launch.world_size:
        library = MPI.Get_library_version().splitlines()[0].strip().rstrip("\x00")
        if launch.mpi_by_srun:
            raise LaunchError(
                f"srun started {launch.world_size} tasks, but mpi4py ({library}) sees "
                f"{MPI.COMM_WORLD.size}: give srun --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI, "
                "or use transport auto"
            )
        raise LaunchError(
            f"mpirun started {launch.world_size} ranks, but mpi4py ({library}) sees "
            f"{MPI.COMM_WORLD.size}: that mpirun belongs to another MPI; use the mpirun of this "
            "Python (`pip install mpich`), or `minidist launch`"
        )
    return MPI.COMM_WORLD


def _is_initialized() -> bool:
    """Return whether this process has called MPI_Init, as importing mpi4py.MPI does."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def check_pmi() -> None:
    """Raise LaunchError if PMI_FD or PMI_PORT cannot be mpirun's: MPI_Init would end the
    process."""
    file = os.environ.get("PMI_FD")
    port = os.environ.get("PMI_PORT")
    if file is not None and not _is_socket(file):
        raise LaunchError(
            f"PMI_FD={file!r:.60} is not the number of an open socket; mpirun sets it, for the "
            "ranks that it starts and not for what they start, so start the job again"
        )
    if file is None and port is not None and not re.fullmatch(r"[\w.:%-]{1,253}:[0-9]{1,5}", port):
        raise LaunchError(
            f"PMI_PORT={port!r:.60} needs the form host:port; mpirun sets it, so start the job "
            "again"
        )


def _is_socket(number: str) -> bool:
    with contextlib.suppress(OSError, OverflowError):
        return re.fullmatch("[0-9]{1,9}", number) is not None and stat.S_ISSOCK(
            os.fstat(int(number)).st_mode
        )
    return False


def make_room(ranks: int) -> None:
    """Before MPI_Init: keep UCX from using /dev/shm if it is small.

    MPICH works without UCX's part of it.

    UCX takes its part if it finds UCX_FREE bytes free, and dies if another rank takes them first.
    Raises: LaunchError if there is no room for MPICH's own part.
    """
    if problem := shortage(ranks):
        raise LaunchError(problem)
    if _free_bytes() < UCX_FREE + ranks * (MPICH_BYTES + UCX_BYTES):
        os.environ.setdefault("UCX_TLS", "^posix")


def shortage(ranks: int) -> str:
    """Return what is missing if /dev/shm is too full for this number of ranks (MPICH would die).

    Return "" if there is room.
    """
    needed = ranks * MPICH_BYTES
    free = _free_bytes()
    # the file may be this job's: then the room is allocated already
    if free >= needed or any(Path(SHM).glob("mpich_shm_*")):
        return ""
    return (
        f"MPICH needs {needed / 2**20:.1f} MiB of {SHM} for {ranks} ranks on {platform.node()}, "
        f"and {free / 2**20:.1f} MiB are free; make it larger (in Docker: --shm-size 1g), or "
        "start the job with `minidist launch`, which does without"
    )


def _free_bytes() -> float:
    """Return the free bytes of /dev/shm; infinite if there is no such folder."""
    try:
        state = os.statvfs(SHM)
    except OSError:
        return math.inf
    return state.f_bavail * state.f_frsize


def shared_memory(pid: int) -> set[str]:
    """Return the files of MPICH's shared memory that a process has mapped.

    The set is empty if the system does not list them.
    """
    with contextlib.suppress(OSError):
        return set(
            re.findall(
                r"/dev/shm/mpich_shm_\w+", Path(f"/proc/{pid}/maps").read_text(errors="replace")
            )
        )
    return set()


def unlink(names: set[str]) -> None:
    """Remove the names of shared memory; processes that have mapped it keep it."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)


@contextlib.contextmanager
def watched(
    launch: Launch, limit: float, patience: float = PATIENCE
) -> Iterator[Callable[[], None]]:
    """Watch MPI_Init and the joining of all ranks, which happen inside the block.

    This is for mpirun's ranks only. The block calls the function that it is given when MPI_Init is
    over. A rank ends the job, without an exception, if it does not reach MPI_Init within `limit`
    seconds, ends before all ranks have joined, or is stopped (SIGSTOP) for `patience` seconds.
    """
    if not launch.by_mpirun:
        yield lambda: None
        return
    over, end = os.pipe()
    rank = os.getpid()

    def watch() -> int:
        os.setsid()  # signals of mpirun or the terminal are for the rank only
        os.close(end)
        InitWatch(launch, limit, rank, over, patience).run()
        return 0

    child = Forked(watch)
    os.close(over)
    try:
        yield lambda: _write(end, b"i")
        _write(end, b".")
    finally:
        os.close(end)
        unlink(shared_memory(os.getpid()))  # every rank has mapped it
        # the program's own handler of SIGCHLD was quicker
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child.pid, 0)


def _write(file: int, word: bytes) -> None:
    with contextlib.suppress(OSError):  # the child has gone
        os.write(file, word)


class InitWatch:
    """The watch in the child: until `over` says that all ranks have joined, or that process `rank`
    is gone."""

    def __init__(
        self, launch: Launch, limit: float, rank: int, over: int, patience: float = PATIENCE
    ) -> None:
        self._launch = launch
        self._limit = limit
        self._rank = rank
        self._over = over
        self._deadline = time.monotonic() + limit
        self._agent = parent_of(os.getsid(rank))  # mpirun begins a session with each rank
        self._names: set[str] = set()
        self._first: bool | None = None
        self._leaving: set[int] | None = set()  # ranks seen in MPI_Finalize; None: reported
        self._looked = 0.0
        self._stops = ProcessLooks(patience)
        self._frozen: dict[int, int] = {}  # the ranks found stopped, and their processes

    def run(self) -> None:
        heard = None
        while heard is None:
            heard = self._hear(_LOOK)
            self._names = self._names or shared_memory(self._rank)
            # mpirun's agent has started all ranks before it serves one of them
            started = bool(self._names)
            missing = started and (self._ended() or self._look_for_stops())
            if heard is None and (missing or time.monotonic() > self._deadline):
                heard = self._end_job()
            elif (
                heard is None
                and self._deadline == math.inf
                and time.monotonic() - self._looked > _GRACE
            ):
                self._look_at_finalize()
        if not heard:
            unlink(self._names)

    def _hear(self, limit: float) -> bytes | None:
        """Return what arrives within `limit` s: b"." if all have joined, b"" if the rank is gone or
        fails, None if nothing."""
        poll = select.poll()
        poll.register(self._over, select.POLLIN)
        heard = os.read(self._over, 1) if poll.poll(1000 * limit) else None
        if heard == b"i":  # MPI_Init is over; the next phases have limits of their own
            self._deadline = math.inf
            self._looked = time.monotonic()
            heard = None
        return heard

    def _end_job(self) -> bytes:
        """Report which ranks are missing, and have mpirun end every rank."""
        heard = self._hear(_SETTLE)
        if heard is not None:  # all have joined; or mpirun ends the job, and says why
            return heard
        line, here = self._missing()
        # the host of the missing rank can report more
        if not here and (heard := self._hear(_GRACE)) is not None:
            return heard
        if self._is_first():
            self._say(f"minidist: {line}; the job ends\n")
            abort_by_mpirun()
        if self._hear(_GRACE) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rank, signal.SIGKILL)  # mpirun ends the others
        return b""

    def _say(self, line: str) -> None:
        """Write to stderr and wait until mpirun has read it: text left in the pipe is lost when
        mpirun ends the job."""
        # not by sys.stderr: a thread may have held its lock at the fork
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
            deadline = time.monotonic() + _GRACE
            while any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
                time.sleep(_LOOK)

    def _is_first(self) -> bool:
        """Return whether this is the first rank of the host to ask.

        The first one then holds a lock on the shared memory.
        """
        if self._first is None:
            self._first = True
            with contextlib.suppress(FileNotFoundError):
                try:
                    for name in self._names:
                        fcntl.flock(os.open(name, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self._first = False
        return self._first

    def _look_for_stops(self) -> bool:
        """Return whether a rank of this host has been stopped for the patience."""
        if time.monotonic() >= self._stops.next(_STOPS):
            first = self._launch.world_rank - self._launch.local_rank
            here = self._here()
            pids = {
                pid: first + local
                for local, above in here.items()
                for pid in (above, *children_of(above))
            }
            self._frozen = {pids[pid]: pid for pid in self._stops.frozen({*pids})}
        return bool(self._frozen)

    def _look_at_finalize(self) -> None:
        """After MPI_Init: name ranks that two looks in a row find to wait in MPI_Finalize."""
        before = self._leaving
        self._looked = time.monotonic()
        if before is None:
            return
        first = self._launch.world_rank - self._launch.local_rank
        processes = {first + local: self._in_mpi(pid) for local, pid in self._here().items()}
        self._leaving = {
            rank
            for rank, pids in processes.items()
            if pids and not any(map(hears_interrupts, pids))
        }
        if (found := sorted(self._leaving & before)) and hears_interrupts(self._rank):
            self._leaving = None
            if self._is_first():
                self._say(
                    f"minidist: {listed(found)} of {self._launch.world_size} on "
                    f"{platform.node()} seems to end in"
                    " MPI_Finalize without md.init, where the others wait: see its output\n"
                )

    def _ended(self) -> list[int]:
        """Return the ranks of this host that have ended, or have not been started yet."""
        size = self._launch.local_size
        if len(self._processes()) >= size:
            return []
        first = self._launch.world_rank - self._launch.local_rank
        here = self._here()
        return [first + local for local in range(size) if local not in here] if here else []

    def _processes(self) -> list[int]:
        """Return the processes that mpirun has started here and that have not ended.

        Ended ones are filtered out, because mpirun may reap them late.
        """
        return [pid for pid in children_of(self._agent) if not has_ended(pid)]

    def _here(self) -> dict[int, int]:
        """Return the process that mpirun has started for each rank of this host that has not ended,
        by local rank.

        It is the rank itself, or a shell that has started it. Empty if mpirun's processes are not
        related in this way.
        """
        found = {}
        for pid in self._processes():
            with contextlib.suppress(OSError, LaunchError):
                variables = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
                found[
                    detect(dict(line.split("=", 1) for line in variables if "=" in line)).local_rank
                ] = pid
        return found if self._launch.local_rank in found else {}

    def _missing(self) -> tuple[str, bool]:
        """Return a text on which ranks are missing and why, and whether ranks of this host are seen
        to be missing."""
        size = self._launch.world_size
        first = self._launch.world_rank - self._launch.local_rank
        host = platform.node()
        if ended := self._ended():
            when = (
                "in md.init, before all had joined"
                if self._deadline == math.inf
                else "before md.init, where the others wait"
            )
            return f"{listed(ended)} of {size} ended on {host} {when}: see its output", True
        if self._frozen:
            what = ", ".join(f"process {pid}" for pid in self._frozen.values())
            return (
                f"{listed(sorted(self._frozen))} of {size} ({what} stopped on {host}) did not "
                "reach md.init, where the others wait",
                True,
            )
        here = self._here()
        late = {
            first + local: pid
            for local, pid in sorted(here.items())
            if self._names and not self._came(pid)
        }
        if late:
            what = ", ".join(
                f"process {pid} {_STATES.get(state_of(pid), 'ending')}" for pid in late.values()
            )
            return (
                f"{listed(list(late))} of {size} ({what} on {host}) did not reach md.init within "
                f"{self._limit:g} s",
                True,
            )
        known = here and (self._names or self._launch.local_size == 1)
        return (
            f"rank {self._launch.world_rank} of {size} waited {self._limit:g} s in MPI_Init, "
            "which waits for every rank; "
            f"{f'none on {host} is missing' if known else 'which one is missing cannot be seen here'}",
            False,
        )

    def _came(self, pid: int) -> bool:
        """Return whether a process, or one that it has started, is in MPI_Init."""
        return bool(self._in_mpi(pid))

    def _in_mpi(self, pid: int) -> list[int]:
        """Return which of a process and its descendants have mapped MPICH's shared memory."""
        own = [pid] if shared_memory(pid) & self._names else []
        return own + [other for child in children_of(pid) for other in self._in_mpi(child)]


def abort_by_mpirun(status: int = 1) -> None:
    """End every rank, and mpirun with that status, as MPI_Abort does: through the socket of
    MPI_Init (MPICH's PMI 1)."""
    with contextlib.suppress(KeyError, OSError):
        file = os.environ["PMI_FD"]
        if _is_socket(file):
            os.write(int(file), f"cmd=abort exitcode={status}\n".encode())


def abort_mpi(status: int) -> NoReturn:
    """End every rank of MPI_COMM_WORLD, and this process, without MPI's own message: ours is
    printed already."""
    flush_output()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        mpi.COMM_WORLD.Abort(status)
    os._exit(status)
