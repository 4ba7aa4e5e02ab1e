"""Elements that a composed plan sends along each axis: sums of the formulas of the chapters' modules."""

from dataclasses import replace

from minidist.nn import GPTConfig
from minidist.nn.shares import even_slices, head_shares
from minidist.parallel.context import ring_attention, sparse_ring_attention, ulysses
from minidist.parallel.context import sequence_parallel as sequence
from minidist.parallel.context.pieces import tokens_sent
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.tensor import tensor_parallel as tensor
from minidist.parallel.tensor.tensor_layers import shared_numbers


def elements_sent(config: GPTConfig, plan: Plan, sequences: int, *, recomputed: int = 0) -> dict[str, int]:
    """Numbers that all ranks together send in a step along tp, cp and pp, scalars apart; for dp see its chapters.

    Args:    sequences: of the global batch, of config.context tokens; recomputed: how many blocks backward recomputes.
    """
    sent = {}
    if plan.tp > 1:
        sent["tp"] = _along_tp(config, plan, sequences, recomputed)
    if plan.cp > 1:
        ring = ring_attention if config.attention_pattern is None else sparse_ring_attention
        kind = ring if plan.attention == "ring" else ulysses
        sent["cp"] = sum(kind.elements_sent(part, 0, ranks=plan.cp, sequences=sequences, recomputed=recomputed)
                         for part in _heads_divided(config, plan.tp))
    if plan.pp > 1:
        carried = 1 if plan.sequence_parallel else plan.tp
        sent["pp"] = 2 * sequences * config.context * config.width * plan.boundaries * carried
        if config.tied and not plan.v_shaped:
            sent["pp"] += 2 * config.vocabulary * config.width * whole_gradients(plan)
    return sent


def wide_elements(config: GPTConfig, plan: Plan, sequences: int, *, recomputed: int = 0) -> dict[str, int]:
    """How many of these travel as float32 in low precision too: maxima and sums over a divided vocabulary, chances of
    gates, and the gradients of keys and values, to which each hop adds. Args: as elements_sent.
    """
    wide = {}
    if plan.tp > 1:
        wide["tp"] = 2 * (plan.tp - 1) * 3 * sequences * config.context
        wide["tp"] += (sum(sequence.gates_sent(config, length, ranks=plan.tp, sequences=sequences,
                                               recomputed=recomputed) for length in _own_lengths(config, plan))
                       if plan.sequence_parallel else
                       tensor.gates_sent(config, ranks=plan.tp, tokens=sequences * config.context))
    if plan.cp > 1 and plan.attention == "ring":
        tokens = (plan.cp * config.context if config.attention_pattern is None else
                  tokens_sent(config.attention_pattern, config.context, plan.cp))
        wide["cp"] = sum(2 * tokens * config.layers * sequences * part.key_heads * part.head_width
                         for part in _heads_divided(config, plan.tp))
    return wide


def whole_gradients(plan: Plan) -> int:
    """Copies of each gradient once the data axis has its sums: with ZeRO one for each copy of the state."""
    return plan.copies // (plan.shard or plan.copies) if plan.zero else plan.copies


def _along_tp(config: GPTConfig, plan: Plan, sequences: int, recomputed: int) -> int:
    """Along tp: activations of all tokens, and what is added up for each update, in each copy."""
    sums = whole_gradients(plan) * plan.updates(sequences)
    if plan.sequence_parallel:
        sent = sum(sequence.activations_sent(config, length, ranks=plan.tp, sequences=sequences, recomputed=recomputed)
                   for length in _own_lengths(config, plan))
        sent += 2 * (plan.tp - 1) * sequence.outside_numbers(config) * sums
    else:
        sent = tensor.activations_sent(config, ranks=plan.tp, tokens=sequences * config.context, recomputed=recomputed)
    return sent + shared_numbers(config, plan.tp) * sums


def _heads_divided(config: GPTConfig, ranks: int) -> list[GPTConfig]:
    """For each of so many ranks of tp a config with its heads."""
    return [replace(config, heads=len(queries), kv_heads=len(keys), width=len(queries) * config.head_width)
            for queries, keys in head_shares(config.heads, config.key_heads, ranks)]


def _own_lengths(config: GPTConfig, plan: Plan) -> list[int]:
    """The number of a sequence's tokens on each rank of cp."""
    if plan.attention == "ring":
        return [len(ring_attention.zigzag(config.context, rank, plan.cp)) for rank in range(plan.cp)]
    return [part.stop - part.start for part in even_slices(config.context, plan.cp)]
