"""The kernel's information about processes: which are stopped for good (SIGSTOP, Ctrl-Z), and how
one ended.

A stopped process sends nothing and loses no connection, like one that computes in a single long
call. The kernel knows the difference: the state of the first is T, of the second R or S. A process
that was stopped at every look for PATIENCE seconds is frozen, and lost; one more look, or the end
of the job, kills it, because it cannot end itself. So a stop of 1.5 s does no harm, and a frozen
rank is found within 2.5 s. If the time between two looks was long, the observer was stopped too
(Ctrl-Z stops a whole job), and begins anew. A process that a debugger holds (gdb, strace) is not
frozen.

The looks also find processes that have ended, because a forked child (e.g. a data loader's worker)
may hold a dead rank's connections open. Again two looks in a row are needed: by the second, the
goodbye of a rank that ended well has been read.

The node agent of another host watches the processes there (node_agent.py).
"""

import contextlib
import os
import platform
import re
import signal
import time
from functools import lru_cache
from pathlib import Path

from minidist.comm.health.failure import how_it_ended

LOOK = 0.4  # seconds between two looks
SHORTEST_LOOK = 0.1  # the same where the patience is less than LOOK
# seconds that a process may be stopped; the next look is this long after the first that saw it
# stopped
PATIENCE = 1.7
# seconds between a connection's end and the end of its process, on a busy machine
REAP_LIMIT = 0.4
_LATE = 3  # times LOOK: after a longer time between two looks, this process was stopped, too


class ProcessLooks:
    """The processes that were stopped, or had ended, at the last look. For one thread."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        # by stopped process: the name of its stop, and when it was found
        self._since: dict[int, tuple[str, float]] = {}
        self._frozen: set[int] = set()
        self._gone: set[int] = set()
        self._last = time.monotonic()

    def frozen(self, pids: set[int]) -> set[int]:
        """Return those of `pids` that were stopped at this look and at all others for `patience`
        seconds."""
        now = time.monotonic()
        before = self._since if now - self._last < _LATE * LOOK else {}
        self._since = {}
        self._last = now
        reported = self._frozen
        self._frozen = set()
        for pid in pids:
            if stop := stop_of(pid):
                known, since = before.get(pid, ("", now))
                self._since[pid] = (stop, since if known == stop else now)
                if known == stop and now - since >= self.patience:
                    self._frozen.add(pid)
        for pid in self._frozen & reported:
            kill_stopped(pid)
        return self._frozen

    def ended(self, pids: set[int]) -> dict[int, str]:
        """Return those of `pids` that had ended at this and the previous look, and how."""
        before = self._gone
        self._gone = {pid for pid in pids if has_ended(pid)}
        return {pid: exit_of(pid) or "" for pid in self._gone & before}

    def next(self, every: float = LOOK) -> float:
        """Return the time of the next look, by time.monotonic: after `every` seconds, or after the
        patience if that is shorter, or when the stop of a process has lasted the patience.
        """
        every = min(every, max(self.patience, SHORTEST_LOOK))
        waited = [
            since + self.patience
            for pid, (_, since) in self._since.items()
            if pid not in self._frozen
        ]
        return min([self._last + every, *waited])

    def close(self) -> None:
        """Kill the frozen processes; there is no later look."""
        for pid in self._frozen:
            kill_stopped(pid)


def has_ended(pid: int) -> bool:
    """Return whether a process of this host has ended; False if the system does not say."""
    return state_of(pid) in ("Z", "X", "") and bool(state_of(os.getpid()))


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process of this host; "" if it is gone, or the
    system does not say."""
    return _stat(pid)[0]


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc about a process: its state, …, its exit code; [""] if it is gone,
    ["?"] if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [""]
    except OSError:  # e.g. this process has too many open files
        return ["?"]


def parent_of(pid: int) -> int:
    """Return the parent of a process of this host; 0 if it is gone, or the system does not say."""
    return int("".join(_stat(pid)[1:2]) or 0)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process's first thread has started and not reaped; none if the
    system does not say."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def with_wrapped(pid: int) -> list[int]:
    """Return a process and the process that it wraps: its only child (as a shell or timeout has),
    and the only child of that."""
    found = [pid]
    while len(children := children_of(found[-1])) == 1:
        found += children
    return found


def stop_of(pid: int) -> str:
    """Return a name for the stop of a process of this host; "" if it is not stopped, or a debugger
    holds it.

    Two stops have different names: the name contains the number of its context switches.
    """
    if state_of(pid) != "T":  # "t": at a breakpoint or a system call that is traced
        return ""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        return (
            status[status.find("voluntary_ctxt_switches") :] if "TracerPid:\t0\n" in status else ""
        )
    return ""


def hears_interrupts(pid: int) -> bool:
    """Return whether a process handles SIGINT, as a running Python does, or ignores it; True if the
    system does not say."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        masks = re.findall(r"^Sig(?:Ign|Cgt):\t(\w+)$", status, re.MULTILINE)
        return any(int(mask, 16) >> signal.SIGINT - 1 & 1 for mask in masks) or not masks
    return True


def kill_stopped(pid: int) -> None:
    """Kill a process that is stopped: it cannot end itself."""
    if stop_of(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def exit_of(pid: int) -> str | None:
    """Return how a process of this host that is not our child ended, if its parent has not reaped
    it yet."""
    deadline = time.monotonic() + REAP_LIMIT
    while True:
        state, *rest = _stat(pid)
        if not state:
            return "was killed, or ended without goodbye"
        if state == "Z":
            return how_it_ended(os.waitstatus_to_exitcode(int(rest[-1])))
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


@lru_cache(maxsize=1)
def this_system() -> str:
    """Return a name for the running system and the processes visible from here: a container may
    have its own."""
    return system_and("pid")


def system_and(namespace: str) -> str:
    """Return a unique name of the running system, and of a namespace of this process: "pid",
    "net"."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(Path(f"/proc/self/ns/{namespace}").readlink().name)
    return " ".join(parts)
