"""What surrounds every command: whose process it is, Ctrl-C while modules load, and what the
machine refuses."""

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
"""Errors of a path that a user has named, or of what lies below it."""
_OWN = ContextVar("own", default=False)


def own_process() -> None:
    """The command is all that this process does: it ends with the command's status."""
    _OWN.set(True)


def may_fork() -> bool:
    """Whether a copy of this process that goes on would do no more than the command, and end: not
    in a test, say."""
    return _OWN.get() and threading.current_thread() is threading.main_thread()


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """In the block Ctrl-C waits for its end: an import that is broken off fails in its own way, 70
    lines long."""
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
    """A line and an exit status, if the machine refused: a full disk, no memory, an unreadable
    folder. Else None."""
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}".removesuffix(": "), 1
    if isinstance(error, OSError) and error.errno in (*DISK_FAILED, *_NAMES):
        named = "" if error.filename is None else f"{str(error.filename)[:80]}: "
        return f"{named}{error.strerror}", 1 if error.errno in DISK_FAILED else 2
    return None
