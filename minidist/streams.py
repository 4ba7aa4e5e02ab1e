"""Standard output that may be closed, full, or a pipe whose reader has gone."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class LossyOutput(io.FileIO):
    """A stdout that never fails: after the first problem it drops the output, because printing is
    not the work."""

    problem: OSError | None = None

    def write(self, data: object, /) -> int:
        """Write the data, or drop it."""
        try:
            if self.problem is None:
                return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            self.problem = error
        return len(memoryview(data).cast("B"))  # type: ignore[arg-type]

    @property
    def lost(self) -> str:
        """Return the reason why output was lost, in a few words; empty if none was lost, or if its
        reader closed the pipe."""
        return (
            ""
            if self.problem is None or self.problem.errno == errno.EPIPE
            else f"stdout: {self.problem.strerror}"
        )


@contextmanager
def standard_output() -> Iterator[LossyOutput]:
    """Context manager: inside, sys.stdout is a LossyOutput, if it is this process's own.

    A closed stream becomes one that drops everything: otherwise the next file or socket would get
    its number, and receive what children print.
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
