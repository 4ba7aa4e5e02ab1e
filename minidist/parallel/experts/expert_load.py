"""How evenly a mixture's experts are loaded over a whole job: counted once a step, for the biases and the report."""

import numpy as np

from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.nn.expert_nodes import copies_between_nodes, placed_by_affinity
from minidist.nn.moe import loads, mixtures, rebalance
from minidist.parallel.experts.node_experts import node_of_places
from minidist.parallel.experts.split_experts import SplitExperts


class ExpertLoad:
    """The loads of the mixtures that this rank has, summed over the ranks that share the batch.

    Args:    model: this rank's part, with names assigned; group: the ranks that share its weights and the batch.
    Attributes: step: (own layers, 2, experts) integers: tokens of the last step's whole batch that chose each expert,
                      and that it took; total: the same, since the run began.
                routed: (own layers, P) integers: rows that this rank gave each rank in the last step, itself included
                      (with experts on several nodes all of these are of its own: node_experts.py).
                copies: (own layers,) integers: copies of tokens that left this node in the last step.
                sent: (own layers,) integers: numbers given to other ranks for forward alone since the run began.
    """

    def __init__(self, model: GPT, group: Group) -> None:
        self.model, self.group, self.layers = model, group, mixtures(model)
        self.numbers = np.array([int(layer.path.split(".")[1]) for layer in self.layers], np.int64)  # 3: blocks.3.mlp
        self.step, self.total, self.sent = loads(model), loads(model), np.zeros(len(self.layers), np.int64)
        self.routed, self.copies = np.zeros((len(self.layers), group.size), np.int64), np.zeros_like(self.sent)
        self.divided = [layer.experts for layer in self.layers if isinstance(layer.experts, SplitExperts)]  # all, none
        self.far = bool(self.divided) and len(set(self.divided[0].group.nodes)) > 1
        for layer in self.layers if self.far else []:
            layer.affinity = np.zeros((layer.config.experts, layer.config.experts), np.int64)

    def settle(self) -> None:
        """After a step: sum its loads over the ranks, and move the biases by them. Does nothing without mixtures.

        Cost:    one all-reduce of 2 E integers a layer, under `control`.
        """
        if not self.layers:
            return
        with self.group.ledger.control():
            self.step = self.group.all_reduce(loads(self.model), algorithm="ring")
        self.total = self.total + self.step
        rebalance(self.model, self.step)
        if self.divided:
            self.routed = np.stack([experts.sent for experts in self.divided])
            self.copies = np.array([experts.copies_away() for experts in self.divided])
            self.sent += [experts.numbers_sent() for experts in self.divided]
        for experts in self.divided:
            experts.clear()

    def sent_by(self, layer: int) -> int:
        """`sent` of one of the model's layers; 0 if another rank has the layer."""
        return int(self.sent[self.numbers == layer].sum())

    def whole(self, pipeline: Group) -> np.ndarray:
        """`total` of all layers of the model, on every rank: (layers, 2, experts) integers. All ranks call it.

        Args:    pipeline: the ranks that have the stages.
        Cost:    one all-reduce, under `control`.
        """
        config = self.model.config
        assert config.mixture is not None
        found = np.zeros((config.layers, 2, config.mixture.experts), np.int64)
        if self.layers:
            found[self.numbers] = self.total
        with pipeline.ledger.control():
            return pipeline.all_reduce(found, algorithm="ring")     # type: ignore[no-any-return]

    def placed(self, pipeline: Group) -> tuple[np.ndarray, np.ndarray] | None:
        """By what was measured since the run began, which experts should share a node; None on one node.

        Args:    pipeline: as `whole`; all ranks call it.
        Returns: (layers, experts) integers, MixtureConfig.placement, equal on all ranks; and (layers, 2), the copies
                 that left their node as the experts lay, and that would have (expert_nodes.py), of all ranks.
        Cost:    an all-reduce of N E² integers a layer for N nodes, and one of E + 2, under `control`.
        """
        if not self.far:
            return None
        config, own = self.model.config, self.divided[0].group
        assert config.mixture is not None
        there = node_of_places(own, config.mixture.experts)
        seen = np.zeros((len(self.layers), int(there.max()) + 1, *self.layers[0].affinity.shape), np.int64)
        seen[:, there[self.divided[0].own[own.rank].start]] = [layer.affinity for layer in self.layers]
        found = np.zeros((config.layers, config.mixture.experts + 2), np.int64)
        with self.group.ledger.control():
            seen = self.group.all_reduce(seen, algorithm="ring")
            for layer, number, affinity in zip(self.layers, self.numbers, seen, strict=True):
                before, after, order = np.empty_like(there), np.empty_like(there), np.empty_like(there)
                before[layer.config.order(layer.layer)] = there
                better = placed_by_affinity(affinity, np.bincount(there))
                order[np.argsort(there, kind="stable")] = better        # nodes may lie in turn
                after[order] = there
                copies = [copies_between_nodes(affinity, node_of) for node_of in (before, after)]
                found[number] = [*order, *copies]
            found = pipeline.all_reduce(found, algorithm="ring")
        return found[:, :-2], found[:, -2:]
