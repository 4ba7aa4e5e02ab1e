"""Limits of a job on its host: cores, memory, and a run folder of its own.

The memory limit is a control group of Linux (cgroup), where this user may make one. By version 2:

    …/minidist-4711-x/      next to this process's own group, or inside it
        memory.max          the limit of all processes inside together; memory.swap.max is 0
        cgroup.procs        each rank is written there right after its start
        memory.events       `oom_kill` counts the processes that the kernel has killed for the limit

Version 1 has memory.limit_in_bytes, memory.memsw.limit_in_bytes and memory.oom_control instead,
inside this process's own group; it is used where version 1 has the memory controller.

The launcher stays outside the group, so it survives to report why a rank died. A killed launcher
leaves its group behind; the next launcher that makes a group in the same place removes it, once its
processes have ended.
"""

import fcntl
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from minidist.comm.health.failure import how_it_ended, say_line
from minidist.device import cores

PREFIX = "minidist-"
RUN_FOLDER = "MINIDIST_RUN_FOLDER"  # the folder that a rank's launcher has locked for its job
FLIGHT = "MINIDIST_FLIGHT"  # the folder of the flight recorders of all ranks
EMPTY_LIMIT = 2.0  # seconds that a group's last processes may take to end


class _Files(NamedTuple):
    """The files of a group: its limit, the limit of memory and swap or of only swap, and the
    counter `oom_kill`."""

    limit: str
    swap: str
    no_swap: str  # "": as `limit`
    events: str


_V1 = _Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "", "memory.oom_control")
_V2 = _Files("memory.max", "memory.swap.max", "0", "memory.events")


