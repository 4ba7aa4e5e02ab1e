"""Chapter 18 · Expert parallelism: the experts of a mixture are divided between ranks, and tokens travel to them.

The idea. In a mixture of experts (nn/moe.py) nearly all weights belong to experts, and each token uses few of them. So
each rank holds some experts and some sequences. A token whose expert is on another rank is sent there, and its result
comes back:

    own rows, sorted by expert -- counts -----> how many rows each rank gets
                               -- all-to-all -> rows of all ranks for my experts -- sort -- experts
    results, weighted and added up <- all-to-all --                              -- sort back --+

Only routed tokens are sent: no padding up to a capacity, no dropped tokens. Backward sends the gradients along the same
two ways, so the gradient of an expert is complete on the rank that has it.

What each rank holds, P ranks, E experts:

    experts     E/P each, cut as numpy.array_split does, with their gradients and optimizer state
    the rest    attention, norms, embeddings, gates, shared experts: whole on all ranks as in DDP (chapter 07); their
                gradients are summed over the ranks
    batch       own rows, as in DDP: for everything but the experts, `ep` is a data axis
    biases      whole on all ranks (balance="bias"); once a step the loads of all ranks move them

The result is one process's: capacity, dropping and balance loss are those of one sequence, noise is keyed by the global
token, and the loss is divided by the targets of all ranks.

Cost, a step, all ranks together, in numbers; R = tokens whose expert is on another rank, counted once per expert:

    tokens      4 R h            two all-to-alls forward, two backward; 6 R h where blocks are computed again
    dense       2(P-1) × numbers of the weights that are not experts', after the last backward (ring)
    experts     2(D-1) × their numbers, if D groups each hold all experts (data × experts; else D = 1)
    control     (P-1) E counts a layer and forward; 2(P-1) × 2 E L loads; P(P-1) for the loss, as many for clipping

Routing decides R: with even loads it is (P-1)/P of k B T; if one expert is hot, its rank computes for all the others.

notes:   N1 (专家混合), N2 §10.3 MoE专用并行优化
Source:  Lepikhin et al. 2020, "GShard" (2006.16668); Fedus et al. 2021, "Switch Transformers" (2101.03961).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.autograd import ops
from minidist.autograd.ops import collectives
from minidist.autograd.recompute import computed_again
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPT, Weight
from minidist.nn.moe import Experts, mixtures
from minidist.nn.shares import even_slices
from minidist.nn.weight_shard import WeightShard
from minidist.optim import Optimizer
from minidist.parallel.experts.expert_load import ExpertLoad
from minidist.parallel.step.flat import sum_in_order
from minidist.parallel.step.step import Batch, micro_parts, part_of
from minidist.parallel.tensor.split_model import SplitModel


def plain_experts(x: Array, chosen: Array, weight: Array, my_expert: Callable[[Array], Array], group: Group) -> Array:
    """One expert a rank, one expert a token: rows x (N, h), chosen (N,), weight (N,) -> (N, h)."""
    order = np.argsort(chosen, kind="stable")                               # rows by expert
    ends = np.cumsum(np.bincount(chosen, minlength=group.size))
    came = group.all_to_all(np.split(x[order], ends[:-1]))                  # they go to their experts
    results = my_expert(np.concatenate(came))
    ends = np.cumsum([len(rows) for rows in came])
    back = group.all_to_all(np.split(results, ends[:-1]))                   # and come home
    y = np.empty_like(x)
    y[order] = np.concatenate(back)                                         # each in its token's place
    return weight[:, None] * y


# The real one makes the same two journeys by differentiable all-to-alls, for several experts a rank and a token. It
# sends counts first, so that a rank knows which rows belong to which of its experts, and adds what routing needs:
# capacity, dropped tokens, shared experts, and loads of all ranks.


class SplitExperts(Experts):
    """Experts divided between ranks: rows travel to them and results come back.

    Args:    as expert_parallel.
    Attributes: sent: (P,) rows that this rank gave each rank, itself included, in training since the last `clear`;
                      rows of a block that is computed again count once.
    """

    def __init__(self, experts: Experts, group: Group, copies: Group | None = None) -> None:
        self.group, self.own = group, even_slices(experts.up.shape[0], group.size)

        def mine(weight: Weight) -> Weight:
            inner, rank = (weight.parts, weight.rank) if isinstance(weight, WeightShard) else ([()], 0)
            places = [(own, *part[1:]) for own in self.own for part in inner]
            return WeightShard(weight, places, group.rank * len(inner) + rank, sharers=copies, among=group)

        self.gate = None if experts.gate is None else mine(experts.gate)
        self.up, self.down = mine(experts.up), mine(experts.down)
        self.clear()

    def clear(self) -> None:
        """Set the counts of sent rows to zero."""
        self.sent = np.zeros(self.group.size, np.int64)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Own rows (R, width), sorted by expert, and the number for each of all experts -> results (R, width)."""
        leaving = [sum(counts[part]) for part in self.own]
        if self.training and not computed_again():
            self.sent += leaving
        came = self._exchange_counts(counts)
        travel = partial(collectives.all_to_all, split=0, join=0, group=self.group)
        here = travel(rows, counts=leaving)
        by_expert = _by_expert(came)
        xp = array_module(rows.data)
        back = xp.asarray(np.argsort(by_expert))
        results = super().forward(ops.take(here, xp.asarray(by_expert)), came.sum(axis=0).tolist())
        return travel(ops.take(results, back), counts=came.sum(axis=1).tolist())

    def _exchange_counts(self, counts: Sequence[int]) -> np.ndarray:
        """The number of rows that come from each rank for each of this rank's experts: (P, own experts)."""
        with self.group.ledger.control():
            return np.stack(self.group.all_to_all([np.array(counts[part], np.int64) for part in self.own],
                                                  algorithm="pairwise"))


