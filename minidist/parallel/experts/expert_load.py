"""How evenly a mixture's experts are loaded over a whole job: counted once a step, for the biases and the report."""

from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.nn.moe import loads, mixtures, rebalance


class ExpertLoad:
    """The loads of the mixtures that this rank has, summed over the ranks that share the batch.

    Args:    model: this rank's part, with names assigned; group: the ranks that share its weights and the batch.
    Attributes: step: (own layers, 2, experts) integers: tokens of the last step's whole batch that chose each expert,
                      and that it took; total: the same, since the run began.
                routed: (own layers, P) integers: rows that this rank gave each rank in the last step, itself included.
                sent: (own layers,) integers: those given to other ranks since the run began.
    """

    def __init__(self, model: GPT, group: Group) -> None:
        self.model, self.group, self.layers = model, group, mixtures(model)
        self.numbers = np.array([int(layer.path.split(".")[1]) for layer in self.layers], np.int64)  # 3: blocks.3.mlp
        self.step, self.total, self.sent = loads(model), loads(model), np.zeros(len(self.layers), np.int64)
        self.routed = np.zeros((len(self.layers), group.size), np.int64)

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
        divided: list[Any] = [layer.experts for layer in self.layers if hasattr(layer.experts, "sent")]    # all or none
        if divided:
            self.routed = np.stack([experts.sent for experts in divided])
            self.sent += self.routed.sum(axis=1) - self.routed[:, divided[0].group.rank]
        for experts in divided:
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