class MemoryLimit:
    """A limit for the memory of all ranks that are started here.

    Args:       text: the limit, as messages write it. own: the folder of this process's group
                (None: the system's).
    Attributes: problem: why the limit is not enforced; "" if it is. kills: number of processes that
                were killed for it.
    """

    def __init__(self, nbytes: int, text: str, own: Path | None = None) -> None:
        self.nbytes = nbytes
        self.text = text
        self.problem = "the job has not begun"
        self.kills = 0
        self._own = own
        self._lock = -1
        self.group: Path | None = None
        self._files = _V2

    def begin(self) -> None:
        """Make the group; if that is impossible, print one line: the job runs without a limit."""
        try:
            if self._own is None and (first := first_version()) is not None:
                self._open(first, _V1)
            else:
                self._make(self._own or own_group())
            self.problem = ""
        except OSError as error:
            self.problem = error.strerror or str(error)
            say_line(f"minidist: --memory-limit {self.text} is not enforced: {self.problem}")
            self.end()

    def _make(self, own: Path) -> None:
        """Make a group of version 2 next to or below `own`.

        Raises: OSError, whose strerror says why there is no group.
        """
        homes = [
            home
            for home in (own.parent, own)
            if "memory" in _words(home / "cgroup.subtree_control")
        ]
        if not homes:
            raise OSError(
                0,
                f"the memory controller of cgroup v2 is not available at {own}",
            )
        usable = [
            home
            for home in homes
            if os.access(home, os.W_OK) and os.access(home / "cgroup.procs", os.W_OK)
        ]
        if not usable:
            raise OSError(
                0,
                f"this user cannot make a control group in {homes[0]}; under systemd, start the "
                "job with `systemd-run --user --scope`",
            )
        self._open(usable[0], _V2)

    def _open(self, home: Path, files: "_Files") -> None:
        """Make the group in `home` and write its limits. Raises: OSError."""
        _sweep(home)
        self._files = files
        self.group, self._lock = _locked_group(home)
        (self.group / files.limit).write_text(str(self.nbytes))
        with suppress(OSError):  # a kernel without accounts of swap
            (self.group / files.swap).write_text(files.no_swap or str(self.nbytes))

    def enter(self, pid: int) -> None:
        """Put a process that has just been started into the group.

        Its later children are in it, too.
        """
        if self.group is None:
            return
        try:
            (self.group / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:  # it has ended
            pass
        except OSError as error:
            self.problem = f"process {pid} cannot be put into {self.group}: {error.strerror}"
            say_line(f"minidist: --memory-limit {self.text} is not enforced: {self.problem}")

    def look(self) -> int:
        """Return the number of processes that the kernel has killed for the limit so far."""
        if self.group is not None:
            with suppress(OSError):
                found = re.search(
                    r"^oom_kill (\d+)", (self.group / self._files.events).read_text(), re.MULTILINE
                )
                self.kills = max(self.kills, int(found[1]) if found else 0)
        return self.kills

    def end(self) -> None:
        """Remove the group, once its processes have ended.

        It remains if a process outlives its rank.
        """
        if self.group is None:
            return
        self.look()
        deadline = time.monotonic() + EMPTY_LIMIT
        while self.group.exists() and not _remove(self.group) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.close(self._lock)
        self.group = None

    def record(self) -> dict[str, object]:
        """Return the limit and its state for --json."""
        return {
            "bytes": self.nbytes,
            "enforced": not self.problem,
            "problem": self.problem or None,
            "killed_processes": self.kills,
        }


@dataclass(frozen=True)
class Limits:
    """The limits of the ranks that are started here.

    Attributes: cores: () for all. memory: None for no limit. folder: the run folder that this
                process has locked for them, or None. flight: the folder of their flight recorders,
                or None.
    """

    cores: Sequence[int] = ()
    memory: MemoryLimit | None = None
    folder: Path | None = None
    flight: Path | None = None

    def begin(self) -> None:
        """Keep this process to the cores, and make the memory limit's group, before the first rank
        starts."""
        if self.cores:
            cores.keep_to(self.cores)
        if self.memory is not None:
            self.memory.begin()

    def variables(self) -> dict[str, str]:
        """Return the variables for the environment of a rank."""
        return (
            ({cores.VARIABLE: str(len(self.cores))} if self.cores else {})
            | ({RUN_FOLDER: os.path.realpath(self.folder)} if self.folder is not None else {})
            | ({FLIGHT: os.path.realpath(self.flight)} if self.flight is not None else {})
        )

    def of_rank(self, local_rank: int, ranks: int) -> list[int]:
        """Return the cores of the rank `local_rank` of `ranks` on this host; empty: all."""
        return cores.deal(self.cores, ranks)[local_rank] if self.cores else []

    def started(self, pid: int) -> None:
        """Put a rank's process, which has just been started, under the memory limit."""
        if self.memory is not None:
            self.memory.enter(pid)

    def how_it_ended(self, code: int) -> str:
        """Return an exit code in words; if the memory limit was the reason for a kill, say so."""
        if code == -signal.SIGKILL and self.memory is not None and self.memory.look():
            return f"was killed by the memory limit of {self.memory.text}"
        return how_it_ended(code)

    def record(self) -> dict[str, object]:
        """Return the limits that are set, for --json."""
        return ({"cores": list(self.cores)} if self.cores else {}) | (
            {"memory_limit": self.memory.record()} if self.memory is not None else {}
        )

    def end(self) -> None:
        """Remove the memory limit's group, when all ranks have ended."""
        if self.memory is not None:
            self.memory.end()


def own_group() -> Path:
    """Return the folder of this process's group of version 2.

    Raises: OSError, whose strerror says why there is none.
    """
    path = next(
        (line[3:].rstrip("\n") for line in _lines("/proc/self/cgroup") if line.startswith("0::")),
        None,
    )
    found = None if path is None else _mounted(path, lambda after: after.startswith("cgroup2 "))
    if found is None:
        raise OSError(0, "this system has no control groups of version 2 (cgroup v2)")
    return found


def first_version() -> Path | None:
    """Return the folder of this process's group of version 1, if it has the memory controller and
    this user may write there."""
    words = [line.rstrip("\n").split(":", 2) for line in _lines("/proc/self/cgroup")]
    path = next(
        (word[2] for word in words if len(word) == 3 and "memory" in word[1].split(",")), None
    )
    found = (
        None
        if path is None
        else _mounted(
            path,
            lambda after: after.startswith("cgroup ") and "memory" in after.split()[-1].split(","),
        )
    )
    return found if found is not None and os.access(found, os.W_OK) else None


def _mounted(path: str, fits: Callable[[str], bool]) -> Path | None:
    """Return the folder of the group `path`, in the hierarchy whose line of mountinfo fits after
    its dash."""
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        if fits(after) and "/.." not in path:
            root, mounted = (
                re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), word)
                for word in before.split()[3:5]
            )
            return Path(mounted, os.path.relpath(path, root)) if path != root else Path(mounted)
    return None


def limit_here() -> int | None:
    """Return the memory limit of the job that this rank belongs to; None without one."""
    for find, files in ((first_version, _V1), (own_group, _V2)):
        with suppress(OSError, ValueError):
            own = find()
            if own is not None and own.name.startswith(PREFIX):
                return int((own / files.limit).read_text())
    return None


def _locked_group(home: Path) -> tuple[Path, int]:
    """Return a new group and the descriptor that holds its lock.

    Repeat if a sweep removes it before the lock.
    """
    while True:
        group = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=home))
        with suppress(FileNotFoundError):
            lock = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if group.exists():
                return group, lock
            os.close(lock)


def _sweep(home: Path) -> None:
    """Remove the groups that killed launchers left; groups of living launchers are locked."""
    for stale in home.glob(f"{PREFIX}*"):
        with suppress(OSError):
            lock = os.open(stale, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(stale)
            finally:
                os.close(lock)


def _remove(group: Path) -> bool:
    """Remove a group and return whether it is gone; a group with processes remains."""
    with suppress(OSError):
        os.rmdir(group)
        return True
    return False


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: str | Path) -> list[str]:
    with suppress(OSError):
        return Path(file).read_text(errors="replace").splitlines()
    return []
