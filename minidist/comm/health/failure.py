"""The reason why a job fails: the first rank that did not end well and how it ended, or a signal to
its launcher."""

import contextlib
import dataclasses
import os
import platform
import re
import signal
import sys
import traceback
from collections.abc import Sequence

from minidist.comm.call_site import raised_at
from minidist.errors import CommError, ConfigError, LinkLostError, PeerLostError

LAUNCHER = -1
"""In place of a world rank: the launcher, if it got a signal to stop. It reports that itself."""

MONITOR = -2
"""In place of a world rank: the process of the job's monitor."""

ENDING = 30
"""Seconds from a rank's goodbye (under mpirun: the last rank's) to its end; then the system kills
it by SIGALRM."""

AGAIN = 75
"""The exit status of a rank that got a signal to stop and has saved its work: try again
(EX_TEMPFAIL of sysexits.h)."""

_TRACEBACK_CHARS = 4000  # the last characters of a traceback name the line


@dataclasses.dataclass(frozen=True)
class Failure:
    """The reason why a job fails: the first rank that did not end well, or the LAUNCHER, or the
    MONITOR.

    `traceback` is empty if the rank could not report it. `status` is the exit status of the whole
    job: 2 for bad input, 130 for an interrupt, the argument of sys.exit, else 1; 128 + the signal's
    number if the launcher got a signal to stop. It is never 0 (ValueError). `link`: the rank's
    process runs, as far as is known; the link between it and the monitor is lost.
    """

    world_rank: int
    pid: int
    host: str
    how: str
    traceback: str = ""
    status: int = 1
    link: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.status, int) and 0 < self.status < 256):
            raise ValueError(
                f"{self} has the exit status {self.status!r}, which is not one of 1 to 255"
            )

    @classmethod
    def here(
        cls, world_rank: int, how: str, traceback: str = "", status: int = 1, *, link: bool = False
    ) -> "Failure":
        """Return a failure of this process."""
        return cls(world_rank, os.getpid(), platform.node(), how, traceback, status, link)

    @classmethod
    def by_exception(cls, error: BaseException, world_rank: int) -> "Failure":
        """Return the failure of this process by `error`."""
        if isinstance(error, SystemExit):
            shown = error.code if isinstance(error.code, int) else 1
            return cls.here(
                world_rank, f"exited with status {shown:d}", status=exit_status(error.code) or 1
            )
        if isinstance(error, KeyboardInterrupt):
            return cls.here(world_rank, "was interrupted", status=130)
        message = words(error)[:1000]
        text = escape_surrogates("".join(traceback.format_exception(error)))
        return cls.here(
            world_rank,
            f"failed with {type(error).__name__}" + (f": {message}" if message else ""),
            text[-_TRACEBACK_CHARS:],
            2 if isinstance(error, ConfigError) else 1,
        )

    @classmethod
    def by_signal(cls, number: int) -> "Failure":
        """Return the failure of this process, the launcher, by a signal."""
        return cls.here(
            LAUNCHER, f"was told to stop by {signal.Signals(number).name}", status=128 + number
        )

    def __str__(self) -> str:
        others = {LAUNCHER: "the launcher", MONITOR: "the job's monitor"}
        name = others.get(self.world_rank, f"rank {self.world_rank}")
        where = f" (process {self.pid} on {self.host})" if self.pid else ""
        return f"{name}{where} {self.how}"

    def error(self) -> PeerLostError:
        """Return the error that the other ranks raise: first a line with the rank and its end, then
        the last lines of its traceback."""
        tail = "".join(f"\n    {line}" for line in self.traceback.splitlines()[-12:])
        return (LinkLostError if self.link else PeerLostError)(f"{self}{tail}", self.world_rank)


def words(error: BaseException) -> str:
    """Return str(error), printable; also for an exception whose own str() raises."""
    try:
        return escape_surrogates(str(error))
    except Exception as problem:
        return f"<its str() raised {type(problem).__name__}>"


def ending(error: BaseException) -> tuple[str, str]:
    """Return how a rank ends, for its flight recorder: (error, its line; "" for an error of other
    ranks or without a line)."""
    own = error.__traceback__ is not None and not isinstance(error, CommError)
    return f"{type(error).__name__}: {words(error)}", raised_at(error) if own else ""


def within(cause: Failure, error: BaseException) -> str:
    """Return the cause, after the error's own name for it: "parameter server 0 of 1 is lost: rank 3
    …"."""
    before, found, _ = words(error).partition(str(cause))
    return f"{before if found and len(before.splitlines()) < 2 else ''}{cause}"


def escape_surrogates(text: str) -> str:
    """Return `text` with escapes for invalid Unicode: file names may contain lone surrogates, which
    cannot be sent."""
    return text.encode(errors="backslashreplace").decode()


def begin_with_rank(error: BaseException, world_rank: int) -> bool:
    """Make the message begin with its rank, "rank 3: …", unless it does; return False if the
    message is not the first argument."""
    if not (
        error.args
        and isinstance(error.args[0], str)
        and words(error) == escape_surrogates(error.args[0])
    ):
        return False
    if not re.match(rf"(world )?rank {world_rank}\b", error.args[0]):
        error.args = (f"rank {world_rank}: {error.args[0]}", *error.args[1:])
    return True


def say_line(line: str) -> None:
    """Write a line to stderr in one write, so that lines of several processes do not mix. A missing
    stderr is no error.

    Control characters are escaped: the line may contain names. Not print(): with PYTHONUNBUFFERED
    it makes two writes.
    """
    # only here: msgspec, which it needs, takes 10 ms of the start of every command
    from minidist.reading import visible

    if sys.stderr is not None:  # None where it was closed when Python started
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{visible(line, keep=chr(10))}\n")
            sys.stderr.flush()


def exit_status(code: object) -> int:
    """Return the exit status for SystemExit(code). The system keeps 8 bits; a multiple of 256
    becomes 1 here instead of 0."""
    if not isinstance(code, int):
        return int(code is not None)
    return code & 0xFF or int(code != 0)


def how_it_ended(code: int) -> str:
    """Return an exit code in words; a negative code is a signal's number, as in subprocess."""
    if code >= 0:
        return f"exited with status {code} without goodbye"
    known = {number.value: number.name for number in signal.Signals}
    late = f": its end took more than {ENDING} s" if -code == signal.SIGALRM else ""
    return f"was killed by {known.get(-code, f'signal {-code}')}{late}"


def listed(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 1, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
