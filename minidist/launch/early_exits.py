"""Two ways a rank can end, or fail to end, without running its exit handlers: os._exit, and a
thread that keeps the process alive.

os._exit under mpirun         MPICH's mpirun kills the other ranks at once; after os._exit(0) it
                              often ends with status 0 itself. So our os._exit first reports to the
                              monitor, lets the others print their line, and has mpirun end with a
                              status that is not 0. _exit(0) called by a C library is not seen: the
                              monitor names the rank, but mpirun ended with 0 in 2 of 2 runs.
a thread that never ends      Python waits for every thread that is no daemon before it calls exit
                              handlers, so there is no goodbye. A daemon thread of ours waits with
                              it, and ends the rank at the limit.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from minidist.comm.health.crash import tell_exit
from minidist.comm.health.failure import Failure
from minidist.launch.children import flush_output
from minidist.launch.mpi_init import abort_by_mpirun

if TYPE_CHECKING:
    from minidist.launch.membership import Membership

TELLING = 2.0  # seconds that the report may take; then the process ends in any case
_SAYING = 0.3  # seconds for the others, or the monitor, to print a line before mpirun ends the job
_LOOK = 0.25  # seconds between two looks at the threads
C_EXIT_AT_ONCE = os._exit


def watch_exits_at_once(membership: "Membership") -> None:
    """Under mpirun: replace os._exit so that it first reports the exit to the job."""

    def _exit(status: int) -> None:
        """End the process at once, without exit handlers."""
        if membership.is_this_process():
            frames = "".join(
                f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n'
                for frame in reversed(traceback.extract_stack()[:-1])
            )
            with contextlib.suppress(RuntimeError):  # no thread can be started
                teller = threading.Thread(
                    target=_tell, args=(membership, status, frames), daemon=True
                )
                # a thread: the caller may hold a lock of the link, as in a signal handler
                teller.start()
                teller.join(TELLING)
        C_EXIT_AT_ONCE(status)

    for module in list(sys.modules.values()):
        names = (
            ModuleType.__getattribute__(module, "__dict__")
            if isinstance(module, ModuleType)
            else {}
        )
        if names is not globals():
            names.update({name: _exit for name, value in names.items() if value is C_EXIT_AT_ONCE})


def _tell(membership: "Membership", status: int, frames: str) -> None:
    if membership.joined is None or membership.failed or membership.joined.link.loss is not None:
        return
    link = membership.joined.link
    shown = status & 0xFF
    if link.closed:
        tell_exit(shown, frames)
    else:
        link.report_failure(
            Failure.here(
                membership.launch.world_rank,
                f"exited with status {shown} without goodbye",
                status=shown or 1,
            )
        )
        link.wait_until_released(_SAYING)
    time.sleep(_SAYING)
    abort_by_mpirun(shown or 1)


# --- threads that outlive the program
# --------------------------------------------------------------------------------


def watch_threads(membership: "Membership", limit: float) -> None:
    """End the job if, after the main thread's end, other threads keep the process alive for `limit`
    s without a call."""
    threading.Thread(
        target=_wait_for_threads, args=(membership, limit), name="minidist end", daemon=True
    ).start()


def _wait_for_threads(membership: "Membership", limit: float) -> None:
    threading.main_thread().join()
    seen = None
    since = time.monotonic()
    while names := list(_running()):
        calls = membership.world and membership.world.ledger.flight.entries()[-1:]
        if membership.ending:
            return
        if calls != seen:  # a program may continue in its threads
            seen = calls
            since = time.monotonic()
        elif time.monotonic() - since > limit:
            break
        time.sleep(_LOOK)
    else:
        return
    rank = membership.launch.world_rank
    how = (
        f"has ended its program, but {limit:g} s later its thread {', '.join(names)} still runs: "
        "join it, or make it a daemon"
    )
    if membership.joined is not None:
        membership.joined.link.report_failure(Failure.here(rank, how))
        membership.joined.link.wait_until_released(_SAYING)
    flush_output()
    if membership.launch.by_mpirun:
        abort_by_mpirun()
    C_EXIT_AT_ONCE(1)


def _running() -> Iterator[str]:
    """Yield a name and a source line for each thread that Python waits for."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            frame = frames.get(thread.ident or 0)
            yield f"{thread.name!r}" + (
                f" ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""
            )
