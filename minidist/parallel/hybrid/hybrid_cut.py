"""Chapter 17 · What the axes inside a replica take of a model: tensor shards, experts, tokens. Then come stages."""

from functools import partial
from typing import NamedTuple

from minidist.autograd.ops.collectives import shard_of
from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.nn.moe import mixtures
from minidist.parallel.context import ring_attention, ulysses
from minidist.parallel.context.sequence_parallel import sequence_parallel
from minidist.parallel.context.token_shard import Own, everything, tell_own, within
from minidist.parallel.experts.expert_parallel import expert_parallel
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.tensor.tensor_parallel import tensor_parallel


class Cut(NamedTuple):
    """What else must be known of a model that was cut.

    Attributes: tokens   which of a sequence's tokens this rank works on, along cp
                carried  those whose activations it hands on between layers: with sequence parallelism its part of them
                others   who shares a weight, by id, where it is not all ranks of dp, ep and cp: experts
    """

    tokens: Own
    carried: Own
    others: dict[int, Group]


def cut_model(model: GPT, mesh: Mesh, plan: Plan) -> Cut:
    """Cut a GPT, its weights not yet drawn, along tp, ep and cp, in place: each strategy as it does alone."""
    tp, others = mesh["tp"], dict[int, Group]()
    if plan.tp > 1:
        (sequence_parallel if plan.sequence_parallel else tensor_parallel)(model, tp)
    if plan.ep > 1:
        expert_parallel(model, mesh["ep"], parts=mesh["ep", "tp"])
        weights = [p for layer in mixtures(model) for p in layer.experts.parameters()]
        others = dict.fromkeys(map(id, weights), mesh.experts)
    tokens: Own = _divide_tokens(model, mesh["cp"], plan.attention) if plan.cp > 1 else everything
    carried = within(tokens, partial(shard_of, group=tp)) if plan.sequence_parallel else tokens
    return Cut(tokens, carried, others)


def _divide_tokens(model: GPT, cp: Group, attention: str) -> Own:
    """Let attention and positions see to it that this rank has some tokens alone; returns which."""
    attend = ring_attention.attend_by_ring if attention == "ring" else ulysses.attend_by_heads
    own = attend(model, cp)
    tell_own(model, cp, own)
    model.assign_names()
    return own
