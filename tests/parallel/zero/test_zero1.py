"""ZeRO-1: equal to one process, at DDP's traffic, with the optimizer's state divided."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from strategies import any_zero_job
from training import SMALL_BUCKETS, difference, global_batch, tiny
from zero import BOUND, check_equal, sent_for_training, train

import minidist as md
from minidist.autograd.tensor import Parameter
from minidist.errors import ConfigError, GradientError, MismatchError
from minidist.nn import GPT
from minidist.parallel.data.buckets import cut
from minidist.parallel.step import step as step_module
from minidist.parallel.step.flat import Flat
from minidist.parallel.step.step import Part, micro_parts
from minidist.parallel.zero.replica import ParameterArrivals
from minidist.parallel.zero.zero1 import Zero1

# --------------------------------------------------------------------------- parallel equals serial
# tests/parallel/test_parity.py has whole trainings on fixed sizes, over every transport


@settings(max_examples=3)
@any_zero_job
def test_any_job(size: int, accumulate: int, options: dict[str, Any]) -> None:
    """Uneven parts and shards, ranks without a row, accumulation, a weight used twice, frozen
    weights."""
    check_equal(1, size, steps=2, step_options={"accumulate": accumulate}, **options)


@pytest.mark.soak
@settings(max_examples=200)
@any_zero_job
def test_very_many_jobs(size: int, accumulate: int, options: dict[str, Any]) -> None:
    """The same, more often."""
    check_equal(1, size, steps=2, step_options={"accumulate": accumulate}, **options)


BUGS = [
    Bug(
        "averages twice",
        Zero1,
        "forward",
        lambda right, self, part, divisor: right(self, part, divisor=divisor * 2),
        {"clip": None},
    ),
    Bug(
        "clips by its own norm",
        step_module,
        "add_squares",
        lambda right, group, share, batch: share,
    ),
    Bug("keeps its weights", ParameterArrivals, "start", lambda right, self: None),
    Bug(
        "reduces each pass",
        Zero1,
        "backward",
        lambda right, self, share, last: right(self, share, last=True),
        raises=GradientError,  # what was reduced already is refused
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(check_equal, 1, 3, optimizer="sgd", clip=0.1, step_options={"accumulate": 2})
    check_caught(bug, check, monkeypatch)


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "accumulate"), [(2, 1), (3, 2), (5, 1)])
def test_bytes_and_messages_are_the_formula(size: int, accumulate: int) -> None:
    steps = 2
    ranks = md.run(
        lambda world: train(world, 1, steps=steps, step_options={"accumulate": accumulate}),
        size=size,
    )
    model = GPT(tiny())
    model.initialize(0)
    buckets = len(cut(model.parameters(), SMALL_BUCKETS))
    each = steps * (size - 1) * ranks[0]["nbytes"]
    assert sent_for_training(ranks) == {"reduce_scatter": each, "all_gather": each}
    for rank in ranks:
        assert rank["messages"]["world"] == dict.fromkeys(
            rank["sent"]["world"], steps * (size - 1) * buckets
        )
        for nbytes in rank["sent"]["world"].values():
            assert abs(nbytes - each / size) <= steps * buckets * 2 * 8
        assert sum(rank["sent"]["control"].values()) == steps * 2 * 8 * (size - 1)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_a_parameter(size: int) -> None:
    """float32, Adam: 4 + 4 + 8/P, each category within an element a bucket."""
    changes = {"dtype": "float32", "width": 32, "vocabulary": 50}
    for rank in md.run(
        lambda world: train(world, 1, changes, bucket_bytes=16384, optimizer="adam"), size=size
    ):
        nbytes = rank["nbytes"]
        memory = rank["memory"]
        for category, expected in (("parameters", nbytes), ("gradients", nbytes)):
            assert memory[category]["now"] == memory[category]["peak"] == expected
        assert memory["optimizer"]["now"] == pytest.approx(2 * nbytes / size, rel=0.01, abs=200)


# -------------------------------------------------------------------------------------------- order


def test_buckets_set_out_in_order_during_backward() -> None:
    def job(world: Any) -> list[str]:
        model = GPT(tiny())
        lines = []
        model.initialize(0)
        strategy = Zero1(model, world, bucket_bytes=SMALL_BUCKETS)
        start = strategy._bucket_order.start
        strategy._bucket_order.start = lambda index: (
            lines.append(f"bucket {index}"),
            start(index),
        )[1]  # type: ignore
        list(model.parameters())[0].hooks.append(lambda parameter: lines.append("first parameter"))
        strategy.backward(
            strategy.forward(strategy.part_of(global_batch(0, 4, tiny())), divisor=24)
        )
        return lines

    for lines in md.run(job, size=2):
        started = [line for line in lines if line.startswith("bucket")]
        assert len(started) > 2 and started == [f"bucket {index}" for index in range(len(started))]
        assert lines.index("first parameter") >= len(started) - 1


# ----------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_refused() -> None:
    def job(world: Any) -> None:
        model = GPT(tiny())
        model.initialize(world.rank)
        with pytest.raises(MismatchError, match=r"ranks \[1\] differ"):
            Zero1(model, world)
        model.initialize(0)
        strategy = Zero1(model, world)
        inputs, targets = global_batch(0, 2, tiny())
        with pytest.raises(GradientError, match=f"ZeRO-1 rank {world.rank} of 2"):
            model.loss(inputs, targets).backward()
        with pytest.raises(ConfigError, match="accumulate=0"):
            strategy.step((inputs, targets), None, accumulate=0)  # type: ignore[arg-type]
        for parameter in model.parameters():
            parameter.requires_grad = False
        with pytest.raises(ConfigError, match="nothing to train"):
            Zero1(model, world)

    md.run(job, size=2)


# -------------------------------------------------------------------------------------- flat shards


@given(
    sizes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6),
    size=st.integers(1, 7),
)
def test_pieces_are_an_array_split(sizes: list[list[int]], size: int) -> None:
    """Together the ranks' pieces are every element once, in order, with as many dims as their
    parameters."""
    parameters = [
        Parameter(np.full(shape, float(i)), name=f"p{i}") for i, shape in enumerate(sizes)
    ]
    whole = np.concatenate([p.data.reshape(-1) for p in parameters])
    for rank, chunk in enumerate(np.array_split(whole, size)):
        flat = Flat(parameters, type("Group", (), {"rank": rank, "size": size})())  # type: ignore[arg-type]
        assert (flat.size, flat.chunk_size) == (len(whole), len(chunk))
        pieces = flat.pieces(whole[flat.chunk], -whole[flat.chunk])
        np.testing.assert_array_equal(
            np.concatenate([piece.data.reshape(-1) for piece in pieces]), chunk
        )
        assert [piece.data.ndim for piece in pieces] == [max(1, p.ndim) for p in parameters]
        for (_, _, positions), piece in zip(flat.chunk_spans(), pieces, strict=True):
            assert len(positions) == piece.data.size == piece.grad.size


def test_micro_parts_know_their_rows() -> None:
    rows = np.arange(7).reshape(7, 1)
    micros = micro_parts(Part(rows + 10, rows, 10), 3)
    assert [micro.first for micro in micros] == [10, 13, 15]
    np.testing.assert_array_equal(np.concatenate([micro.inputs for micro in micros]), rows + 10)


def test_weights_move_into_one_vector() -> None:
    model = GPT(tiny())
    model.initialize(0)
    before = model.state_dict()
    (run,) = cut(model.parameters(), 1 << 20)
    vector = Flat(run, type("Group", (), {"rank": 0, "size": 1})()).join()  # type: ignore[arg-type]
    assert difference(model.state_dict(), before) < BOUND
    assert all(np.shares_memory(p.data, vector) for p in model.parameters())
