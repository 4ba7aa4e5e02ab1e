"""All-to-all attention: equal to one process, its bytes, and what does not fit."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from split import (
    GROUPED,
    any_job,
    check_job,
    check_parity,
    run,
    swapped,
)
from training import difference, tiny

import minidist as md
from minidist.autograd.ops import collectives
from minidist.device import account
from minidist.errors import PlanError
from minidist.nn import GPT
from minidist.optim import SGD
from minidist.parallel.context import ulysses as chapter
from minidist.parallel.context.ulysses import elements_sent, ulysses


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5])
def test_equals_one_process(size: int) -> None:
    """Eight heads and seven tokens: three and five divide neither."""
    check_job(
        swapped, elements_sent, size, {"dropout": 0.2, "context": 7}, {"sequences": 3}, steps=3
    )


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3])
def test_key_heads_that_several_ranks_need(size: int) -> None:
    check_job(
        swapped,
        elements_sent,
        size,
        {**GROUPED, "context": 13},
        {"sequences": 2, "checkpoint": "all", "accumulate": 2},
        steps=2,
    )


@settings(max_examples=2)
@any_job(context=st.integers(1, 17))
def test_any_job(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    check_job(swapped, elements_sent, size, changes, options, steps=2)


@pytest.mark.soak
@settings(max_examples=200)
@any_job(context=st.integers(1, 17))
def test_very_many_jobs(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """The same, more often."""
    check_job(swapped, elements_sent, size, changes, options, steps=3)


def test_a_rank_sends_its_share() -> None:
    """8(P-1)/P of batch × sequence × width / P, where P divides tokens and heads."""
    sequences = 2
    context = 8
    width = 16
    size = 4
    ranks = run(swapped, size, {"context": context, "layers": 1}, sequences=sequences, steps=1)
    for rank in ranks:
        numbers = 8 * (size - 1) * sequences * context * width // size**2
        assert rank["sent"]["cp"]["all_to_all"] == 8 * numbers


def test_scores_and_activations_are_divided() -> None:
    """A block holds a P-th of what one rank holds, also of the probabilities that short sequences
    keep."""

    def held(world: Any) -> int:
        by_layers = []
        for layers in (1, 2):
            with account.use(account.MemoryAccount()) as memory:
                model = GPT(
                    tiny(
                        heads=8,
                        width=32,
                        context=16,
                        vocabulary=16,
                        layers=layers,
                        positions="rotary",
                    )
                )
                if world.size > 1:
                    ulysses(model, world)
                model.initialize(0)
                loss = model.loss(np.zeros((2, 16), np.int64), np.zeros((2, 16), np.int64))
                assert loss.requires_grad
                by_layers.append(memory.now["activations"])
        return by_layers[1] - by_layers[0]

    one = md.run(held, size=1)[0]
    for each in md.run(held, size=4):
        assert each <= one / 4 * 1.1


def test_more_ranks_than_heads() -> None:
    with pytest.raises(
        PlanError,
        match=r"over world=3 ranks: 2 heads leave a rank without any; choose 1 to 2 ranks, "
        r"or at least 3 heads, or ring attention",
    ):
        md.run(lambda world: ulysses(GPT(tiny(heads=2)), world), size=3)


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str) -> None:
    """Replicas stay equal, and near one process: sums are rounded where the sequence is cut."""
    changes = {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[precision], "context": 13}
    alone, ranks = (run(swapped, count, changes, precision=precision) for count in (1, 3))
    assert all(difference(rank["weights"], ranks[0]["weights"]) == 0.0 for rank in ranks)
    np.testing.assert_allclose(ranks[0]["losses"], alone[0]["losses"], rtol=2e-2)


def test_generating_text() -> None:
    """Every rank draws the text that one process draws, also while it has fewer tokens than
    ranks."""

    def job(world: Any) -> list[int]:
        model = GPT(tiny(context=9, heads=4))
        if world.size > 1:
            ulysses(model, world)
        model.initialize(5)
        return model.generate([1], 12, temperature=0.9).tolist()

    expected = md.run(job, size=1)[0]
    assert md.run(job, size=3) == [expected] * 3


# -------------------------------------------------------------------- the parity test sees the bugs


def turned_heads(right: Any, x: Any, *, split: int, **options: Any) -> Any:
    """What comes back is put together in another order of the ranks' heads."""
    y = right(x, split=split, **options)
    if split == chapter.HEADS:
        return y
    heads = y.shape[chapter.HEADS]
    return chapter.ops.take(y, (np.arange(heads) + 1) % heads, dim=chapter.HEADS)


BUGS = [
    Bug(
        "positions of the first tokens",
        chapter,
        "pick",
        lambda right, array, own, dim: array[: len(array[own(len(array))])],
    ),
    # no swap: each rank attends to its own tokens alone (N2:315)
    Bug("heads without tokens", collectives, "all_to_all", lambda right, x, **options: x),
    Bug("turned heads", collectives, "all_to_all", turned_heads),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    job: dict[str, Any] = {"changes": {"positions": "rotary", "context": 6}}
    check_caught(
        bug, partial(check_parity, swapped, 3, **job, optimizer=SGD, clip=None), monkeypatch
    )
