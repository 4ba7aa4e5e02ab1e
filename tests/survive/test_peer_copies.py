"""Peer copies: the partner, the next rank, holds what no other rank has."""

from typing import Any

import numpy as np
import pytest
from training import global_batch, tiny

import minidist as md
from minidist.comm.group import Group
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.survive.peer_copies import PeerCopies

STEPS = 2


def trainer_of(world: Group) -> Trainer:
    return Trainer(Plan(dp=world.size, zero=3), tiny(), world, seed=3, lr=1e-2)


def survive(size: int, lost: set[int]) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Train with so many ranks, then lose some.

    Returns: the weights before the loss; of each rank that is left None, or the weights that the
             ranks that are left hold together.
    """
    copies = [PeerCopies() for _ in range(size)]

    def train(world: Group) -> dict[str, np.ndarray]:
        trainer = trainer_of(world)
        copies[world.rank].begin(trainer, 1)
        for step in range(STEPS):
            trainer.step(global_batch(step, 2 * size, tiny()))
            copies[world.rank].keep(trainer)
        assert world.ledger.sent_bytes("peer copies")
        weights = trainer.state_dict()
        trainer.close()
        return weights

    def go_on(world: Group) -> dict[str, np.ndarray] | None:
        left = [rank for rank in range(size) if rank not in lost]
        trainer = trainer_of(world)
        restored, _ = copies[left[world.rank]].restore(trainer)
        assert not restored or trainer.steps_done == STEPS
        weights = trainer.state_dict() if restored else None
        trainer.close()
        return weights

    return md.run(train, size=size)[0], md.run(go_on, size=size - len(lost))


@pytest.mark.parametrize(("size", "lost"), [(2, {0}), (3, {2}), (4, {1}), (4, {0, 2})])
def test_ranks_whose_partners_live_may_be_lost(size: int, lost: set[int]) -> None:
    """The others hold the state whole, to the bit."""
    before, after = survive(size, lost)
    for held in after:
        assert held is not None
        for name, array in before.items():
            np.testing.assert_array_equal(array, held[name])


@pytest.mark.parametrize("lost", [{1, 2}, {0, 3}])
def test_a_rank_and_its_partner_take_the_only_copies_with_them(lost: set[int]) -> None:
    _, after = survive(4, lost)
    assert after == [None, None]
