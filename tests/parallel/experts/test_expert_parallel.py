"""Expert parallelism: equal to one process for any split, at the cost its docstring states; bugs
planted and seen."""

from typing import Any

import numpy as np
import pytest
import split
from experts import KINDS, MOE, check_equal, digest, train
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from training import tiny

import minidist as md
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPT, DropoutKey, MixtureConfig, mixture
from minidist.nn.moe import loads
from minidist.nn.weight_shard import WeightShard
from minidist.optim import SGD, AdamW
from minidist.parallel.context import sequence_parallel
from minidist.parallel.data.ddp import DDP
from minidist.parallel.experts import expert_load, split_experts
from minidist.parallel.experts.expert_parallel import expert_parallel
from minidist.parallel.hybrid.hybrid_step import Hybrid
from minidist.parallel.step import step as step_module
from minidist.parallel.tensor import tensor_parallel

ITEM = 8


def run(
    size: int, moe: dict[str, Any], changes: dict[str, Any], **options: Any
) -> list[dict[str, Any]]:
    """Return what each of `size` threads holds after training."""
    return md.run(lambda world: train(world, moe, changes, **options), size=size)


def check_traffic(
    ranks: list[dict[str, Any]],
    moe: dict[str, Any],
    *,
    steps: int,
    passes: int = 1,
    clip: bool = True,
    again: bool = False,
) -> None:
    """To the byte: four all-to-alls of routed tokens (six with blocks computed again), the dense
    sum, the counts."""
    size = len(ranks)
    config = ranks[0]["config"]
    experts = {**MOE, **moe}["experts"]
    layers = config["layers"]

    def total(axis: str, verb: str) -> int:
        return sum(rank["sent"].get(axis, {}).get(verb, 0) for rank in ranks)

    rows = sum(rank["rows"] for rank in ranks)
    assert total("ep", "all_to_all") == ITEM * (6 if again else 4) * rows * config["width"]
    assert total("dp,ep", "all_reduce") == ITEM * steps * ranks[0]["dense"]
    assert {
        axis for rank in ranks for axis, verbs in rank["sent"].items() if sum(verbs.values())
    } <= {"ep", "dp,ep", "control"}
    assert (
        total("control", "all_to_all")
        == ITEM * steps * passes * (2 if again else 1) * layers * (size - 1) * experts
    )
    assert total("control", "all_reduce") == ITEM * steps * 2 * (size - 1) * 2 * experts * layers
    assert total("control", "all_gather") == ITEM * steps * (1 + clip) * size * (size - 1)


@pytest.fixture(scope="module")
def serial() -> dict[str, dict[str, Any]]:
    """One process, STEPS steps of five sequences."""
    return {kind: run(1, moe, {})[0] for kind, moe in KINDS.items()}


@pytest.mark.sampled
@pytest.mark.parametrize(("kind", "size"), [("loss", 2), ("loss", 4), ("capacity", 3), ("bias", 4)])
def test_equals_one_process(serial: dict[str, dict[str, Any]], kind: str, size: int) -> None:
    """Five experts and five sequences on two to four ranks."""
    ranks = run(size, KINDS[kind], {})
    check_equal(ranks, serial[kind])
    check_traffic(ranks, KINDS[kind], steps=split.STEPS)
    assert (
        kind != "capacity"
        or serial[kind]["loads"][:, :, 1].sum() < serial[kind]["loads"][:, :, 0].sum()
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("sequences", "accumulate"), [(2, 1), (3, 2)])
def test_ranks_without_a_row_take_part(sequences: int, accumulate: int) -> None:
    options: dict[str, Any] = {
        "sequences": sequences,
        "accumulate": accumulate,
        "clip": None,
        "steps": 2,
    }
    ranks = run(4, {}, {"positions": "rotary", "kv_heads": 2}, **options)
    check_equal(ranks, run(1, {}, {"positions": "rotary", "kv_heads": 2}, **options)[0])
    check_traffic(ranks, {}, steps=2, passes=accumulate, clip=False)


