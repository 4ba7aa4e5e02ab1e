"""Chapter 24 · What a rank that runs alone knows of the others: it follows from the plan, and no
message is sent.

Here stands whatever a rank would learn from the others while it runs: which ranks make a group, how
long the blocks are that come, and what an all-to-all brings. The rest (loss, norm, digests,
overflow) is a number, and that is 1 or equal.
"""

from collections.abc import Sequence
from typing import Any

from minidist.comm.chunks import bounds
from minidist.comm.ledger import Ledger
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.parallel.context.ring_attention import zigzag
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.group_ranks import group_ranks
from minidist.simulate.recording import Recording


class SimRank:
    """One rank of a plan.

    Attributes: recording: what it did.
                lengths: the tokens of a sequence, and how many of them this rank of cp has; one
                number if both are equal. Other axes divide one of the two.
    """

    def __init__(self, plan: Plan, config: GPTConfig, rank: int, tokens: int, device: str) -> None:
        self.plan = plan
        self.config = config
        self.rank = rank
        self.size = plan.size
        self.recording = Recording(device)
        self.ledger = Ledger(rank)
        self.lengths = tuple(dict.fromkeys((tokens, self._own_tokens(tokens))))

    def _own_tokens(self, tokens: int) -> int:
        """Return the tokens of a sequence that this rank of cp works on."""
        place = group_ranks(self.plan, self.config, "cp", self.rank).index(self.rank)
        if self.plan.attention == "ring":
            return len(zigzag(tokens, place, self.plan.cp))
        return _part(tokens, self.plan.cp, place)

    def subgroup(self, parent: str, axis: str | None) -> tuple[str, tuple[int, ...]]:
        """Return the name and the world ranks of this rank's part of a group that is split."""
        name = axis or ""
        if axis == parent:
            kinds = {"pp": "pp.ends", "tp": "tp.sharers", "dp": "dp.peers"}
            if parent not in kinds:
                raise ConfigError(
                    f"simulate: it is not known which ranks make the parts of {parent}"
                )
            name = kinds[parent]
        return name, group_ranks(self.plan, self.config, name, self.rank)

    def blocks(self, own: Any, out: Any, size: int, rank: int, axis: str) -> list[int]:
        """Return the rows that each rank of a group brings to a gather: all as many, or a divided
        dim's parts."""
        mine = len(own)
        if axis == "cp" and self.plan.attention == "ring" and out is None:
            parts = [len(zigzag(self.lengths[0], r, size)) for r in range(size)]
            if parts[rank] == mine:
                return parts
        for whole in ([len(out)] if out is not None else []) + [mine * size, *self.lengths]:
            edges = bounds(whole, size)
            if edges[rank + 1] - edges[rank] == mine and not (
                whole == mine * size and self._divided(mine, size, rank)
            ):
                return [edges[r + 1] - edges[r] for r in range(size)]
        return [mine] * size

    def _divided(self, mine: int, size: int, rank: int) -> bool:
        """Return True if `mine` is this rank's part of a known length that the ranks do not divide
        evenly."""
        return any(whole % size and _part(whole, size, rank) == mine for whole in self.lengths)

    def swapped(
        self, sent: Sequence[tuple[int, ...]], size: int, rank: int
    ) -> list[tuple[int, ...]]:
        """Return the shapes that come in an all_to_all: as this rank's own part, or (B, heads, T,
        D) of their tokens.

        An all_to_all that sends what came in an earlier one is its way back (SimGroup), and is not
        asked for here.
        """
        own = sent[rank]
        if len(own) < 4:
            return [own] * size
        return [(*own[:2], _part(self.lengths[0], size, r), *own[3:]) for r in range(size)]


def _part(whole: int, size: int, rank: int) -> int:
    edges = bounds(whole, size)
    return edges[rank + 1] - edges[rank]
