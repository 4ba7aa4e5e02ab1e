"""Chapter 18 · Expert parallelism: the experts of a mixture are divided between ranks, and tokens
are sent to them.

The idea. In a mixture of experts (nn/moe.py) nearly all weights belong to experts, and each token
uses few of them. So each rank holds some experts and some sequences. A token whose expert is on
another rank is sent there, and its result is sent back:

    own rows, sorted by expert -- counts -----> how many rows each rank gets
                               -- all-to-all -> rows of all ranks for my experts -- sort -- experts
    results, weighted and added up <- all-to-all --                              -- sort back --+

Only routed tokens are sent: no padding up to a capacity, no dropped tokens. Backward sends the
gradients by the same two exchanges, so the gradient of an expert is complete on the rank that has
it.

What each rank holds, P ranks, E experts:

    experts     E/P each, cut as numpy.array_split does, with their gradients and optimizer state;
                by number, or in the order of MixtureConfig.placement
    the rest    attention, norms, embeddings, gates, shared experts: whole on all ranks as in DDP
                (chapter 07); their gradients are summed over the ranks
    batch       own rows, as in DDP: for everything but the experts, `ep` is a data axis
    biases      whole on all ranks (balance="bias"); once a step the loads of all ranks move them

The result is one process's: capacity, dropping and balance loss are those of one sequence, noise is
keyed by the global token, and the loss is divided by the targets of all ranks.

Cost, per step, all ranks together, in numbers; R = tokens whose expert is on another rank, counted
once per expert:

    tokens      4 R h            two all-to-alls forward, two backward; 6 R h where blocks are
                                 computed again
    dense       2(P-1) × numbers of the weights that are not experts', after the last backward
                (ring)
    experts     2(D-1) × their numbers, if D groups each hold all experts (data × experts; else D =
                1)
    control     (P-1) E counts a layer and forward; 2(P-1) × 2 E L loads; P(P-1) for the loss, as
                many for clipping (with a Trainer three times as many for each: two digests of the
                batch)

Routing decides R: with even loads it is (P-1)/P of k B T; if one expert gets most tokens, the other
ranks wait for its rank. If the ranks lie on several nodes, a token is sent to each node only once
(node_experts.py).

notes:   N1 (专家混合), N2 §10.3 MoE专用并行优化
Source:  Lepikhin et al. 2020, "GShard" (2006.16668); Fedus et al. 2021, "Switch Transformers"
         (2101.03961).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPT
from minidist.nn.moe import mixtures
from minidist.nn.weight_shard import WeightShard
from minidist.parallel.experts.node_experts import NodeExperts, settle_nodes
from minidist.parallel.experts.split_experts import SplitExperts
from minidist.parallel.step.model_axis import ModelAxis


def plain_experts(
    x: Array, chosen: Array, weight: Array, my_expert: Callable[[Array], Array], group: Group
) -> Array:
    """Run one expert per rank, one expert per token: rows x (N, h), chosen (N,), weight (N,) -> (N,
    h)."""
    order = np.argsort(chosen, kind="stable")  # rows by expert
    ends = np.cumsum(np.bincount(chosen, minlength=group.size))
    came = group.all_to_all(np.split(x[order], ends[:-1]))  # they go to their experts
    results = my_expert(np.concatenate(came))
    ends = np.cumsum([len(rows) for rows in came])
    back = group.all_to_all(np.split(results, ends[:-1]))  # and return
    y = np.zeros_like(x)
    y[order] = np.concatenate(back)  # each in its token's place
    return weight[:, None] * y


# The real one (split_experts.py) makes the same two journeys by differentiable all-to-alls, for
# several experts a rank and a token. It sends counts first, so that a rank knows which rows belong
# to which of its experts, and adds what routing needs: capacity, dropped tokens, shared experts,
# loads of all ranks, and experts that lie in another order.


def expert_parallel(model: GPT, group: Group, *, once_a_node: bool = True) -> GPT:
    """Divide a mixture's experts between the ranks of `group`, in place; then
    `model.initialize(seed)` draws.

    If a limit of nodes is set without MixtureConfig.nodes, it counts the nodes of these ranks.
    Args:    once_a_node: whether a token is sent to each node only once (node_experts.py), if there
             are several.
    Raises:  PlanError if a rank would get no expert; ConfigError without a mixture, or if the
             weights are drawn.
    """
    layers = mixtures(model)
    if not layers:
        raise ConfigError(
            "expert parallelism: the model has no experts; make it a mixture first: "
            "mixture(model, MixtureConfig(experts=8))"
        )
    if any(getattr(parameter, "drawn", True) for parameter in model.parameters()):
        raise ConfigError(
            "expert parallelism: the model's weights are drawn already; divide it first, so that "
            "each rank draws only its part"
        )
    for layer in layers:
        if layer.config.experts < group.size:
            raise PlanError(
                f"expert parallelism over ep={group.size} ranks: {layer.config.experts} experts "
                f"leave a rank without any; choose ep from 1 to {layer.config.experts}, or at "
                f"least {group.size} experts"
            )
    settle_nodes(model, [group.nodes])
    inside = None
    if once_a_node and len(set(group.nodes)) > 1:
        inside = group.split(group.nodes[group.rank], axis=f"{group.axis}.inside")
    for layer in layers:
        order = None if layer.config.placement is None else layer.config.order(layer.layer)
        layer.experts = (
            SplitExperts(layer.experts, group, order)
            if inside is None
            else NodeExperts(layer.experts, group, order, inside=inside)
        )
    model.assign_names()
    return model


class ExpertParallel(ModelAxis):
    """The ranks that divide a mixture's experts, and the batch's rows as data parallelism does;
    making it divides the model, in place.

    Args:    group: the ranks that have all experts together; sharers: the ranks that hold the same
             experts, this one included: they sum those gradients; among: the ranks that have all
             parts of an expert's weights, if tensor parallelism divides them too; nodes: of each
             group with all experts, the nodes of its ranks (default: this group's); once_a_node: as
             expert_parallel.
    """

    def __init__(
        self,
        model: GPT,
        group: Group,
        *,
        sharers: Group,
        among: Group | None = None,
        nodes: Sequence[Sequence[int]] | None = None,
        once_a_node: bool = True,
    ) -> None:
        super().__init__(model, group)
        if nodes is not None:
            settle_nodes(model, nodes)
        expert_parallel(model, group, once_a_node=once_a_node)
        shards: list[Any] = [p for layer in mixtures(model) for p in layer.experts.parameters()]
        for parameter in shards:  # their replicas are fewer than those of the other weights
            parameter.shared_by = sharers
            parameter.among = among or parameter.among


def elements_sent(model: GPT, *, ranks: int, rows: int) -> int:
    """Return the count of numbers that all ranks together send in a step, without `control`, if one
    group holds all experts and no block is computed again: the cost above.

    Args:    ranks: that share the batch; rows: R, summed over all layers.
    """
    dense = sum(
        parameter.size
        for parameter in model.parameters()
        if parameter.requires_grad and not isinstance(parameter, WeightShard)
    )
    return 4 * rows * model.config.width + 2 * (ranks - 1) * dense
