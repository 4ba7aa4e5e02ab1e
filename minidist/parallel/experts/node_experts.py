"""Chapter 18 · Experts on several nodes: a token is sent to each node once, and from there to its
experts inside the node.

The idea. If each row is sent separately, a token with four experts on the other node is four rows
between the nodes. But links between nodes are the slow ones. So the token is sent there once, to
the rank that has the sender's place on its node. That rank passes it to the experts of the node.
Their results are weighted and added up there, and sent back as one row:

    2 nodes of 2 ranks, a token of r0 with the experts e4, e5 on r2 and e6, e7 on r3:

    each row separately      r0 ─ 4 rows ─> r2, r3           4 results are sent back
    once per node            r0 ─ 1 copy ─> r2 ─ 2 rows ─> r3
                             r0 <─ 1 sum ── r2 <─ 2 results ── r3

The weights of a token are sent with its copy: the k numbers of the gate, which get a gradient in
backward. So the sum can be made where the experts are. Its order of additions is another, so
results differ only by rounding.

Cost, per step, all ranks together, in numbers; C copies to other nodes, R rows to other ranks of the
own node:

    between nodes     (4 h + 2 k) C      two all-to-alls forward, two backward; half as many more if
                                         computed again
    inside a node     4 h R              the same
    control           k C, and (L-1) E counts per layer and forward on nodes of L ranks; twice if
                      computed again

C is at most N-1 per token on N nodes, for any k; with a limit of M nodes
(MixtureConfig.node_limit) at most M; and a good placement makes it even smaller
(nn/expert_nodes.py).

notes:   N2 §10.3 动态路由优化 (N2:398)
Source:  DeepSeek-AI 2024, "DeepSeek-V3" (2412.19437), section 3.2.2; hierarchical all-to-all:
         Rajbhandari et al. 2022, "DeepSpeed-MoE" (2201.05596).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops import collectives
from minidist.autograd.ops.experts import place_rows
from minidist.autograd.recompute import computed_again
from minidist.autograd.tensor import Tensor, tensor
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, device_of, to_device, to_host
from minidist.errors import PlanError
from minidist.nn import GPT
from minidist.nn.expert_nodes import copies_between_nodes, placed_by_choices
from minidist.nn.moe import Experts, mixtures
from minidist.nn.shares import even_slices
from minidist.parallel.experts.split_experts import SplitExperts


def plain_node_experts(
    x: Array, weights: Array, my_expert: Callable[[Array], Array], across: Group, inside: Group
) -> Array:
    """Run one expert per rank on nodes of equal size: rows x (N, h), weights (N, ranks), 0 if not
    chosen -> (N, h).

    Args:    across: the ranks with this one's place on each node; inside: the ranks of this node.
    """
    of_nodes = np.split(weights, across.size, axis=1)  # (N, ranks of the node)
    # each token once, with its weights
    tokens = [np.flatnonzero(part.any(axis=1)) for part in of_nodes]
    came = across.all_to_all(
        [np.hstack([x[ids], part[ids]]) for ids, part in zip(tokens, of_nodes, strict=True)]
    )
    copies, weights = np.split(np.concatenate(came), [x.shape[1]], axis=1)
    rows = [np.flatnonzero(column) for column in weights.T]  # on to each expert of the node
    here = inside.all_to_all([copies[ids] for ids in rows])
    results = inside.all_to_all(
        np.split(my_expert(np.concatenate(here)), np.cumsum([len(part) for part in here])[:-1])
    )
    sums = np.zeros_like(copies)
    y = np.zeros_like(x)
    for ids, column, part in zip(rows, weights.T, results, strict=True):
        sums[ids] += column[ids, None] * part  # added up on the node
    back = across.all_to_all(np.split(sums, np.cumsum([len(part) for part in came])[:-1]))
    for ids, part in zip(tokens, back, strict=True):
        y[ids] += part  # home: one row for each node
    return y


# The real one does so for several experts a rank, for nodes of any sizes, and with gradients: on
# the node it is what SplitExperts does, for copies in place of tokens and among the node's ranks.


class NodeExperts(SplitExperts):
    """Experts divided between ranks of several nodes.

    Args:    as SplitExperts; inside: this rank's node, as a group.
    Attributes: home: the number of this rank's node, counted from 0 in the order of the nodes'
                first ranks
                copies: (P,) copies of tokens that this rank gave each rank, itself included, in
                training since `clear`
                sent: rows given to each rank, all of this node
    """

    def __init__(
        self,
        experts: Experts,
        group: Group,
        order: np.ndarray | None = None,
        *,
        inside: Group,
    ) -> None:
        super().__init__(experts, group, order)
        ranks = ranks_by_node(group.nodes)
        self.among = inside
        self.ranks = next(own for own in ranks if group.rank in own)
        place = self.ranks.index(group.rank)
        self.home = ranks.index(self.ranks)
        # the rank that this one's copies go to
        self.gates = sorted((own[place % len(own)], own) for own in ranks)
        self.node_of = np.empty(self.count, np.int64)  # of each place, in the order of `gates`
        for node, (_, own) in enumerate(self.gates):
            for rank in own:
                self.node_of[self.own[rank]] = node

    def clear(self) -> None:
        super().clear()
        self.copies = np.zeros(self.group.size, np.int64)

    def numbers_sent(self) -> int:
        """Return the count of numbers sent: rows inside the node (as SplitExperts), and copies with
        their weights to other nodes."""
        each: int = 2 * self.up.shape[1] + self.top_k
        return super().numbers_sent() + self.copies_away() * each

    def copies_away(self) -> int:
        """Return the number of copies that left this node, since the last `clear`."""
        return int(sum(self.copies[gate] for gate, own in self.gates if self.group.rank not in own))

    def placed(self, chosen: np.ndarray, home: np.ndarray, order: np.ndarray) -> list[int]:
        """Return a better order of the experts (nn/expert_nodes.py), followed by the number of
        tokens and the copies in the old and new order.

        Args:    chosen: (T, k) choices of tokens, -1 for none; home: (T,) the node of each; order:
                 (E,) as it is now.
        """
        there = np.empty(self.count, np.int64)  # the node of each place
        for node, ranks in enumerate(ranks_by_node(self.group.nodes)):
            for rank in ranks:
                there[self.own[rank]] = node
        better = np.empty_like(there)
        copies = []
        better[np.argsort(there, kind="stable")] = placed_by_choices(
            chosen, home, np.bincount(there).tolist()
        )
        for experts in (order, better):
            node_of = np.empty_like(there)
            node_of[experts] = there
            copies.append(copies_between_nodes(chosen, home, node_of))
        return [*better.tolist(), len(chosen), *copies]

    def mixed(self, x: Tensor, weights: Tensor, chosen: Array, kept: Array) -> Tensor:
        xp = array_module(chosen)
        self.top_k = chosen.shape[1]
        nodes = xp.asarray(self.node_of)[self.places(chosen)]  # (T, k)
        numbers = xp.arange(len(self.gates))
        visited = ((nodes[..., None] == numbers) & kept[..., None]).any(axis=1)  # (T, nodes)
        copies = place_rows(xp.broadcast_to(numbers, visited.shape), visited, experts=len(numbers))
        leaving = np.zeros(self.group.size, np.int64)
        leaving[[gate for gate, _ in self.gates]] = to_host(copies.counts)
        if self.training and not computed_again():
            self.copies += leaving
        there = kept[copies.tokens] & (nodes[copies.tokens] == copies.experts[:, None])
        wanted = self._exchange(to_host(xp.where(there, chosen[copies.tokens], -1)), leaving)
        travel = partial(collectives.all_to_all, split=0, join=0, group=self.group)
        came = to_device(np.concatenate(wanted), device_of(chosen))  # (copies here, k)
        here = travel(ops.to_experts(x, copies), counts=leaving.tolist())
        given = travel(ops.take(weights, copies.tokens), counts=leaving.tolist())
        sums = travel(
            super().mixed(here, given, came, came >= 0), counts=[len(part) for part in wanted]
        )
        return ops.from_experts(sums, tensor(xp.ones(len(copies.choices), x.dtype)), copies)

    def _exchange(self, wanted: np.ndarray, leaving: np.ndarray) -> list[np.ndarray]:
        """Return the experts that each rank's copies need here: (its copies, k), -1 for an expert
        on another node or a dropped choice."""
        with self.group.ledger.control():
            return list(
                self.group.all_to_all(
                    np.split(wanted, np.cumsum(leaving)[:-1]), algorithm="pairwise"
                )
            )


def ranks_by_node(nodes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, in the order of their first ranks."""
    return [[rank for rank, of in enumerate(nodes) if of == node] for node in dict.fromkeys(nodes)]


