"""Standard output that may be closed, full, or a pipe whose reader has gone."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class LossyOutput(io.FileIO):
    """stdout that never fails: after the first problem it drops what is printed, because printing
    is not the work."""

    problem: OSError | None = None

    def write(self, data: object, /) -> int:
        """Write, or drop."""
        try:
            if self.problem is None:
                return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.problem = error
        return len(memoryview(data).cast("B"))  # type: ignore[arg-type]

    @property
    def lost(self) -> str:
        """Why output was lost, in a few words; empty if none was, or if its reader had enough."""
        return (
            ""
            if self.problem is None or self.problem.errno == errno.EPIPE
            else f"stdout: {self.problem.strerror}"
        )


@contextmanager
def standard_output() -> Iterator[LossyOutput]:
    """In the block sys.stdout is a LossyOutput, if it is this process's own.

    A closed stream becomes one that drops everything: otherwise the next file or socket would take
    its number, and get what children print.
    """
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    output = LossyOutput(1, "wb", closefd=False)
    before = sys.stdout
    if before is not sys.__stdout__:  # a test's, say
        yield output
        return
    raw = output if before is not None and before.write_through else io.BufferedWriter(output)
    sys.stdout = io.TextIOWrapper(
        raw,
        getattr(before, "encoding", "utf-8"),
        "backslashreplace",
        line_buffering=output.isatty(),
        write_through=raw is output,
    )
    try:
        yield output
    finally:
        sys.stdout.flush()
