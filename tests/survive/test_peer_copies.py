"""Peer copies: the partner is on another node, and any node may be lost."""

import numpy as np
import pytest
from training import global_batch, tiny

import minidist as md
from minidist.comm.group import Group
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.survive import peer_copies
from minidist.survive.peer_copies import PeerCopies, partners


@pytest.mark.parametrize(
    "nodes",
    [[0] * 3 + [3] * 4, [0, 0, 0, 0, 0, 5], [0, 1, 0, 1], [0, 0, 2, 2, 4, 4, 4], [0, 1, 1, 1, 0]],
)
def test_each_partner_is_on_another_node(nodes):
    chosen = partners(nodes)
    assert all(nodes[rank] != nodes[partner] for rank, partner in enumerate(chosen))
    wards = [chosen.count(rank) for rank in range(len(nodes))]
    assert (
        sum(wards) == len(nodes)
        and max(wards)
        <= -(-max(map(nodes.count, nodes)) // min(len(nodes) - nodes.count(node) for node in nodes))
        + 1
    )


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [([0], [0]), ([0, 0, 0], [1, 2, 0]), ([0, 0, 2, 2], [2, 3, 0, 1]), ([0, 1, 1], [1, 0, 0])],
)
def test_partners_by_hand(nodes, expected):
    assert partners(nodes) == expected


def survive(nodes: list[int], lost: int) -> None:
    """Train on these nodes; each node in turn is lost: the others hold the state whole, to the
    bit."""
    copies = [PeerCopies() for _ in nodes]

    def train(world: Group) -> tuple[dict[str, np.ndarray], int]:
        world.nodes = tuple(nodes)
        trainer = Trainer(Plan(dp=world.size, zero=3), tiny(), world, seed=3, lr=1e-2)
        copies[world.rank].begin(trainer, 1)
        for step in range(2):
            trainer.step(global_batch(step, 2 * len(nodes), tiny()))
            copies[world.rank].keep(trainer)
        assert world.ledger.sent_bytes("peer copies")
        weights = trainer.state_dict()
        trainer.close()
        return weights, trainer.steps_done

    def go_on(world: Group) -> tuple[dict[str, np.ndarray], int]:
        left = [rank for rank, node in enumerate(nodes) if node != lost]
        trainer = Trainer(Plan(dp=world.size, zero=3), tiny(), world, seed=3, lr=1e-2)
        restored, _ = copies[left[world.rank]].restore(trainer)
        assert restored
        weights = trainer.state_dict()
        trainer.close()
        return weights, trainer.steps_done

    before = md.run(train, size=len(nodes))[0]
    after = md.run(go_on, size=sum(node != lost for node in nodes))[0]
    assert before[1] == after[1] == 2
    for name, array in before[0].items():
        np.testing.assert_array_equal(array, after[0][name])


@pytest.mark.parametrize("lost", [0, 1])
def test_a_whole_node_may_be_lost(lost):
    """Nodes of one and of three ranks: one rank holds the copies of three."""
    survive([0, 1, 1, 1], lost)


def test_partners_beside_each_other_would_lose_a_node(monkeypatch):
    monkeypatch.setattr(
        peer_copies,
        "partners",
        lambda nodes: [(rank + 1) % len(nodes) for rank in range(len(nodes))],
    )
    with pytest.raises((AssertionError, md.errors.MinidistError)):
        survive([0, 1, 1, 1], 1)
