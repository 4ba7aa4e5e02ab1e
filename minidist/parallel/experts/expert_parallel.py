"""Chapter 18 · Expert parallelism: the experts of a mixture are divided between ranks, and tokens travel to them.

The idea. In a mixture of experts (nn/moe.py) nearly all weights are experts', and each token uses a few of them. So
each rank holds some experts and some sequences, and tokens whose expert is elsewhere are sent there and come back:

    own rows, sorted by expert ── counts ──> who gets how many
                               ── all-to-all ──> rows of all ranks for my experts ── sort ── experts
    results, weighted and added up  <── all-to-all ──                             ── sort back ──┘

Only routed tokens travel: no padding up to a capacity, nothing for a dropped one. Backward makes the same two journeys
with the gradients, so an expert's gradient is made on its own rank, from all tokens that came there.

Who holds what, P ranks, E experts:

    experts     E/P each, cut as numpy.array_split does, with their gradients and optimizer state
    the rest    attention, norms, embeddings, gates, shared experts: whole on all, as in DDP (chapter 07); gradients are
                summed over the ranks
    batch       own rows, as in DDP: to all but the experts, `ep` is a data axis
    biases      whole on all (balance="bias"), moved by the loads of all ranks, once a step

So the model is one process's whatever the number of ranks: capacity, dropping and the balance loss are of one sequence,
noise is keyed by the global token, and the loss is divided by the targets of all ranks.

Cost, a step, all ranks together, in numbers; R tokens (a token to two experts is two) whose expert is on another rank:

    tokens      4 R h            two all-to-alls forward, two backward; 6 R h where blocks are computed again
    dense       2(P-1) × numbers of the weights that are not experts', after the last backward (ring)
    experts     2(D-1) × their numbers, where D groups each hold all of them (data × experts; else D = 1)
    control     (P-1) E counts a layer and forward; 2(P-1) × 2 E L loads; P(P-1) for the loss, as many for clipping

Beside other axes (chapter 17): tensor parallelism cuts each expert's matrices too (tensor/tensor_layers.py), and then
each of its ranks sends the rows to the same column of another's experts, R once a tensor rank; with the context divided
capacity and balance look at whole sequences all the same (context/token_shard.py); ZeRO divides experts over the ranks
that share them, dp and cp, and the rest over ep too.

R is what routing makes it: with even loads (P-1)/P of k B T, and if one expert is hot, its rank computes for all.

notes:   N1 (专家混合), N2 §10.3 MoE专用并行优化
Source:  Lepikhin et al. 2020, "GShard" (2006.16668); Fedus et al. 2021, "Switch Transformers" (2101.03961).
"""

import math
from collections.abc import Callable, Sequence
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
from minidist.nn.moe import Experts, loads, mixtures, rebalance
from minidist.optim import Optimizer
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.step import Batch, Loss, micro_parts, part_of, zero_unused
from minidist.parallel.tensor.split_model import SplitModel
from minidist.parallel.tensor.tensor_layers import ranges
from minidist.parallel.zero.weight_shard import Place, WeightShard, add_up, squares_once


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

# ------------------------------------------------------------------------------------------------------- partition


class SplitExperts(Experts):
    """Experts of which each rank holds some: rows go to them and their results come back.

    Args:    as expert_parallel.
    Attributes: sent    (P,) rows that this rank gave each rank, itself too, in training since the last `clear`; those
                        of a block computed again count once
    """

    def __init__(self, experts: Experts, group: Group, algorithm: str = "pairwise", copies: Group | None = None,
                 parts: Group | None = None) -> None:
        self.own = ranges(experts.up.shape[0], group.size)

        def mine(weight: Weight) -> Weight:
            inner: Sequence[Place] = weight.parts if isinstance(weight, WeightShard) else [()]
            places = [(own, *part[1:]) for own in self.own for part in inner]
            holders = group if parts is None else parts
            return WeightShard(weight, places, holders.rank, sharers=copies, among=holders)

        self.group, self.algorithm = group, algorithm
        self.gate = None if experts.gate is None else mine(experts.gate)
        self.up, self.down = mine(experts.up), mine(experts.down)
        self.clear()

    def clear(self) -> None:
        """Count rows from nothing."""
        self.sent = np.zeros(self.group.size, np.int64)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Own rows sorted by expert (R, width), and how many each expert of all gets -> their results (R, width)."""
        leaving = [sum(counts[part]) for part in self.own]
        if self.training and not computed_again():
            self.sent += leaving
        came = self._exchange_counts(counts)
        here = self._travel(rows, leaving)
        by_expert = _by_expert(came)
        xp = array_module(rows.data)
        back = xp.asarray(np.argsort(by_expert))
        results = super().forward(ops.take(here, xp.asarray(by_expert)), came.sum(axis=0).tolist())
        return self._travel(ops.take(results, back), came.sum(axis=1).tolist())

    def _exchange_counts(self, counts: Sequence[int]) -> np.ndarray:
        """How many rows come from each rank for each of my experts: (P, own experts)."""
        with self.group.ledger.control():
            came = self.group.all_to_all([np.array(counts[part], np.int64) for part in self.own],
                                         algorithm=self.algorithm)
        return np.stack(came)

    def _travel(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        return collectives.all_to_all(rows, split=0, join=0, counts=counts, group=self.group,   # type: ignore
                                      algorithm=self.algorithm)


def _by_expert(came: np.ndarray) -> np.ndarray:
    """The order that sorts rows by expert, which came sorted by rank and then by expert: a permutation."""
    experts = np.tile(np.arange(came.shape[1]), len(came))
    return np.argsort(np.repeat(experts, came.reshape(-1)), kind="stable")


def expert_parallel(model: GPT, group: Group, *, copies: Group | None = None, parts: Group | None = None,
                    algorithm: str = "pairwise") -> GPT:
    """Divide the experts of a mixture between the ranks of `group`, in place; `model.initialize(seed)` draws the own.

    Args:    copies: the ranks of other groups that hold the same experts and add up their gradients, or None.
             parts: where tensor parallelism has cut each expert (chapter 12), the ranks of `group` and of the tensor
             axis together, the latter innermost: each has its own part of its own experts.
             algorithm: of the all-to-alls.
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
        layer.experts = SplitExperts(layer.experts, group, algorithm, copies, parts)
    model.assign_names()
    return model


