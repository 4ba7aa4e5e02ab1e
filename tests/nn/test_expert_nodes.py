"""Choices limited to nodes are those of the plain loop; copies between nodes are counted exactly;
placement saves some."""

from itertools import combinations
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
    NewestChoices,
    copies_between_nodes,
    limit_to_nodes,
    placed_by_choices,
    plain_limited_choice,
)
from minidist.nn.moe import mixtures


@given(
    seed=st.integers(0, 99),
    node_of=st.lists(st.integers(0, 2), min_size=6, max_size=9),
    limit=st.integers(1, 3),
    k=st.integers(1, 4),
)
def test_a_limited_choice_is_that_of_the_plain_loop(
    seed: int, node_of: list[int], limit: int, k: int
) -> None:
    """Whatever the sizes of nodes; scores have ties."""
    nodes = np.unique(node_of, return_inverse=True)[1]
    limit = min(limit, int(nodes.max()) + 1)
    k = min(k, int(np.sort(np.bincount(nodes))[:limit].sum()))
    scores = np.random.default_rng(seed).integers(0, 6, (2, 5, len(nodes))) / 8
    chosen = top_positions(limit_to_nodes(scores, nodes, limit, k), k)
    plain = [
        [plain_limited_choice(row, nodes, limit, k) for row in sequence] for sequence in scores
    ]
    np.testing.assert_array_equal(chosen, plain)
    assert all(len(set(nodes[row])) <= limit for row in chosen.reshape(-1, k))


def test_the_sum_of_the_best_decides_not_the_best() -> None:
    """Node 1 has no expert as good as node 0's best, but two good ones."""
    scores = np.array([[0.4, 0.0, 0.3, 0.3]])
    node_of = np.array([0, 0, 1, 1])
    assert top_positions(limit_to_nodes(scores, node_of, 1, 2), 2).tolist() == [[2, 3]]
    assert top_positions(limit_to_nodes(scores, node_of, 1, 1), 1).tolist() == [[0]]


def routed(seed: int, *, nodes: int = 2, k: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Choices of 40 tokens among 6 experts, some of them dropped, and the node of each token."""
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(6)[:k] for _ in range(40)])
    return np.where(rng.random(chosen.shape) < 0.1, -1, chosen), rng.integers(0, nodes, 40)


def copies(chosen: np.ndarray, home: np.ndarray, node_of: np.ndarray) -> int:
    """Counted token by token."""
    return sum(
        len({*node_of[row[row >= 0]]} - {node}) for row, node in zip(chosen, home, strict=True)
    )


@pytest.mark.parametrize(("nodes", "k"), [(2, 1), (2, 4), (3, 2), (3, 3)])
def test_placement_ends_where_no_swap_saves(nodes: int, k: int) -> None:
    """Each copy is counted; and the order holds as many experts a node as it should."""
    counts = np.bincount(np.arange(6) % nodes)
    for seed in range(4):
        chosen, home = routed(seed, nodes=nodes, k=k)
        start = np.repeat(np.arange(nodes), counts)
        found = np.empty(6, int)
        found[placed_by_choices(chosen, home, counts)] = start
        assert (
            copies_between_nodes(chosen, home, found)
            == copies(chosen, home, found)
            <= copies(chosen, home, start)
        )
        for e, f in combinations(range(6), 2):
            other = found.copy()
            other[[e, f]] = other[[f, e]]
            assert copies(chosen, home, other) >= copies(chosen, home, found)


def test_placement_finds_what_was_planted() -> None:
    """Experts that are chosen together, and those that the tokens of one node choose."""
    chosen = np.array([[0, 3, 4], [0, 3, 1], [1, 4, 0], [2, 5, 2]])
    home = np.array([0, 0, 0, 1])
    assert placed_by_choices(chosen, home, (4, 2)).tolist() == [0, 1, 3, 4, 2, 5]
    assert placed_by_choices(chosen[:0], home[:0], (3, 3)).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_newest_choices_are_kept() -> None:
    newest = NewestChoices(3, 2)
    newest.add(np.array([[[0, 2], [2, 1]]]), np.array([[[True, True], [True, False]]]))
    assert newest.chosen.tolist() == [[0, 2], [2, -1]]
    newest.add(np.array([[[4, 5], [5, 6]]]), np.ones((1, 2, 2), bool))
    assert newest.chosen.tolist() == [[2, -1], [4, 5], [5, 6]]


def test_a_layer_keeps_its_choices_within_the_limit() -> None:
    """Two nodes of two experts, by number and by a placement."""
    for placement, pairs in ((None, {(0, 1), (2, 3)}), (((3, 0, 1, 2),), {(0, 3), (1, 2)})):
        model = mixture(
            GPT(tiny(layers=1)),
            MixtureConfig(experts=4, node_limit=1, nodes=2, placement=placement),
        )
        model.initialize(0)
        layer = mixtures(model)[0]
        layer.newest = NewestChoices(100, 2)
        model(np.arange(12).reshape(2, 6) % 11)
        assert len(layer.newest.chosen) == 12
        assert {tuple(sorted(pair)) for pair in layer.newest.chosen.tolist()} <= pairs


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"nodes": (2, 3)}, r"nodes is \(2, 3\); .* each 1 or more, 6 in all"),
        ({"nodes": (6, 0)}, "each node, each 1 or more"),
        ({"nodes": 7}, "6 experts on 7 nodes; choose from 1 to 6"),
        ({"node_limit": 0}, "node_limit is 0"),
        (
            {"node_limit": 1, "nodes": (1, 5)},
            r"with \(1, 5\) experts on the nodes limits a token to 1, but top_k is 2",
        ),
        ({"placement": ((0, 1, 2, 3, 4, 4),)}, "each of the 6 experts exactly once"),
    ],
)
def test_nodes_that_cannot_be_say_what_would(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MixtureConfig(experts=6, **values)


def test_a_placement_has_a_row_for_each_layer() -> None:
    with pytest.raises(ConfigError, match="lists 1 layers, but the model has 2; give one order"):
        tiny(mixture=MixtureConfig(experts=2, placement=((1, 0),)))
