"""Inputs of checkpointed blocks, kept in fewer bits, by fewer ranks, elsewhere: bytes, bits and
errors."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import SCHEDULES
from training import difference, global_batch, tiny

import minidist as md
from minidist.device.backend import random_uniform
from minidist.errors import PlanError
from minidist.nn import GPT, DropoutKey
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.memory.activations import checkpoint_blocks, ways_of
from minidist.parallel.memory.kept_inputs import (
    GROUP,
    LARGEST,
    InputKeeper,
    bytes_of,
    plain_codes,
    quantise,
    restore,
)
from minidist.parallel.memory.transfer_lanes import Pace

KEPT = ("8bit", "shard", "offload", "8bit,shard", "shard,offload", "8bit,shard,offload")
CONFIG = tiny(layers=3, dropout=0.1)


def train(
    plan: dict[str, Any], *, steps: int = 2, sequences: int = 5, config: Any = CONFIG
) -> list[dict[str, Any]]:
    """Return what each rank of a plan holds after some steps."""

    def rank(world: Any) -> dict[str, Any]:
        trainer = Trainer(Plan(**plan), config, world, lr=1e-2, seed=3)
        try:
            losses = [trainer.step(global_batch(step, sequences, config)) for step in range(steps)]
            return {
                "weights": trainer.state_dict(),
                "losses": losses,
                "digest": trainer.weights_sha256(),
                "sent": world.ledger.sent_bytes("step"),
                "memory": trainer.account.snapshot(),
                "kept": trainer.keeper and trainer.keeper.record(),
            }
        finally:
            trainer.close()

    return md.run(rank, size=Plan(**plan).size, limit=300.0)


def check(plan: dict[str, Any], kept: str, *, steps: int = 2) -> None:
    """Ways that are exact change no bit; 8bit equals 8bit on one rank. The bytes are those of the
    formulas."""
    plan = {"checkpoint_blocks": "all", **plan}
    plain = train(plan, steps=steps)
    ours = train({**plan, "keep_activations": kept}, steps=steps)
    if "8bit" not in kept:
        assert [rank["digest"] for rank in ours] == [rank["digest"] for rank in plain]
        assert [rank["losses"] for rank in ours] == [rank["losses"] for rank in plain]
    else:
        alone = train(
            {"checkpoint_blocks": plan["checkpoint_blocks"], "keep_activations": "8bit"},
            steps=steps,
        )
        assert difference(ours[0]["weights"], alone[0]["weights"]) < 1e-10
        assert difference(ours[0]["weights"], plain[0]["weights"]) > 1e-6
    sent, before = (
        sum(sum(rank["sent"].get("tp", {}).values()) for rank in ranks) for ranks in (ours, plain)
    )
    tp = Plan(**plan).tp if "shard" in kept else 1
    numbers = steps * 5 * CONFIG.context * CONFIG.width
    blocks = (
        CONFIG.layers
        if plan["checkpoint_blocks"] == "all"
        else len(plan["checkpoint_blocks"].split(","))
    )
    stand_in = blocks * bytes_of(numbers, CONFIG.width, 8, ways_of(kept))
    assert sent - before == (tp - 1) * stand_in
    copies = 1 if "shard" in kept or plan.get("sequence_parallel") else Plan(**plan).tp
    assert sum(rank["kept"]["kept_bytes"] for rank in ours) == copies * stand_in
    moved = [rank["kept"]["moved_bytes"] for rank in ours]
    for way in ("device to host", "host to device"):
        assert sum(each.get(way, 0) for each in moved) == (
            copies * stand_in if "offload" in kept else 0
        )


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kept", KEPT)
def test_with_tensor_parallelism_and_a_pipeline(kept: str) -> None:
    check({"pp": 2, "tp": 2, "microbatches": 2}, kept)


@pytest.mark.soak
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"dp": 2, "zero": 3, "checkpoint_blocks": "0,2"},
        {"dp": 3, "zero": 1},
        {"cp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"accumulate": 2},
        {"dp": 2, "pp": 2, "microbatches": 4, "zero": 3},
    ],
    ids=str,
)
def test_with_each_axis(plan: dict[str, Any]) -> None:
    check(plan, "8bit,offload")


@pytest.mark.soak  # test_with_each_axis and test_what_one_block_more_takes remain
def test_with_experts() -> None:
    config = tiny(layers=2, mixture=md.nn.MixtureConfig(experts=4))
    plain, ours = (
        train(
            {"ep": 2, "tp": 2, "checkpoint_blocks": "all", "keep_activations": kept}, config=config
        )
        for kept in ("whole", "shard,offload")
    )
    assert [rank["digest"] for rank in ours] == [rank["digest"] for rank in plain]


@pytest.mark.soak
@pytest.mark.timeout(900)
@given(data=st.data())
@settings(max_examples=40)
def test_with_any_plan_for_long(data: st.DataObject) -> None:
    kept = data.draw(st.sampled_from(KEPT))
    axes = {
        "dp": data.draw(st.integers(1, 2)),
        "pp": data.draw(st.integers(1, 3)),
        "cp": data.draw(st.integers(1, 2)),
        "tp": data.draw(st.just(2) if "shard" in kept else st.integers(1, 2)),
    }
    check(
        {
            **axes,
            "zero": data.draw(st.integers(0, 3)),
            "accumulate": data.draw(st.integers(1, 2)),
            "schedule": data.draw(st.sampled_from(SCHEDULES))
            if axes["pp"] == 2 and CONFIG.layers >= 2
            else "1f1b",
            "checkpoint_blocks": data.draw(st.sampled_from(["all", "1", "0,2"])),
        },
        kept,
        steps=4,
    )


# ------------------------------------------------------------------------------------------- memory


def peaks(kept: str, layers: int, tp: int = 1) -> dict[str, int]:
    """The peak of the activations of a rank, and its host's."""
    config = tiny(layers=layers, context=16, width=16, dtype="float32")
    plan = {"tp": tp, "checkpoint_blocks": "all", "keep_activations": kept}
    rank = train(plan, steps=1, sequences=4, config=config)[0]
    return {"device": rank["memory"]["activations"]["peak"], "host": rank["kept"]["host_bytes"]}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("kept", "tp", "device", "host"),
    [
        ("shard", 2, 4096 // 2, 0),
        ("8bit", 1, 1024 + 4 * 64, 0),
        ("8bit,shard", 2, (1024 + 4 * 64) // 2, 0),
        ("offload", 1, 0, 4096),
        ("8bit,offload", 1, 0, 1024 + 4 * 64),
    ],
)
def test_what_one_block_more_takes(kept: str, tp: int, device: int, host: int) -> None:
    """4 sequences of 16 tokens of width 16: an input of 4096 bytes, or 1024 codes and a scale a
    token."""
    less, more = (peaks(kept, layers, tp) for layers in (5, 6))
    assert {name: more[name] - less[name] for name in more} == {"device": device, "host": host}


def test_a_slow_bus_changes_nothing() -> None:
    """Moves that take their time are waited for: the same gradients; and the inputs are on the host
    meanwhile."""
    config = tiny(layers=4)
    batch = global_batch(0, 4, tiny())
    found = []
    for pace in (Pace(), Pace(latency=0.005)):
        model = GPT(config)
        keeper = InputKeeper(["offload"], pace=pace)
        model.initialize(0)
        checkpoint_blocks(model, "all", keeper)
        for _ in range(2):
            loss = model.loss(*batch)
            assert keeper.host.now["activations"] == 4 * 4 * config.context * config.width * 8
            loss.backward()
        keeper.close()
        found.append([np.array(p.grad) for p in model.parameters()])
    for fast, slow in zip(*found, strict=True):
        np.testing.assert_array_equal(fast, slow)


# ------------------------------------------------------------------------------------------- 8 bits


@given(
    rows=st.integers(0, 4),
    width=st.integers(1, 300),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-20, 1, 1e9]),
    kind=st.sampled_from(["float32", "float64"]),
)
@settings(max_examples=30)
def test_an_error_is_less_than_a_step(
    rows: int, width: int, seed: int, scale: float, kind: str
) -> None:
    x = (scale * np.random.default_rng(seed).normal(size=(1, rows, width))).astype(kind)
    codes, scales = quantise(x, name="block", seed=seed, tokens=np.arange(rows)[None])
    again = restore(codes, scales, x.dtype)
    assert (again.shape, again.dtype, codes.dtype) == (x.shape, x.dtype, np.int8)
    assert codes.nbytes + scales.nbytes == bytes_of(x.size, width, x.itemsize, ["8bit"])
    for start in range(0, width, GROUP):
        part = x[..., start : start + GROUP]
        step = np.abs(part).max(axis=-1, keepdims=True, initial=0) / LARGEST
        assert (np.abs(again[..., start : start + GROUP] - part) <= 1.0001 * step).all()


