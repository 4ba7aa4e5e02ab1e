"""Run what lesson 13 and its figure share: a small model cut in three ways, its costs, a ring by
hand."""

import time
from functools import partial
from typing import Any

import numpy as np

from minidist.autograd.ops.online_attention import OnlineSoftmax
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import random_uniform
from minidist.lessons.lab import hashed_batch
from minidist.nn import GPT, GPTConfig
from minidist.optim import AdamW
from minidist.parallel.context import (
    ring_attention,
    sequence_parallel,
    sparse_ring_attention,
    ulysses,
)
from minidist.parallel.context.context_parallel import ContextParallel
from minidist.parallel.context.sequence_parallel import SequenceParallel
from minidist.parallel.hybrid.hybrid_step import Hybrid, own_loss
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.parallelize import compose, no_dropout
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.memory.activations import forget_scores
from minidist.parallel.step.recorder import Silent
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Part
from minidist.parallel.zero.shards import ShardStore

NAMES = ("sequence", "ring", "all-to-all")
TITLES = {
    "sequence": "sequence (Megatron's)",
    "ring": "ring attention",
    "all-to-all": "all-to-all attention",
}
CUTS: dict[str, tuple[str, Any]] = {
    "sequence": ("tp", SequenceParallel),
    "ring": ("cp", ContextParallel),
    "all-to-all": ("cp", partial(ContextParallel, attention="all-to-all")),
    "pieces": ("cp", ContextParallel),  # of a model with an attention pattern
}
SEQUENCES = 2


def config_for(ranks: int, context: int) -> GPTConfig:
    """Return a model of two blocks with rotary positions and a head for every rank, in float64."""
    heads = max(8, ranks)
    return GPTConfig(
        vocabulary=max(32, ranks),
        context=context,
        layers=2,
        width=4 * heads,
        heads=heads,
        positions="rotary",
        dtype="float64",
    )


