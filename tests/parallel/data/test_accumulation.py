"""Accumulation: the weights of one pass, the activations of one microbatch, and each stage's
traffic."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from training import difference, global_batch, tiny, train

import minidist as md
from minidist.device import account
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPT
from minidist.optim import SGD
from minidist.parallel.data.accumulation import elements_sent
from minidist.parallel.data.ddp import DDP
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step import strategy
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Part, micro_parts
from minidist.parallel.zero.zero3 import Zero3

BOUND = 1e-10


def run(size: int, *, config: dict[str, Any] | None = None, **options: Any) -> list[dict[str, Any]]:
    """`train` on `size` threads."""
    return md.run(lambda world: train(world, config=tiny(**(config or {})), **options), size=size)


def check_equal(size: int, **options: Any) -> None:
    """Ranks that take passes equal one process that takes none, and each other to the bit."""
    serial = run(1, **{**options, "zero": 0, "accumulate": 1})[0]
    ranks = run(size, **options)
    assert difference(ranks[0]["weights"], serial["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], serial["losses"], rtol=1e-10)
    assert len({rank["digest"] for rank in ranks}) == 1


# --------------------------------------------------------------------------- parallel equals serial
# tests/parallel/test_parity.py has whole trainings on fixed sizes, over every transport


any_job = given(
    size=st.integers(1, 5),
    accumulate=st.integers(1, 5),
    zero=st.integers(0, 3),
    sequences=st.integers(1, 11),
    tied=st.booleans(),
    clip=st.sampled_from([None, 0.1]),
)


@settings(max_examples=3)
@any_job
def test_any_job(
    size: int, accumulate: int, zero: int, sequences: int, tied: bool, clip: float | None
) -> None:
    """Also fewer rows than ranks × passes."""
    check_equal(
        size,
        accumulate=accumulate,
        zero=zero,
        sequences=sequences,
        clip=clip,
        steps=2,
        optimizer="sgd",
        config={"tied": tied, "layers": 1},
    )


@pytest.mark.soak
@settings(max_examples=200)
@any_job
def test_very_many_jobs(
    size: int, accumulate: int, zero: int, sequences: int, tied: bool, clip: float | None
) -> None:
    """The same, more often."""
    check_equal(
        size,
        accumulate=accumulate,
        zero=zero,
        sequences=sequences,
        clip=clip,
        steps=2,
        optimizer="sgd",
        config={"tied": tied, "layers": 1},
    )


BUGS = [
    Bug(
        "mean of means",
        DDP,
        "forward",
        lambda right, self, part, divisor: right(self, part, divisor=max(part.targets.size, 1) * 4),
    ),
    Bug(
        "divides by the passes too",
        DDP,
        "forward",
        lambda right, self, part, divisor: right(self, part, divisor=divisor * 2),
    ),
    Bug(
        "forgets a pass",
        DDP,
        "backward",
        lambda right, self, share, last: right(self, share, last=last) if last else None,
    ),
    Bug("takes all rows", strategy, "micro_parts", lambda right, part, count: [part] * count),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD without clipping: Adam and clipping forgive a wrong scale."""
    check_caught(
        bug, partial(check_equal, 2, accumulate=2, optimizer="sgd", clip=None), monkeypatch
    )


def test_a_mean_of_means_is_another_number() -> None:
    """The module's example: passes of three rows and of one."""
    losses = [np.array([1.0, 1.0, 1.0]), np.array([5.0])]
    assert np.concatenate(losses).mean() == 2.0 and np.mean([part.mean() for part in losses]) == 3.0


# ------------------------------------------------------------------------------------------- passes


@given(rows=st.integers(0, 12), count=st.integers(1, 7), first=st.integers(0, 9))
def test_passes_are_array_splits_that_know_their_rows(rows: int, count: int, first: int) -> None:
    ids = np.arange(first, first + rows).reshape(rows, 1)
    micros = micro_parts(Part(ids, ids + 1, first), count)
    for micro, expected in zip(micros, np.array_split(ids, count), strict=True):
        np.testing.assert_array_equal(micro.inputs, expected)
        np.testing.assert_array_equal(micro.targets, expected + 1)
        assert not len(expected) or micro.first == expected[0, 0]


