"""Composed plans: dp × pp × tp equals one process, sends what its chapters say, refuses what does not go together."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from training import difference, global_batch, tiny

import minidist as md
from minidist.cli import train_report
from minidist.errors import MismatchError, PlanError
from minidist.nn import GPTConfig
from minidist.optim import clip
from minidist.parallel import hybrid_step
from minidist.parallel.common.layered import Layered
from minidist.parallel.hybrid import Plan, Trainer
from minidist.parallel.hybrid_step import Hybrid, elements_sent
from minidist.parallel.pipeline import Pipeline
from minidist.parallel.schedules import ORDERS

BOUND = 1e-10
MOST = {"layers": 3, "heads": 4, "tied": True, "dropout": 0.2}      # what most can go wrong in


def train(world: Any, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What a rank holds after some steps. `options`: plan (its fields), steps, sequences, and the Trainer's."""
    config, options = tiny(**changes), {"optimizer": "adamw", "lr": 1e-2, "clip": 0.5, "seed": 3, **options}
    plan = Plan(**{"bucket_bytes": 2048, **options.pop("plan", {})})
    steps, sequences = options.pop("steps", 3), options.pop("sequences", 5)
    trainer = Trainer(plan, config, world, **options)
    losses = [trainer.step(global_batch(step, sequences, config)) for step in range(steps)]
    trainer.check_replicas()
    batch = global_batch(steps, 3, config)
    losses.append(trainer.evaluate([batch, global_batch(0, 1, config)]))
    result = {"weights": trainer.state_dict(), "losses": losses, "digest": trainer.weights_sha256(),
              "sent": world.ledger.sent_bytes("step"),
              "formula": train_report.gradient_formula(trainer, global_batch(0, sequences, config)),
              "memory": trainer.account.snapshot()}
    trainer.close()
    return result