@pytest.mark.sampled
@pytest.mark.parametrize("balance", ["bias", "loss"])
def test_blocks_computed_again_send_tokens_twice_more(balance: str) -> None:
    """And count loads once."""
    moe = {"balance": balance}
    ranks = run(3, moe, {}, checkpoint="all", steps=2)
    check_equal(ranks, run(1, moe, {}, steps=2)[0])
    check_traffic(ranks, moe, steps=2, again=True)


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "copies", "kind"), [(4, 2, "loss"), (6, 3, "bias")])
def test_data_times_experts(size: int, copies: int, kind: str) -> None:
    """Several groups, each with all experts: their gradients are summed over the copies, by the
    formula."""
    options: dict[str, Any] = {"optimizer": SGD, "clip": 0.05}
    ranks = run(size, KINDS[kind], {}, copies=copies, **options)
    check_equal(ranks, run(1, KINDS[kind], {}, **options)[0])
    summed = sum(rank["sent"]["dp"]["all_reduce"] for rank in ranks)
    assert summed == ITEM * split.STEPS * 2 * (copies - 1) * 2 * MOE["experts"] * 2 * 16 * 64
    moved = sum(rank["sent"].get("ep", {}).get("all_to_all", 0) for rank in ranks)
    assert moved == ITEM * 4 * sum(rank["rows"] for rank in ranks) * 16
    assert (
        sum(rank["sent"]["dp,ep"]["all_reduce"] for rank in ranks)
        == ITEM * split.STEPS * ranks[0]["dense"]
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "moe", "changes"),
    [
        (split.tensor, {"shared": 1, "capacity": 0.8}, {"activation": "silu"}),
        (split.sequence, {"shared": 1}, {}),
    ],
    ids=["tensor", "sequence"],
)
def test_experts_times_tensor(kind: Any, moe: dict[str, Any], changes: dict[str, Any]) -> None:
    """Each expert cut by columns and rows; the gate sees all tokens or, with sequence parallelism,
    its own."""
    changes = {"mixture": MixtureConfig(experts=5, **moe), **changes}
    config = tiny(**{**split.SIZES, **changes})
    ranks = split.run(kind, 3, changes, checkpoint="0")
    split.check_equal(ranks, split.run(kind, 1, changes)[0])
    formula = (
        tensor_parallel.elements_sent(config, ranks=3, tokens=18, recomputed=1)
        if kind is split.tensor
        else sequence_parallel.elements_sent(config, ranks=3, sequences=3, recomputed=1)
    )
    assert split.sent_along_the_axis(ranks) == split.STEPS * ITEM * formula


any_job = given(
    size=st.integers(2, 5),
    moe=st.fixed_dictionaries(
        {
            "experts": st.integers(5, 9),
            "top_k": st.integers(1, 3),
            "noise": st.sampled_from([0.0, 0.5]),
            "capacity": st.sampled_from([None, 0.5, 1.0, 1.25]),
            "balance": st.sampled_from(["loss", "bias", "none"]),
            "shared": st.integers(0, 1),
            "bias_rate": st.just(0.05),
        }
    ),
    changes=st.fixed_dictionaries(
        {
            "heads": st.just(2),
            "width": st.sampled_from([8, 12]),
            "layers": st.integers(1, 2),
            "tied": st.booleans(),
            "activation": st.sampled_from(["gelu", "silu"]),
            "dropout": st.sampled_from([0.0, 0.2]),
            "positions": st.sampled_from(["learned", "rotary"]),
        }
    ),
    options=st.fixed_dictionaries(
        {
            "sequences": st.integers(1, 7),
            "accumulate": st.integers(1, 2),
            "clip": st.sampled_from([None, 0.1]),
            "optimizer": st.sampled_from([AdamW, SGD]),
        }
    ),
)


def check_job(
    size: int, moe: dict[str, Any], changes: dict[str, Any], options: dict[str, Any], steps: int
) -> None:
    ranks = run(size, moe, changes, steps=steps, **options)
    check_equal(ranks, run(1, moe, changes, steps=steps, **options)[0])
    check_traffic(
        ranks, moe, steps=steps, passes=options["accumulate"], clip=options["clip"] is not None
    )


