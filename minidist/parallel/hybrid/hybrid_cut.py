"""Chapter 17 · What the axes inside a replica take of a model: tensor shards, experts, tokens, and
then stages.

In a pipeline the data axis runs the backwards, and sums their gradients. With DDP and ZeRO-1 they
add up in place, over all microbatches, and are reduced once a step. With ZeRO-2 and 3 no rank keeps
a whole gradient. So each microbatch's backward of a stage ends in the reduce-scatters of that
stage, and with ZeRO-3 each of its forwards and backwards begins with gathers:

    compute         F0 | F1 | B0           | F2 | B1           | …
    ZeRO-2                    reduce stage        reduce stage        m microbatches: m times the scatters
    ZeRO-3          gather for each F and each B; reduce               and m times the gathers

A microbatch is a pass of chapters 15 and 16. In elements a step, over all ranks of one group of P
on the data axis that holds Ψ elements, R of them in a tied table, for A passes of m microbatches:

    DDP, ZeRO-1     2 (P-1) Ψ
    ZeRO-2          (A m + 1) (P-1) Ψ
    ZeRO-3          (P-1) (3 A m (Ψ - R) + 2 R)     the table is gathered once a step and held, and
                                                    so is its gradient

Where both ends are on one rank (zb-v, dualpipe-v) two stages give a tied table gradients, and
ZeRO-2 reduces it twice a microbatch.

While a segment's last units compute, the first ones of the schedule's next instruction are read
ahead, where weights lie on disk (chapter 20): they stream in the order of the step.

With keep_gathered a unit stays as long as one of its microbatches is between forward and backward:
gpipe and 1f1b's first stages then gather once a pass, but hold all weights. Where backward is split
in two (zero bubble) gradients are reduced after the second half, and lie whole until then.

All ranks of the data axis must gather and reduce the same, so a microbatch without a row goes
through too, empty.
"""

from functools import partial
from typing import Any

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.ops.collectives import shard_of
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, device_of, index_range, to_device
from minidist.nn import GPT, DropoutKey, Module
from minidist.nn.moe import Sequences, mixtures
from minidist.nn.weight_shard import assemble
from minidist.parallel.context.ring_attention import attend_by_ring
from minidist.parallel.context.sequence_parallel import sequence_parallel
from minidist.parallel.context.sparse_ring_attention import attend_by_pieces
from minidist.parallel.context.token_shard import (
    TOKENS,
    OwnTokens,
    TokenShardPositions,
    own_key,
    pick,
)
from minidist.parallel.context.ulysses import attend_by_heads
from minidist.parallel.experts.expert_parallel import expert_parallel
from minidist.parallel.experts.node_experts import settle_nodes
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.plan import AXES, Plan
from minidist.parallel.pipeline.instructions import BackwardWeights, Forward, Schedule
from minidist.parallel.pipeline.pipeline import Pipeline
from minidist.parallel.pipeline.stages import Stages
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.strategy import DataAxis
from minidist.parallel.tensor.tensor_parallel import tensor_parallel


def cut_model(model: GPT, mesh: Mesh, plan: Plan) -> tuple[OwnTokens, OwnTokens]:
    """Cut a GPT, its weights not yet drawn, along tp, ep and cp, in place: each strategy as it does
    alone.

    Returns: the tokens of a sequence that this rank works on, and those whose activations it hands
             on between layers:
             with sequence parallelism its part of its tokens.
    """
    tp = mesh["tp"]
    if plan.tp > 1:
        divide = sequence_parallel if plan.sequence_parallel else tensor_parallel
        divide(model, tp)
    if plan.ep > 1:
        divide_experts(model, mesh, plan)
    tokens: OwnTokens = all_tokens
    if plan.cp > 1:
        tokens = divide_attention(model, mesh["cp"], plan.attention)
        divide_positions(model, mesh["cp"], tokens)
        model.assign_names()
    return tokens, within(tokens, partial(shard_of, group=tp)) if plan.sequence_parallel else tokens


