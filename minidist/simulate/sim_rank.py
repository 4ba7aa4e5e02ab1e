"""Chapter 24 · What a rank that runs alone knows of the others: it follows from the plan, nobody is asked.

Here stands whatever a rank would learn from the others while it runs: which ranks make a group, how long the blocks are
that come, and what an all-to-all brings. The rest (loss, norm, digests, overflow) is a number, and that is 1 or equal.
"""

from collections.abc import Sequence
from typing import Any

from minidist.comm.chunks import bounds
from minidist.comm.ledger import Ledger
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.group_ranks import group_ranks
from minidist.simulate.recording import Recording


class SimRank:
    """One rank of a plan. Attributes: tape: its recording; lengths: of dims that ranks divide (tokens, heads)."""

    def __init__(self, plan: Plan, config: GPTConfig, rank: int, tokens: int, device: str) -> None:
        self.plan, self.config, self.rank, self.size = plan, config, rank, plan.size
        self.tape, self.ledger = Recording(device), Ledger(rank)
        self.lengths = (tokens, config.heads)

    def subgroup(self, parent: str, axis: str | None) -> tuple[str, tuple[int, ...]]:
        """The name and the world ranks of this rank's part of a group that is split."""
        name = axis or ""
        if axis == parent:
            kinds = {"pp": "pp.ends", "tp": "tp.sharers", "dp": "dp.peers"}
            if parent not in kinds:
                raise ConfigError(f"simulate: nobody has told which ranks make the parts of {parent}")
            name = kinds[parent]
        return name, group_ranks(self.plan, self.config, name, self.rank)

    def blocks(self, own: Any, out: Any, size: int, rank: int) -> list[int]:
        """The rows that each rank of a group brings to a gather: all as many, or a divided dim's parts."""
        mine = len(own)
        for whole in ([len(out)] if out is not None else []) + [mine * size, *self.lengths]:
            edges = bounds(whole, size)
            if edges[rank + 1] - edges[rank] == mine and not (whole == mine * size and self._divided(mine, size, rank)):
                return [edges[r + 1] - edges[r] for r in range(size)]
        return [mine] * size

    def _divided(self, mine: int, size: int, rank: int) -> bool:
        """Whether `mine` is this rank's part of a known length that the ranks do not divide evenly."""
        return any(whole % size and _part(whole, size, rank) == mine for whole in self.lengths)

    def swapped(self, sent: Sequence[tuple[int, ...]], size: int, rank: int) -> list[tuple[int, ...]]:
        """The shapes that come in an all_to_all of arrays: as this rank's own part, but for a divided dim."""
        own = sent[rank]
        came = [own] * size
        for dim in range(len(own)):
            if len({shape[dim] for shape in sent}) > 1:
                continue
            for whole in self.lengths:
                if whole % size and own[dim] == _part(whole, size, rank):
                    came = [(*own[:dim], _part(whole, size, r), *own[dim + 1:]) for r in range(size)]
        return came


def _part(whole: int, size: int, rank: int) -> int:
    edges = bounds(whole, size)
    return edges[rank + 1] - edges[rank]