def global_batch(
    config: GPTConfig, step: int, sequences: int = SEQUENCES
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a step, the same on every rank."""
    return hashed_batch(f"lesson 13, batch {step}", config, sequences)


def strategy_for(group: Group, config: GPTConfig, name: str, change: Any = None) -> Any:
    """Return the strategy that a Trainer makes for a model cut as `name` says.

    Args:    name: a key of CUTS, or "one process". change: is given the cut model before its
             weights are drawn.
    """
    model = GPT(config)
    if name == "one process":
        model.initialize(0)
        return Single(model)
    axis, divides = CUTS[name]
    mesh = Mesh(group, **{axis: group.size})
    axes = [divides(model, mesh[axis])]
    if change is not None:
        change(model, group)
    plan = Plan(cp=mesh.shape["cp"], tp=mesh.shape["tp"])
    return compose(model, mesh, plan, axes, seed=0)


def sent(group: Group, phase: str, verb: str | None = None) -> int:
    """Return the bytes that this rank sent in a phase along the axes of its mesh: by one verb, or
    by all."""
    return sum(
        nbytes
        for axis, verbs in group.ledger.sent_bytes(phase).items()
        for each, nbytes in verbs.items()
        if axis != "control" and each == (verb or each)
    )


def train(group: Group, config: GPTConfig, name: str, steps: int, phase: str = "lesson 13") -> Any:
    """Train for some steps and return the strategy; what it sent is counted under `phase`."""
    strategy = strategy_for(group, config, name)
    optimizer = AdamW(strategy.parameters, 1e-2)
    for step in range(steps):
        with group.ledger.during(phase):
            strategy.step(global_batch(config, step), optimizer, clip=0.5)
    return strategy


def peaks(
    group: Group, config: GPTConfig, name: str, *, limit: int | None = None
) -> dict[str, int]:
    """Return this rank's peak bytes in forward and backward of one sequence."""
    inputs, targets = global_batch(config, 0, sequences=1)
    with account.use(account.MemoryAccount(limit=limit)) as memory:
        model = GPT(config)
        axes = []
        mesh = Mesh(group, dp=group.size)
        if name != "one process":
            axis, divides = CUTS[name]
            mesh = Mesh(group, **{axis: group.size})
            axes = [divides(model, mesh[axis])]
        model.initialize(0)
        forget_scores(model)
        memory.reset_peak()
        step = Hybrid(
            model,
            mesh,
            Plan(),
            axes,
            # no replicas, whose buckets of gradients would count too
            Single(model, loss=own_loss(model, axes, no_dropout)),
            recorder=Silent(),
            store=ShardStore(),
        )
        step.run(Part(inputs, targets, 0), divisor=targets.size, last=True)
        return memory.peak


def formula(group: Group, config: GPTConfig, name: str, parameters: int) -> int:
    """Return how many numbers all ranks send in a step, by the module's own formula."""
    if name == "sequence":
        return sequence_parallel.elements_sent(config, ranks=group.size, sequences=SEQUENCES)
    module: Any = {"ring": ring_attention, "pieces": sparse_ring_attention, "all-to-all": ulysses}[
        name
    ]
    return module.elements_sent(config, parameters, ranks=group.size, sequences=SEQUENCES)


# --------------------------------------------------------------------------------- the ring by hand


def numbers(name: str, length: int, width: int = 4) -> np.ndarray:
    """Return numbers (1, 1, length, width), between -1 and 1, the same on every rank."""
    between = np.asarray(random_uniform(f"lesson 13, {name}", 0, range(length * width), "float64"))
    return (2 * between - 1).reshape(1, 1, length, width)


def consecutive(length: int, rank: int, size: int) -> np.ndarray:
    """Return the positions of a rank's tokens if the sequence were cut into P consecutive parts."""
    return np.array_split(np.arange(length), size)[rank]


def scores_seen(length: int, rank: int, size: int) -> int:
    """Return how many scores of a rank softmax uses with the zigzag, by the library's own list of
    blocks."""
    pairs = [
        pair
        for source in range(size)
        for pair in ring_attention.visible(length, rank, source, size)
    ]
    return sum(
        (q.stop - q.start) * (q.stop - q.start + 1) // 2
        if causal
        else (q.stop - q.start) * (k.stop - k.start)
        for q, k, causal in pairs
    )


def walk(group: Group, length: int) -> dict[str, Any]:
    """Run ring attention's forward by the library's parts; record which blocks were multiplied at
    which hop, and every message.

    Returns: rank 0: {"pairs": (rank, hop, source, query block, key block), "messages": (src, dst,
    start, bytes)}.
    """
    own = ring_attention.zigzag(length, group.rank, group.size)
    q, k, v = (numbers(name, length)[:, :, own] for name in "qkv")
    running = OnlineSoftmax(q)
    pairs = []
    messages = []
    unsubscribe = group.ledger.subscribe(
        lambda event: (
            messages.append(
                (event.details["src"], event.details["dst"], event.start, event.details["nbytes"])
            )
            if event.kind == "message" and event.details["verb"] == "exchange"
            else None
        )
    )
    for hop, (source, piece) in enumerate(ring_attention.around(group, np.stack([k, v]), length)):
        for queries, keys, causal in ring_attention.visible(length, group.rank, source, group.size):
            k_seen, v_seen = piece[:, :, :, keys]
            running.absorb(q / 2, k_seen, v_seen, queries, causal=causal)
            numbered = [
                next(
                    number
                    for number, place in ring_attention.own_blocks(length, rank, group.size)
                    if place == where
                )
                for rank, where in ((group.rank, queries), (source, keys))
            ]
            pairs.append((group.rank, hop, source, *numbered))
        time.sleep(0.001)
    unsubscribe()
    with group.ledger.control():
        all_pairs = group.gather(np.array(pairs))
        all_messages = group.gather(np.array(messages, np.float64).reshape(-1, 4))
    return {} if group.rank else {"pairs": all_pairs.tolist(), "messages": all_messages.tolist()}
