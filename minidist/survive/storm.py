"""Chapter 26 · A storm: ranks of an elastic job are killed, stopped and cut off on purpose, and what happened is told.

    fault       what it does to a rank, chosen at random                     what the job notices
    kill        kill -9                                                      its connections end, within milliseconds
    stop        SIGSTOP: it neither answers nor ends                         it is stopped at every look for a while
    cut         shuts down one of its TCP connections, as a network would    the connection ends; its rank lives

The job is any program that launch.elastic_job runs and that writes its log; faults come from outside, by process number
alone. All figures are of that log (launch/generation.py) and of the faults' times, on one clock.
"""

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FAULTS = ("kill", "stop", "cut")

Event = dict[str, Any]

_PIDFD_GETFD = 438      # a system call of Linux 5.6, the same number on all its machines
_LOOK = 0.02            # seconds between looks at the job


class Storm:
    """Faults for one job, whose log is `log`.

    Args:       every: seconds between faults, on average; `faults`: kinds, in turn; seed: of times and ranks.
    Attributes: faults: {"kind", "pid", "time"} of each.
    """

    def __init__(self, log: Path, *, every: float, kinds: Sequence[str] = FAULTS, seed: int = 0) -> None:
        self._log, self._every, self._kinds, self._random = log, every, kinds, random.Random(seed)
        self.faults: list[Event] = []

    def rage(self, job: "subprocess.Popen[Any]", seconds: float) -> None:
        """From the job's first step on, break it for so many seconds, or until it ends."""
        while job.poll() is None and not any(event["event"] == "stepped" for event in events(self._log)):
            time.sleep(_LOOK)
        end = time.monotonic() + seconds
        while job.poll() is None and time.monotonic() < end:
            time.sleep(self._every * self._random.uniform(0.5, 1.5))
            if job.poll() is None:
                self._strike(self._kinds[len(self.faults) % len(self._kinds)])

    def _strike(self, kind: str) -> None:
        forming = [event for event in events(self._log) if event["event"] == "forming"]
        pid, now = self._random.choice(forming[-1]["pids"]), time.time()
        try:
            if kind == "cut":
                cut_connection(pid, self._random)
            else:
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        except OSError:                                     # it has ended, or has no such connection: another time
            return
        self.faults.append({"kind": kind, "pid": pid, "time": now})


def cut_connection(pid: int, chance: random.Random) -> None:
    """Shut down one of the TCP connections of another process of this user.

    Raises: OSError if it has none, or the system does not allow it (Linux 5.6 or newer, a child or grandchild of ours).
    """
    folder = Path(f"/proc/{pid}/fd")
    files = [int(file.name) for file in folder.iterdir() if os.readlink(file).startswith("socket:")]
    chance.shuffle(files)
    library, process = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        for file in files:
            copy = library.syscall(_PIDFD_GETFD, process, file, 0)
            if copy < 0:
                raise OSError(ctypes.get_errno(), "pidfd_getfd")
            with socket.socket(fileno=copy) as sock, contextlib.suppress(OSError):
                if sock.family == socket.AF_INET and sock.getpeername():
                    sock.shutdown(socket.SHUT_RDWR)
                    return
    finally:
        os.close(process)
    raise OSError(f"process {pid} has no TCP connection")


def events(log: Path) -> list[Event]:
    """What the log says so far; a line that is being written is not yet there."""
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines(keepends=True)
                if line.endswith("\n")]
    return []


def summary(told: Sequence[Event], faults: Sequence[Event], size: int) -> dict[str, Any]:
    """The figures of a storm.

    Returns: recovered: faults after which a step was made; seconds: from a fault to the end of the next step that
             counts, of each (from its detection, of a stop; a cut that the job did not notice has none);
             kept: of all steps that were made, the part that was not made again; participation: ranks that took part
             over `size`, on average over the time from the first step to the end of the work.
    """
    timed = [event for event in told if "time" in event]
    steps = [event for event in timed if event["event"] == "stepped"]
    seconds, recovered = dict[str, list[float]](), 0
    for fault in faults:
        broken = next((event for event in timed if event["event"] == "broken" and event["time"] >= fault["time"]), None)
        after = None if broken is None else next((e for e in steps if e["time"] > broken["time"]), None)
        recovered += broken is None or after is not None
        if broken is not None and after is not None:
            since = broken["time"] if fault["kind"] == "stop" else fault["time"]
            seconds.setdefault(fault["kind"], []).append(after["time"] - since)
    reached = [event for event in timed if event["event"] == "reached"]
    again = sum(max(0, event["step"] - next((later["step"] for later in timed if later["event"] == "formed"
                                             and later["time"] > event["time"]), event["step"])) for event in reached)
    made = max((event["step"] for event in timed if "step" in event), default=0) + again
    every = [value for values in seconds.values() for value in values]
    return {"faults": len(faults), "recovered": recovered, "seconds": seconds,
            "median_seconds": statistics.median(every) if every else None, "steps_made": made, "steps_again": again,
            "kept": 1 - again / made if made else None, "participation": _participation(timed, size)}


def spans(told: Sequence[Event]) -> list[tuple[float, float, int, int]]:
    """(begin, end, ranks, generation) of each generation's work, from its state to its end, in seconds of the log."""
    found, begun, ranks = [], dict[int, float](), dict[int, int]()
    for event in told:
        number = event.get("generation", 0)
        match event["event"]:
            case "forming":
                ranks[number] = len(event["processes"])
            case "formed":
                begun[number] = event["seconds"]
            case "broken" | "left" | "done" if number in begun:
                found.append((begun.pop(number), event["seconds"], ranks[number], number))
    return found


def _participation(told: Sequence[Event], size: int) -> float | None:
    works = spans(told)
    if not works:
        return None
    return sum((end - begin) * ranks for begin, end, ranks, _ in works) / ((works[-1][1] - works[0][0]) * size)
