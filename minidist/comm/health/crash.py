"""Report a rank that crashes after its goodbye, in an exit handler or in a library: no rank waits
for it any more.

mpirun then ends the job, but does not say which rank crashed. So the rank's connection to the
monitor stays open until its process ends. Python's faulthandler, which may run inside a signal
handler, writes into it:

    rank                        monitor
    goodbye             ->
                        <-      over: every rank has said it
    tell_crash
    ends: EOF           ->      all is well
    or is killed: words ->      crash_told: SIGSEGV, and the frames of the thread that crashed
"""

import contextlib
import faulthandler
import os
import signal
import socket

from minidist.comm.health.failure import Failure
from minidist.comm.health.seats import Seat

_BEGIN = b"Fatal Python error: "
_EXIT = "exit "  # followed by the status: tell_exit sends it in place of a signal
_LIMIT = 1.0  # seconds from the first byte to the last
_MOST_BYTES = 1 << 16
_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""The signals that faulthandler handles."""


_told_on: list[int] = []  # the descriptor that tell_crash has opened


def tell_crash(sock: socket.socket) -> None:
    """Make this process report a crash on `sock`. The thread that reads there is woken, and may
    close it."""
    with contextlib.suppress(OSError, ValueError):  # the monitor has hung up
        _told_on[:] = [os.dup(sock.fileno())]
        faulthandler.enable(_told_on[0], all_threads=False)
        sock.shutdown(socket.SHUT_RD)


def tell_exit(status: int, frames: str) -> None:
    """Report that this process ends by os._exit(status), at `frames`; only after tell_crash."""
    # suppressed: the monitor has hung up; tell_crash was not called
    with contextlib.suppress(OSError, IndexError), socket.socket(fileno=_told_on.pop()) as sock:
        sock.sendall(_BEGIN + f"{_EXIT}{status}\n{frames}".encode(errors="replace"))
        sock.shutdown(socket.SHUT_WR)


def crash_told(seat: Seat) -> Failure | None:
    """Return the crash that a rank reports; None, with nothing read, if it sent something else or
    has ended."""
    seat.sock.settimeout(_LIMIT)
    if seat.sock.recv(len(_BEGIN), socket.MSG_PEEK) != _BEGIN:
        return None
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < _MOST_BYTES and (more := seat.sock.recv(_MOST_BYTES)):
            said += more
    name, *lines = said.removeprefix(_BEGIN).decode(errors="replace").splitlines() or [""]
    frames = [line for line in lines if line.startswith("  File ")]
    how = f"was killed by {_signal(name)} after its goodbye"
    if name.startswith(_EXIT):
        how = (
            f"exited with status {name.removeprefix(_EXIT)} after its goodbye, before MPI_Finalize"
        )
    return Failure(
        seat.world_rank,
        seat.pid,
        seat.host,
        how,
        "\n".join(frames and ["most recent call first:", *frames]),
    )


def _signal(name: str) -> str:
    """Return the name of a signal, given the system's text for it ("Floating-point exception")."""
    plain = name.replace("-", " ").lower()
    return next(
        (one.name for one in _SIGNALS if (signal.strsignal(one) or "").lower() == plain), name
    )
