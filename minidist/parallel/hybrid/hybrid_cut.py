"""Chapter 17 · What the axes inside a replica take of a model: tensor shards, experts, tokens. Then come stages."""

from functools import partial
from typing import NamedTuple

from minidist.autograd.ops.collectives import shard_of
from minidist.comm.group import Group
from minidist.nn import GPT
from minidist.nn.moe import mixtures
from minidist.parallel.context.token_shard import Own, everything, tell_own, within
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.hybrid.strategies import load


class Cut(NamedTuple):
    """The tokens of a sequence that a rank works on, and those whose activations it hands on between layers.

    They differ with sequence parallelism alone, where a rank hands on its part of its tokens.
    """

    tokens: Own
    carried: Own


def cut_model(model: GPT, mesh: Mesh, plan: Plan) -> Cut:
    """Cut a GPT, its weights not yet drawn, along tp, ep and cp, in place: each strategy as it does alone.

    Experts are told the ranks that share them, where these are not all ranks of dp, ep and cp.
    """
    tp = mesh["tp"]
    if plan.tp > 1:
        load("sequence" if plan.sequence_parallel else "tensor")(model, tp)
    if plan.ep > 1:
        load("experts")(model, mesh["ep"], parts=mesh["ep", "tp"])
        for parameter in (p for layer in mixtures(model) for p in layer.experts.parameters()):
            parameter.shared_by = mesh.experts
    tokens: Own = _divide_tokens(model, mesh["cp"], plan.attention) if plan.cp > 1 else everything
    return Cut(tokens, within(tokens, partial(shard_of, group=tp)) if plan.sequence_parallel else tokens)


def _divide_tokens(model: GPT, cp: Group, attention: str) -> Own:
    """Divide each sequence between the ranks of cp, in attention and positions; returns this rank's tokens."""
    own: Own = load(attention)(model, cp)
    tell_own(model, cp, own)
    model.assign_names()
    return own
