"""The members of a group: their ranks, and the data with which their calls reach each other. Group
adds the verbs."""

import os
import threading
from collections.abc import Sequence

import numpy as np

from minidist.comm.calls.prepared import PreparedCalls
from minidist.comm.cost.critical_path import tiers
from minidist.comm.ledger import Ledger
from minidist.comm.transport import Tag, Transport
from minidist.errors import CommError, ConfigError

WORLD = 0
"""The id of the group of all ranks."""
COLLECTIVE = 0
"""The sequence of the tag that a group's collectives share; the sequence of point-to-point messages
has the high bit set."""
_SITES = 1000  # maximum number of pairs of program lines that are remembered


class GroupGuard:
    """Guards one rank's use of one group.

        guard.check()           # before a call takes its number
        with guard:             # while the call is carried out in the caller's thread
            ...

    Raises (both): CommError that names the wrong process or thread and the remedy.
    Attributes:    failure  the CommError of a collective that failed before its end. The other
                            ranks would take the next call's messages for its messages, so every
                            later call, also a queued call, raises it
    """

    failure: CommError | None = None

    def __init__(self, axis: str, world_rank: int) -> None:
        self._name = f"the group {axis}"
        self._rank = world_rank
        self._process = os.getpid()
        self._closed = False
        self._met: set[tuple[bytes, int, str, str]] = set()
        self._told = False
        self._busy = threading.Lock()

    def crossed(self, call: bytes, src: int, here: str, there: str) -> bool:
        """Return whether the call at `here` matches rank src's call at `there` after an earlier
        match the other way round; True at most once per group."""
        found = not self._told and (call, src, there, here) in self._met
        self._told = self._told or found
        if len(self._met) < _SITES:
            self._met.add((call, src, here, there))
        return found

    def close(self) -> None:
        """Make every later use raise."""
        self._closed = True

    def check(self) -> None:
        """Raise in a forked child (its messages would be sent as the parent's), after close(), or
        after a failure."""
        if os.getpid() != self._process:
            raise CommError(
                f"process {os.getpid()} uses {self._name} of rank {self._rank}, which is process "
                f"{self._process}, its parent; call it from the parent, or start more ranks"
            )
        if self._closed:
            raise CommError(
                f"{self._name} was closed, and rank {self._rank} uses it; close it later, or "
                "split another from a group that is open"
            )
        if self.failure is not None:
            raise self.failure

    def check_alone(self) -> None:
        """Raise if another thread is inside a call: the two would take each other's messages."""
        if self._busy.locked():
            self._refuse()

    def __enter__(self) -> None:
        if not self._busy.acquire(blocking=False):
            self._refuse()

    def __exit__(self, *_: object) -> None:
        self._busy.release()

    def _refuse(self) -> None:
        raise CommError(
            f"two threads of rank {self._rank} use {self._name} at the same time, the second is "
            f"{threading.current_thread().name!r}; make all calls from one thread, or give each "
            "thread its own group (split)"
        )


class Members:
    """An ordered set of ranks of the job that contains this rank.

    Attributes: rank, size     this rank's place in the group, and the number of ranks
                next_rank, prev_rank   the ranks after and before it, in a ring
                world_rank     this rank's place in the job
                world_ranks    world rank of each rank
                nodes          the machine of each rank: ranks with equal numbers share a machine
                axis           the purpose of the group ("world", "dp", ...); the ledger counts
                               under it
                ledger         the counts of this rank's messages, shared with its other groups
                link           the cost of a message between its ranks (cost/link_model.py); None if
                               not measured
                tiers          its layout on nodes, if several nodes hold several ranks; else None
                board          memory that all its ranks share, or None
                id, tag        64 bits, the same on every rank; the tag of its collectives' messages
                prepared       the calls that it has prepared, for when they are repeated
                transport, guard   for the lower layers
    """

    def __init__(
        self,
        transport: Transport,
        ledger: Ledger,
        world_ranks: Sequence[int],
        *,
        axis: str = "world",
        id: int = WORLD,
        nodes: Sequence[int] | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        """`places`: each rank's reserved place for its part of the board; the world uses the first
        place on every rank."""
        self.transport = transport
        self.ledger = ledger
        self.world_ranks = tuple(world_ranks)
        self.axis = axis
        self.id = id
        self.tag = Tag(id, COLLECTIVE)
        self.nodes = tuple(nodes or (0,) * len(self.world_ranks))
        self.world_rank = transport.world_rank
        self.size = len(self.world_ranks)
        transport.waits.flight = ledger.flight
        if self.world_rank not in self.world_ranks:
            raise ConfigError(
                f"world rank {self.world_rank} is not in the group {self.world_ranks} it would make"
            )
        self.rank = self.world_ranks.index(self.world_rank)
        self.next_rank, self.prev_rank = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        profile = transport.profile
        self.link = None if profile is None else profile.link(transport.inside, self.nodes)
        self.tiers = tiers(self.nodes, profile, transport.inside)
        places = places or [transport.reserve_board()] * self.size
        self.board = transport.open_board(self.world_ranks, places) if self.size > 1 else None
        self.guard = GroupGuard(axis, self.world_rank)
        self.prepared = PreparedCalls()
        self._sequence = 0

    def next_sequence(self) -> int:
        """Take and return the number of the next collective call. A call takes it when it is made.

        Returns: a number, from 1.
        Raises:  CommError if the group cannot be used: closed, failed, or in a forked child.
        """
        self.guard.check()
        self._sequence += 1
        return self._sequence

    def rank_in(self, name: str, rank: int) -> int:
        """Check a rank that a caller has passed.

        Args:    name: the argument's name. rank: of this group.
        Returns: the rank, as an int.
        Raises:  ConfigError if the group has no such rank.
        """
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.size:
            raise ConfigError(
                f"{name}={rank!r}: the group {self.axis} has ranks 0 to {self.size - 1}"
            )
        return int(rank)
