"""Ring attention: equal to one process, its bytes, its balance, and memory that is that of a
shard."""

import threading
import time
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import run as run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from split import (
    BOUND,
    GROUPED,
    any_job,
    check_job,
    check_parity,
    context,
    run,
    sequence,
)
from training import difference, global_batch, tiny

import minidist as md
from minidist.autograd import ops
from minidist.autograd.ops import online_attention
from minidist.autograd.tensor import tensor
from minidist.comm.transports.throttled import delayed
from minidist.device import account
from minidist.device.backend import random_uniform
from minidist.errors import MemoryLimitError, ShapeError
from minidist.grading import sent_since, totals
from minidist.nn import GPT
from minidist.optim import SGD
from minidist.parallel.context import ring_attention as chapter
from minidist.parallel.context import token_shard
from minidist.parallel.context.ring_attention import (
    context_parallel,
    elements_sent,
    ring_attention,
    visible,
    zigzag,
)
from minidist.parallel.data.ddp import DDP
from minidist.parallel.hybrid import hybrid_step
from minidist.parallel.memory.activations import forget_scores

# ---------------------------------------------------------------------------------------- attention


def numbers(name: str, *shape: int, dtype: str = "float64") -> Any:
    """The same numbers on every rank, between -1 and 1."""
    return (
        (2 * random_uniform(name, 0, range(int(np.prod(shape))), "float64") - 1)
        .reshape(shape)
        .astype(dtype)
    )


def parts(length: int, kv_heads: int, each: int, scale: float) -> dict[str, Any]:
    """q, k, v and the result's gradient, of whole sequences."""
    shapes = {"q": kv_heads * each, "k": kv_heads, "v": kv_heads, "dy": kv_heads * each}
    return {
        name: (scale if name == "q" else 1.0) * numbers(name, 2, heads, length, 4)
        for name, heads in shapes.items()
    }


def attend(
    world: Any, length: int, kv_heads: int, each: int, scale: float, dtype: str = "float64"
) -> list[Any]:
    """This rank's tokens; attention to them, and the gradients of their q, k, v."""
    own = zigzag(length, world.rank, world.size)
    whole = {
        name: array[:, :, own].astype(dtype)
        for name, array in parts(length, kv_heads, each, scale).items()
    }
    dy = whole.pop("dy")
    leaves = {name: tensor(array, requires_grad=True) for name, array in whole.items()}
    with world.ledger.during("step"):
        y = ring_attention(**leaves, group=world, length=length)
        forward = world.ledger.sent_bytes("step")
        y.backward(dy)
    sent = [
        ledger.get("world", {}).get("exchange", 0)
        for ledger in (forward, world.ledger.sent_bytes("step"))
    ]
    return [own, [y.data, *(leaf.grad for leaf in leaves.values())], sent[0], sent[1] - sent[0]]


def alone(length: int, kv_heads: int, each: int, scale: float) -> list[Any]:
    """causal_attention's result and gradients."""
    whole = parts(length, kv_heads, each, scale)
    dy = whole.pop("dy")
    leaves = {name: tensor(array, requires_grad=True) for name, array in whole.items()}
    y = ops.causal_attention(**leaves)
    y.backward(dy)
    return [y.data, *(leaf.grad for leaf in leaves.values())]


def check_attention(
    size: int,
    length: int,
    kv_heads: int = 2,
    each: int = 2,
    scale: float = 1.0,
    *,
    transport: str = "threads",
    dtype: str = "float64",
    bound: float = BOUND,
) -> None:
    """Every rank's part equals that part of causal_attention's, and the bytes are the formula's."""
    expected = alone(length, kv_heads, each, scale)
    ranks = run_ranks(attend, length, kv_heads, each, scale, dtype, size=size, transport=transport)
    for own, arrays, _, _ in ranks:
        for ours, whole in zip(arrays, expected, strict=True):
            assert np.all(
                np.abs(ours.astype("float64") - whole[:, :, own])
                < bound * max(1.0, np.abs(whole).max())
            )
    assert sorted(np.concatenate([own for own, *_ in ranks])) == list(range(length))
    if dtype == "float64":
        whole_piece = 8 * 2 * length * kv_heads * 4 * (size > 1)
        assert sum(forward for _, _, forward, _ in ranks) == 2 * (size - 1) * whole_piece
        assert sum(backward for _, _, _, backward in ranks) == (4 * size - 2) * whole_piece


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_equals_causal_attention(size: int) -> None:
    """Lengths that 2P divides and does not, less than 2P, and of several blocks of queries."""
    for length in (1, 7, 20, 139):
        check_attention(size, length)
    check_attention(size, 7, transport="threads-unbuffered")