def test_the_plain_codes() -> None:
    x = np.random.default_rng(0).normal(size=16)
    chance = random_uniform("block", 5, np.arange(16) + 3 * 16, "float64")
    codes, scale = plain_codes(x, chance)
    ours, scales = quantise(x[None, None], name="block", seed=5, tokens=np.array([[3]]))
    np.testing.assert_array_equal(ours[0, 0], codes)
    assert scales[0, 0, 0] == np.float32(scale)


def test_errors_cancel_on_average() -> None:
    """Stochastic rounding: the mean over many seeds comes nearer with their root, and rounding to
    nearest would not."""
    x = np.random.default_rng(1).normal(size=(1, 8, 64))
    draws = [
        restore(*quantise(x, name="block", seed=seed, tokens=np.arange(8)[None]), x.dtype)
        for seed in range(400)
    ]
    step = np.abs(x).max() / LARGEST
    assert np.abs(np.mean(draws, axis=0) - x).max() < 5 * 0.5 * step / 400**0.5
    assert np.abs(draws[0] - x).max() > 0.5 * step


def test_what_is_not_finite_stays_so() -> None:
    x = np.ones((1, 3, 4), np.float32)
    x[0, 0, 1] = np.nan
    x[0, 1, 2] = np.inf
    x[0, 2] = 0.0
    again = restore(*quantise(x, name="b", seed=0, tokens=np.arange(3)[None]), x.dtype)
    assert np.isnan(again[0, :2]).all()
    assert (again[0, 2] == 0).all()


