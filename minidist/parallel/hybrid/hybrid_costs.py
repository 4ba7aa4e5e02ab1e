"""Elements that a composed plan sends along each axis, and bytes that an offload moves: sums of the
chapters' formulas."""

from dataclasses import replace
from typing import Any

from minidist.nn import GPTConfig
from minidist.nn.shares import even_slices, head_shares
from minidist.parallel.context import ring_attention, sparse_ring_attention, ulysses
from minidist.parallel.context import sequence_parallel as sequence
from minidist.parallel.context.pieces import tokens_sent
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.memory.offload_costs import moved_to_disk, moved_to_host, numbers_moved
from minidist.parallel.pipeline.instructions import BackwardWeights, Forward, Schedule
from minidist.parallel.step.strategy import Collective
from minidist.parallel.tensor import tensor_parallel as tensor
from minidist.parallel.tensor.tensor_layers import shared_numbers
from minidist.parallel.zero.memory_formula import Each


def elements_sent(
    config: GPTConfig, plan: Plan, sequences: int, *, recomputed: int = 0
) -> dict[str, int]:
    """Return the count of numbers that all ranks together send in a step along tp, cp and pp,
    without scalars; for dp see its chapters.

    Args:    sequences: of the global batch, of config.context tokens; recomputed: number of blocks
             that backward recomputes.
    """
    sent = {}
    if plan.tp > 1:
        sent["tp"] = _along_tp(config, plan, sequences, recomputed)
    if plan.cp > 1:
        ring = ring_attention if config.attention_pattern is None else sparse_ring_attention
        kind = ring if plan.attention == "ring" else ulysses
        sent["cp"] = sum(
            kind.elements_sent(part, 0, ranks=plan.cp, sequences=sequences, recomputed=recomputed)
            for part in _heads_divided(config, plan.tp)
        )
    if plan.pp > 1:
        carried = 1 if plan.sequence_parallel else plan.tp
        sent["pp"] = 2 * sequences * config.context * config.width * plan.boundaries * carried
        if config.tied and not plan.v_shaped:
            sent["pp"] += 2 * config.vocabulary * config.width * whole_gradients(plan)
    return sent


def wide_elements(
    config: GPTConfig, plan: Plan, sequences: int, *, recomputed: int = 0
) -> dict[str, int]:
    """Return how many of these are sent as float32 in low precision too, along each axis.

    They are maxima and sums over a divided vocabulary, gate probabilities, and the gradients of
    keys and values, to which each hop adds. Args: as elements_sent.
    """
    wide = {}
    if plan.tp > 1:
        wide["tp"] = 2 * (plan.tp - 1) * 3 * sequences * config.context
        wide["tp"] += (
            sum(
                sequence.gates_sent(
                    config, length, ranks=plan.tp, sequences=sequences, recomputed=recomputed
                )
                for length in _own_lengths(config, plan)
            )
            if plan.sequence_parallel
            else tensor.gates_sent(config, ranks=plan.tp, tokens=sequences * config.context)
        )
    if plan.cp > 1 and plan.attention == "ring":
        tokens = (
            plan.cp * config.context
            if config.attention_pattern is None
            else tokens_sent(config.attention_pattern, config.context, plan.cp)
        )
        wide["cp"] = sum(
            2 * tokens * config.layers * sequences * part.key_heads * part.head_width
            for part in _heads_divided(config, plan.tp)
        )
    return wide


def whole_gradients(plan: Plan) -> int:
    """Return the number of copies of each gradient once the data axis has its sums: with ZeRO one
    for each copy of the state."""
    return plan.copies // (plan.shard or plan.copies) if plan.zero else plan.copies


