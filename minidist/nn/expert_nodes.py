"""Experts on several nodes: the nodes that a token may go to, and the experts that should share a
node.

Links between nodes are slower than links inside one, and a token that goes to a node once reaches
all experts there (parallel/experts/node_experts.py). So what counts is on how many other nodes the
experts of a token lie. Two things lower that number:

    limit         a token chooses its k experts on at most M nodes: those whose best ceil(k/M)
                  experts have the largest sum of scores. This is another choice, so it changes the
                  model
    placement     experts that tokens often choose together, or that tokens of a node often choose,
                  lie on that node. Without a limit this changes no result: it permutes experts

What placement goes by is measured: the choices of the newest tokens are kept, each with the node of
its token (`NewestChoices`). Swaps of two experts are tried until none saves a copy.

notes:   N2 §10.3 动态路由优化 (N2:398), 稀疏通信优化 (N2:400)
Source:  DeepSeek-AI 2024, "DeepSeek-V3" (2412.19437), node-limited routing; Kernighan & Lin 1970,
         swaps of two.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from minidist.autograd.ops.experts import top_positions
from minidist.device.backend import Array, array_module, is_virtual, to_host, widen


def plain_limited_choice(scores: np.ndarray, node_of: np.ndarray, limit: int, k: int) -> np.ndarray:
    """Return the experts of one token, best first: scores (E,), and the node of each expert (E,) ->
    (k,)."""
    best = -(-k // limit)  # as many of a node may well be chosen
    sums = [
        np.sort(scores[node_of == node])[::-1][:best].sum() for node in range(node_of.max() + 1)
    ]
    nodes = np.argsort(np.negative(sums), kind="stable")[:limit]  # the best nodes
    allowed = np.where(np.isin(node_of, nodes), scores, -np.inf)
    return np.argsort(-allowed, kind="stable")[:k]  # and the best experts there


# The real one does so for all tokens at once, on any device.


def limit_to_nodes(scores: Array, node_of: np.ndarray, limit: int, k: int) -> Array:
    """Return scores (…, E) with -inf for each token's experts outside its `limit` best nodes;
    float32 at least.

    Args:    node_of: (E,) the node of each expert, from 0; k: experts that the token will choose.
    """
    if is_virtual(scores):  # choices of a simulated rank are drawn, not computed
        return scores
    xp = array_module(scores)
    wide = widen(scores)
    best = -(-k // limit)
    of_nodes = [
        wide[..., xp.asarray(np.flatnonzero(node_of == node))]
        for node in range(int(node_of.max()) + 1)
    ]
    sums = xp.stack([-xp.sort(-own, axis=-1)[..., :best].sum(axis=-1) for own in of_nodes], axis=-1)
    nodes = top_positions(sums, limit)  # (…, M)
    allowed = (nodes[..., None] == xp.asarray(node_of)).any(axis=-2)  # (…, M, E) -> (…, E)
    return xp.where(allowed, wide, -xp.inf)


class NewestChoices:
    """The choices of the newest tokens of one layer on one rank.

    Args:    most: how many tokens to keep.
    Attributes: chosen: (tokens, k) integers, the experts of each token, the newest last; -1 for a
    dropped choice.
    """

    def __init__(self, most: int, k: int) -> None:
        self.most = most
        self.chosen = np.empty((0, k), np.int64)

    def add(self, chosen: Array, kept: Array) -> None:
        """Record the choices of some tokens, (…, k), kept or dropped."""
        newest = to_host(array_module(chosen).where(kept, chosen, -1)).reshape(
            -1, self.chosen.shape[1]
        )[-self.most :]
        self.chosen = np.concatenate([self.chosen, newest])[-self.most :]


def copies_between_nodes(chosen: np.ndarray, home: np.ndarray, node_of: np.ndarray) -> int:
    """Return the number of copies of tokens that leave their node: one for each other node on which
    a token has an expert.

    Args:    chosen: (T, k) integers, -1 for none; home: (T,) the node of each token; node_of: (E,)
             of each expert.
    """
    visited = np.zeros((len(chosen), int(max(node_of.max(), home.max(initial=0))) + 1), bool)
    for column in chosen.T:
        there = np.flatnonzero(column >= 0)
        visited[there, node_of[column[there]]] = True
    visited[np.arange(len(home)), home] = False
    return int(visited.sum())


def placed_by_choices(chosen: np.ndarray, home: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return an order of the experts in which fewer copies leave their node: (E,) integers, node
    after node.

    Begins with the order by number, and swaps the two experts of different nodes that save most,
    until no swap saves.
    Args:    chosen, home: as copies_between_nodes; counts: how many experts each node holds.
    Cost:    T E² operations a swap.
    """
    node_of = np.repeat(np.arange(len(counts)), counts)
    member = np.stack(
        [(chosen == expert).any(axis=1) for expert in range(len(node_of))], axis=1
    ).astype(np.float64)
    while True:
        # (T, nodes) experts of a token on a node
        held = member @ (node_of[:, None] == np.arange(len(counts)))
        found = [
            _best_swap(member, held, home, node_of, pair)
            for pair in combinations(range(len(counts)), 2)
        ]
        change, e, f = min(found, default=(0.0, 0, 0))
        if change >= 0:
            return np.asarray(np.argsort(node_of, kind="stable"))
        node_of[e], node_of[f] = node_of[f], node_of[e]


def _best_swap(
    member: np.ndarray,
    held: np.ndarray,
    home: np.ndarray,
    node_of: np.ndarray,
    pair: tuple[int, int],
) -> tuple[float, int, int]:
    """Return the best swap of an expert e of one node with f of another: (change of the number of
    copies, e, f)."""

    def moved(here: int, there: int) -> np.ndarray:
        """Return for each token by how many its copies change if one of its experts moves from
        `here` to `there`."""
        new = (home != there) & (held[:, there] == 0)
        gone = (home != here) & (held[:, here] == 1)
        return np.asarray(new.astype(np.float64) - gone)

    one, other = (np.flatnonzero(node_of == node) for node in pair)
    out = moved(*pair)
    back = moved(*pair[::-1])
    of_e = member[:, one]
    of_f = member[:, other]
    # with both: nothing changes
    change = (out @ of_e)[:, None] + back @ of_f - of_e.T @ ((out + back)[:, None] * of_f)
    e, f = np.unravel_index(int(change.argmin()), change.shape)
    return float(change[e, f]), int(one[e]), int(other[f])