def _by_expert(came: np.ndarray) -> np.ndarray:
    """The permutation that sorts arriving rows by expert; they arrive sorted by rank, then by expert."""
    experts = np.tile(np.arange(came.shape[1]), len(came))
    return np.argsort(np.repeat(experts, came.reshape(-1)), kind="stable")


def expert_parallel(model: GPT, group: Group, *, copies: Group | None = None) -> GPT:
    """Divide a mixture's experts between the ranks of `group`, in place; then `model.initialize(seed)` draws.

    Args:    copies: the ranks of other groups that hold the same experts and sum their gradients, or None.
    Raises:  PlanError if a rank would get no expert; ConfigError without a mixture, or if the weights are drawn.
    """
    layers = mixtures(model)
    if not layers:
        raise ConfigError("expert parallelism: the model has no experts; make it a mixture first: "
                          "mixture(model, MixtureConfig(experts=8))")
    if any(getattr(parameter, "drawn", True) for parameter in model.parameters()):
        raise ConfigError("expert parallelism: the model's weights are drawn already; divide it first, so that each "
                          "rank draws its part alone")
    for layer in layers:
        if layer.config.experts < group.size:
            raise PlanError(f"expert parallelism over ep={group.size} ranks: {layer.config.experts} experts leave a "
                            f"rank without any; choose ep from 1 to {layer.config.experts}, or at least {group.size} "
                            f"experts")
        layer.experts = SplitExperts(layer.experts, group, copies)
    model.assign_names()
    return model


class ExpertParallel(SplitModel):
    """A mixture divided by `expert_parallel`, trained on the rank's own rows of a batch.

        model = expert_parallel(mixture(GPT(config), MixtureConfig(experts=8)), group)
        model.initialize(seed)
        strategy = ExpertParallel(model, group)
        loss = strategy.step(batch, AdamW(strategy.parameters, lr))

    Args:    as SplitModel. If `everyone` is several groups, each has all experts, and ranks with the same ones are the
             `copies` of expert_parallel.
    Attributes: loads, routed: `step` and `routed` of ExpertLoad, over all layers.
    """

    sums_undivided = True       # each rank has the gradients of its own rows

    def __init__(self, model: GPT, group: Group, **options: Any) -> None:
        super().__init__(model, group, **options)
        self.load = ExpertLoad(model, self.everyone)
        self.layers, self.loads, self.routed = self.load.layers, self.load.step, self.load.routed

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """As SplitModel.step, with balance losses. A rank without rows takes part: its experts get tokens of others."""
        optimizer.zero_grad()
        total = 0.0
        for part in micro_parts(part_of(batch, size=self.everyone.size, rank=self.everyone.rank), accumulate):
            total += self.add_gradients(part, batch[1].size)
        self.update(optimizer, lr=lr, clip=clip)
        self.load.settle()
        self.loads, self.routed = self.load.step, self.load.routed
        return sum_in_order(self.everyone, total)


def elements_sent(model: GPT, *, ranks: int, rows: int) -> int:
    """Numbers that all ranks together send in a step, without `control`, if one group holds all experts and no block
    is computed again: the cost above.

    Args:    ranks: that share the batch; rows: R, summed over all layers.
    """
    dense = sum(parameter.size for parameter in model.parameters()
                if parameter.requires_grad and not isinstance(parameter, WeightShard))
    return 4 * rows * model.config.width + 2 * (ranks - 1) * dense