@settings(max_examples=2)
@any_job
def test_any_job(
    size: int, moe: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    check_job(size, moe, changes, options, steps=2)


@pytest.mark.soak
@settings(max_examples=200)
@any_job
def test_very_many_jobs(
    size: int, moe: dict[str, Any], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    """The same, more often."""
    check_job(size, moe, changes, options, steps=3)


@pytest.mark.parametrize("size", [2, 4])
def test_experts_and_their_state_are_divided(size: int) -> None:
    for rank, held in enumerate(run(size, {}, {}, steps=1)):
        own = len(np.array_split(np.arange(MOE["experts"]), size)[rank])
        dense = held["dense"] // (2 * (size - 1))
        numbers = dense + 2 * own * 2 * 16 * 64  # layers × own experts × (up and down)
        now = [
            held["memory"][category]["now"] for category in ("parameters", "gradients", "optimizer")
        ]
        assert now == [ITEM * numbers, ITEM * numbers, 2 * ITEM * numbers]


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str) -> None:
    """Replicas stay equal, and near one process: sums are rounded where they are cut."""
    changes = {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[precision]}
    alone = run(1, {}, changes, precision=precision)[0]
    ranks = run(3, {}, changes, precision=precision)
    assert len({digest(rank) for rank in ranks}) == 1
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=2e-2)


# -------------------------------------------------------------------- the parity test sees the bugs


def experts_averaged(right: Any, self: Hybrid) -> None:
    """Experts' gradients divided by the number of ranks."""
    right(self)
    for weight in self.model.parameters():
        if isinstance(weight, WeightShard):
            weight.grad /= 3


def dense_not_summed(right: Any, self: DDP, index: int) -> None:
    """Only the buckets of experts are reduced."""
    if self.buckets[index].parameters[0].shared_by is not None:
        right(self, index)


BUGS = [
    # noise keyed by the token's number on its rank
    Bug(
        "local noise",
        DropoutKey,
        "of_sequences",
        lambda right, seed, step, first, *shape: right(seed, step, 0, *shape),
        {"moe": {"noise": 1.0}},
    ),
    Bug(
        "results not sorted back",
        split_experts,
        "_by_expert",
        lambda right, came: np.arange(came.sum()),
    ),
    # each rank moves its biases by its own loads
    Bug(
        "local loads",
        expert_load,
        "rebalance",
        lambda right, model, counted: right(model, loads(model)),
        {"moe": {"balance": "bias", "bias_rate": 0.1}},
    ),
    Bug("experts averaged", Hybrid, "finish_step", experts_averaged),
    Bug("dense not summed", DDP, "_start_reduce", dense_not_summed),
    Bug(
        "norm of own experts",
        step_module,
        "add_squares",
        lambda right, group, share, batch: share,
        {"clip": 0.05},
    ),
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGD: Adam forgives a wrong scale."""

    def check(moe: dict[str, Any] | None = None, clip: float | None = None) -> None:
        options: dict[str, Any] = {"optimizer": SGD, "clip": clip, "steps": 2}
        ranks, (alone,) = (run(size, moe or {}, {}, **options) for size in (3, 1))
        check_equal(ranks, alone)

    check_caught(bug, check, monkeypatch)


# ------------------------------------------------------------------------------------------- errors


def test_what_cannot_be_divided_says_what_would() -> None:
    def job(world: Any, experts: int) -> None:
        expert_parallel(mixture(GPT(tiny()), MixtureConfig(experts=experts)), world)

    with pytest.raises(
        PlanError,
        match="ep=3 ranks: 2 experts leave a rank without any; choose ep from 1 to 2, or at",
    ):
        md.run(job, 2, size=3)
    with pytest.raises(ConfigError, match="the model has no experts; make it a mixture first"):
        md.run(lambda world: expert_parallel(GPT(tiny()), world), size=1)
    drawn = mixture(GPT(tiny()), MixtureConfig(experts=2))
    drawn.initialize(0)
    with pytest.raises(ConfigError, match="drawn already; divide it first"):
        md.run(lambda world: expert_parallel(drawn, world), size=1)
