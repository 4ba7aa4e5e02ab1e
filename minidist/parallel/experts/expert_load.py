"""The load of a mixture's experts over a whole job: counted once a step, for the biases and the
report."""

from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.nn.expert_nodes import NewestChoices
from minidist.nn.moe import loads, mixtures, rebalance

SAMPLE = 8192
"""Tokens of a layer, on all ranks together, whose newest choices decide on a placement."""


class ExpertLoad:
    """The loads of the mixtures that this rank has, summed over the ranks that share the batch.

    Args:    model: this rank's part, with names assigned; group: the ranks that share its weights
             and the batch.
    Attributes: step: (own layers, 2, experts) integers: tokens of the last step's whole batch that
                chose each expert, and tokens that it took; total: the same, since the run began.
                routed: (own layers, P) integers: rows that this rank gave each rank in the last
                step, itself included; with experts on several nodes only ranks of its own node get
                any (node_experts.py).
                copies: (own layers,) integers: copies of tokens that left this node in the last
                step.
                sent: (own layers,) integers: numbers given to other ranks since the run began, only
                for forward.
    """

    def __init__(self, model: GPT, group: Group) -> None:
        self.model = model
        self.group = group
        self.layers = mixtures(model)
        # 3: blocks.3.mlp
        self.numbers = np.array([int(layer.path.split(".")[1]) for layer in self.layers], np.int64)
        self.step, self.total, self.sent = (
            loads(model),
            loads(model),
            np.zeros(len(self.layers), np.int64),
        )
        self.routed, self.copies = (
            np.zeros((len(self.layers), group.size), np.int64),
            np.zeros_like(self.sent),
        )
        self.divided: list[Any] = [
            layer.experts for layer in self.layers if hasattr(layer.experts, "sent")
        ]
        self.far = any(hasattr(experts, "placed") for experts in self.divided)  # over several nodes
        for layer in self.layers if self.far else []:
            layer.newest = NewestChoices(-(-SAMPLE // group.size), layer.config.top_k)

    def settle(self) -> None:
        """Sum the loads of a step over the ranks, and move the biases by them; called after each
        step of a model with mixtures.

        Cost:    one all-reduce of 2 E integers a layer, under `control`.
        """
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
        """Return `sent` of one of the model's layers; 0 if another rank has the layer."""
        return int(self.sent[self.numbers == layer].sum())

    def whole(self, pipeline: Group) -> np.ndarray:
        """Return `total` of all layers of the model, on every rank: (layers, 2, experts) integers.
        All ranks call it.

        Args:    pipeline: the ranks that have the stages.
        Cost:    one all-reduce, under `control`.
        """
        config = self.model.config
        assert config.mixture is not None
        found = np.zeros((config.layers, 2, config.mixture.experts), np.int64)
        if self.layers:
            found[self.numbers] = self.total
        with pipeline.ledger.control():
            return pipeline.all_reduce(found, algorithm="ring")  # type: ignore[no-any-return]

    def placed(self, pipeline: Group) -> tuple[np.ndarray, np.ndarray] | None:
        """Return which experts should share a node, by the choices of the newest SAMPLE tokens;
        None on one node.

        Args:    pipeline: as `whole`; all ranks call it.
        Returns: (layers, experts) integers, MixtureConfig.placement, equal on all ranks; and
                 (layers, 3): the tokens that were looked at, their copies that left their node in
                 the present placement, and the copies that leave it in the new one.
        Cost:    an all-gather of k + 1 integers per token and layer, an all-reduce of E + 3 per
                 layer, under `control`.
        """
        if not self.far:
            return None
        config = self.model.config
        assert config.mixture is not None
        found = np.zeros((config.layers, config.mixture.experts + 3), np.int64)
        with self.group.ledger.control():
            for layer, experts, number in zip(self.layers, self.divided, self.numbers, strict=True):
                chosen = (
                    layer.newest.chosen if layer.newest is not None else np.empty((0, 1), np.int64)
                )
                seen = self.group.all_gather(
                    np.column_stack([np.full(len(chosen), experts.home), chosen]), algorithm="ring"
                )
                found[number] = experts.placed(
                    seen[:, 1:], seen[:, 0], layer.config.order(layer.layer)
                )
            found = pipeline.all_reduce(found, algorithm="ring")
        return found[:, :-3], found[:, -3:]
