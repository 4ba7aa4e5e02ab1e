"""Checkpointed blocks: the same bits, less memory, the same traffic."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import difference, global_batch, tiny, train_tiny
from training import train as train_rank

import minidist as md
from minidist.device import account
from minidist.errors import PlanError
from minidist.nn import GPT, GPTConfig
from minidist.parallel.memory.activations import checkpoint_blocks, chosen, pass_bytes


def train(size: int, **options: Any) -> list[dict[str, Any]]:
    """Return what each rank of a job of threads holds after training."""
    return md.run(lambda world: train_rank(world, **options), size=size)


@pytest.mark.sampled
@pytest.mark.parametrize("which", ["scores", "all", "0", "1,0"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_the_same_weights(which: str, positions: str) -> None:
    """Dropout too: what is computed again drops the same. Scores are made another way, so not with
    the same bits."""
    config = tiny(positions=positions, dropout=0.2)
    plain, again = (
        train(size=1, config=config, checkpoint_blocks=how)[0] for how in ("none", which)
    )
    assert difference(again["weights"], plain["weights"]) < 1e-12
    assert which == "scores" or again["digest"] == plain["digest"]


@given(
    zero=st.integers(0, 3),
    size=st.integers(1, 4),
    which=st.sampled_from(["scores", "all", "1"]),
    tied=st.booleans(),
)
@settings(max_examples=2)
def test_under_any_strategy(zero: int, size: int, which: str, tied: bool) -> None:
    check(zero, size, which, tied, steps=2)


@pytest.mark.soak
@pytest.mark.timeout(600)
@given(
    zero=st.integers(0, 3),
    size=st.integers(1, 5),
    which=st.sampled_from(["scores", "all", "0", "1"]),
    tied=st.booleans(),
)
@settings(max_examples=60)
def test_under_any_strategy_for_long(zero: int, size: int, which: str, tied: bool) -> None:
    check(zero, size, which, tied, steps=20)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads", "threads-unbuffered", "tcp", "shm", "mpi"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_on_every_transport_after_twenty_steps(transport: str, size: int) -> None:
    options = {"steps": 20, "sequences": 7, "checkpoint_blocks": "all", "zero": 3, "accumulate": 2}
    serial = md.run(train_tiny, {}, {"steps": 20, "sequences": 7}, size=1)[0]
    ranks = md.run(train_tiny, {}, options, size=size, transport=transport)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10
    assert len({rank["digest"] for rank in ranks}) == 1


def check(zero: int, size: int, which: str, tied: bool, *, steps: int) -> None:
    """Parallel equals serial, and sends what it sends without."""
    config = tiny(tied=tied)
    options = {"config": config, "zero": zero, "steps": steps}
    plain, again = (train(size=size, checkpoint_blocks=how, **options) for how in ("none", which))
    serial = train(size=1, config=config, steps=steps)[0]
    assert difference(again[0]["weights"], serial["weights"]) < 1e-10
    assert [rank["sent"] for rank in again] == [rank["sent"] for rank in plain]


CONFIG = GPTConfig(vocabulary=16, context=32, layers=6, width=16, heads=4)
BATCH = 4
INPUT = BATCH * 32 * 16 * 4  # bytes of a block's input
SCORES = BATCH * 4 * 32 * 32 * 4  # and of its probabilities


def held(which: str, layers: int) -> int:
    """Activation bytes at the end of forward."""
    config = GPTConfig(**{**CONFIG.as_dict(), "layers": layers})  # type: ignore[arg-type]
    with account.use(account.MemoryAccount()) as memory:
        model = GPT(config)
        model.initialize(0)
        checkpoint_blocks(model, which)
        loss = model.loss(*global_batch(0, BATCH, config))
        assert loss.requires_grad
        return memory.now["activations"]


def test_what_a_block_keeps() -> None:
    """By the formulas of the chapter: the difference that a block more makes."""
    each = {which: held(which, 6) - held(which, 5) for which in ("none", "scores", "all")}
    assert each["none"] - each["scores"] == SCORES
    assert each["all"] == INPUT
    assert held("0,2,5", 6) == held("none", 6) - 3 * (each["none"] - INPUT)


def test_the_peak_is_one_block() -> None:
    def peak(layers: int, which: str) -> int:
        config = GPTConfig(**{**CONFIG.as_dict(), "layers": layers})  # type: ignore[arg-type]
        return train(size=1, config=config, sequences=BATCH, steps=1, checkpoint_blocks=which)[0][
            "memory"
        ]["activations"]["peak"]

    assert peak(6, "all") - peak(5, "all") == INPUT
    assert peak(6, "all") < 0.5 * peak(6, "none")


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": True, "positions": "rotary", "norm": "rms", "activation": "silu"},
        {"vocabulary": 300, "dropout": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_is_known_beforehand(changes: dict[str, Any], precision: str) -> None:
    """Never too much, and at most a hundredth too little; or by a block, where the last is among
    those chosen."""
    config = tiny(dtype="float32", layers=5, context=16, width=16, **changes)
    computed = replace(config, dtype={"fp32": "float32", "bf16": "bfloat16"}[precision])
    kept = pass_bytes(computed, 4, "none") - pass_bytes(replace(computed, layers=4), 4, "none")
    for which in ("none", "scores", "all", "0,2", "1,4"):
        options = {"config": config, "sequences": 4, "steps": 1, "precision": precision}
        peak = train(size=1, checkpoint_blocks=which, **options)[0]["memory"]["activations"]["peak"]
        room = 0.01 * peak + (kept if "4" in which else 0)
        assert 0 <= peak - pass_bytes(computed, 4, which) <= room, which


@pytest.mark.parametrize("which", ["", "some", "6", "-1", "0,,1", "²", "0.5"])
def test_bad_choices_say_what_would_do(which: str) -> None:
    with pytest.raises(
        PlanError, match=r"choose none, scores, all, or numbers of blocks from 0 to 5"
    ):
        chosen(which, 6)
    with pytest.raises(PlanError):
        train(size=1, config=CONFIG, checkpoint_blocks=which)


def test_random_numbers_are_replayed() -> None:
    """A model in whose dropped places gradients are zero, computed again with the same places."""
    config = GPTConfig(**{**CONFIG.as_dict(), "dropout": 0.5})  # type: ignore[arg-type]
    results: dict[str, Any] = {}
    for which in ("none", "all"):
        model = GPT(config)
        model.initialize(0)
        checkpoint_blocks(model, which)
        key = md.nn.DropoutKey.of_sequences(0, 0, 0, BATCH, 32)
        model.loss(*global_batch(0, BATCH, config), key=key).backward()
        results[which] = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in results["none"].items():
        np.testing.assert_array_equal(results["all"][name], gradient, err_msg=name)
