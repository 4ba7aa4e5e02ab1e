"""Chapter 17 · What the axes inside a replica take of a model: tensor shards, experts, tokens. Then come stages."""

from functools import partial
from typing import Any

import numpy as np

from minidist.autograd.ops.collectives import shard_of
from minidist.autograd.tensor import Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, device_of, to_device
from minidist.nn import GPT, DropoutKey
from minidist.nn.moe import Sequences, mixtures
from minidist.parallel.context.token_shard import TOKENS, OwnTokens, TokenShardPositions, own_key, pick
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.hybrid.strategies import load
from minidist.parallel.pipeline.stages import Stages


def cut_model(model: GPT, mesh: Mesh, plan: Plan) -> tuple[OwnTokens, OwnTokens]:
    """Cut a GPT, its weights not yet drawn, along tp, ep and cp, in place: each strategy as it does alone.

    Returns: the tokens of a sequence that this rank works on, and those whose activations it hands on between layers:
             with sequence parallelism its part of its tokens.
    """
    tp = mesh["tp"]
    if plan.tp > 1:
        load("sequence" if plan.sequence_parallel else "tensor")(model, tp)
    if plan.ep > 1:
        load("experts")(model, mesh["ep"])
        shards: list[Any] = [p for layer in mixtures(model) for p in layer.experts.parameters()]
        for parameter in shards:        # not by all ranks of dp, ep and cp
            parameter.shared_by, parameter.among = mesh.experts, mesh["ep", "tp"]
    tokens: OwnTokens = all_tokens
    if plan.cp > 1:
        tokens = load(plan.attention)(model, mesh["cp"])
        divide_positions(model, mesh["cp"], tokens)
        model.assign_names()
    return tokens, within(tokens, partial(shard_of, group=tp)) if plan.sequence_parallel else tokens


# ---------------------------------------------------------------------------------------- a shard of the tokens

def all_tokens(length: int) -> slice:
    """The OwnTokens of a rank that has all tokens."""
    return slice(0, length)


def within(outer: OwnTokens, inner: OwnTokens) -> OwnTokens:
    """The tokens that `inner` takes of those that `outer` takes."""
    def own(length: int) -> Any:
        places = np.arange(length)[outer(length)]
        return places[inner(len(places))]
    return own


class TokenShardSequences(Sequences):
    """`inner`, for a gate that sees its own tokens of sequences; the ranks of `group` have the others."""

    def __init__(self, inner: Sequences, group: Group, own: OwnTokens) -> None:
        self.inner, self.group, self.own = inner, group, own

    def joined(self, chosen: Array) -> Array:
        """As Sequences.joined. Cost: an all-gather of k integers a token, under `control`."""
        xp = array_module(chosen)
        with self.group.ledger.control():
            gathered = self.group.all_gather(xp.ascontiguousarray(xp.moveaxis(chosen, TOKENS, 0)), algorithm="ring")
            places = self.group.all_gather(np.arange(len(gathered))[self.own(len(gathered))], algorithm="ring")
        whole = xp.empty_like(gathered)
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
    """Let a GPT that is given the own tokens' ids, in place, pick their positions and route by whole sequences."""
    positions = model.positions
    if positions is not None:
        inner = within(own, positions.own) if isinstance(positions, TokenShardPositions) else own
        model.positions = TokenShardPositions(positions, inner)
    for layer in mixtures(model):
        layer.sequences = TokenShardSequences(layer.sequences, group, own)


class TokenStages(Stages):
    """Stages of a GPT that work on a shard of the tokens.

    Attributes: tokens: the tokens that this rank works on; carried: those whose activations it sends to other stages.
    """

    tokens: OwnTokens = staticmethod(all_tokens)
    carried: OwnTokens = staticmethod(all_tokens)

    def between(self, rows: int, length: int) -> tuple[int, int, int]:
        """As Stages.between, of the carried tokens."""
        return super().between(rows, len(np.arange(length)[self.carried(length)]))

    def forward(self, stage: int, x: Any, *, targets: Array, positions: Array | None = None,
                divisor: float | None = None, key: DropoutKey | None = None) -> Tensor:
        """As Stages.forward; ids, targets and key are of all tokens."""
        return super().forward(stage, x if isinstance(x, Tensor) else pick(x, self.tokens, TOKENS),
                               targets=pick(targets, self.tokens, TOKENS), positions=np.arange(targets.shape[1]),
                               divisor=divisor, key=own_key(key, self.tokens))
