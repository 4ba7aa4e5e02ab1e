"""The interfaces of the ranks that the plain version of a collective runs on: only blocking
messages.

    total = md.run(lambda world: ring.plain_all_reduce(world, np.ones(5)), size=3)[0]       # a Group will do

Each family's module begins with its plain version. The real version below it takes a Call
(calls/call.py) instead: several of its messages can be in flight at once, they arrive directly in
their place, and they carry the data that all ranks must agree on.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Ranks(Protocol):
    """A rank's number and the number of ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class BlockingGroup(Ranks, Protocol):
    """A group of ranks that send each other arrays: a Group, and the `group` of exercises 02 and
    03."""

    def send(self, x: Any, dst: int) -> None:
        """Send `x` to rank `dst`."""

    def recv(self, src: int) -> Any:
        """Receive and return the next array from rank `src`."""

    def exchange(self, x: Any, dst: int, src: int) -> Any:
        """Send `x` to rank `dst` and at the same time receive an array from rank `src`; return
        it."""


class SharingGroup(Ranks, Protocol):
    """A group of ranks of one host that see each other's memory, e.g. a Call whose board is set."""

    def show(self, x: np.ndarray) -> Sequence[np.ndarray]:
        """Wait until all ranks have shown an array; return all arrays, by rank, readable until the
        next show."""