any_attention = given(
    size=st.integers(1, 5),
    length=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    each=st.integers(1, 3),
    scale=st.sampled_from([1.0, 1e-3, 3e4]),
)


@settings(max_examples=5)
@any_attention
def test_any_attention(size: int, length: int, kv_heads: int, each: int, scale: float) -> None:
    """Also where scores are so large that exp of them would overflow."""
    check_attention(size, length, kv_heads, each, scale)


@pytest.mark.soak
@settings(max_examples=300)
@any_attention
def test_very_many_attentions(
    size: int, length: int, kv_heads: int, each: int, scale: float
) -> None:
    """The same, more often."""
    check_attention(size, length, kv_heads, each, scale)


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 2e-2)])
def test_low_precision(dtype: str, bound: float) -> None:
    """Off float64 by the rounding of what comes in and goes out: in between sums and gradients are
    float32."""
    check_attention(4, 33, dtype=dtype, bound=bound)


def test_a_rank_sends_its_blocks() -> None:
    """Where 2P divides the tokens each rank sends 2(P-1) blocks forward and 4P-2 backward."""
    block = 8 * 2 * (24 // 4) * 2 * 4  # batch × sequence/P × key-value width
    for _, _, forward, backward in md.run(attend, 24, 2, 2, 1.0, size=4):
        assert (forward, backward) == (6 * block, 14 * block)


def test_every_rank_has_as_much_to_do() -> None:
    """Zigzag: the scores that ranks compute differ by no more than blocks do; consecutive tokens
    would be 1 to 2P-1."""

    def scores(rank: int, size: int, length: int) -> int:
        pairs = [pair for source in range(size) for pair in visible(length, rank, source, size)]
        return sum(
            (q.stop - q.start) * (k.stop - k.start)
            if not causal
            else (q.stop - q.start) * (q.stop - q.start + 1) // 2
            for q, k, causal in pairs
        )

    for size, length in ((1, 5), (4, 64), (5, 73)):
        each = [scores(rank, size, length) for rank in range(size)]
        assert sum(each) == length * (length + 1) // 2
        assert max(each) - min(each) <= (0 if length % (2 * size) == 0 else 2 * length)


def test_wrong_number_of_tokens() -> None:
    def job(world: Any) -> None:
        q = tensor(np.zeros((1, 2, 5, 4)))
        ring_attention(q, q, q, group=world, length=9)

    with pytest.raises(
        ShapeError, match=r"rank \d of 2 has 5 tokens, but of a sequence of 9 it should have \d"
    ):
        md.run(job, size=2)
    with pytest.raises(
        ShapeError, match="ring_attention: 3 query heads cannot be divided equally among 2"
    ):
        q = tensor(np.zeros((1, 3, 4, 4)))
        k = tensor(np.zeros((1, 2, 4, 4)))
        md.run(lambda world: ring_attention(q, k, k, group=world, length=4), size=1)


# ------------------------------------------------------------------------------------- memory, time

LONG = {"heads": 2, "width": 8, "layers": 1, "vocabulary": 16, "positions": "rotary"}


def step_under(world: Any, context: int, limit: int | None, serial: bool = False) -> dict[str, int]:
    """Peak bytes of a rank after a step of one sequence of so many tokens."""
    with account.use(account.MemoryAccount(limit=limit)) as memory:
        model = GPT(tiny(**LONG, context=context))
        if not serial:
            context_parallel(model, world)
        model.initialize(0)
        forget_scores(model)
        model.loss(*global_batch(0, 1, model.config)).backward()
        return memory.peak


def test_the_peak_is_that_of_a_shard() -> None:
    """A context P times as long: P ranks need no more than one needs of its P-th part, but for
    pieces on their way."""
    context = 128
    size = 4
    one = step_under(None, context, None, serial=True)
    piece = 8 * 2 * context * LONG["width"]  # keys and values of a rank's tokens
    limit = one["total"] + 5 * piece
    for peak in md.run(step_under, context * size, limit, size=size):
        assert peak["total"] <= limit
        # its targets: an array of its own
        assert peak["activations"] <= one["activations"] + 8 * context
        assert peak["communication"] == 5 * piece
    with pytest.raises(MemoryLimitError, match="do not fit under the limit"):
        step_under(None, context * size, limit, serial=True)


def test_nobody_makes_all_scores() -> None:
    """By what NumPy allocates, over all ranks: a fraction of even one rank's scores with one
    other's keys."""
    length = 2048
    size = 4
    whole = {name: numbers(name, 1, 1, length, 4) for name in ("q", "k", "v")}

    def job(world: Any) -> None:
        own = zigzag(length, world.rank, world.size)
        leaves = [tensor(array[:, :, own], requires_grad=True) for array in whole.values()]
        y = ring_attention(*leaves, group=world, length=length)
        y.backward(np.ones(y.shape))

    tracemalloc.start()
    try:
        md.run(job, size=size)
        assert tracemalloc.get_traced_memory()[1] < 8 * (length // size) ** 2 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("waits", [False, True])
def test_blocks_are_computed_with_while_pieces_are_on_their_way(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and back, between the start of each piece and the wait for it, but for the gradients
    that come home; not where a rank waits for what it starts."""
    own = threading.local()
    start = chapter.pass_on
    absorb = online_attention.OnlineSoftmax.absorb
    add = online_attention.OnlineGradients.add

    class Piece:
        def __init__(self, pending: Any) -> None:
            self.pending = pending
            self.blocks = own.blocks
            if waits:
                self.wait()

        def wait(self) -> Any:
            own.beside.setdefault(self, own.blocks - self.blocks)
            return self.pending.wait()

    def counted(work: Any) -> Any:
        def block(*args: Any, **options: Any) -> None:
            own.blocks += 1
            work(*args, **options)

        return block

    monkeypatch.setattr(chapter, "pass_on", lambda *args: Piece(start(*args)))
    monkeypatch.setattr(chapter.OnlineSoftmax, "absorb", counted(absorb))
    monkeypatch.setattr(chapter.OnlineGradients, "add", counted(add))

    def job(world: Any) -> list[int]:
        own.blocks = 0
        own.beside = {}
        q, k = (tensor(numbers(name, 2, 2, 4, 4), requires_grad=True) for name in "qk")
        y = ring_attention(q, k, k, group=world, length=12)
        y.backward(np.ones(y.shape))
        return list(own.beside.values())

    for beside in md.run(job, size=3):
        assert beside == [0] * 7 if waits else [3, 2, 3, 2, 2, 2, 0]


@pytest.mark.parametrize("tokens", [1, 100_000])
def test_a_hop_is_one_message_of_any_size(tokens: int) -> None:
    """Also of an array larger than a ring all-reduce sends at once."""

    def job(world: Any) -> tuple[int, int]:
        kv = np.zeros((2, 1, 1, tokens, 8))
        before = totals(world.ledger)
        assert [source for source, _ in chapter.around(world, kv, 3 * tokens)] == [
            (world.rank - hop) % 3 for hop in range(3)
        ]
        return sent_since(world.ledger, before)

    assert md.run(job, size=3) == [(2, 2 * 2 * tokens * 8 * 8)] * 3


@pytest.mark.soak  # of seconds
def test_pieces_travel_while_others_are_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece takes 40 ms on its way and 20 ms of work for each of two pairs of blocks: both at
    once."""
    original = online_attention.OnlineSoftmax.absorb

    def slowly(self: Any, *args: Any, **options: Any) -> None:
        time.sleep(0.02)
        original(self, *args, **options)

    monkeypatch.setattr(chapter.OnlineSoftmax, "absorb", slowly)
    size = 3
    length = 12
    nbytes = 8 * 2 * 2 * 2 * (length // size) * 4

    def job(world: Any) -> float:
        q, k = (tensor(numbers(name, 2, 2, length // size, 4)) for name in "qk")
        with delayed(world, alpha=0.0, beta=0.04 / nbytes) as slow:
            slow.barrier()
            start = time.perf_counter()
            ring_attention(q, k, k, group=slow, length=length)
            return time.perf_counter() - start

    one_after_the_other = 0.06 + 2 * (0.04 + 0.04)
    taken = 1.0
    for _ in range(5):  # other programs can only add to it
        taken = min(taken, max(md.run(job, size=size)))
        if taken < one_after_the_other - 0.04:
            break
    assert taken < one_after_the_other - 0.04


# ----------------------------------------------------------------------------------------- training


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5])
def test_training_equals_one_process(size: int) -> None:
    """Seven tokens: less than 2P blocks for the largest; one rank more gets one more."""
    check_job(
        context, elements_sent, size, {"dropout": 0.2, "context": 7}, {"sequences": 3}, steps=3
    )


@pytest.mark.soak  # test_any_job draws both
def test_grouped_queries_and_rotary_positions() -> None:
    check_job(
        context,
        elements_sent,
        3,
        {**GROUPED, "context": 13},
        {"sequences": 2, "checkpoint": "all", "accumulate": 2},
        steps=3,
    )


@settings(max_examples=2)
@any_job(context=st.integers(1, 23))
def test_any_job(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    check_job(context, elements_sent, size, changes, options, steps=2)


@pytest.mark.soak
@settings(max_examples=200)
@any_job(context=st.integers(1, 23))
def test_very_many_jobs(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """The same, more often."""
    check_job(context, elements_sent, size, changes, options, steps=3)


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str) -> None:
    """Replicas stay equal, and near one process: sums are rounded where the sequence is cut."""
    changes = {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[precision], "context": 13}
    alone, ranks = (run(context, count, changes, precision=precision) for count in (1, 3))
    assert all(difference(rank["weights"], ranks[0]["weights"]) == 0.0 for rank in ranks)
    np.testing.assert_allclose(ranks[0]["losses"], alone[0]["losses"], rtol=2e-2)


def test_generating_text() -> None:
    """Every rank draws the text that one process draws, also while it has fewer tokens than
    ranks."""

    def job(world: Any) -> list[int]:
        model = GPT(tiny(context=9))
        if world.size > 1:
            context_parallel(model, world)
        model.initialize(5)
        return model.generate([1], 12, temperature=0.9).tolist()

    expected = md.run(job, size=1)[0]
    assert md.run(job, size=3) == [expected] * 3


def test_the_loss_is_the_mean_of_all_tokens() -> None:
    """Without a divisor too, and on ranks that have no token."""
    config = tiny(context=3)

    def job(world: Any) -> float:
        model = GPT(config)
        if world.size > 1:
            context_parallel(model, world)
        model.initialize(1)
        return float(model.loss(*global_batch(0, 2, config)).item())

    np.testing.assert_allclose(md.run(job, size=4), md.run(job, size=1) * 4, rtol=1e-14)


# -------------------------------------------------------------------- the parity test sees the bugs


def forgetful_update(right: Any, scores: Any, v: Any, y: Any, top: Any, total: Any) -> None:
    """What was summed under an old maximum is left as it is."""
    now = np.maximum(top, scores.max(axis=-2, keepdims=True))
    p = np.exp(scores - now)
    total += p.sum(axis=-2, keepdims=True)
    y += p.swapaxes(-1, -2) @ v
    top[...] = now


def mean_of_means(right: Any, model: Any, key: Any, own: Any) -> Any:
    """A rank's share of the loss is the mean over its own tokens; three ranks."""

    def loss(part: Any, divisor: int) -> Any:
        rows, length = part.inputs.shape
        return right(model, key, own)(part, rows * len(np.arange(length)[own(length)]) * 3)

    return loss


BUGS = [
    Bug("gradients not added", DDP, "_start_reduce", lambda right, self, index: None),
    # the position offset forgotten: learned and rotary
    Bug(
        "positions of the first tokens",
        chapter,
        "pick",
        lambda right, array, own, dim: array[: len(own(len(array)))],
    ),
    Bug("no scaling down", online_attention, "_update", forgetful_update),
    # N2:315: L/2 × L/2 scores a rank
    Bug(
        "own piece alone",
        chapter,
        "visible",
        lambda right, length, rank, source, size: (
            right(length, rank, source, size) if rank == source else iter(())
        ),
    ),
    Bug(
        "no mask",
        chapter,
        "visible",
        lambda right, *args: ((q, k, False) for q, k, _ in right(*args)),
    ),
    Bug("share of the loss by own tokens", hybrid_step, "loss_of_tokens", mean_of_means),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    job: dict[str, Any] = {"changes": {"positions": "rotary", "context": 7}}
    check_caught(
        bug, partial(check_parity, context, 3, **job, optimizer=SGD, clip=None), monkeypatch
    )


def of_the_first(right: Any, self: Any, *args: Any, **options: Any) -> Any:
    """A layer takes the first tokens for the own."""
    own = self.own
    self.own = lambda length: slice(0, len(np.arange(length)[own(length)]))
    try:
        return right(self, *args, **options)
    finally:
        self.own = own


OTHER_TOKENS = [
    Bug(
        "learned positions",
        token_shard.TokenShardPositions,
        "forward",
        of_the_first,
        {"kind": context},
    ),
    Bug("dropout", token_shard.TokenShardDropout, "forward", of_the_first, {"kind": sequence}),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", OTHER_TOKENS, ids=str)
def test_other_tokens_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check_parity, size=2, changes={"dropout": 0.2}), monkeypatch)
