"""The matrix of compositions: any plan over dp, pp, cp and tp equals one process, and sends what
its modules say."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import BOUND, MOST, SCHEDULES, check, sent_by_axis, train
from planted import Bug, check_caught
from training import difference, tiny

import minidist as md
from minidist.autograd.ops.collectives import shard_of
from minidist.errors import GradientError, MismatchError, PlanError
from minidist.nn import Embedding
from minidist.nn.config import divisors
from minidist.parallel.context import context_parallel, token_shard
from minidist.parallel.hybrid import hybrid_step
from minidist.parallel.hybrid.hybrid import Mesh, Plan
from minidist.parallel.pipeline.stages import StagePass
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.staged_zero2 import StagedZero2
from minidist.parallel.zero.staged_zero3 import StagedZero3

EVERYTHING = {
    "dp": 2,
    "pp": 2,
    "cp": 2,
    "tp": 2,
    "zero": 3,
    "sequence_parallel": True,
    "microbatches": 3,
}
"""Sixteen ranks, four axes, and a rank has a part of all that can be divided."""

Job = tuple[dict[str, Any], dict[str, Any], int]
"""The model's changes, the plan, sequences."""


@st.composite
def axes(draw: Any, ranks: int) -> dict[str, int]:
    """Sizes of dp, pp, cp and tp: 2 to `ranks` ranks, and more than dp alone."""
    sizes = {"dp": 1}
    left = ranks
    for axis in draw(st.permutations(["pp", "cp", "tp"])):
        sizes[axis] = draw(st.integers(1, min(4, left)))
        left //= sizes[axis]
    assume(max(sizes.values()) > 1)
    return {**sizes, "dp": draw(st.integers(1, left))}


@st.composite
def uneven(draw: Any, layers: int, stages: int) -> str:
    """So many layers on so many stages, of which none but the ends is without."""
    assume(stages <= layers + 2)
    counts = [0, *[1] * (stages - 2), 0]
    for stage in draw(
        st.lists(
            st.integers(0, stages - 1), min_size=layers + 2 - stages, max_size=layers + 2 - stages
        )
    ):
        counts[stage] += 1
    return ",".join(map(str, counts))


@st.composite
def any_plan(draw: Any, ranks: int, layers: int) -> Job:
    """A job of up to `ranks` ranks and `layers` layers that no plan's check refuses."""
    sizes = draw(axes(ranks))
    heads = draw(st.integers(sizes["tp"], max(sizes["tp"], 4)))
    changes = {
        "layers": draw(st.integers(2, layers)),
        "heads": heads,
        "width": 2 * heads,
        "kv_heads": draw(st.sampled_from([heads, heads, 1])),
        "vocabulary": draw(st.integers(8, 14)),
        "context": draw(st.integers(3, 9)),
        "tied": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "positions": draw(st.sampled_from(["learned", "rotary"])),
        "activation": draw(st.sampled_from(["gelu", "silu"])),
        "norm": draw(st.sampled_from(["layer", "rms"])),
    }
    plan = {
        **sizes,
        "zero": draw(st.integers(0, 3)),
        "accumulate": draw(st.integers(1, 2)),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "keep_gathered": draw(st.booleans()),
        "microbatches": draw(st.integers(1, 5)) if sizes["pp"] > 1 else None,
        "attention": draw(st.sampled_from(["ring", "all-to-all"])) if sizes["cp"] > 1 else "ring",
        "sequence_parallel": draw(st.booleans()) and sizes["tp"] > 1,
        "checkpoint_blocks": draw(st.sampled_from(["none", "scores", "all", "0"])),
        "offload": draw(st.sampled_from(["none", "none", "optimizer", "all"])),
        "bucket_bytes": draw(st.sampled_from([500, 1 << 20])),
    }
    plan["keep_gathered"] &= plan["zero"] == 3
    if sizes["pp"] > 1 and plan["schedule"] == "interleaved":
        plan["stages_per_rank"] = draw(st.integers(1, 3))
    if sizes["pp"] > 1:
        splits = uneven(changes["layers"], Plan(**{**plan, "offload": "none"}).stages)
        plan["stage_layers"] = draw(st.sampled_from(["even", "measured"]) | splits)
    if plan["zero"]:
        plan["shard"] = draw(st.sampled_from([None, *divisors(sizes["dp"] * sizes["cp"])]))
    try:
        Plan(**plan).require_model(tiny(**changes))
    except PlanError:
        assume(False)
    return changes, plan, draw(st.integers(1, 7))


