"""What the plain version of a collective asks of the ranks that it runs on: messages that block,
and no more.

    total = md.run(lambda world: ring.plain_all_reduce(world, np.ones(5)), size=3)[0]       # a Group will do

Each family's module opens with its plain version. The real one below it is given a Call
(calls/call.py) instead, whose messages can be under way at once, go straight into place, and carry
what all ranks must agree on.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Ranks(Protocol):
    """This rank's number, and how many ranks there are."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class BlockingGroup(Ranks, Protocol):
    """Ranks that send each other arrays. A Group is one, and so is the `group` of exercises 02 and
    03."""

    def send(self, x: Any, dst: int) -> None:
        """Send `x` to rank `dst`."""

    def recv(self, src: int) -> Any:
        """The next array from rank `src`."""

    def exchange(self, x: Any, dst: int, src: int) -> Any:
        """Send `x` to rank `dst` and return what comes from rank `src`, both at once."""


class SharingGroup(Ranks, Protocol):
    """Ranks of one host that see each other's memory. A Call is one where they do."""

    def show(self, x: np.ndarray) -> Sequence[np.ndarray]:
        """Wait for all ranks to show an array; theirs, by rank, to be read until the next show."""
