"""All-to-all attention: equal to one process, its bytes, and what does not fit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split import swapped, swapped_in_processes
from training import difference, tiny

import minidist as md
from minidist import account
from minidist.errors import PlanError
from minidist.nn import GPT, GPTConfig
from minidist.ops import collectives
from minidist.optim import SGD, AdamW
from minidist.parallel import ulysses as chapter
from minidist.parallel.ulysses import elements_sent, ulysses

BOUND = 1e-10
GROUPED = {"heads": 8, "kv_heads": 2, "width": 32, "positions": "rotary", "activation": "silu", "norm": "rms",
           "tied": True}


def run(size: int, changes: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """What each of `size` threads holds after training."""
    return md.run(lambda world: swapped(world, changes, **options), size=size)


def along_the_axis(ranks: list[dict[str, Any]]) -> int:
    return sum(nbytes for rank in ranks for axis, verbs in rank["sent"].items() if axis != "control"
               for nbytes in verbs.values())


def check_job(size: int, changes: dict[str, Any], options: dict[str, Any], *, steps: int) -> None:
    """Ranks equal one process and each other, and send what the formula says."""
    ranks, alone = run(size, changes, steps=steps, **options), run(1, changes, steps=steps, **options)[0]
    for rank in ranks:
        assert difference(rank["weights"], ranks[0]["weights"]) == 0.0
        assert rank["losses"] == ranks[0]["losses"]
    assert difference(ranks[0]["weights"], alone["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-12)
    config = GPTConfig(**ranks[0]["config"])
    again = {"none": 0, "scores": 0, "all": config.layers, "0": 1}[options.get("checkpoint", "none")]
    formula = elements_sent(config, parameters_of(alone), ranks=size, sequences=options["sequences"], recomputed=again)
    assert along_the_axis(ranks) == 8 * steps * formula


def parameters_of(alone: dict[str, Any]) -> int:
    return sum(array.size for array in alone["weights"].values())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_equals_one_process(size: int) -> None:
    """Eight heads and seven tokens: three and five divide neither."""
    check_job(size, {"dropout": 0.2, "context": 7}, {"sequences": 3}, steps=3)


@pytest.mark.parametrize("size", [2, 3])
def test_key_heads_that_several_ranks_need(size: int) -> None:
    check_job(size, {**GROUPED, "context": 13}, {"sequences": 2, "checkpoint": "all", "accumulate": 2}, steps=2)


any_job = given(
    size=st.integers(2, 5), changes=st.fixed_dictionaries({
        "heads": st.sampled_from([6, 8]), "kv_heads": st.sampled_from([None, 1, 2]), "width": st.just(48),
        "tied": st.booleans(), "layers": st.integers(1, 2), "positions": st.sampled_from(["learned", "rotary"]),
        "dropout": st.sampled_from([0.0, 0.2]), "context": st.integers(1, 17)}),
    options=st.fixed_dictionaries({
        "sequences": st.integers(2, 4), "clip": st.sampled_from([None, 0.1]),
        "optimizer": st.sampled_from([AdamW, SGD]), "accumulate": st.integers(1, 2),
        "checkpoint": st.sampled_from(["none", "scores", "all", "0"])}))


@settings(max_examples=4)
@any_job
def test_any_job(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    check_job(size, changes, options, steps=2)


@pytest.mark.soak
@settings(max_examples=200)
@any_job
def test_very_many_jobs(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """The same, more often."""
    check_job(size, changes, options, steps=3)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads", "threads-unbuffered", "sockets", "shm", "mpi"])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_equals_one_process_after_twenty_steps(transport: str, size: int) -> None:
    for changes in ({"context": 17}, GROUPED):
        serial = run(1, changes, steps=20)[0]
        ranks = md.run(swapped_in_processes, changes, {"steps": 20}, size=size, transport=transport)
        assert difference(ranks[0]["weights"], serial["weights"]) < BOUND


def test_a_rank_sends_its_share() -> None:
    """8(P-1)/P of batch × sequence × width / P, where P divides tokens and heads."""
    sequences, context, width, size = 2, 8, 16, 4
    ranks = run(size, {"context": context, "layers": 1}, sequences=sequences, steps=1)
    for rank in ranks:
        numbers = 8 * (size - 1) * sequences * context * width // size ** 2
        assert rank["sent"]["world"]["all_to_all"] == 8 * numbers


def test_scores_and_activations_are_divided() -> None:
    """A block holds a P-th of what one rank holds, also of the probabilities that short sequences keep."""
    def held(world: Any) -> int:
        by_layers = []
        for layers in (1, 2):
            with account.use(account.MemoryAccount()) as memory:
                model = GPT(tiny(heads=8, width=32, context=16, vocabulary=16, layers=layers, positions="rotary"))
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
    with pytest.raises(PlanError, match=r"over world=3 ranks: 2 heads leave a rank without any; choose 1 to 2 ranks, "
                                        r"or at least 3 heads, or ring attention"):
        md.run(lambda world: ulysses(GPT(tiny(heads=2)), world), size=3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str) -> None:
    """Replicas stay equal, and near one process: sums are rounded where the sequence is cut."""
    changes = {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[precision], "context": 13}
    alone, ranks = run(1, changes, precision=precision)[0], run(3, changes, precision=precision)
    assert all(difference(rank["weights"], ranks[0]["weights"]) == 0.0 for rank in ranks)
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=2e-2)


def test_generating_text() -> None:
    """Every rank draws the text that one process draws, also while it has fewer tokens than ranks."""
    def job(world: Any) -> list[int]:
        model = GPT(tiny(context=9, heads=4))
        if world.size > 1:
            ulysses(model, world)
        model.initialize(5)
        return model.generate([1], 12, temperature=0.9).tolist()

    expected = md.run(job, size=1)[0]
    assert md.run(job, size=3) == [expected] * 3


# --------------------------------------------------------------------------------------- the parity test sees the bugs

def positions_of_the_first_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(chapter, "pick", lambda array, own, dim: array[:len(array[own(len(array))])])


def heads_without_tokens(patch: pytest.MonkeyPatch) -> None:
    """No swap: each rank attends to its own tokens alone (N2:315)."""
    patch.setattr(collectives, "all_to_all", lambda x, **options: x)


def turned_heads(patch: pytest.MonkeyPatch) -> None:
    """What comes back is put together in another order of the ranks' heads."""
    original = collectives.all_to_all

    def turned(x: Any, *, split: int, **options: Any) -> Any:
        y = original(x, split=split, **options)
        if split == chapter.HEADS:
            return y
        heads = y.shape[chapter.HEADS]
        return chapter.ops.take(y, (np.arange(heads) + 1) % heads, dim=chapter.HEADS)

    patch.setattr(collectives, "all_to_all", turned)


@pytest.mark.parametrize("bug", [positions_of_the_first_tokens, heads_without_tokens, turned_heads],
                         ids=lambda bug: bug.__name__)
def test_planted_bugs_break_parity(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"positions": "rotary", "context": 6}
    options: dict[str, Any] = {"optimizer": SGD, "clip": None, "steps": 2}
    serial = run(1, changes, **options)[0]
    bug(monkeypatch)
    assert not all(difference(rank["weights"], serial["weights"]) < 1e-7 for rank in run(3, changes, **options))
