"""Ring attention under a pattern: equal to one process, and only what is seen is sent and
computed."""

from typing import Any

import numpy as np
import pytest
from helpers import run as run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import check as check_plan
from plans import sent_by_axis
from plans import train as train_plan
from planted import Bug, check_caught
from split import BOUND, check_job, train
from training import tiny

import minidist as md
from minidist.autograd import ops
from minidist.autograd.ops.block_sparse import SIDE
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.backend import random_uniform
from minidist.errors import ConfigError, ShapeError
from minidist.nn import GPT
from minidist.nn.attention_pattern import pattern_blocks
from minidist.parallel.context import pieces
from minidist.parallel.context.pieces import PieceExchange, needed, tokens_sent
from minidist.parallel.context.ring_attention import context_parallel, zigzag
from minidist.parallel.context.sparse_ring_attention import (
    elements_sent,
    plain_window_attention,
    sparse_context_parallel,
    sparse_ring_attention,
)
from minidist.parallel.hybrid.hybrid import Plan
from minidist.simulate.simulate import simulate

PATTERNS = (
    "local:64",
    "local:128",
    "local:64+global:1",
    "strided:128",
    "local:64+strided:192",
    "rows:1/2/5/8/1f/3/7/c1",
    "rows:1/1/1/1/1/1/1/1",
)


def numbers(name: str, *shape: int) -> Any:
    """The same numbers on every rank, between -1 and 1."""
    return (2 * random_uniform(name, 0, range(int(np.prod(shape))), "float64") - 1).reshape(shape)


def whole(length: int, kv_heads: int, each: int) -> dict[str, Any]:
    """q, k, v and the result's gradient, of whole sequences."""
    heads = {"q": kv_heads * each, "k": kv_heads, "v": kv_heads, "dy": kv_heads * each}
    return {name: numbers(name, 2, count, length, 4) for name, count in heads.items()}


def attend(
    world: Any, pattern: str, length: int, kv_heads: int, each: int, dtype: str
) -> list[Any]:
    """This rank's tokens; attention to them, and the gradients of their q, k, v; bytes and
    messages."""
    own = zigzag(length, world.rank, world.size)
    given = {
        name: array[:, :, own].astype(dtype)
        for name, array in whole(length, kv_heads, each).items()
    }
    dy = given.pop("dy")
    leaves = {name: tensor(array, requires_grad=True) for name, array in given.items()}
    with world.ledger.during("step"):
        y = sparse_ring_attention(**leaves, group=world, length=length, pattern=pattern)
        forward = world.ledger.sent_bytes("step")
        y.backward(dy)
    sent = [
        ledger.get("world", {}).get("send", 0)
        for ledger in (forward, world.ledger.sent_bytes("step"))
    ]
    messages = world.ledger.messages("step").get("world", {}).get("send", 0)
    return [own, [y.data, *(leaf.grad for leaf in leaves.values())], sent, messages]


def alone(pattern: str, length: int, kv_heads: int, each: int) -> list[Any]:
    """The result and the gradients of one process."""
    given = whole(length, kv_heads, each)
    dy = given.pop("dy")
    leaves = {name: tensor(array, requires_grad=True) for name, array in given.items()}
    y = ops.sparse_attention(**leaves, blocks=pattern_blocks(pattern, length))
    y.backward(dy)
    return [y.data, *(leaf.grad for leaf in leaves.values())]


def needed_by_tokens(pattern: str, length: int, size: int) -> dict[tuple[int, int], int]:
    """{(rank, source): tokens of source that rank's queries see}, token by token from the mask."""
    shown = (
        np.kron(pattern_blocks(pattern, length), np.ones((SIDE, SIDE)))[:length, :length]
        * np.tri(length)
        > 0
    )
    own = [zigzag(length, rank, size) for rank in range(size)]
    return {
        (rank, source): int(shown[own[rank]][:, own[source]].any(axis=0).sum())
        for rank in range(size)
        for source in range(size)
        if rank != source
    }


def check_attention(
    size: int,
    pattern: str,
    length: int,
    kv_heads: int = 2,
    each: int = 2,
    *,
    transport: str = "threads",
    dtype: str = "float64",
    bound: float = BOUND,
) -> None:
    """Every rank's part equals that part of one process's, and bytes and messages are those of the
    mask's tokens."""
    expected = alone(pattern, length, kv_heads, each)
    ranks = run_ranks(
        attend, pattern, length, kv_heads, each, dtype, size=size, transport=transport
    )
    for own, arrays, _, _ in ranks:
        for ours, target in zip(arrays, expected, strict=True):
            assert np.all(
                np.abs(ours.astype("float64") - target[:, :, own])
                < bound * max(1.0, np.abs(target).max())
            )
    each = needed_by_tokens(pattern, length, size)
    assert tokens_sent(pattern, length, size) == sum(each.values())
    if dtype == "float64":
        token = 8 * 2 * 2 * kv_heads * 4
        assert sum(sent[0] for *_, sent, _ in ranks) == token * sum(each.values())
        assert sum(sent[1] for *_, sent, _ in ranks) == 3 * token * sum(each.values())
    assert sum(messages for *_, messages in ranks) == 3 * sum(count > 0 for count in each.values())


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_one_process_under_any_pattern(pattern: str) -> None:
    """Blocks of the zigzag that hold several blocks of the pattern, parts of one, and, in 7 tokens,
    nothing at all."""
    for size, length in ((1, 130), (2, 427), (3, 300), (5, 512)):
        check_attention(size, pattern, length)
    check_attention(4, pattern, 7)
    check_attention(3, pattern, 200, transport="threads-unbuffered")


