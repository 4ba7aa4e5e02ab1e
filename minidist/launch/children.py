"""The processes that one of our launchers has started: find out how each ended, and end them
all."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping

from minidist.comm.health.failure import Failure
from minidist.comm.health.process_state import (
    PATIENCE,
    REAP_LIMIT,
    SHORTEST_LOOK,
    ProcessLooks,
    kill_stopped,
    with_wrapped,
)
from minidist.errors import LaunchError
from minidist.launch.limits import Limits

UNMET = "before md.init, where the others wait"


def flush_output() -> None:
    """Write out the buffered lines of stdout and stderr, if these can still be written."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as where a program closed it, or has no terminal
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


class Forked:
    """A forked copy of this process, which runs `body()` and exits with the status that it returns.

    Python 3.12 and newer warn when a process with several threads forks, because a lock that is
    held at the fork stays locked in the copy. The only other threads here are the BLAS library's,
    and that library prepares itself for a fork. The child uses nothing else of the parent's.
    """

    def __init__(self, body: Callable[[], int]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            try:
                self.pid = os.fork()
            except OSError as error:
                raise LaunchError(
                    f"this process cannot be copied for a rank ({error.strerror}); see `ulimit "
                    "-u` and `ulimit -v`, or start fewer ranks"
                ) from error
        if self.pid == 0:  # never return into the parent's code, nor run its exit handlers
            status = 1
            try:
                status = body()
            finally:
                os._exit(status)
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._code = os.waitstatus_to_exitcode(status)
            return self._code

    def send_signal(self, sig: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._code is None:
                os.kill(self.pid, sig)


class Children:
    """The processes of the ranks started here, by world rank.

    `patience`: the number of seconds that a process may be stopped (SIGSTOP).
    """

    def __init__(
        self,
        processes: Mapping[int, "subprocess.Popen[bytes] | Forked"],
        limits: Limits | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.processes = processes
        self.limits = limits or Limits()
        self._looks = ProcessLooks(patience)

    def how(self, world_rank: int) -> str | None:
        """Return how a rank ended that is about to end; None if it still runs, or is not ours."""
        code = self.code(world_rank, REAP_LIMIT)
        return None if code is None else self.limits.how_it_ended(code)

    def code(self, world_rank: int, limit: float) -> int | None:
        """Return the exit code of a rank that is about to end.

        None if it still runs after `limit` s, or is not ours.
        """
        process = self.processes.get(world_rank)
        deadline = time.monotonic() + limit
        while process is not None:
            code = process.poll()
            if code is not None or time.monotonic() > deadline:
                return code
            time.sleep(0.001)
        return None

    def frozen(self, awaited: Collection[int]) -> list[Failure]:
        """Kill ranks in `awaited` whose processes have been stopped too long; return their
        failures."""
        if time.monotonic() < self._looks.next(SHORTEST_LOOK):
            return []
        running = set(self.running()).intersection(awaited)
        ranks = {pid: rank for rank in running for pid in with_wrapped(self.processes[rank].pid)}
        frozen = self._looks.frozen({*ranks})
        self._looks.close()
        return [
            Failure(ranks[pid], pid, os.uname().nodename, f"is frozen (stopped) {UNMET}")
            for pid in sorted(frozen, key=ranks.__getitem__)
        ]

    def running(self) -> list[int]:
        """Return the world ranks whose process has not ended."""
        return [rank for rank, process in self.processes.items() if process.poll() is None]

    def wait(self, limit: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all have ended, for at most `limit` seconds or until hurry() is true.

        Return whether all have.
        """
        deadline = time.monotonic() + limit
        while self.running():
            if time.monotonic() > deadline or hurry():
                return False
            time.sleep(0.005)
        return True

    def end(self, grace: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Give the processes `grace` seconds to end, send SIGTERM, wait as long again, kill them.

        A stopped process is killed at once: it cannot handle a signal. When hurry() is true, all
        are killed at once.
        """
        for rank in self.running():
            kill_stopped(self.processes[rank].pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.wait(0.0 if hurry() else grace, hurry):
                return
            for rank in self.running():
                self.processes[rank].send_signal(signal.SIGKILL if hurry() else number)
        self.wait(10.0)
