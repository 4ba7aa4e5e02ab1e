"""ZeRO-2: equal to one process, (A+1)Ψ of traffic, and never more gradient than the shard and two
buckets."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from planted import Bug, check_caught
from strategies import any_zero_job
from training import CHOICES, SMALL_BUCKETS, Chooser, global_batch, tiny
from zero import check_equal, sent_for_training, train

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import Parameter
from minidist.errors import GradientError
from minidist.nn import GPT
from minidist.optim import AdamW
from minidist.parallel.data.buckets import cut
from minidist.parallel.step.single import Single
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2

# --------------------------------------------------------------------------- parallel equals serial
# tests/parallel/test_parity.py has whole trainings on fixed sizes, over every transport


@pytest.mark.parametrize("size", [5, 1, 2])
def test_the_bits_of_zero1(size: int) -> None:
    """Both sum each gradient in the same order."""
    first, second = (
        md.run(lambda world, stage=stage: train(world, stage), size=size)[0] for stage in (1, 2)
    )
    assert first["digest"] == second["digest"]


@settings(max_examples=3)
@any_zero_job
def test_any_job(size: int, accumulate: int, options: dict[str, Any]) -> None:
    """Uneven parts and shards, ranks without a row, accumulation, a weight used twice, frozen
    weights."""
    check_equal(2, size, steps=2, step_options={"accumulate": accumulate}, **options)


@pytest.mark.soak
@settings(max_examples=200)
@any_zero_job
def test_very_many_jobs(size: int, accumulate: int, options: dict[str, Any]) -> None:
    """The same, more often."""
    check_equal(2, size, steps=2, step_options={"accumulate": accumulate}, **options)


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [Zero1, Zero2])
@pytest.mark.parametrize("bucket_bytes", [1, 60, 1 << 20])
def test_ranks_that_use_different_parameters(stage: Any, bucket_bytes: int) -> None:
    def choose(world: Any) -> list[np.ndarray]:
        model = Chooser()
        strategy: Any = (
            Single(model) if world.size == 1 else stage(model, world, bucket_bytes=bucket_bytes)
        )
        optimizer = AdamW(strategy.parameters, 0.1)
        for batch in CHOICES:
            strategy.step((batch, batch), optimizer)
        return [weight.data.copy() for weight in model.weights]

    serial = md.run(choose, size=1)[0]
    for weights in md.run(choose, size=3):
        np.testing.assert_allclose(weights, serial, rtol=1e-12)


BUGS = [
    Bug(
        "forgets to add",
        GradientShards,
        "take_sum",
        lambda right, self: (right(self), self.forget())[0],
    ),
    Bug("forgets nothing", GradientShards, "forget", lambda right, self: None),
    Bug(
        "frees too early",
        GradientShards,
        "start",
        lambda right, self, index: (self._buffers[index].fill(0), right(self, index)),
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(check_equal, 2, 3, optimizer="sgd", clip=None, step_options={"accumulate": 2})
    check_caught(bug, check, monkeypatch)


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "accumulate"), [(2, 1), (3, 2), (5, 3)])
def test_bytes_and_messages_are_the_formula(size: int, accumulate: int) -> None:
    steps = 2
    ranks = md.run(
        lambda world: train(world, 2, steps=steps, step_options={"accumulate": accumulate}),
        size=size,
    )
    model = GPT(tiny())
    model.initialize(0)
    buckets = len(cut(model.parameters(), SMALL_BUCKETS))
    each = steps * (size - 1) * ranks[0]["nbytes"]
    assert sent_for_training(ranks) == {"reduce_scatter": accumulate * each, "all_gather": each}
    for rank in ranks:
        sent = rank["sent"]["world"]
        messages = rank["messages"]["world"]
        for verb, passes in (("reduce_scatter", accumulate), ("all_gather", 1)):
            assert messages[verb] == passes * steps * (size - 1) * buckets
            assert abs(sent[verb] - passes * each / size) <= passes * steps * buckets * 2 * 8
        assert sum(rank["sent"]["control"].values()) == steps * 2 * 8 * (size - 1)


BUCKET = 16384


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_bytes_a_parameter(size: int, tied: bool) -> None:
    """float32, Adam: 4 + (4 + 8)/P; the gradients' peak is the shard, two buckets, and a tied
    weight's bucket."""
    changes = {"dtype": "float32", "width": 32, "vocabulary": 50, "layers": 4, "tied": tied}
    for rank in md.run(
        lambda world: train(world, 2, changes, bucket_bytes=BUCKET, optimizer="adam"), size=size
    ):
        nbytes = rank["nbytes"]
        memory = rank["memory"]
        assert nbytes > 10 * BUCKET
        assert memory["parameters"]["now"] == memory["parameters"]["peak"] == nbytes
        assert memory["gradients"]["now"] == pytest.approx(nbytes / size, rel=0.01, abs=100)
        assert memory["optimizer"]["now"] == pytest.approx(2 * nbytes / size, rel=0.01, abs=200)
        held = (3 if tied else 2) * BUCKET
        assert memory["gradients"]["peak"] <= 1.01 * nbytes / size + 100 + held


