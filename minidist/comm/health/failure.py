"""Why a job fails: the first rank that did not end well, and how it went; or its launcher was told to stop."""

import contextlib
import dataclasses
import os
import platform
import signal
import sys
import traceback

from minidist.errors import ConfigError, PeerLostError

LAUNCHER = -1
"""In place of a world rank: the launcher, which was told to stop. It reports that itself."""

_TRACEBACK_CHARS = 4000    # the tail of a traceback names the line


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a job fails: the first rank that did not end well, or the LAUNCHER.

    `traceback` is empty if the rank could not report it. `status` is the exit status of the whole job: 2 for bad input,
    130 for an interrupt, the argument of sys.exit, else 1; 128 + the signal's number if the launcher was told to stop.
    """

    world_rank: int
    pid: int
    host: str
    how: str
    traceback: str = ""
    status: int = 1

    @classmethod
    def by_exception(cls, error: BaseException, world_rank: int) -> "Failure":
        """This process fails with `error`."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        message = str(error)[:1000]
        match error:
            case SystemExit():
                status = error.code if isinstance(error.code, int) else 1
                return cls(world_rank, os.getpid(), platform.node(), f"exited with status {status}", "", status)
            case KeyboardInterrupt():
                return cls(world_rank, os.getpid(), platform.node(), "was interrupted", "", 130)
        how = f"failed with {type(error).__name__}" + (f": {message}" if message else "")
        status = 2 if isinstance(error, ConfigError) else 1
        return cls(world_rank, os.getpid(), platform.node(), how, text[-_TRACEBACK_CHARS:], status)

    @classmethod
    def by_signal(cls, number: int) -> "Failure":
        """This process, the launcher, was sent a signal."""
        return cls(LAUNCHER, os.getpid(), platform.node(), f"was told to stop by {signal.Signals(number).name}", "",
                   128 + number)

    def __str__(self) -> str:
        who = "the launcher" if self.world_rank == LAUNCHER else f"rank {self.world_rank}"
        where = f" (process {self.pid} on {self.host})" if self.pid else ""
        return f"{who}{where} {self.how}"

    def error(self) -> PeerLostError:
        """What the other ranks raise: the first line names the rank and its end, the rest is its traceback's tail."""
        tail = "".join(f"\n    {line}" for line in self.traceback.splitlines()[-12:])
        return PeerLostError(f"{self}{tail}", self.world_rank)


def say_line(line: str) -> None:
    """To stderr in one write, so that lines of several processes stay apart. A closed stderr is no error.

    Where PYTHONUNBUFFERED is set, print() makes two writes.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def how_it_ended(code: int) -> str:
    """An exit code in words; negative is a signal's number, as subprocess has it."""
    if code >= 0:
        return f"exited with status {code} without goodbye"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def monitor_gone(world_rank: int) -> Failure:
    """What a rank makes of a control connection that ends without a word."""
    return Failure(world_rank, os.getpid(), platform.node(),
                "lost its connection to the job's monitor: the launcher, or rank 0's host, is gone or out of reach")