def divide_experts(model: GPT, mesh: Mesh, plan: Plan) -> None:
    """Divide the experts of a GPT's mixtures between the ranks of ep, in place."""
    nodes = np.reshape(mesh.world.nodes, tuple(mesh.shape.values()))
    groups = np.moveaxis(nodes, AXES.index("ep"), -1).reshape(-1, plan.ep)
    settle_nodes(model, groups.tolist())
    expert_parallel(model, mesh["ep"])
    shards: list[Any] = [p for layer in mixtures(model) for p in layer.experts.parameters()]
    for parameter in shards:  # not by all ranks of dp, ep and cp
        parameter.shared_by = mesh.experts
        parameter.among = mesh["ep", "tp"]


def divide_attention(model: GPT, group: Group, attention: str) -> OwnTokens:
    """Let a GPT's attention, in place, see tokens of all ranks of `group`, as the plan's
    `attention` says; return this rank's tokens."""
    if attention == "all-to-all":
        return attend_by_heads(model, group)
    if model.config.attention_pattern is not None:
        return attend_by_pieces(model, group)
    return attend_by_ring(model, group)


# ---------------------------------------------------------------------------- a shard of the tokens


def all_tokens(length: int) -> slice:
    """The OwnTokens of a rank that has all tokens."""
    return slice(0, length)


def within(outer: OwnTokens, inner: OwnTokens) -> OwnTokens:
    """The tokens that `inner` takes of those that `outer` takes."""

    def own(length: int) -> Any:
        places = index_range(length)[outer(length)]
        return places[inner(len(places))]

    return own


class TokenShardSequences(Sequences):
    """`inner`, for a gate that sees its own tokens of sequences; the ranks of `group` have the
    others."""

    def __init__(self, inner: Sequences, group: Group, own: OwnTokens) -> None:
        self.inner = inner
        self.group = group
        self.own = own

    def joined(self, chosen: Array) -> Array:
        """As Sequences.joined. Cost: an all-gather of k integers a token, under `control`."""
        xp = array_module(chosen)
        with self.group.ledger.control():
            gathered = self.group.all_gather(
                xp.ascontiguousarray(xp.moveaxis(chosen, TOKENS, 0)), algorithm="ring"
            )
            places = self.group.all_gather(
                within(all_tokens, self.own)(len(gathered)), algorithm="ring"
            )
        whole = xp.zeros_like(gathered)  # a simulated rank knows its own places only
        whole[to_device(places, device_of(gathered))] = gathered
        return xp.ascontiguousarray(xp.moveaxis(whole, 0, TOKENS))

    def parted(self, kept: Array) -> Array:
        """The own tokens' part."""
        return pick(kept, self.own, TOKENS)

    def keys(self, tokens: Array) -> Array:
        """As `inner`: the gate is given keys of the own tokens only."""
        return self.inner.keys(tokens)

    def total(self, share: Array) -> Array:
        """As `inner`: shares of the ranks of `group` add up later, in the loss."""
        return self.inner.total(share)


def divide_positions(model: GPT, group: Group, own: OwnTokens) -> None:
    """Let a GPT that is given the own tokens' ids, in place, pick their positions and route by
    whole sequences."""
    positions = model.positions
    if positions is not None:
        inner = within(own, positions.own) if isinstance(positions, TokenShardPositions) else own
        model.positions = TokenShardPositions(positions, inner)
    for layer in mixtures(model):
        layer.sequences = TokenShardSequences(layer.sequences, group, own)


# ------------------------------------------------------------------------------------------- stages


