"""The members of a group: which ranks they are, and what their calls need to reach each other. Group adds the verbs."""

from collections.abc import Sequence

import numpy as np

from minidist.comm.calls.group_guard import GroupGuard
from minidist.comm.cost.critical_path import tiers
from minidist.comm.ledger import Ledger
from minidist.comm.transport import Tag, Transport
from minidist.errors import ConfigError

WORLD = 0
"""The id of the group of all ranks."""
COLLECTIVE = 0
"""The sequence of the tag that a group's collectives share; point-to-point messages have one with the high bit set."""


class Members:
    """An ordered set of ranks of the job, this one among them.

    Attributes: rank, size     this rank's place in the group, and the number of ranks
                world_rank     this rank's place in the job
                world_ranks    world rank of each rank
                nodes          the machine of each rank: equal numbers share one
                axis           what the group is for ("world", "dp", ...): the ledger counts under it
                ledger         what this rank sent, shared with its other groups
                link           what a message costs among its ranks (cost/link_model.py); None if it was not measured
                tiers          how it lies on nodes, if it spans several of several ranks; else None
                board          memory that all its ranks share, or None
                id, tag        64 bits, the same on every rank; the tag of its collectives' messages
                transport, guard   for the layers below
    """

    def __init__(self, transport: Transport, ledger: Ledger, world_ranks: Sequence[int], *, axis: str = "world",
                 id: int = WORLD, nodes: Sequence[int] | None = None, places: Sequence[int] | None = None) -> None:
        """`places`: where each rank has reserved its part of the board; the world's is the first place everywhere."""
        self.transport, self.ledger, self.world_ranks = transport, ledger, tuple(world_ranks)
        self.axis, self.id, self.tag = axis, id, Tag(id, COLLECTIVE)
        self.nodes = tuple(nodes or (0,) * len(self.world_ranks))
        self.world_rank, self.size = transport.world_rank, len(self.world_ranks)
        if self.world_rank not in self.world_ranks:
            raise ConfigError(f"world rank {self.world_rank} is not in the group {self.world_ranks} it would make")
        self.rank = self.world_ranks.index(self.world_rank)
        profile = transport.profile
        self.link = None if profile is None else profile.link(transport.inside, self.nodes)
        self.tiers = tiers(self.nodes, profile, transport.inside)
        places = places or [transport.reserve_board()] * self.size
        self.board = transport.open_board(self.world_ranks, places) if self.size > 1 else None
        self.guard = GroupGuard(axis, self.world_rank)
        self._sequence = 0

    def next_sequence(self) -> int:
        """The number of the next collective call. Calls take theirs when they are made."""
        self.guard.check()
        self._sequence += 1
        return self._sequence

    def rank_in(self, name: str, rank: int) -> int:
        """`rank` as an int, or ConfigError if the group has no such rank; `name` is the argument's name."""
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.size:
            raise ConfigError(f"{name}={rank!r}: the group {self.axis} has ranks 0 to {self.size - 1}")
        return int(rank)
