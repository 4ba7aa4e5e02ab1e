"""Checks of what a program passes to md.run and md.init: each bad value is one line."""

import operator
import reprlib
from typing import Any

from minidist.errors import LaunchError

MOST = 4096
"""Most ranks or threads that one call starts on this host."""

LONGEST = 1e7
"""Most seconds of a limit, 115 days: the system's own waits take no more than 2**31 milliseconds at a time."""


def require_count(call: str, name: str, value: Any) -> int:
    """Return a number of ranks or threads as an int. Raises: LaunchError unless it is a whole number, 1 to MOST."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if isinstance(value, bool) or not 1 <= count <= MOST:
        raise LaunchError(f"{call}: {name}={reprlib.repr(value)}; expected a whole number from 1 to "
                          f"{MOST}, such as 4")
    return count


def require_seconds(call: str, name: str, value: Any) -> float:
    """Return a number of seconds. Raises: LaunchError unless it is above 0 and at most LONGEST."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = 0.0
    if isinstance(value, bool | str | bytes) or not 0.0 < seconds <= LONGEST:
        raise LaunchError(f"{call}: {name}={reprlib.repr(value)}; expected seconds above 0, at most "
                          f"{LONGEST:.0e}, such as 60: every wait has a limit")
    return seconds