def check_job(job: Job, **options: Any) -> None:
    """Parity, and along each axis as many bytes as the sum of the modules' formulas."""
    changes, plan, sequences = job
    ranks = check(changes, plan, sequences=sequences, **options)
    axes = ranks[0]["formula"]["axes"]
    assert sent_by_axis(ranks) == {axis: sent for axis, sent in axes.items() if sent}


@settings(max_examples=2)
@given(any_plan(4, layers=3))
def test_any_plan(job: Job) -> None:
    check_job(job)


@pytest.mark.soak
@settings(max_examples=100)
@given(any_plan(16, layers=6))
def test_very_many_plans(job: Job) -> None:
    """The same, more often, longer, on more ranks."""
    check_job(job, steps=20)


@pytest.mark.soak
@pytest.mark.parametrize(
    "plan",
    [
        {"cp": 2, "tp": 2, "sequence_parallel": True},
        {"dp": 2, "cp": 2, "zero": 3},
        {"dp": 2, "pp": 2, "zero": 3},
        {"pp": 2, "cp": 2, "attention": "all-to-all", "zero": 2, "schedule": "zb-h1"},
        {"dp": 2, "pp": 2, "zero": 2, "schedule": "interleaved"},
        EVERYTHING,
    ],
    ids=lambda plan: ",".join(f"{key}={value}" for key, value in plan.items()),
)
def test_plans_under_mpirun(plan: dict[str, Any]) -> None:
    """Fixed examples: processes that draw for themselves would draw different ones."""
    (serial,) = md.run(train, MOST, {"steps": 20}, size=1)
    ranks = md.run(
        train, MOST, {"plan": plan, "steps": 20}, size=Plan(**plan).size, transport="mpi"
    )
    assert difference(ranks[-1]["weights"], serial["weights"]) < BOUND
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1
    assert sent_by_axis(ranks) == ranks[0]["formula"]["axes"]


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.soak  # tests/parallel/hybrid/test_hybrid_step.py has memory
def test_what_lasts_is_divided_by_dp_and_cp_together() -> None:
    """ZeRO's shards span both; activations are of a rank's rows and tokens; with tp outside the
    regions too."""
    changes = {"layers": 4, "width": 32, "heads": 4, "context": 16, "vocabulary": 8}
    options = {"steps": 1}
    (alone,) = md.run(train, changes, {**options, "sequences": 4}, size=1)

    def shares(plan: dict[str, Any]) -> list[float]:
        memory = [
            rank["memory"]
            for rank in md.run(train, changes, {"plan": plan, **options, "sequences": 4}, size=4)
        ]
        return [
            max(rank[what][when] for rank in memory) / alone["memory"][what][when]
            for what, when in (
                ("parameters", "now"),
                ("gradients", "now"),
                ("optimizer", "now"),
                ("activations", "peak"),
            )
        ]

    assert shares({"dp": 2, "cp": 2, "zero": 3}) == pytest.approx([1 / 4] * 4, rel=0.1)
    tensor, sequence = (
        shares({"cp": 2, "tp": 2, "sequence_parallel": divided})[-1] for divided in (False, True)
    )
    # what was gathered for the regions stays whole (chapter 13)
    assert 1 / 4 < sequence < 0.95 * tensor < 1 / 3


