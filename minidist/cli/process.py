"""Helpers around every command: whether it owns its process, Ctrl-C during imports, and errors of
the machine."""

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

from minidist.files import DISK_FAILED

_NAMES = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
)
"""Errors of a path that a user has named, or of a file below it."""
_OWN = ContextVar("own", default=False)


def own_process() -> None:
    """Declare that this process does nothing but the command, and ends with its status."""
    _OWN.set(True)


def may_fork() -> bool:
    """Return whether a fork of this process would run only the command and then end.

    False in a test, for example.
    """
    return _OWN.get() and threading.current_thread() is threading.main_thread()


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block: an interrupted import fails with up to 70 lines."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread() and before in (
        signal.SIG_DFL,
        signal.default_int_handler,
    )
    if here:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if here:
            # our launcher blocks it (launch/spawning.py)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if told:
        raise KeyboardInterrupt


def refusal(error: BaseException) -> tuple[str, int] | None:
    """Return a line and an exit status for an error of the machine: a full disk, no memory, an
    unreadable folder. Else None."""
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}".removesuffix(": "), 1
    if isinstance(error, OSError) and error.errno in (*DISK_FAILED, *_NAMES):
        named = "" if error.filename is None else f"{str(error.filename)[:80]}: "
        return f"{named}{error.strerror}", 1 if error.errno in DISK_FAILED else 2
    return None
