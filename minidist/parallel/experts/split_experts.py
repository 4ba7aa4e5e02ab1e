"""Experts divided between ranks: rows are sent to them, and results are sent back. The idea:
expert_parallel.py."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops import collectives
from minidist.autograd.recompute import computed_again
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module
from minidist.nn import Weight
from minidist.nn.moe import Experts
from minidist.nn.shares import even_slices
from minidist.nn.weight_shard import WeightShard


class SplitExperts(Experts):
    """Experts divided between ranks: rows are sent to them, and results are sent back.

    Args:    as expert_parallel; order: (E,) the experts in the order in which they lie on the
             ranks; None: by number.
    Attributes: own:  the slice of that order which each rank has
                sent: (P,) rows that this rank gave each rank, itself included, in training since
                the last `clear`; rows of a block that is computed again count once
    """

    def __init__(
        self,
        experts: Experts,
        group: Group,
        order: np.ndarray | None = None,
    ) -> None:
        self.group = group
        self.count = experts.count
        self.own = even_slices(self.count, group.size)
        self.place_of = None if order is None else np.argsort(order).astype(np.int64, copy=False)
        # rows travel to these, as a group
        self.among = group
        self.ranks = list(range(group.size))

        def mine(weight: Weight) -> Weight:
            inner, rank = (
                (weight.parts, weight.rank) if isinstance(weight, WeightShard) else ([()], 0)
            )
            places = [
                (own if order is None else order[own], *part[1:])
                for own in self.own
                for part in inner
            ]
            return WeightShard(weight, places, group.rank * len(inner) + rank, among=group)

        self.gate = None if experts.gate is None else mine(experts.gate)
        self.up = mine(experts.up)
        self.down = mine(experts.down)
        self.clear()

    def clear(self) -> None:
        """Set the counts of sent rows to zero."""
        self.sent = np.zeros(self.group.size, np.int64)

    def numbers_sent(self) -> int:
        """Return the count of numbers that this rank sent to others for one forward, since the last
        `clear`; backward sends as many."""
        return 2 * int(self.sent.sum() - self.sent[self.group.rank]) * self.up.shape[1]

    def copies_away(self) -> int:
        """Return the number of copies of tokens that left this node: none; NodeExperts has some."""
        return 0

    def places(self, chosen: Array) -> Array:
        """Return the experts' places in the order in which they lie on the ranks."""
        return (
            chosen if self.place_of is None else array_module(chosen).asarray(self.place_of)[chosen]
        )

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Own rows (R, width), sorted by place, and the number for each of all places -> results
        (R, width)."""
        leaving = [sum(counts[self.own[rank]]) for rank in self.ranks]
        if self.training and not computed_again():
            self.sent[self.ranks] += leaving
        came = self._exchange_counts(counts)
        travel = partial(collectives.all_to_all, split=0, join=0, group=self.among)
        here = travel(rows, counts=leaving)
        by_expert = _by_expert(came).astype(np.int64, copy=False)
        xp = array_module(rows.data)
        back = xp.asarray(np.argsort(by_expert), np.int64)
        results = super().forward(ops.take(here, xp.asarray(by_expert)), came.sum(axis=0).tolist())
        return travel(ops.take(results, back), counts=came.sum(axis=1).tolist())

    def _exchange_counts(self, counts: Sequence[int]) -> np.ndarray:
        """Return the number of rows from each rank for each of this rank's experts: (P, own
        experts)."""
        with self.among.ledger.control():
            return np.stack(
                self.among.all_to_all(
                    [np.array(counts[self.own[rank]], np.int64) for rank in self.ranks],
                    algorithm="pairwise",
                )
            )


def _by_expert(came: np.ndarray) -> np.ndarray:
    """Return the permutation that sorts arriving rows by expert; they arrive sorted by rank, then
    by expert."""
    experts = np.tile(np.arange(came.shape[1]), len(came))
    return np.argsort(np.repeat(experts, came.reshape(-1)), kind="stable")