def data_collectives(trainer: Any, sequences: int) -> list[Collective]:
    """Return the collectives of a Trainer's data axis in a step on `sequences` sequences of all
    ranks.

    Under a pipeline each microbatch is a pass of ZeRO-2 and 3, and under PipeDream an update of
    DDP.
    """
    plan = trainer.plan
    data = trainer.strategy.data_axis
    pipeline = trainer.strategy.pipeline
    if pipeline is None or not data.reduces_each_pass:
        return data.traffic(plan.accumulate) * plan.updates(sequences)  # type: ignore[no-any-return]
    passes = plan.accumulate * plan.pieces
    # 0: the optimizer on the host of a rank that shares its weights with no other
    if plan.zero != 3:
        return data.traffic(passes)  # type: ignore[no-any-return]
    fetches = [
        plan.accumulate
        * gathers(pipeline.schedule, pipeline.group.rank, stage, keep=plan.keep_gathered)
        for stage in pipeline.stages.layers
    ]
    return data.traffic(passes, fetches)  # type: ignore[no-any-return]


def moved_in_a_step(trainer: Any) -> dict[str, int]:
    """Return the bytes that this rank of a Trainer with an offload moves in a step, by direction
    (chapter 20)."""
    plan = trainer.plan
    data = trainer.strategy.data_axis
    weights = next(trainer.model.parameters())
    masters = plan.precision != "fp32"
    each = Each.of(
        weights.dtype.itemsize, moments=len(trainer.optimizer.state_names), masters=masters
    )
    learning = sum(piece.data.size for _, piece in data.updated())
    numbers = numbers_moved(data_collectives(trainer, 1), weights.dtype.itemsize)
    if plan.offload == "optimizer":
        return moved_to_host(learning, each, reduced=numbers["reduce_scatter"])
    again = [flat for flat in data.flats if data.sharing.has_copies(flat)]
    again += trainer.strategy.flats_with_sums if plan.composed else []
    return moved_to_disk(
        0,
        0,
        learning,
        each,
        masters=masters,
        fetched=numbers["all_gather"],
        reduced=numbers["reduce_scatter"],
        outside=sum(flat.chunk_size for flat in again),
    )


def _along_tp(config: GPTConfig, plan: Plan, sequences: int, recomputed: int) -> int:
    """Return the count along tp: activations of all tokens, and gradients that are added up for
    each update, in each copy."""
    sums = whole_gradients(plan) * plan.updates(sequences)
    if plan.sequence_parallel:
        sent = sum(
            sequence.activations_sent(
                config, length, ranks=plan.tp, sequences=sequences, recomputed=recomputed
            )
            for length in _own_lengths(config, plan)
        )
        sent += 2 * (plan.tp - 1) * sequence.outside_numbers(config) * sums
    else:
        sent = tensor.activations_sent(
            config, ranks=plan.tp, tokens=sequences * config.context, recomputed=recomputed
        )
    return sent + shared_numbers(config, plan.tp) * sums


def _heads_divided(config: GPTConfig, ranks: int) -> list[GPTConfig]:
    """Return for each of `ranks` ranks of tp a config with its heads."""
    return [
        replace(
            config, heads=len(queries), kv_heads=len(keys), width=len(queries) * config.head_width
        )
        for queries, keys in head_shares(config.heads, config.key_heads, ranks)
    ]


def _own_lengths(config: GPTConfig, plan: Plan) -> list[int]:
    """Return the number of a sequence's tokens on each rank of cp."""
    if plan.attention == "ring":
        return [
            len(ring_attention.zigzag(config.context, rank, plan.cp)) for rank in range(plan.cp)
        ]
    return [part.stop - part.start for part in even_slices(config.context, plan.cp)]


def gathers(schedule: Schedule, rank: int, stage: int, *, keep: bool) -> int:
    """Return the number of times that ZeRO-3 gathers a unit of a stage in one pass.

    That is once for each forward and each backward. With `keep`: once for each forward that begins
    while no microbatch of the stage is in progress.
    """
    times = on_its_way = 0
    for instruction in schedule.computes(rank):
        if instruction.stage != stage or isinstance(instruction, BackwardWeights):
            continue
        forward = isinstance(instruction, Forward)
        times += not keep or (forward and not on_its_way)
        on_its_way += 1 if forward else -1
    return times
