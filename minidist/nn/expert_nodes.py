"""Experts on several nodes: the nodes that a token may go to, and the experts that should share a node.

Links between nodes are slower than links inside one, and a token that goes to a node once reaches all experts there
(parallel/experts/node_experts.py). So what counts is on how many other nodes the experts of a token lie. Two things
lower that number:

    limit         a token chooses its k experts on at most M nodes: those whose best ceil(k/M) experts have the largest
                  sum of scores. This is another choice, so it changes the model
    placement     experts that tokens often choose together, or that tokens of a node often choose, lie on that node.
                  Without a limit this changes no result: it permutes experts

What placement goes by is measured: affinity[n, e, f] counts the tokens of node n that chose experts e and f, [n, e, e]
those that chose e. With it the copies of tokens that leave their node are

    Σ over e, n not e's node of affinity[n, e, e]  -  Σ over pairs e, f of one node, n another, of affinity[n, e, f]

exactly for k up to 2; for larger k it is at most the true number, because three experts on a node are three pairs.

notes:   N2 §10.3 动态路由优化 (N2:398), 稀疏通信优化 (N2:400)
Source:  DeepSeek-AI 2024, "DeepSeek-V3" (2412.19437), node-limited routing; Kernighan & Lin 1970, swaps of two.
"""

from collections.abc import Sequence

import numpy as np

from minidist.autograd.ops.experts import top_positions
from minidist.device.backend import Array, array_module, is_virtual, to_host, widen


def plain_limited_choice(scores: np.ndarray, node_of: np.ndarray, limit: int, k: int) -> np.ndarray:
    """The experts of one token, best first: scores (E,), and the node of each expert (E,) -> (k,)."""
    best = -(-k // limit)                                                   # as many of a node may well be chosen
    sums = [np.sort(scores[node_of == node])[::-1][:best].sum() for node in range(node_of.max() + 1)]
    nodes = np.argsort(np.negative(sums), kind="stable")[:limit]            # the best nodes
    allowed = np.where(np.isin(node_of, nodes), scores, -np.inf)
    return np.argsort(-allowed, kind="stable")[:k]                          # and the best experts there


# The real one does so for all tokens at once, on any device.


def limit_to_nodes(scores: Array, node_of: np.ndarray, limit: int, k: int) -> Array:
    """Scores (…, E), with -inf for each token's experts that are on none of its `limit` best nodes; float32 at least.

    Args:    node_of: (E,) the node of each expert, from 0; k: experts that the token will choose.
    """
    if is_virtual(scores):      # choices of a simulated rank are drawn, not computed
        return scores
    xp, wide, best = array_module(scores), widen(scores), -(-k // limit)
    of_nodes = [wide[..., xp.asarray(np.flatnonzero(node_of == node))] for node in range(int(node_of.max()) + 1)]
    sums = xp.stack([-xp.sort(-own, axis=-1)[..., :best].sum(axis=-1) for own in of_nodes], axis=-1)
    nodes = top_positions(sums, limit)                                      # (…, M)
    allowed = (nodes[..., None] == xp.asarray(node_of)).any(axis=-2)        # (…, M, E) -> (…, E)
    return xp.where(allowed, wide, -xp.inf)


def chosen_together(chosen: Array, kept: Array, experts: int) -> np.ndarray:
    """How many tokens chose each pair of experts: (…, k), kept or dropped -> (experts, experts) integers, symmetric.

    On the diagonal: how many chose the expert. Cost: k² integers a token.
    """
    xp, k = array_module(chosen), chosen.shape[-1]
    ids, there = chosen.reshape(-1, k), kept.reshape(-1, k)
    pairs = (ids[:, :, None] * experts + ids[:, None, :])[there[:, :, None] & there[:, None, :]]
    return np.asarray(to_host(xp.bincount(pairs, minlength=experts * experts))).reshape(experts, experts)


def copies_between_nodes(affinity: np.ndarray, node_of: np.ndarray) -> int:
    """The copies of tokens that leave their node, if experts lie so: the formula above.

    Args:    affinity: (nodes, experts, experts) integers; node_of: (experts,) the node of each expert.
    """
    away = affinity.sum(axis=0) - affinity                      # of tokens of the other nodes
    total = 0
    for node, counts in enumerate(away):
        own = counts[np.ix_(node_of == node, node_of == node)]
        total += 2 * np.trace(own) - (own.sum() - np.trace(own))    # each pair stands there twice
    return int(total) // 2


def placed_by_affinity(affinity: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """An order of the experts in which fewer copies leave their node: (experts,) integers, node after node.

    Begins with the order by number and swaps the two experts of different nodes that save most, until no swap saves.
    Args:    affinity: (nodes, experts, experts) integers; counts: how many experts each node holds.
    Cost:    nodes · experts² operations a swap.
    """
    experts = np.arange(affinity.shape[1])
    node_of = np.repeat(np.arange(len(counts)), counts)
    away = affinity.sum(axis=0) - affinity
    alone = away[:, experts, experts]                           # (nodes, experts): copies, if e lay there alone
    saved = away * ~np.eye(len(experts), dtype=bool)            # (nodes, experts, experts): saved, if f lies there too
    while True:
        there = (node_of == np.arange(len(counts))[:, None]).astype(np.int64)
        price = alone - np.einsum("nef,nf->ne", saved, there)   # of e on node n, beside the experts of n
        moved = price[node_of].T + saved[node_of, experts[:, None], experts]    # [e, f]: e on f's node, f gone
        now = price[node_of, experts]
        gain = now[:, None] + now - moved - moved.T
        gain[node_of[:, None] == node_of] = 0
        e, f = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[e, f] <= 0:
            return np.argsort(node_of, kind="stable")
        node_of[e], node_of[f] = node_of[f], node_of[e]