def settle_nodes(model: GPT, groups: Sequence[Sequence[int]]) -> None:
    """Set the nodes of a mixture that has a limit of nodes and no `nodes`: those of the ranks.

    Args:    groups: the node of each rank, of every group that holds all experts.
    Raises:  PlanError if groups lie differently, or ranks of a node do not follow each other.
    """
    config = model.config.mixture
    if config is None or config.node_limit is None or config.nodes is not None:
        return
    found = {tuple(len(list(ranks)) for _, ranks in groupby(nodes)) for nodes in groups}
    counts = found.pop()
    if found or len(counts) != max(len(set(nodes)) for nodes in groups):
        raise PlanError(
            f"experts with node_limit={config.node_limit}: the ranks that divide them lie on "
            f"nodes {', '.join(sorted({str(tuple(nodes)) for nodes in groups}))}, not the same in "
            "each group, or not consecutive; give the number of nodes for the experts, as nodes=2 "
            "(--expert-nodes 2)"
        )
    held = [part.stop - part.start for part in even_slices(config.experts, sum(counts))]
    ends = [0, *accumulate(counts)]
    config = replace(config, nodes=tuple(sum(held[first:end]) for first, end in pairwise(ends)))
    model.config = replace(model.config, mixture=config)
    for layer in mixtures(model):
        layer.config = config