def test_a_bucket_that_is_not_freed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    take_sum = GradientShards.take_sum
    monkeypatch.setattr(
        GradientShards,
        "take_sum",
        lambda self: (kept.extend(self._buffers.values()), take_sum(self))[1],
    )
    with pytest.raises(AssertionError):
        test_bytes_a_parameter(2, False)


# -------------------------------------------------------------------------------------------- order


def test_a_bucket_sets_out_when_its_last_gradient_is_final() -> None:
    def job(world: Any) -> list[str]:
        model = GPT(tiny())
        model.initialize(0)
        lines: list[str] = []
        for parameter in model.parameters():
            parameter.hooks.append(lambda parameter: lines.append(parameter.name))
        strategy = Zero2(model, world, bucket_bytes=SMALL_BUCKETS)
        start = strategy._bucket_order.start
        strategy._bucket_order.start = lambda index: (
            lines.append(f"bucket {index}"),
            start(index),
        )[1]  # type: ignore
        strategy.backward(
            strategy.forward(strategy.part_of(global_batch(0, 4, tiny())), divisor=24)
        )
        for index, flat in enumerate(strategy.flats):
            finals = [lines.index(parameter.name) for parameter in flat.parameters]
            previous = lines.index(f"bucket {index - 1}") if index else 0
            assert lines.index(f"bucket {index}") == max(*finals, previous) + 1
        return lines

    for lines in md.run(job, size=2):
        started = [line for line in lines if line.startswith("bucket")]
        assert len(started) > 2 and started == [f"bucket {index}" for index in range(len(started))]


# ----------------------------------------------------------------------------------- borrowed rooms


def test_a_parameter_borrows_when_its_gradient_comes() -> None:
    room = np.zeros(3)
    parameter = Parameter(np.arange(3.0), name="p")
    asked: list[str] = []
    parameter.lender = lambda p: (asked.append(p.name), room)[1]
    assert not asked and parameter.grad is None
    for _ in range(2):
        ops.sum(parameter * parameter).backward()
    np.testing.assert_array_equal(room, [0.0, 4.0, 8.0])
    assert asked == ["p"] and np.shares_memory(parameter.grad, room)
    parameter.bind_gradient(None)
    ops.sum(parameter * 3.0).backward()
    np.testing.assert_array_equal(room, 3.0)
    assert asked == ["p", "p"]


def test_backward_behind_its_back_is_refused() -> None:
    def job(world: Any) -> None:
        model = GPT(tiny())
        model.initialize(0)
        Zero2(model, world)
        inputs, targets = global_batch(0, 2, tiny())
        with pytest.raises(GradientError, match="ZeRO-2 rank"):
            model.loss(inputs, targets).backward()

    md.run(job, size=2)
