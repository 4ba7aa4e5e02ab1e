"""Composed plans: dp × pp × tp equals one process, sends what its chapters say, refuses what does
not go together."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from plans import MOST, check, sent_by_axis, train
from planted import Bug, check_caught
from training import global_batch, tiny

import minidist as md
from minidist.errors import MismatchError
from minidist.nn import GPT
from minidist.nn.weight_shard import WeightShard
from minidist.parallel.hybrid import hybrid_step
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.hybrid.hybrid_costs import elements_sent
from minidist.parallel.pipeline.pipeline import Pipeline
from minidist.parallel.pipeline.stages import StageModel
from minidist.parallel.step import step as step_module
from minidist.parallel.tensor.tensor_parallel import TensorParallel

# --------------------------------------------------------------------------- parallel equals serial
# tests/parallel/test_parity.py has whole trainings on fixed sizes, over every transport


@pytest.mark.soak  # tests/parallel/context/test_ulysses.py has shared key heads
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 3, "tp": 2, "zero": 2, "bucket_bytes": 300},
        *(
            pytest.param(plan, marks=pytest.mark.soak)
            for plan in (
                {"dp": 2, "pp": 2, "tp": 2},
                {"dp": 2, "tp": 2, "zero": 1},
                {"dp": 4, "tp": 2, "zero": 2, "shard": 2},
                {"dp": 2, "cp": 2, "tp": 2, "zero": 3, "sequence_parallel": True},
                {"dp": 2, "pp": 2, "tp": 2, "zero": 3, "schedule": "zb-h1", "microbatches": 3},
            )
        ),
    ],
    ids=str,
)
def test_key_heads_that_several_ranks_hold(plan: dict[str, Any]) -> None:
    """One key head of three queries: two lie on one rank and one on the other."""
    ranks = check({**MOST, "heads": 3, "width": 12, "kv_heads": 1}, plan)
    assert sent_by_axis(ranks) == ranks[0]["formula"]["axes"]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("precision", "plan"),
    [
        ("bf16", {"cp": 2, "tp": 2, "zero": 1, "sequence_parallel": True}),
        ("fp16", {"pp": 2, "tp": 2}),
        ("fp8", {"cp": 2, "pp": 2, "zero": 3}),
        ("fp8", {"tp": 2, "sequence_parallel": True}),
    ],
)
def test_mixed_precision(precision: str, plan: dict[str, Any]) -> None:
    """Nearer to one process in the same precision than a tenth of the way that training went;
    masters are float32."""
    changes = {**MOST, "dtype": "float32"}
    (start,) = md.run(train, changes, {"steps": 0, "plan": {"precision": precision}}, size=1)
    (serial,) = md.run(
        train, changes, {"optimizer": "sgd", "plan": {"precision": precision}}, size=1
    )
    ranks = md.run(
        train,
        changes,
        {"optimizer": "sgd", "plan": {**plan, "precision": precision}},
        size=Plan(**plan).size,
    )
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1
    ours = ranks[0]["weights"]
    assert all(array.dtype == np.float32 for array in ours.values())
    apart, way = (
        float(np.sqrt(sum(np.sum((a[name] - b[name]) ** 2.0) for name in a)))
        for a, b in ((ours, serial["weights"]), (serial["weights"], start["weights"]))
    )
    assert apart < 0.1 * way
    assert sent_by_axis(ranks) == ranks[0]["formula"]["axes"]


@pytest.mark.sampled
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_scales_of_fp8_are_those_of_whole_matrices(kv_heads: int) -> None:
    """Of every linear the largest of x, weights and dy, which a shard cannot know, are one
    process's; but where ranks share a key head each rounds its summand of the head's dy.
    """

    def job(world: Any, plan: dict[str, Any]) -> np.ndarray:
        config = tiny(heads=4, kv_heads=kv_heads, dtype="float32")
        trainer = Trainer(Plan(**plan, precision="fp8"), config, world, optimizer="sgd", lr=0.0)
        trainer.step(global_batch(0, 4, config))
        return trainer.precision.float8.state()[:, :, -1]  # type: ignore[attr-defined]

    (alone,) = md.run(job, {}, size=1)
    ranks = md.run(job, {"dp": 2, "tp": 2}, size=4)
    for seen in ranks:
        np.testing.assert_array_equal(seen, ranks[0])
        # weights are drawn alike, to the bit
        np.testing.assert_array_equal(seen[:, 1], alone[:, 1])
        known = slice(3 if kv_heads == 4 else 2)
        # bf16 rounds what adds up in parts
        np.testing.assert_allclose(seen[:, known], alone[:, known], rtol=2e-2)
    assert alone.min() > 0


# -------------------------------------------------------------------- the parity test sees the bugs


BUGS = [
    Bug(
        "ends not summed",
        hybrid_step,
        "add_up",
        lambda right, parts: None,
        raises=MismatchError,
    ),
    Bug("norm too large", step_module, "add_squares", lambda right, *given: 2 * right(*given)),
    Bug(
        "norms counted on every tensor rank",
        TensorParallel,
        "counts",
        lambda right, self, parameter: (
            not isinstance(parameter, WeightShard) or right(self, parameter)
        ),
    ),
    Bug("table counted twice", StageModel, "counts", lambda right, self, parameter: True),
    Bug(
        "own dropout rows",
        Trainer,
        "_key",
        lambda right, self, part: right(self, replace(part, first=0)),
    ),
    Bug(
        "loss of all tensor ranks",
        Pipeline,
        "run",
        lambda right, self, part, **options: 2 * right(self, part, **options),
    ),
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"pp": 2, "tp": 2, "microbatches": 2}
    check_caught(bug, partial(check, MOST, plan, optimizer="sgd", clip=0.1), monkeypatch)


BUGS_OF_SHARED_HEADS = [
    # equal but for the last bits
    Bug(
        "lie apart",
        TensorParallel,
        "held_alike",
        lambda right, self, parameter: not isinstance(parameter, WeightShard),
        raises=MismatchError,
    ),
    Bug("counted by each", WeightShard, "first_sharer", lambda right, self: True),
    Bug(
        "not added up",
        hybrid_step,
        "add_up",
        lambda right, parts: None,
        raises=MismatchError,
    ),
]


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS_OF_SHARED_HEADS, ids=str)
def test_planted_bugs_in_shared_key_heads(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**MOST, "heads": 3, "width": 12, "kv_heads": 1}
    plan = {"dp": 3, "tp": 2, "zero": 2}
    check_caught(bug, partial(check, changes, plan, optimizer="sgd", clip=0.05), monkeypatch)


# ------------------------------------------------------------------------------------- cost, memory


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("plan", "tied"),
    [
        ({"dp": 2, "pp": 2, "tp": 2}, True),
        ({"dp": 2, "tp": 2, "zero": 2, "accumulate": 2}, False),
        ({"pp": 2, "tp": 2, "schedule": "interleaved"}, False),
        ({"dp": 2, "pp": 2, "zero": 1}, True),
        ({"dp": 3, "tp": 2, "zero": 3}, True),
        ({"dp": 2, "pp": 2, "zero": 3, "keep_gathered": True}, True),
        ({"dp": 2, "cp": 2, "tp": 2, "zero": 2, "sequence_parallel": True}, True),
        ({"cp": 3, "pp": 2, "zero": 2, "attention": "all-to-all"}, False),
    ],
)
def test_traffic(plan: dict[str, Any], tied: bool) -> None:
    """The ledger beside the formulas, by axis, exactly."""
    config = tiny(layers=4, heads=4, tied=tied)
    ranks = md.run(
        train,
        {"layers": 4, "heads": 4, "tied": tied},
        {"plan": plan, "steps": 2},
        size=Plan(**plan).size,
    )
    sent = sent_by_axis(ranks)
    assert sent == ranks[0]["formula"]["axes"]
    assert {
        axis: 2 * 8 * count for axis, count in elements_sent(config, Plan(**plan), 5).items()
    } == {axis: sent[axis] for axis in sent if not axis.startswith("dp")}


def test_memory() -> None:
    """Of blocks, a rank of pp=2, tp=2 holds a quarter; and with zero=1, dp=2 of Adam's state an
    eighth."""
    changes = {"layers": 4, "width": 32, "heads": 4, "vocabulary": 8}
    (alone,) = md.run(train, changes, {}, size=1)
    ranks = md.run(train, changes, {"plan": {"dp": 2, "pp": 2, "tp": 2, "zero": 1}}, size=8)
    for category, share in (("parameters", 1 / 4), ("gradients", 1 / 4), ("optimizer", 1 / 8)):
        held = [
            rank["memory"][category]["now"] / alone["memory"][category]["now"] for rank in ranks
        ]
        assert all(0.9 * share < each < 1.12 * share for each in held), (category, held)


@pytest.mark.parametrize("plan", [{"pp": 4}, {"pp": 2, "tp": 2}], ids=str)
def test_weights_that_no_device_can_hold_are_gathered_on_the_host(plan: dict[str, Any]) -> None:
    config = tiny(layers=4, width=32, heads=4, vocabulary=8)
    whole = 8 * sum(parameter.size for parameter in GPT(config).parameters())

    def job(world: Any) -> tuple[int, int]:
        trainer = Trainer(Plan(**plan, device_memory=whole - 1), config, world)
        gathered = sum(weights.nbytes for weights in trainer.state_dict().values())
        return gathered, trainer.store.host.peak["total"]

    for gathered, on_the_host in md.run(job, size=4):
        assert gathered == whole
        assert on_the_host >= whole / 4