def gradients(kept: list[str], seed: int = 0) -> np.ndarray:
    """All gradients of one batch, as one vector."""
    config = tiny(layers=3, width=32, context=16, vocabulary=32)
    model = GPT(config)
    model.initialize(1)
    checkpoint_blocks(model, "all", InputKeeper(kept) if kept else None)
    model.loss(
        *global_batch(0, 4, config), key=DropoutKey.of_sequences(seed, 0, 0, 4, 16)
    ).backward()
    return np.concatenate([np.asarray(p.grad).reshape(-1) for p in model.parameters()])


def test_the_error_of_a_gradient() -> None:
    """Below 2 % of its length for one draw, and nearer on average: 16 draws' mean has a third of
    one draw's error."""
    exact = gradients([])
    draws = [gradients(["8bit"], seed) for seed in range(16)]
    errors = [float(np.linalg.norm(draw - exact) / np.linalg.norm(exact)) for draw in draws]
    assert 1e-4 < max(errors) < 0.02
    assert np.linalg.norm(np.mean(draws, axis=0) - exact) / np.linalg.norm(exact) < 0.5 * np.mean(
        errors
    )


# -------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            {"keep_activations": "4bit", "checkpoint_blocks": "all"},
            "choose whole, or one or several of 8bit, shard, offload",
        ),
        ({"keep_activations": "8bit,8bit", "checkpoint_blocks": "all"}, "choose whole"),
        ({"keep_activations": "8bit"}, "no block keeps only its input; use checkpoint_blocks=all"),
        (
            {"keep_activations": "offload", "checkpoint_blocks": "scores"},
            "use checkpoint_blocks=all",
        ),
        ({"keep_activations": "shard", "checkpoint_blocks": "all"}, "use tp=2, or 8bit or offload"),
        (
            {
                "keep_activations": "shard",
                "checkpoint_blocks": "all",
                "tp": 2,
                "sequence_parallel": True,
            },
            "divided already",
        ),
        (
            {"keep_activations": "8bit", "checkpoint_blocks": "all", "strategy": "data-parallel"},
            "use ddp",
        ),
        ({"activation_memory": 0}, "write 64MiB"),
        ({"activation_memory": 9, "checkpoint_blocks": "all"}, "it chooses the blocks itself"),
        ({"activation_memory": 9, "strategy": "data-parallel"}, "use ddp"),
    ],
    ids=str,
)
def test_what_does_not_go_together(plan: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says) as raised:
        Plan(**plan)
    assert "\n" not in str(raised.value)