any_attention = given(
    size=st.integers(1, 6),
    pattern=st.sampled_from(PATTERNS),
    length=st.integers(1, 512),
    kv_heads=st.integers(1, 3),
    each=st.integers(1, 3),
)


@settings(max_examples=3)
@any_attention
def test_any_attention(size: int, pattern: str, length: int, kv_heads: int, each: int) -> None:
    check_attention(size, pattern, length, kv_heads, each)


@pytest.mark.soak
@settings(max_examples=150)
@any_attention
def test_very_many_attentions(
    size: int, pattern: str, length: int, kv_heads: int, each: int
) -> None:
    """The same, more often."""
    check_attention(size, pattern, length, kv_heads, each)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads-unbuffered", "tcp", "shm", "mpi"])
def test_over_every_transport(transport: str) -> None:
    for pattern in PATTERNS:
        check_attention(4, pattern, 427, transport=transport)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_pieces_in_low_precision(dtype: str, bound: float) -> None:
    check_attention(3, "local:64+global:1", 200, dtype=dtype, bound=bound)


def test_the_bytes_of_a_window() -> None:
    """(2P - 2)(N - 64) tokens where blocks of the zigzag hold whole blocks of the pattern, however
    long the sequence; each rank talks to its neighbours alone. A dense ring sends (P - 1) T."""
    for size, window in ((2, 128), (3, 192), (4, 64), (4, 256)):
        for blocks in (4, 8):
            length = 2 * size * 64 * blocks
            assert tokens_sent(f"local:{window}", length, size) == (2 * size - 2) * (window - 64)
            for rank in range(size):
                talks = [
                    source
                    for source in range(size)
                    if source != rank
                    and needed(f"local:{window}", length, rank, source, size).total
                ]
                assert set(talks) <= {rank - 1, rank + 1}


def test_every_rank_computes_the_same_tiles() -> None:
    """Tiles of a window by rank, zigzag: equal but for the first blocks, whose window is cut
    short."""
    size = 4
    length = 4096

    def scores(rank: int) -> int:
        return sum(
            (queries.stop - queries.start) * (keys.stop - keys.start)
            for source in range(size)
            for queries, keys, _ in needed("local:256", length, rank, source, size).tiles
        )

    each = [scores(rank) for rank in range(size)]
    assert sum(each) == 64 * 64 * int(pattern_blocks("local:256", length).sum())
    assert max(each) - min(each) == 64 * 64 * (1 + 2 + 3)