def test_no_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="accumulate=0: a step has at least one backward pass"):
        micro_parts(Part(np.zeros((2, 1)), np.zeros((2, 1)), 0), 0)
    with pytest.raises(PlanError, match="accumulate=0"):
        md.Plan(accumulate=0)


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_traffic_is_the_formula(zero: int, accumulate: int) -> None:
    """Exact over all ranks, tied weights being ZeRO-3's root."""
    size = 3
    steps = 2
    ranks = run(size, zero=zero, accumulate=accumulate, steps=steps, config={"tied": True})
    count = sum(array.size for array in ranks[0]["weights"].values())
    root = ranks[0]["weights"]["tokens.weight"].size if zero == 3 else 0
    expected = elements_sent(count, ranks=size, zero=zero, accumulate=accumulate, root=root)
    assert sum(sum(rank["sent"]["dp"].values()) for rank in ranks) == steps * 8 * expected
    assert (
        expected
        == (size - 1)
        * [
            2 * count,
            2 * count,
            (accumulate + 1) * count,
            3 * accumulate * (count - root) + (1 + accumulate) * root,
        ][zero]
    )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_units_that_stay_until_backward_cost_less(accumulate: int) -> None:
    def job(world: Any) -> tuple[int, int]:
        model = GPT(tiny())
        model.initialize(0)
        count = sum(parameter.size for parameter in model.parameters())
        strategy = Zero3(model, world, free_after_forward=False)
        with world.ledger.during("step"):
            strategy.step(
                global_batch(0, 4, tiny()), SGD(strategy.parameters, 0.1), accumulate=accumulate
            )
        return count, sum(world.ledger.sent_bytes("step")["world"].values())

    results = md.run(job, size=2)
    expected = elements_sent(
        results[0][0], ranks=2, zero=3, accumulate=accumulate, free_after_forward=False
    )
    assert expected == 2 * accumulate * results[0][0]
    assert sum(sent for _, sent in results) == 8 * expected


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("strategy", [Single, DDP])
def test_activations_are_those_of_one_microbatch(strategy: Any) -> None:
    """Measured by the account: 8 rows in A passes have the peak of 8/A rows in one, and gradients
    are not doubled.

    But for the token ids, which a pass's rows are views of, and the loss of the pass before.
    """
    config = tiny(width=16, context=12, dtype="float32")

    def peaks(world: Any, sequences: int, accumulate: int) -> dict[str, int]:
        with account.use(account.MemoryAccount()) as memory:
            model = GPT(config)
            model.initialize(0)
            trained = strategy(model, world) if strategy is DDP else strategy(model)
            optimizer = SGD(trained.parameters, 0.1)
            for step in range(2):
                trained.step(
                    global_batch(step, sequences, config), optimizer, accumulate=accumulate
                )
            return memory.peak

    def job(world: Any) -> list[tuple[dict[str, int], dict[str, int]]]:
        return [
            (peaks(world, 8 * world.size, passes), peaks(world, 8 // passes * world.size, 1))
            for passes in (1, 2, 4, 8)
        ]

    for found in md.run(job, size=2 if strategy is DDP else 1):
        whole = found[0][0]
        batch = 2 * 8 * 13 * 8 + 4
        for passes, (accumulated, alone) in zip((1, 2, 4, 8), found, strict=True):
            assert (
                alone["activations"] <= accumulated["activations"] <= alone["activations"] + batch
            )
            assert accumulated["activations"] <= whole["activations"] / passes + batch
            assert accumulated["gradients"] == whole["gradients"]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("size", "plan"),
    [(3, {}), (2, {"zero": 3}), (1, {"zero": 3, "offload": "all", "checkpoint_blocks": "all"})],
    ids=str,
)
def test_an_evaluation_takes_no_more_than_a_step(size: int, plan: dict[str, Any]) -> None:
    """It takes as many passes, uneven ones and empty ones too; the loss is that of one pass."""
    config = tiny(width=16, context=12, dtype="float32")
    batches = [global_batch(9, sequences, config) for sequences in (13, 1)]

    def job(world: Any, passes: int) -> tuple[dict[str, int], dict[str, int], float]:
        with account.use(account.MemoryAccount()) as memory:
            trainer = Trainer(
                Plan(dp=world.size, accumulate=passes, **plan), config, world, steps=1
            )
            before = trainer.evaluate(batches)
            memory.reset_peak()
            trainer.step(batches[0])
            step = memory.peak
            memory.reset_peak()
            trainer.evaluate(batches)
            trainer.close()
            return step, memory.peak, before

    for (step, evaluation, loss), (_, _, whole) in zip(
        *(md.run(job, passes, size=size) for passes in (8, 1)), strict=True
    ):
        assert 0 < evaluation["activations"] <= step["activations"]
        assert evaluation["total"] <= step["total"]
        assert loss == pytest.approx(whole, rel=1e-6)
