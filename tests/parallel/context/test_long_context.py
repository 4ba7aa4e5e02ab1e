"""32,768 tokens on four ranks: the peak is that of a shard, dense and under a window; with
processes, in minutes."""

import resource
from typing import Any

import pytest
from training import global_batch

import minidist as md
from minidist.device import account
from minidist.nn import GPT, GPTConfig
from minidist.parallel.context.ring_attention import context_parallel
from minidist.parallel.context.sparse_ring_attention import sparse_context_parallel, tokens_sent
from minidist.parallel.memory.activations import forget_scores

TOKENS = 32768
RANKS = 4
WIDTH = 32
WINDOW = "local:1024"


def peak_of_a_step(world: Any, tokens: int, pattern: str | None, divided: bool) -> dict[str, float]:
    """Peak bytes of a rank in forward and backward of one sequence, by the account; and of its
    process, by the system."""
    config = GPTConfig(
        vocabulary=64,
        context=tokens,
        layers=2,
        width=WIDTH,
        heads=2,
        positions="rotary",
        attention_pattern=pattern,
    )
    with account.use(account.MemoryAccount()) as memory:
        model = GPT(config)
        if divided:
            (context_parallel if pattern is None else sparse_context_parallel)(model, world)
        model.initialize(0)
        forget_scores(model)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with world.ledger.during("step"):
            loss = model.loss(*global_batch(0, 1, config))
            loss.backward()
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        sent = sum(world.ledger.sent_bytes("step").get("world", {}).values())
        return {"loss": float(loss.data), "process": grown, "sent": sent, **memory.peak}


def measured(size: int, tokens: int, pattern: str | None) -> list[dict[str, float]]:
    """One process with the whole sequence, or so many with a part of it."""
    return md.run(peak_of_a_step, tokens, pattern, size > 1, size=size, transport="shm", limit=1500)


@pytest.mark.soak
@pytest.mark.parametrize("pattern", [None, WINDOW], ids=["dense", "window"])
def test_four_ranks_hold_a_quarter(pattern: str | None) -> None:
    """Four ranks, 32,768 tokens: no rank holds more activations than one process with 8,192, and
    all peaks are those of a shard; the loss is that of one process with the whole sequence.
    """
    (whole,) = measured(1, TOKENS, pattern)
    (shard,) = measured(1, TOKENS // RANKS, pattern)
    ranks = measured(RANKS, TOKENS, pattern)
    piece = 4 * 2 * (TOKENS // RANKS) * WIDTH
    for rank in ranks:
        print(pattern or "dense", rank)
        assert abs(rank["loss"] - whole["loss"]) < 1e-4 * whole["loss"]
        assert rank["activations"] <= 1.01 * shard["activations"]
        assert rank["communication"] <= 5 * piece
        assert rank["total"] <= 1.01 * shard["total"] + 5 * piece < 0.5 * whole["total"]
    print("one process", whole, "a shard alone", shard)
    if pattern is not None:
        token = 4 * 2 * WIDTH
        assert sum(rank["sent"] for rank in ranks) == 2 * 3 * token * tokens_sent(
            pattern, TOKENS, RANKS
        )
        assert max(rank["communication"] for rank in ranks) < 3 * piece