def test_the_plain_loop_is_a_window_of_tokens() -> None:
    size = 3
    length = 50
    window = 9
    q, k, v = (numbers(name, length, 4) for name in "qkv")
    away = np.arange(length)[:, None] - np.arange(length)
    scores = np.where((away >= 0) & (away < window), q @ k.T / 2.0, -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    target = p / p.sum(axis=1, keepdims=True) @ v

    def job(world: Any) -> float:
        own = zigzag(length, world.rank, size)
        y = plain_window_attention(q[own], k[own], v[own], own, length, window, world)
        return float(np.abs(y - target[own]).max())

    assert max(md.run(job, size=size)) < 1e-12


def test_a_few_pieces_are_held_at_a_time() -> None:
    """The peak of communication, forward and backward: under a window some blocks of 64, however
    long the sequence; where all is seen a few times the own keys and values, however many ranks.
    """

    def job(world: Any, length: int, pattern: str) -> int:
        with account.use(account.MemoryAccount()) as memory:
            own = zigzag(length, world.rank, world.size)
            q = tensor(np.zeros((1, 1, len(own), 8)), requires_grad=True)
            y = sparse_ring_attention(q, q, q, group=world, length=length, pattern=pattern)
            y.backward(np.zeros(y.shape))
            # own keys and values, and their gradients
            return memory.peak["communication"] - 2 * 2 * q.data.nbytes

    token = 2 * 8 * 8
    for size, length in ((2, 1024), (4, 2048), (4, 4096)):
        # from and to two neighbours
        assert max(md.run(job, length, "local:128", size=size)) <= 7 * 64 * token
    for size in (4, 9):
        assert max(md.run(job, 128 * size, "strided:64", size=size)) <= 10 * 128 * token


def test_what_a_rank_sends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message has left when attention returns, and when its gradient does."""
    started = []
    start = Group.start_send
    monkeypatch.setattr(
        Group, "start_send", lambda *args: started.append(start(*args)) or started[-1]
    )
    for size in (2, 5):
        md.run(attend, "strided:64", 300, 1, 1, "float64", size=size)
        assert len(started) == 3 * size * (size - 1)
        assert all(message.delivered for message in started)
        started.clear()


# ----------------------------------------------------------------------------------------- training


def context(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """`train` under context parallelism by pieces."""
    return train(world, {"cp": world.size}, changes, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_one_process(size: int) -> None:
    check_job(
        context,
        elements_sent,
        size,
        {
            "heads": 2,
            "kv_heads": 1,
            "width": 8,
            "positions": "rotary",
            "dropout": 0.2,
            "context": 201,
            "attention_pattern": "local:64+global:1",
        },
        {"sequences": 2, "checkpoint": "0"},
        steps=2,
    )


PLANS = [
    {"cp": 3},
    {"cp": 2, "tp": 2, "attention": "all-to-all"},
    {"dp": 2, "cp": 2, "zero": 3},
    {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 2},
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "plan",
    [PLANS[0], PLANS[3], *(pytest.param(plan, marks=pytest.mark.soak) for plan in PLANS[1:3])],
    ids=str,
)
def test_composed_plans(plan: dict[str, Any]) -> None:
    """Parity, and along each axis as many bytes as the sum of the modules' formulas."""
    changes = {
        "heads": 4,
        "kv_heads": 2,
        "width": 8,
        "context": 150,
        "attention_pattern": "local:64+global:1",
    }
    ranks = check_plan(changes, plan, sequences=2, steps=2)
    axes = ranks[0]["formula"]["axes"]
    assert sent_by_axis(ranks) == {axis: sent for axis, sent in axes.items() if sent}


def test_gradients_travel_wide_in_half_precision() -> None:
    """bf16: keys and values as they are, their gradients as float32, both in the formula."""
    changes = {"dtype": "float32", "context": 150, "attention_pattern": "local:64"}
    ranks = md.run(
        train_plan, changes, {"plan": {"cp": 2, "precision": "bf16"}, "steps": 1}, size=2
    )
    assert sent_by_axis(ranks) == ranks[0]["formula"]["axes"]


# ------------------------------------------------------------------------------------------ refused


def test_the_wrong_ring() -> None:
    """A dense ring does not take a model with a pattern, nor this one a model without."""
    with pytest.raises(ConfigError, match="the model has the attention pattern local:64"):
        md.run(
            lambda world: context_parallel(
                GPT(tiny(context=128, attention_pattern="local:64")), world
            ),
            size=1,
        )
    with pytest.raises(ConfigError, match="the model has no attention pattern"):
        md.run(lambda world: sparse_context_parallel(GPT(tiny()), world), size=1)


def test_wrong_number_of_tokens() -> None:
    q = tensor(np.zeros((1, 2, 5, 4)))
    with pytest.raises(
        ShapeError, match=r"rank \d of 2 has 5 tokens, but of a sequence of 9 it should have \d"
    ):
        md.run(
            lambda world: sparse_ring_attention(q, q, q, group=world, length=9, pattern="local:64"),
            size=2,
        )


def test_the_simulator_sends_what_the_pattern_needs() -> None:
    """On four ranks of cp the simulated bytes are those of the cost above."""
    config = tiny(context=512, attention_pattern="local:128", dtype="float32")
    plan = Plan(cp=4)
    found = simulate(plan, config, "h100:1x4", batch=2)
    sent = sum(
        row["nbytes"]
        for trace in found.traces
        for row in trace.last_step
        if row["axis"] == "cp" and row["verb"] in ("send", "exchange")
    )
    assert sent == 4 * elements_sent(config, 0, ranks=4, sequences=2)


# ------------------------------------------------------------------------------------- planted bugs


def fewer_keys(right: Any, *args: Any, **options: Any) -> Any:
    """A rank leaves out the first run of what it needs."""
    found = right(*args, **options)
    return found._replace(tiles=found.tiles[1:])


def turned_hops(right: Any, self: Any, group: Any, *args: Any) -> None:
    """Hops differ between ranks: an error must end the job, not a wait without end."""
    right(self, group, *args)
    self.hops = self.hops[::-1] if group.rank else self.hops


BUGS = [
    Bug(
        "too few keys",
        pieces,
        "needed",
        fewer_keys,
        {"size": 2, "pattern": "local:128", "length": 300},
    ),
    Bug(
        "hops in another order",
        PieceExchange,
        "__init__",
        turned_hops,
        {"size": 4, "pattern": "strided:128", "length": 427},
        raises=md.errors.MinidistError,
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_are_seen(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, check_attention, monkeypatch)
