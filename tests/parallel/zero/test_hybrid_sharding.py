"""Hybrid sharding: equal to one process; what travels within a copy and between copies; what a rank
holds."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from training import global_batch, tiny
from zero import check_equal, train

import minidist as md
from minidist.cli.train import metrics
from minidist.errors import ConfigError
from minidist.nn.config import divisors
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step import step as step_module
from minidist.parallel.step.recorder import Silent
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.memory_formula import SINGLE, state_bytes
from minidist.parallel.zero.shards import HybridSharding

any_shard = given(
    stage=st.sampled_from([1, 2, 3]),
    size=st.sampled_from([2, 4, 6]),
    choice=st.integers(0, 3),
    accumulate=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {
            "sequences": st.integers(1, 9),
            "optimizer": st.sampled_from(["adamw", "sgd"]),
            "clip": st.sampled_from([None, 0.1]),
            "frozen": st.sampled_from([(), ("tokens.weight", "norm.bias")]),
            "changes": st.fixed_dictionaries({"tied": st.booleans(), "layers": st.just(1)}),
        }
    ),
)


def check(stage: int, size: int, choice: int, accumulate: int, options: dict[str, Any]) -> None:
    """Any divisor as the number of ranks that share a copy."""
    fits = divisors(size)
    check_equal(
        stage,
        size,
        steps=2,
        step_options={"accumulate": accumulate},
        strategy_options={"shard": fits[choice % len(fits)]},
        **options,
    )


@settings(max_examples=3)
@any_shard
def test_equals_one_process(
    stage: int, size: int, choice: int, accumulate: int, options: dict[str, Any]
) -> None:
    check(stage, size, choice, accumulate, options)


@pytest.mark.soak
@settings(max_examples=200)
@any_shard
def test_equals_one_process_often(
    stage: int, size: int, choice: int, accumulate: int, options: dict[str, Any]
) -> None:
    check(stage, size, choice, accumulate, options)


BUGS = [
    Bug(
        "copies are forgotten",
        HybridSharding,
        "start_sum_of_copies",
        lambda right, self, index, chunk, what: None,
    ),
    Bug("every pass is summed", GradientShards, "begin", lambda right, self, last: None),
    Bug(
        "the norm counts copies",
        step_module,
        "add_squares",
        lambda right, *given: 2 * right(*given),
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(
        check_equal,
        2,
        4,
        optimizer="sgd",
        clip=0.1,
        step_options={"accumulate": 2},
        strategy_options={"shard": 2},
    )
    check_caught(bug, check, monkeypatch)


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("stage", "size", "shard", "accumulate"),
    [(1, 4, 2, 2), (2, 6, 3, 2), (3, 6, 2, 2), (3, 4, 1, 1)],
)
def test_bytes_by_axis(stage: int, size: int, shard: int, accumulate: int) -> None:
    """(S-1)/S of what is gathered and reduced within a copy; 2(R-1)/R of a shard between copies,
    once a step."""
    steps = 2
    copies = size // shard
    ranks = md.run(
        lambda world: train(
            world,
            stage,
            steps=steps,
            sequences=7,
            shard=shard,
            step_options={"accumulate": accumulate},
        ),
        size=size,
    )
    nbytes = ranks[0]["nbytes"]
    reduced = {1: 1, 2: accumulate, 3: accumulate}[stage]
    gathered = {1: 1, 2: 1, 3: 2 * accumulate}[stage]
    sent: dict[tuple[str, str], int] = {}
    for rank in ranks:
        for axis, verbs in rank["sent"].items():
            for verb, count in verbs.items():
                sent[axis, verb] = sent.get((axis, verb), 0) + count
    del sent["control", "all_gather"]
    inside = steps * copies * (shard - 1) * nbytes
    assert sent == {
        ("world.shard", "reduce_scatter"): reduced * inside,
        ("world.shard", "all_gather"): gathered * inside,
        ("world.replicas", "all_reduce"): steps * 2 * (copies - 1) * nbytes,
    }


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1},
        {"zero": 2, "accumulate": 2},
        {"zero": 3, "keep_gathered": True},
        {"zero": 3, "accumulate": 2, "precision": "bf16"},
    ],
)
def test_through_the_trainer(options: dict[str, Any]) -> None:
    """What the command line's table holds measured traffic against; and evaluation."""
    config = tiny(dtype="float32", tied=options["zero"] == 3)

    def job(world: Any) -> tuple[Any, ...]:
        trainer = Trainer(Plan(dp=4, shard=2, **options), config, world, lr=0.01)
        batch = global_batch(0, 3, config)
        before = trainer.evaluate([batch])
        losses = [trainer.step(batch) for _ in range(2)]
        formula = metrics.gradient_formula(trainer, batch)
        digest = trainer.weights_sha256()
        trainer.close()
        tables = world.ledger.sent_bytes("step"), world.ledger.messages("step")
        bytes_and_messages = [
            sum(sum(verbs.values()) for axis, verbs in table.items() if axis != "control")
            for table in tables
        ]
        assert losses[0] == pytest.approx(before, rel=1e-5) and losses[1] < losses[0]
        return formula, *bytes_and_messages, digest

    ranks = md.run(job, size=4)
    assert ranks[0][0]["sent_bytes"] == sum(rank[1] for rank in ranks)
    assert ranks[0][0]["messages"] == sum(rank[2] for rank in ranks)
    assert len({rank[3] for rank in ranks}) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_holds_the_share_of_its_copy(stage: int) -> None:
    changes = {"dtype": "float32", "width": 32, "vocabulary": 50}
    for rank in md.run(
        lambda world: train(world, stage, changes, optimizer="adam", shard=2), size=4
    ):
        held = state_bytes(rank["nbytes"] // 4, SINGLE, zero=stage, ranks=4, shard=2)
        for category in ("parameters", "gradients", "optimizer"):
            assert rank["memory"][category]["now"] == pytest.approx(
                held[category], rel=0.01, abs=200
            )


def test_one_copy_is_the_group_itself() -> None:
    def job(world: Any) -> None:
        for shard in (None, world.size):
            sharing = HybridSharding(world, shard, algorithm="ring", recorder=Silent())
            assert sharing.shard_group is world and sharing.copies == 1
        sharing = HybridSharding(world, 2, algorithm="ring", recorder=Silent())
        assert (
            sharing.shard_group.world_ranks == ((0, 1), (2, 3))[world.rank // 2]
            and sharing.copies == 2
        )
        with pytest.raises(
            ConfigError, match="4 ranks cannot be cut into copies of 3; choose one of 1, 2, 4"
        ):
            HybridSharding(world, 3, algorithm="ring", recorder=Silent())

    md.run(job, size=4)
