"""Composed plans: dp × pp × tp equals one process, sends what its chapters say, refuses what does not go together."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import BOUND, MOST, check, sent_by_axis, train
from training import difference, tiny

import minidist as md
from minidist.errors import MismatchError, PlanError
from minidist.optim import clip
from minidist.parallel import hybrid_step
from minidist.parallel.hybrid import Plan, Trainer
from minidist.parallel.hybrid_costs import elements_sent
from minidist.parallel.hybrid_step import Hybrid
from minidist.parallel.pipeline import Pipeline
from minidist.parallel.schedules import ORDERS

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


@pytest.mark.parametrize("transport", ["sockets", pytest.param("mpi", marks=pytest.mark.soak)])
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
        monkeypatch.setattr(hybrid_step, "add_up", lambda parts: None)
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
        monkeypatch.setattr(Pipeline, "run", lambda self, part, **told: 2 * run(self, part, **told))
    with pytest.raises((AssertionError, MismatchError)):
        check(MOST, {"pp": 2, "tp": 2, "microbatches": 2}, optimizer="sgd", clip=0.1)


# ------------------------------------------------------------------------------------------------------ cost, memory

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
    assert {axis: 2 * 8 * count for axis, count in elements_sent(config, Plan(**plan), 5).items()} == {
        axis: sent[axis] for axis in sent if axis != "dp"}


def test_memory() -> None:
    """Of blocks, a rank of pp=2, tp=2 holds a quarter; and with zero=1, dp=2 of Adam's state an eighth."""
    changes = {"layers": 4, "width": 32, "heads": 4, "vocabulary": 8}
    alone, = md.run(train, changes, {}, size=1)
    ranks = md.run(train, changes, {"plan": {"dp": 2, "pp": 2, "tp": 2, "zero": 1}}, size=8)
    for category, share in (("parameters", 1 / 4), ("gradients", 1 / 4), ("optimizer", 1 / 8)):
        held = [rank["memory"][category]["now"] / alone["memory"][category]["now"] for rank in ranks]
        assert all(0.9 * share < each < 1.12 * share for each in held), (category, held)