# ------------------------------------------------------------------------------------------------------------ cost

def elements_sent(model: GPT, *, ranks: int, rows: int, copies: int = 1, recomputed: bool = False) -> int:
    """Numbers that all ranks together send in a step, but for control: the cost above.

    Args:    ranks: that share the batch; rows: routed tokens whose expert is on another rank, of all layers.
             copies: of each expert; recomputed: whether blocks run twice.
    """
    experts = sum(math.prod(parameter.whole) for parameter in model.parameters() if isinstance(parameter, WeightShard))
    dense = sum(parameter.size for parameter in model.parameters()
                if parameter.requires_grad and not isinstance(parameter, WeightShard))
    return (6 if recomputed else 4) * rows * model.config.width + 2 * (ranks - 1) * dense + 2 * (copies - 1) * experts


# ------------------------------------------------------------------------------------------------------------ step

class ExpertParallel(SplitModel):
    """A mixture divided by `expert_parallel`, trained on the rank's own rows of a batch.

        model = expert_parallel(mixture(GPT(config), MixtureConfig(experts=8)), group)
        model.initialize(seed)
        strategy = ExpertParallel(model, group)
        loss = strategy.step(batch, AdamW(strategy.parameters, lr))

    Args:    as SplitModel, and everyone: the ranks that share the batch, if more than `group`: several groups, each
             with all experts. Those that hold the same ones are the `copies` of expert_parallel.
    Attributes: loads   (layers, 2, experts) integers: tokens of the last step's whole batch that chose each expert,
                        and that it took
                routed  (layers, P) integers: rows that this rank gave each rank in the last step, itself too
    """

    def __init__(self, model: GPT, group: Group, *, everyone: Group | None = None, loss: Loss | None = None,
                 algorithm: str = "ring", precision: Precision | None = None,
                 recorder: Recorder | None = None) -> None:
        self.everyone = group if everyone is None else everyone
        super().__init__(model, group, outside=self.everyone, loss=loss, algorithm=algorithm, precision=precision,
                         recorder=recorder)
        self.layers = mixtures(model)
        self.loads = loads(model)
        self.routed = np.zeros((len(self.layers), group.size), np.int64)

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same on every rank.

        Balance losses are in it. A rank without a row takes part: its experts have others' tokens.
        Args:    as SplitModel.step.
        """
        optimizer.zero_grad()
        total = 0.0
        for part in micro_parts(part_of(batch, size=self.everyone.size, rank=self.everyone.rank), accumulate):
            with self.recorder.span("forward", rows=len(part.inputs)):
                loss = self.loss(part, batch[1].size)
            with self.recorder.span("backward"):
                self.precision.backward(loss)
            total += float(loss.item())
        zero_unused(self.weights)
        with self.recorder.span("add up", "communication"):
            add_up(self.summands, algorithm=self.algorithm)
        with self.recorder.span("optimizer"):
            self.precision.update(optimizer, lambda: squares_once(self.weights, self.everyone), lr=lr, clip=clip)
        self._balance()
        return self._sum(total)

    def _balance(self) -> None:
        """Sum the loads over the ranks, and move the biases by them."""
        with self.everyone.ledger.control():
            self.loads = self.everyone.all_reduce(loads(self.model), algorithm=self.algorithm)
        rebalance(self.model, self.loads)
        for number, layer in enumerate(self.layers):
            experts: Any = layer.experts
            self.routed[number] = experts.sent
            experts.clear()

    def _sum(self, share: float) -> float:
        """The ranks' shares of the loss, added in rank order."""
        with self.recorder.span("loss", "communication"), self.everyone.ledger.control():
            return float(np.sum(self.everyone.all_gather(np.array([share], dtype=np.float64))))