@pytest.mark.soak
def test_stages_keep_their_promise_behind_a_pipeline() -> None:
    """Ψ of a rank's stage on dp=4: with ZeRO-2 no whole gradient is held at any time, with ZeRO-3
    no whole weights."""
    changes = {"layers": 6, "width": 16, "vocabulary": 8}
    held = {
        zero: [
            rank["memory"]
            for rank in md.run(
                train,
                changes,
                {
                    "plan": {
                        "dp": 4,
                        "pp": 2,
                        "zero": zero,
                        "microbatches": 2,
                        "bucket_bytes": 4096,
                    },
                    "steps": 1,
                    "sequences": 4,
                },
                size=8,
            )
        ]
        for zero in (2, 3)
    }
    for two, three in zip(*held.values(), strict=True):
        psi = two["parameters"]["now"]
        assert abs(two["gradients"]["now"] - psi / 4) < psi / 100
        # the largest of either: a matrix, a block
        bucket = 8 * 4 * 16 * 16
        unit = 8 * 13 * (16 * 16 + 16)
        assert two["gradients"]["peak"] < psi / 4 + 3 * bucket
        for what in ("parameters", "gradients"):
            assert three[what]["peak"] < psi / 4 + 2 * unit < psi
        assert abs(three["parameters"]["now"] - psi / 4) < psi / 100


# -------------------------------------------------------------------- the parity test sees the bugs


def consecutive(right: Any, model: Any, group: Any) -> Any:
    """The ring, of ranks that take consecutive tokens as if it needed no zigzag."""
    right(model, group)
    return partial(shard_of, group=group)


BUGS = [
    Bug(
        "tokens not in zigzag",
        context_parallel,
        "attend_by_ring",
        consecutive,
        {"plan": {"cp": 2}},
    ),
    Bug(
        "rows divided by cp too",
        Mesh,
        "rows",
        lambda right, mesh: mesh.copies,
        {"plan": {"dp": 2, "cp": 2}},
        raises=MismatchError,
    ),
    Bug(
        "dropout of the first tokens",
        token_shard,
        "own_key",
        lambda right, key, own: right(key, lambda length: slice(len(own(length)))),
        {"plan": {"cp": 2}},
    ),
    Bug(
        "positions of the first tokens",
        token_shard.TokenShardPositions,
        "forward",
        lambda right, self, ids: Embedding.forward(self, np.arange(len(self.own(len(ids))))),
        {"plan": {"cp": 2}},
    ),
    Bug(
        "norms not summed over tp",
        hybrid_step,
        "add_up",
        lambda right, parts: None,
        {"plan": {"dp": 2, "tp": 2, "zero": 2, "sequence_parallel": True}},
        raises=MismatchError,
    ),
    Bug(
        "second halves not reduced",
        StagePass,
        "backward_weights",
        lambda right, self, *of: self.pipeline.precision.backward_weights(self._deferred.pop(of)),
        {"plan": {"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-h1", "microbatches": 2}},
        raises=GradientError,
    ),
    Bug(
        "a stage's gradients not reduced",
        StagedZero2,
        "set_segments",
        lambda right, self, segments, order: setattr(self, "_segments", [[] for _ in segments]),
        {"plan": {"dp": 2, "pp": 2, "zero": 2, "schedule": "interleaved"}},
        raises=GradientError,
    ),
    Bug(
        "table not reduced",
        StagedZero3,
        "finish_step",
        lambda right, self: self.gradients.sum_copies(),
        {"plan": {"dp": 2, "pp": 2, "zero": 3, "microbatches": 2}},
    ),
    Bug(
        "copies not summed",
        GradientShards,
        "sum_copies",
        lambda right, self: None,
        {"plan": {"dp": 2, "pp": 2, "zero": 2, "shard": 1, "microbatches": 2}},
        raises=MismatchError,
    ),
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**MOST, "positions": "learned"}
    check_caught(bug, partial(check, changes, optimizer="sgd", clip=None, steps=2), monkeypatch)
