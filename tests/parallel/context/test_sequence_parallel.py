"""Sequence parallelism: equal to one process, with tensor parallelism's bytes and less memory."""

from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from split import (
    BOUND,
    SIZES,
    STEPS,
    any_job,
    blocks_again,
    check_equal,
    check_parity,
    run,
    sent_along_the_axis,
    sequence,
    tensor,
)
from training import difference, global_batch, tiny

import minidist as md
from minidist.device import account
from minidist.nn import GPT, GPTConfig
from minidist.nn.layers import Embedding
from minidist.optim import SGD
from minidist.parallel.context import sequence_parallel as chapter
from minidist.parallel.context import token_shard
from minidist.parallel.context.sequence_parallel import (
    elements_sent,
    outside_numbers,
    sequence_parallel,
)
from minidist.parallel.hybrid import hybrid_step
from minidist.parallel.memory.activations import checkpoint_blocks


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_equals_one_process(size: int) -> None:
    """Six tokens on 4 and 5 ranks: some have one more."""
    check_job(size, {"dropout": 0.2}, {"sequences": 3, "checkpoint": "none"}, steps=3)


def test_a_group_of_one_rank() -> None:
    alone = run(sequence, 1, {}, axis=chapter.SequenceParallel)[0]
    serial = run(sequence, 1, {})[0]
    assert (
        difference(alone["weights"], serial["weights"]) < BOUND
        and sent_along_the_axis([alone]) == 0
    )


def test_more_ranks_than_tokens() -> None:
    check_job(5, {"context": 3}, {"sequences": 2, "checkpoint": "all"}, steps=2)


@settings(max_examples=2)
@any_job(context=st.integers(1, 7))
def test_any_job(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    check_job(size, changes, options, steps=2)


@pytest.mark.soak
@settings(max_examples=200)
@any_job(context=st.integers(1, 7))
def test_very_many_jobs(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """The same, more often."""
    check_job(size, changes, options, steps=3)


def check_job(size: int, changes: dict[str, Any], options: dict[str, Any], *, steps: int) -> None:
    """Ranks equal one process and each other, and send what the formula says."""
    ranks, alone = (run(sequence, count, changes, steps=steps, **options) for count in (size, 1))
    check_equal(ranks, alone[0])
    formula = elements_sent(
        GPTConfig(**ranks[0]["config"]),
        ranks=size,
        sequences=options["sequences"],
        recomputed=blocks_again(ranks[0], options["checkpoint"]),
    )
    assert sent_along_the_axis(ranks) == 8 * steps * formula


def test_the_same_bytes_as_tensor_parallelism() -> None:
    """Where ranks divide the tokens: but for the gradients of the weights outside, halves of the
    same all-reduces."""
    changes = {"context": 8}
    ours, plain = (run(kind, 4, changes) for kind in (sequence, tensor))
    config = GPTConfig(**ours[0]["config"])
    outside = STEPS * 8 * 2 * 3 * outside_numbers(config)  # steps × bytes × 2(P-1)
    assert sent_along_the_axis(ours) == sent_along_the_axis(plain) + outside
    verbs = ours[0]["sent"]["tp"]
    assert verbs.keys() == {"all_gather", "reduce_scatter", "all_reduce"}
    assert verbs["all_gather"] == verbs["reduce_scatter"]


def held(size: int, layers: int, which: str) -> int:
    """Activation bytes of rank 0 at the end of forward."""
    config = tiny(heads=8, width=32, context=16, layers=layers, vocabulary=16)

    def job(world: Any) -> int:
        with account.use(account.MemoryAccount()) as memory:
            model = GPT(config)
            if size > 1:
                sequence_parallel(model, world)
            model.initialize(0)
            checkpoint_blocks(model, which)
            loss = model.loss(*global_batch(0, 2, config))
            assert loss.requires_grad
            return memory.now["activations"]

    return md.run(job, size=size)[0]


def test_all_but_the_gathered_inputs_is_divided() -> None:
    """A block keeps (2 (h + 1) + inside) / P numbers a token, and 2 h that were gathered; computed
    again, h / P."""
    tokens = 2 * 16
    h = 32
    for which in ("none", "all"):
        each = {size: held(size, 3, which) - held(size, 2, which) for size in (1, 2, 4)}
        whole = 8 * tokens * 2 * h if which == "none" else 0
        assert each == {size: whole + (each[1] - whole) // size for size in each}
        assert which == "none" or each[1] == 8 * tokens * h


def test_generating_text() -> None:
    """Every rank draws the text that one process draws, also while it has fewer tokens than
    ranks."""

    def job(world: Any) -> list[int]:
        model = GPT(tiny(**SIZES))
        if world.size > 1:
            sequence_parallel(model, world)
        model.initialize(5)
        return model.generate([1], 9, temperature=0.9).tolist()

    expected = md.run(job, size=1)[0]
    assert md.run(job, size=3) == [expected] * 3


# -------------------------------------------------------------------- the parity test sees the bugs


BUGS = [
    Bug("norms not added", hybrid_step, "add_up", lambda right, parts: None),
    # the position offset forgotten
    Bug(
        "positions of the first tokens",
        token_shard.TokenShardPositions,
        "forward",
        lambda right, self, ids: Embedding.forward(self, ids[: len(ids[self.own(len(ids))])]),
    ),
    # the gather's gradient as a slice instead of a sum
    Bug(
        "gathered as copies",
        chapter.SequenceRegion,
        "enter",
        lambda right, self, x: chapter.collectives.gather_copies(x, dim=1, group=self.group),
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check_parity, sequence, 3, {}, optimizer=SGD, clip=None), monkeypatch)
