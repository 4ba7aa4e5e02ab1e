"""A group is used by the process that made it, by one thread at a time, until it is closed."""

import os
import threading

from minidist.errors import CommError


class GroupGuard:
    """Guards one rank's use of one group.

        guard.check()           # before a call takes its number
        with guard:             # while the call is carried out in the caller's thread
            ...

    Raises (both): CommError that says which process or thread is wrong, and what to do.
    """

    def __init__(self, axis: str, world_rank: int) -> None:
        self._name, self._rank = f"the group {axis}", world_rank
        self._process, self._closed = os.getpid(), False
        self._busy = threading.Lock()

    def close(self) -> None:
        """Refuse every later use."""
        self._closed = True

    def check(self) -> None:
        """Refuse a forked child (its messages would go out as the parent's), and any use after close()."""
        if os.getpid() != self._process:
            raise CommError(f"process {os.getpid()} uses {self._name} of rank {self._rank}, which is process "
                            f"{self._process}, its parent; let that one communicate, or start more ranks")
        if self._closed:
            raise CommError(f"{self._name} was closed, and rank {self._rank} uses it; close it later, or split another "
                            "from a group that is open")

    def check_alone(self) -> None:
        """Refuse if another thread is inside a call: the two would take each other's messages."""
        if self._busy.locked():
            self._refuse()

    def __enter__(self) -> None:
        if not self._busy.acquire(blocking=False):
            self._refuse()

    def __exit__(self, *_: object) -> None:
        self._busy.release()

    def _refuse(self) -> None:
        raise CommError(f"two threads of rank {self._rank} use {self._name} at once, the second is "
                        f"{threading.current_thread().name!r}; make its calls from one thread, or give each thread a "
                        "group of its own (split)")
