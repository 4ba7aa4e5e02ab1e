"""Why a job fails: the first rank that did not end well, and how it went."""

import dataclasses
import os
import platform
import signal
import traceback

from minidist.errors import ConfigError, PeerLostError

_TRACEBACK_CHARS = 4000    # the tail of a traceback is what names the line


@dataclasses.dataclass(frozen=True)
class Loss:
    """Why a job fails: the first rank that did not end well.

    `traceback` is empty where the rank could not speak for itself. `status` is the exit status that the whole job
    should end with: 2 for bad input, 130 for an interrupt, what the rank gave to sys.exit, else 1.
    """

    world_rank: int
    pid: int
    host: str
    how: str
    traceback: str = ""
    status: int = 1

    @classmethod
    def by_exception(cls, error: BaseException, world_rank: int) -> "Loss":
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

    def __str__(self) -> str:
        where = f" (process {self.pid} on {self.host})" if self.pid else ""
        return f"rank {self.world_rank}{where} {self.how}"

    def error(self) -> PeerLostError:
        """What the other ranks raise: the first line says who and how, the rest is the tail of its traceback."""
        tail = "".join(f"\n    {line}" for line in self.traceback.splitlines()[-12:])
        return PeerLostError(f"{self}{tail}", self.world_rank)


def how_it_ended(code: int) -> str:
    """An exit code in words; negative is a signal's number, as subprocess has it."""
    if code >= 0:
        return f"exited with status {code} without goodbye"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def monitor_gone(world_rank: int) -> Loss:
    """What a rank makes of a control connection that ends without a word."""
    return Loss(world_rank, os.getpid(), platform.node(),
                "lost its connection to the job's monitor: the launcher, or rank 0's host, is gone or out of reach")
