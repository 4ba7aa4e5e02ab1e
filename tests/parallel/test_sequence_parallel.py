"""Sequence parallelism: equal to one process, with tensor parallelism's bytes and less memory."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split import SIZES, sequence, sequence_in_processes, tensor
from training import difference, global_batch, tiny

import minidist as md
from minidist import account
from minidist.nn import GPT, GPTConfig
from minidist.optim import SGD, AdamW
from minidist.parallel import sequence_parallel as chapter
from minidist.parallel.activations import checkpoint_blocks
from minidist.parallel.common import own_tokens, split_model
from minidist.parallel.sequence_parallel import elements_sent, outside_numbers, sequence_parallel

BOUND = 1e-10
GROUPED = {"heads": 8, "kv_heads": 2, "width": 32, "positions": "rotary", "activation": "silu", "norm": "rms",
           "tied": True}


def run(size: int, changes: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """What each of `size` threads holds after training."""
    return md.run(lambda world: sequence(world, changes, **options), size=size)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_equals_one_process(size: int) -> None:
    """Six tokens on 4 and 5 ranks: some have one more."""
    check_job(size, {"dropout": 0.2}, {"sequences": 3, "checkpoint": "none"}, steps=3)


def test_a_group_of_one_rank() -> None:
    alone, serial = run(1, {}, whole=False)[0], run(1, {})[0]
    assert difference(alone["weights"], serial["weights"]) < BOUND and along_the_axis([alone]) == 0


def test_more_ranks_than_tokens() -> None:
    check_job(5, {"context": 3}, {"sequences": 2, "checkpoint": "all"}, steps=2)


def test_same_bits_in_processes() -> None:
    """Over sockets; over mpirun in the long run."""
    over_threads = run(3, GROUPED, steps=2)[0]
    over_processes = md.run(sequence_in_processes, GROUPED, {"steps": 2}, size=3, transport="sockets")[0]
    for name, array in over_threads["weights"].items():
        np.testing.assert_array_equal(over_processes["weights"][name], array, err_msg=name)


any_job = given(
    size=st.integers(2, 5), changes=st.fixed_dictionaries({
        "heads": st.sampled_from([6, 8]), "kv_heads": st.sampled_from([None, 1, 2]), "width": st.just(48),
        "tied": st.booleans(), "activation": st.sampled_from(["gelu", "silu"]), "layers": st.integers(1, 2),
        "norm": st.sampled_from(["layer", "rms"]), "positions": st.sampled_from(["learned", "rotary"]),
        "dropout": st.sampled_from([0.0, 0.2]), "context": st.integers(1, 7)}),
    options=st.fixed_dictionaries({
        "sequences": st.integers(1, 4), "clip": st.sampled_from([None, 0.1]),
        "optimizer": st.sampled_from([AdamW, SGD]), "accumulate": st.integers(1, 2),
        "checkpoint": st.sampled_from(["none", "scores", "all", "0"])}))


@settings(max_examples=6)
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
    """With and without key heads that ranks share."""
    for changes in ({"context": 16}, GROUPED):
        serial = run(1, changes, steps=20)[0]
        ranks = md.run(sequence_in_processes, changes, {"steps": 20}, size=size, transport=transport)
        assert difference(ranks[0]["weights"], serial["weights"]) < BOUND


def check_job(size: int, changes: dict[str, Any], options: dict[str, Any], *, steps: int) -> None:
    """Ranks equal one process and each other, and send what the formula says."""
    ranks, alone = run(size, changes, steps=steps, **options), run(1, changes, steps=steps, **options)[0]
    for rank in ranks:
        assert difference(rank["weights"], ranks[0]["weights"]) == 0.0
    assert difference(ranks[0]["weights"], alone["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-12)
    config = GPTConfig(**ranks[0]["config"])
    again = {"none": 0, "scores": 0, "all": config.layers, "0": 1}[options["checkpoint"]]
    formula = elements_sent(config, ranks=size, sequences=options["sequences"], recomputed=again)
    assert along_the_axis(ranks) == 8 * steps * formula


def along_the_axis(ranks: list[dict[str, Any]]) -> int:
    return sum(nbytes for rank in ranks for axis, verbs in rank["sent"].items() if axis != "control"
               for nbytes in verbs.values())


def test_the_same_bytes_as_tensor_parallelism() -> None:
    """Where ranks divide the tokens: but for the gradients of the weights outside, halves of the same all-reduces."""
    changes = {"context": 8}
    ours, plain = run(4, changes), md.run(lambda world: tensor(world, changes), size=4)
    config = GPTConfig(**ours[0]["config"])
    outside = 3 * 8 * 2 * 3 * outside_numbers(config)           # steps × bytes × 2(P-1)
    assert along_the_axis(ours) == along_the_axis(plain) + outside
    verbs = ours[0]["sent"]["world"]
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
    """A block keeps (2 (h + 1) + inside) / P numbers a token, and 2 h that were gathered; computed again, h / P."""
    tokens, h = 2 * 16, 32
    for which in ("none", "all"):
        each = {size: held(size, 3, which) - held(size, 2, which) for size in (1, 2, 4)}
        whole = 8 * tokens * 2 * h if which == "none" else 0
        assert each == {size: whole + (each[1] - whole) // size for size in each}
        assert which == "none" or each[1] == 8 * tokens * h


def test_generating_text() -> None:
    """Every rank draws the text that one process draws, also while it has fewer tokens than ranks."""
    def job(world: Any) -> list[int]:
        model = GPT(tiny(**SIZES))
        if world.size > 1:
            sequence_parallel(model, world)
        model.initialize(5)
        return model.generate([1], 9, temperature=0.9).tolist()

    expected = md.run(job, size=1)[0]
    assert md.run(job, size=3) == [expected] * 3


# --------------------------------------------------------------------------------------- the parity test sees the bugs

def norms_not_added(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(split_model, "add_up", lambda parts, **options: None)


def positions_of_the_first_tokens(patch: pytest.MonkeyPatch) -> None:
    """The position offset forgotten."""
    patch.setattr(own_tokens.OwnPositions, "forward", lambda self, ids: super(own_tokens.OwnPositions, self).forward(
        ids[:len(ids[self.own(len(ids))])]))


def gathered_as_copies(patch: pytest.MonkeyPatch) -> None:
    """The gather's gradient as a slice instead of a sum."""
    patch.setattr(chapter.SequenceRegion, "enter", lambda self, x: chapter.collectives.gather_copies(
        x, dim=1, group=self.group))


@pytest.mark.parametrize("bug", [norms_not_added, positions_of_the_first_tokens, gathered_as_copies],
                         ids=lambda bug: bug.__name__)
def test_planted_bugs_break_parity(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"optimizer": SGD, "clip": None, "steps": 2}
    serial = run(1, {}, **options)[0]
    assert difference(run(3, {}, **options)[0]["weights"], serial["weights"]) < BOUND
    bug(monkeypatch)
    assert not all(difference(rank["weights"], serial["weights"]) < 1e-7 for rank in run(3, {}, **options))