class TokenStages(Stages):
    """Stages of a GPT that work on a shard of the tokens.

    Attributes: tokens: the tokens that this rank works on; carried: those whose activations it
    sends to other stages.
    """

    tokens: OwnTokens = staticmethod(all_tokens)
    carried: OwnTokens = staticmethod(all_tokens)

    def between(self, rows: int, length: int) -> tuple[int, int, int]:
        """As Stages.between, of the carried tokens."""
        return super().between(rows, len(np.arange(length)[self.carried(length)]))

    def forward(
        self,
        stage: int,
        x: Any,
        *,
        targets: Array,
        positions: Array | None = None,
        divisor: float | None = None,
        key: DropoutKey | None = None,
    ) -> Tensor:
        """As Stages.forward; ids, targets and key are of all tokens."""
        return super().forward(
            stage,
            x if isinstance(x, Tensor) else pick(x, self.tokens, TOKENS),
            targets=pick(targets, self.tokens, TOKENS),
            divisor=divisor,
            key=own_key(key, self.tokens),
            positions=index_range(targets.shape[1]),
        )


class DataPipeline(Pipeline):
    """This rank's stages of a GPT, whose backwards, gradients and update are those of a data axis
    that it `serve`s.

    Args:    as Pipeline's; of: the precision of its backward; tp: the ranks that divide its layers.
    """

    cuts = TokenStages

    def __init__(
        self,
        model: GPT,
        group: Group,
        schedule: Schedule,
        *,
        of: Precision,
        tp: Group,
        **options: Any,
    ) -> None:
        super().__init__(model, group, schedule, **options)
        # not before: the data axis makes the masters
        self.precision = of
        self.tp = tp
        self.data_axis: DataAxis

    def serve(self, data: DataAxis, *, always: bool) -> None:
        """From here on gradients are `data`'s, made of this pipeline's model. `always`: ranks
        without a row compute."""
        self.data_axis = data
        self.always = always or data.reduces_each_pass
        computes = [
            each
            for each in self.schedule.computes(self.group.rank)
            if not isinstance(each, BackwardWeights)
        ]
        data.set_segments(
            [self.modules_of(stage) for stage in self.stages.layers],
            [(each.stage // self.group.size, isinstance(each, Forward)) for each in computes],
        )

    def modules_of(self, stage: int) -> list[Module]:
        """The modules that a stage calls, in order; a tied table at either end comes first."""
        model = self.stages.model
        last = stage == self.stages.last
        first = [model.tokens] if stage == 0 or (last and self.config.tied) else []
        first += [model.positions] if stage == 0 else []
        blocks = [model.blocks[layer] for layer in self.stages.layers[stage]]
        return [
            module
            for module in (*first, *blocks, *([model.norm, model.head] if last else []))
            if module is not None
        ]

    def weights_of(self, stage: int) -> list[Parameter]:
        """The parameters of a stage that learn."""
        return [
            p for module in self.modules_of(stage) for p in module.parameters() if p.requires_grad
        ]

    def go_back(
        self, stage: int, y: Tensor, dy: Array | None, *, whole: bool
    ) -> list[WeightGradient]:
        share = y if y.requires_grad else None  # None: the first stage is frozen
        return self.data_axis.backward(
            share, dy, segment=stage // self.group.size, last=False, defer=not whole
        )

    def go_back_weights(self, stage: int, put_off: list[WeightGradient]) -> None:
        self.data_axis.backward_weights(put_off, segment=stage // self.group.size)

    def own_state(self) -> dict[str, np.ndarray]:
        """The weights of this rank's stages, put together over the data axis and tp."""
        return assemble(self.model, self.data_axis.state_dict(), self.tp)


def gathers(schedule: Schedule, rank: int, stage: int, *, keep: bool) -> int:
    """How often ZeRO-3 gathers a unit of a stage in one pass: for each forward and each backward,
    or with `keep` as often as none of its microbatches is on its way when one begins.
    """
    times = on_its_way = 0
    for instruction in schedule.computes(rank):
        if instruction.stage != stage or isinstance(instruction, BackwardWeights):
            continue
        forward = isinstance(instruction, Forward)
        times += not keep or (forward and not on_its_way)
        on_its_way += 1 if forward else -1
    return times
