"""Check the arguments of md.run and md.init (seconds, numbers of ranks and threads); a wrong one
raises a LaunchError of one line."""

import math
import resource
import threading
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

from minidist.errors import LaunchError

MOST_SECONDS = 2_000_000  # poll() counts milliseconds in 32 bits
MOST_RANKS = 1024  # of a job that md.run starts: each is a process or a thread of this host
STACK = 8 << 20  # bytes of a thread's stack, if the system sets no limit
SPARE = 4 << 20  # bytes that a process needs besides its threads' stacks


def check_seconds(call: str, name: str, value: Any) -> float:
    """Return the value as a float.

    Raises: LaunchError unless it is a number above 0 and at most MOST_SECONDS.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if number and 0 < value <= MOST_SECONDS:
        return float(value)
    raise LaunchError(
        f"{call}({name}={shown(value)}): a number of seconds is expected, above 0 and at most "
        f"{MOST_SECONDS:,}"
    )


def check_count(call: str, name: str, value: Any, noun: str, most: float = math.inf) -> int:
    """Return the value as an int.

    Raises: LaunchError unless it is a whole number from 1 to `most`.
    """
    try:
        count = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        count = 0
    if 1 <= count <= most:
        return count
    bound = "" if most == math.inf else f", at most {most:,}"
    raise LaunchError(
        f"{call}({name}={shown(value)}): a whole number is expected, at least one {noun}{bound}"
    )


def check_word(call: str, name: str, value: Any) -> str:
    """Return the value. Raises: LaunchError unless it is a string."""
    if isinstance(value, str):
        return value
    raise LaunchError(f"{call}({name}={shown(value)}): a word is expected, such as 'tcp'")


def check_room(size: int, *, helpers: int) -> None:
    """Raise LaunchError if this process may not map enough memory for one thread per rank and the
    helpers.

    Under `ulimit -v` (RLIMIT_AS) a thread without room for its stack does not start; the job would
    wait for it.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit in (-1, resource.RLIM_INFINITY):
        return
    stack = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = stack if 0 < stack < 1 << 40 else STACK
    needed = (size + helpers) * stack + SPARE
    free = max(0, limit - _address_space())
    if needed > free:
        raise LaunchError(
            f"run(size={size}) needs about {needed >> 20} MiB of address space in this process, "
            f"and its limit (ulimit -v) leaves {free >> 20} MiB; raise the limit, or start fewer "
            "ranks"
        )


def _address_space() -> int:
    """Return the number of bytes that this process has mapped.

    0 if the system does not report it.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0


def shown(value: Any) -> str:
    """Return a short text of a caller's value for an error message."""
    try:
        text = repr(value)
    except Exception:  # an int of more digits than Python writes, or the user's
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:40]}…"
