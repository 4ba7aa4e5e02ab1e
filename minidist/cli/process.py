"""What surrounds every command: its standard streams, Ctrl-C while modules load, and what the machine refuses."""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from minidist.files import DISK_FAILED


class Output(io.FileIO):
    """stdout that never fails: after the first problem it drops what is printed, because printing is not the work."""

    problem: OSError | None = None

    def write(self, data: object, /) -> int:
        """Write, or drop."""
        try:
            if self.problem is None:
                return super().write(data)      # type: ignore[arg-type]
        except OSError as error:
            self.problem = error
        return len(memoryview(data).cast("B"))  # type: ignore[arg-type]


@contextmanager
def standard_output() -> Iterator[Output]:
    """In the block sys.stdout is an Output, if it is this process's own.

    A closed stream becomes one that drops everything: otherwise the next file or socket would take its number, and get
    what children print.
    """
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    output, before = Output(1, "wb", closefd=False), sys.stdout
    if before is not sys.__stdout__:            # a test's, say
        yield output
        return
    raw = output if before is not None and before.write_through else io.BufferedWriter(output)
    sys.stdout = io.TextIOWrapper(raw, getattr(before, "encoding", "utf-8"), "backslashreplace",
                                  line_buffering=output.isatty(), write_through=raw is output)  # type: ignore
    try:
        yield output
    finally:
        sys.stdout.flush()


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """In the block Ctrl-C waits for its end: an import that is broken off fails in its own way, 70 lines long."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    if here:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if here:
            signal.signal(signal.SIGINT, before)
    if told:
        raise KeyboardInterrupt


def refusal(error: BaseException) -> tuple[str, int] | None:
    """A line and an exit status, if the machine refused: a full disk, no memory, a name too long. Else None."""
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}".removesuffix(": "), 1
    if isinstance(error, OSError) and error.errno in (*DISK_FAILED, errno.ENAMETOOLONG):
        named = "" if error.filename is None else f"{str(error.filename)[:80]}: "
        return f"{named}{error.strerror}", 1 if error.errno in DISK_FAILED else 2
    return None
