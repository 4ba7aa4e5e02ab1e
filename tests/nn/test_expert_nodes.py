"""Choices limited to nodes are those of the plain loop; copies between nodes are counted exactly; placement saves some.
"""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import tiny

from minidist.autograd.ops.experts import top_positions
from minidist.errors import ConfigError
from minidist.nn import GPT, MixtureConfig, mixture
from minidist.nn.expert_nodes import (
    chosen_together,
    copies_between_nodes,
    limit_to_nodes,
    placed_by_affinity,
    plain_limited_choice,
)
from minidist.nn.moe import mixtures


@given(seed=st.integers(0, 99), node_of=st.lists(st.integers(0, 2), min_size=6, max_size=9), limit=st.integers(1, 3),
       k=st.integers(1, 4))
def test_a_limited_choice_is_that_of_the_plain_loop(seed: int, node_of: list[int], limit: int, k: int) -> None:
    """Whatever the sizes of nodes; scores have ties."""
    nodes = np.unique(node_of, return_inverse=True)[1]
    limit = min(limit, int(nodes.max()) + 1)
    k = min(k, int(np.sort(np.bincount(nodes))[:limit].sum()))
    scores = np.random.default_rng(seed).integers(0, 6, (2, 5, len(nodes))) / 8
    chosen = top_positions(limit_to_nodes(scores, nodes, limit, k), k)
    plain = [[plain_limited_choice(row, nodes, limit, k) for row in sequence] for sequence in scores]
    np.testing.assert_array_equal(chosen, plain)
    assert all(len(set(nodes[row])) <= limit for row in chosen.reshape(-1, k))


def test_the_sum_of_the_best_decides_not_the_best() -> None:
    """Node 1 has no expert as good as node 0's best, but two good ones."""
    scores, node_of = np.array([[0.4, 0.0, 0.3, 0.3]]), np.array([0, 0, 1, 1])
    assert top_positions(limit_to_nodes(scores, node_of, 1, 2), 2).tolist() == [[2, 3]]
    assert top_positions(limit_to_nodes(scores, node_of, 1, 1), 1).tolist() == [[0]]


def routed(seed: int, *, experts: int = 6, nodes: int = 2, k: int = 2, tokens: int = 40) -> tuple[Any, Any, Any]:
    """(chosen, the node of each token, affinity) of random choices."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)])
    home = rng.integers(0, nodes, tokens)
    affinity = np.stack([chosen_together(chosen[home == node], np.ones((int((home == node).sum()), k), bool), experts)
                         for node in range(nodes)])
    return chosen, home, affinity


def copies(chosen: np.ndarray, home: np.ndarray, node_of: np.ndarray) -> int:
    """Counted token by token."""
    return sum(len(set(node_of[row]) - {node}) for row, node in zip(chosen, home, strict=True))


@pytest.mark.parametrize(("nodes", "k"), [(2, 1), (2, 2), (3, 2), (3, 3)])
def test_copies_follow_from_affinity(nodes: int, k: int) -> None:
    """Exactly for two experts a token; for three at most as many."""
    for seed in range(5):
        chosen, home, affinity = routed(seed, nodes=nodes, k=k)
        node_of = np.random.default_rng(seed).permutation(np.arange(6) % nodes)
        found, true = copies_between_nodes(affinity, node_of), copies(chosen, home, node_of)
        assert found == true if k <= 2 else found <= true


def test_dropped_choices_are_no_affinity() -> None:
    chosen, kept = np.array([[[0, 2], [2, 1]]]), np.array([[[True, True], [True, False]]])
    assert chosen_together(chosen, kept, 3).tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 2]]


def test_a_placement_is_never_worse_and_finds_what_was_planted() -> None:
    better = 0
    for seed in range(8):
        chosen, home, affinity = routed(seed)
        found = np.empty(6, int)
        found[placed_by_affinity(affinity, (3, 3))] = [0, 0, 0, 1, 1, 1]
        every = {copies(chosen, home, np.array(order)) for order in set(permutations([0, 0, 0, 1, 1, 1]))}
        assert copies(chosen, home, found) <= copies(chosen, home, np.array([0, 0, 0, 1, 1, 1]))
        better += copies(chosen, home, found) == min(every)
    assert better >= 6          # swaps of two may end in a placement that only three together would improve
    pairs = np.array([[0, 3], [1, 4], [2, 5]])              # chosen together, and by the tokens of one node
    affinity = np.stack([chosen_together(pairs[[0, 1]], np.ones((2, 2), bool), 6),
                         chosen_together(pairs[[2]], np.ones((1, 2), bool), 6)])
    assert placed_by_affinity(affinity, (4, 2)).tolist() == [0, 1, 3, 4, 2, 5]


def test_a_layer_counts_what_its_tokens_chose_together() -> None:
    model = mixture(GPT(tiny(layers=1)), MixtureConfig(experts=4, top_k=2, node_limit=1, nodes=(2, 2)))
    model.initialize(0)
    layer = mixtures(model)[0]
    layer.affinity = np.zeros((4, 4), np.int64)
    model(np.arange(12).reshape(2, 6) % 11)
    assert np.trace(layer.affinity) == 2 * 12 and not layer.affinity[:2, 2:].any() and layer.affinity[0, 1] > 0
    placed = mixture(GPT(tiny(layers=1)), MixtureConfig(experts=4, top_k=2, node_limit=1, nodes=2,
                                                        placement=((3, 0, 1, 2),)))
    placed.initialize(0)
    placed(np.arange(12).reshape(2, 6) % 11)
    routing = mixtures(placed)[0].routing
    assert routing is not None
    assert {tuple(sorted(pair)) for pair in routing.chosen.reshape(-1, 2).tolist()} <= {(0, 3), (1, 2)}


@pytest.mark.parametrize(("values", "says"), [
    ({"nodes": (2, 3)}, r"nodes hold \(2, 3\) experts; give each node 1 or more of the 6"),
    ({"nodes": (6, 0)}, "give each node 1 or more"), ({"nodes": 7}, "6 experts on 7 nodes; choose from 1 to 6"),
    ({"node_limit": 0}, "node_limit is 0"),
    ({"node_limit": 1, "nodes": (1, 5)}, r"with \(1, 5\) experts on the nodes can leave a token 1, and top_k is 2"),
    ({"placement": ((0, 1, 2, 3, 4, 4),)}, "names each of 6 experts once")])
def test_nodes_that_cannot_be_say_what_would(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MixtureConfig(experts=6, **values)


def test_a_placement_has_a_row_for_each_layer() -> None:
    with pytest.raises(ConfigError, match="placed in 1 layers, the model has 2; give one order"):
        tiny(mixture=MixtureConfig(experts=2, placement=((1, 0),)))