def check(changes: dict[str, Any], plan: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Every rank equals one process in weights, losses and evaluation, and all ranks in every bit; their results."""
    serial, = md.run(train, changes, {**options, "plan": {"precision": plan.get("precision", "fp32")}}, size=1)
    ranks = md.run(train, changes, {**options, "plan": plan}, size=Plan(**plan).size)
    assert difference(ranks[0]["weights"], serial["weights"]) < BOUND
    assert np.max(np.abs(np.subtract(ranks[0]["losses"], serial["losses"]))) < BOUND
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1
    return ranks


# ------------------------------------------------------------------------------------------- parallel equals serial

@pytest.mark.parametrize("plan", [
    {"dp": 2, "tp": 2, "zero": 3}, {"dp": 3, "tp": 2, "zero": 2, "accumulate": 2}, {"pp": 3, "tp": 2},
    {"dp": 2, "pp": 2, "tp": 2, "zero": 1, "schedule": "zb-h1", "microbatches": 3, "checkpoint_blocks": "0,2"},
    {"dp": 4, "pp": 2, "zero": 1, "shard": 2, "schedule": "interleaved", "accumulate": 2}],
    ids=lambda plan: ",".join(f"{key}={value}" for key, value in plan.items()))
def test_equals_one_process(plan: dict[str, Any]) -> None:
    check(MOST, plan)


def test_key_heads_that_several_ranks_hold() -> None:
    check({**MOST, "kv_heads": 1}, {"dp": 2, "pp": 2, "tp": 2})
    check({**MOST, "kv_heads": 1}, {"dp": 2, "tp": 2})


def test_uneven_shards_have_equal_bits() -> None:
    """Three data ranks, whose sums depend on their order; heads that do not divide; check_replicas looks."""
    for zero in (0, 1):
        check({**MOST, "heads": 3, "width": 12, "vocabulary": 13}, {"dp": 3, "tp": 2, "zero": zero})
    check(MOST, {"dp": 3, "pp": 2, "zero": 1})


@st.composite
def any_plan(draw: Any, ranks: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(the model, the plan, sequences) of a job of 2 to `ranks` ranks that is not refused."""
    tp, pp = draw(st.integers(1, min(4, ranks))), draw(st.integers(1, min(4, ranks)))
    assume(1 < tp * pp <= ranks)
    dp = draw(st.integers(1, ranks // (tp * pp)))
    heads = draw(st.integers(tp, max(tp, 4)))
    changes = {"layers": draw(st.integers(2, 6)), "heads": heads, "width": 2 * heads, "tied": draw(st.booleans()),
               "kv_heads": draw(st.sampled_from([heads, 1])), "vocabulary": draw(st.integers(8, 14)),
               "dropout": draw(st.sampled_from([0.0, 0.2])), "positions": draw(st.sampled_from(["learned", "rotary"])),
               "activation": draw(st.sampled_from(["gelu", "silu"])), "norm": draw(st.sampled_from(["layer", "rms"]))}
    plan = {"dp": dp, "pp": pp, "tp": tp, "zero": draw(st.integers(0, 1 if pp > 1 else 3)),
            "schedule": draw(st.sampled_from([*ORDERS])), "accumulate": draw(st.integers(1, 2)),
            "microbatches": draw(st.integers(1, 5)) if pp > 1 else None,
            "checkpoint_blocks": draw(st.sampled_from(["none", "all", "0"]))}
    try:
        Plan(**plan).require_model(tiny(**changes))
    except PlanError:
        assume(False)
    return changes, plan, draw(st.integers(1, 7))


@settings(max_examples=3)
@given(any_plan(8))
def test_any_plan(job: tuple[dict[str, Any], dict[str, Any], int]) -> None:
    changes, plan, sequences = job
    check(changes, plan, sequences=sequences)


@pytest.mark.soak
@settings(max_examples=100)
@given(any_plan(16))
def test_very_many_plans(job: tuple[dict[str, Any], dict[str, Any], int]) -> None:
    """The same, more often, longer, on more ranks."""
    changes, plan, sequences = job
    check(changes, plan, sequences=sequences, steps=20)


@pytest.mark.parametrize("transport", ["sockets", "mpi"])
def test_processes(transport: str) -> None:
    plan = {"dp": 1, "pp": 2, "tp": 2, "microbatches": 2}
    serial, = md.run(train, MOST, {}, size=1)
    ranks = md.run(train, MOST, {"plan": plan}, size=4, transport=transport)
    assert difference(ranks[3]["weights"], serial["weights"]) < BOUND
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads-unbuffered", "sockets", "shm", "mpi"])
def test_eight_ranks_everywhere(transport: str) -> None:
    plan = {"dp": 2, "pp": 2, "tp": 2, "zero": 1, "microbatches": 4}
    serial, = md.run(train, MOST, {"steps": 20}, size=1)
    ranks = md.run(train, MOST, {"plan": plan, "steps": 20}, size=8, transport=transport)
    assert difference(ranks[7]["weights"], serial["weights"]) < BOUND


@pytest.mark.parametrize(("precision", "plan"), [
    ("bf16", {"dp": 2, "tp": 2, "zero": 1}), ("fp16", {"pp": 2, "tp": 2}), ("fp8", {"dp": 2, "pp": 2})])
def test_mixed_precision(precision: str, plan: dict[str, Any]) -> None:
    """Nearer to one process in the same precision than a tenth of the way that training went; masters are float32."""
    changes = {**MOST, "dtype": "float32"}
    start, = md.run(train, changes, {"steps": 0, "plan": {"precision": precision}}, size=1)
    serial, = md.run(train, changes, {"optimizer": "sgd", "plan": {"precision": precision}}, size=1)
    ranks = md.run(train, changes, {"optimizer": "sgd", "plan": {**plan, "precision": precision}},
                   size=Plan(**plan).size)
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1
    ours = ranks[0]["weights"]
    assert all(array.dtype == np.float32 for array in ours.values())
    apart, way = (float(np.sqrt(sum(np.sum((a[name] - b[name]) ** 2.0) for name in a)))
                  for a, b in ((ours, serial["weights"]), (serial["weights"], start["weights"])))
    assert apart < 0.1 * way
    assert sent_by_axis(ranks) == ranks[0]["formula"]["axes"]


# --------------------------------------------------------------------------------------- the parity test sees the bugs

@pytest.mark.parametrize("bug", ["ends not summed", "norm too large", "norms counted on every tensor rank",
                                 "table counted twice", "own dropout rows", "loss of all tensor ranks"])
def test_planted_bugs_break_parity(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "ends not summed":
        monkeypatch.setattr(Layered, "sum_ends", lambda self: None)
    elif bug == "norm too large":
        monkeypatch.setattr(hybrid_step, "sum_of_squares", lambda arrays: 2 * clip.sum_of_squares(arrays))
    elif bug == "norms counted on every tensor rank":
        counted = hybrid_step.counted_at
        monkeypatch.setattr(hybrid_step, "counted_at", lambda parameters, rank: counted(parameters, 0))
    elif bug == "table counted twice":
        squares = Hybrid._squares

        def twice(self: Hybrid) -> float:
            table, self._twice = self._twice, lambda: []        # type: ignore[method-assign]
            try:
                return squares(self)
            finally:
                self._twice = table                             # type: ignore[method-assign]

        monkeypatch.setattr(Hybrid, "_squares", twice)
    elif bug == "own dropout rows":
        key = Trainer._key
        monkeypatch.setattr(Trainer, "_key", lambda self, inputs, first: key(self, inputs, 0))
    else:
        run = Pipeline.run
        monkeypatch.setattr(Pipeline, "run", lambda self, part, divisor: 2 * run(self, part, divisor=divisor))
    with pytest.raises((AssertionError, MismatchError)):
        check(MOST, {"pp": 2, "tp": 2, "microbatches": 2}, optimizer="sgd", clip=0.1)


# ------------------------------------------------------------------------------------------------------ cost, memory

def sent_by_axis(ranks: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes of all ranks, scalars apart."""
    sent: dict[str, int] = {}
    for axis, verbs in ((axis, verbs) for rank in ranks for axis, verbs in rank["sent"].items() if axis != "control"):
        sent[axis] = sent.get(axis, 0) + sum(verbs.values())
    return {axis: count for axis, count in sent.items() if count}


@pytest.mark.parametrize(("plan", "tied"), [
    ({"dp": 2, "pp": 2, "tp": 2}, True), ({"dp": 2, "tp": 2, "zero": 2, "accumulate": 2}, False),
    ({"pp": 2, "tp": 2, "schedule": "interleaved"}, False), ({"dp": 2, "pp": 2, "zero": 1}, True),
    ({"dp": 3, "tp": 2, "zero": 3}, True)])
def test_traffic(plan: dict[str, Any], tied: bool) -> None:
    """The ledger beside the formulas, by axis, exactly."""
    config = tiny(layers=4, heads=4, tied=tied)
    ranks = md.run(train, {"layers": 4, "heads": 4, "tied": tied}, {"plan": plan, "steps": 2},
                   size=Plan(**plan).size)
    sent = sent_by_axis(ranks)
    assert sent == ranks[0]["formula"]["axes"]
    tokens = 5 * config.context
    assert {axis: 2 * 8 * count for axis, count in elements_sent(config, Plan(**plan), tokens).items()} == {
        axis: sent[axis] for axis in sent if axis != "dp"}


def test_memory() -> None:
    """Of blocks, a rank of pp=2, tp=2 holds a quarter; and with zero=1, dp=2 of Adam's state an eighth."""
    changes = {"layers": 4, "width": 32, "heads": 4, "vocabulary": 8}
    alone, = md.run(train, changes, {}, size=1)
    ranks = md.run(train, changes, {"plan": {"dp": 2, "pp": 2, "tp": 2, "zero": 1}}, size=8)
    for category, share in (("parameters", 1 / 4), ("gradients", 1 / 4), ("optimizer", 1 / 8)):
        held = [rank["memory"][category]["now"] / alone["memory"][category]["now"] for rank in ranks]
        assert all(0.9 * share < each < 1.12 * share for each in held), (category, held)


# ---------------------------------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize(("options", "says"), [
    ({"pp": 2, "zero": 2}, "reduce its gradients anew; use zero=1, or pp=1"),
    ({"pp": 2, "tp": 2, "zero": 3}, "gather weights and reduce gradients anew; use zero=1"),
    ({"pp": 2, "schedule": "2f2b"}, "choose one of naive, gpipe, 1f1b"), ({"pp": 2, "microbatches": 0}, "at least one"),
    ({"dp": 2, "microbatches": 4}, "no pipeline to fill; use accumulate=4"),
    ({"tp": 2, "zero": 3, "offload": "all"}, "offloads on the data axis alone; use offload=none, or dp=2 with zero=3"),
    ({"dp": 2, "tp": 2, "strategy": "parameter-server"}, "whole models; use strategy=ddp, or dp=4"),
    ({"dp": 2, "tp": 2, "precision": "fp8"}, "use bf16, or tp=1 with dp=4")])
def test_plan_refuses(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "changes", "says"), [
    ({"pp": 6}, {}, "has 6 stages, and the model 2 layers: .*use dp=2,pp=3, or at least 4 layers"),
    ({"pp": 3, "schedule": "interleaved", "tp": 2}, {}, "has 6 stages.*use dp=3,tp=2, or at least 4 layers"),
    ({"tp": 4}, {}, "2 heads leave a rank without any; choose tp from 1 to 2"),
    ({"tp": 2, "zero": 1}, {"kv_heads": 1}, "use tp=1, or zero=0"),
    ({"dp": 3, "tp": 2, "zero": 3}, {"heads": 3, "width": 12}, "3 heads .* do not divide.*use zero=2")])
def test_plan_refuses_a_model(options: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    config: GPTConfig = tiny(**changes)
    with pytest.raises(PlanError, match=says):
        Plan(**options).require_model(config)


def test_plan_names_the_nearest_for_so_many_ranks() -> None:
    with pytest.raises(PlanError, match="plan dp=2,pp=2,tp=2 is for 8 ranks, the job has 12; use dp=3,pp=2,tp=2, or"):
        Plan(dp=2, pp=2, tp=2).require(12)
    with pytest.raises(PlanError, match="plan pp=2,tp=2 is for 4 ranks, the job has 6; use dp=6, or start 4"):
        Plan(pp=2, tp=2).require(6)
