"""Plans with the axis ep: experts × everything else equals one process, sends and holds what the
formulas say."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plans import BIAS, MOST, SCHEDULES, check, sent_by_axis, train
from planted import Bug, check_caught
from training import tiny

import minidist as md
from minidist.errors import MismatchError, PlanError
from minidist.nn import MixtureConfig, moe
from minidist.parallel.context import context_parallel
from minidist.parallel.experts import expert_load
from minidist.parallel.hybrid.hybrid import Mesh, Plan
from minidist.parallel.hybrid.hybrid_step import Hybrid
from minidist.parallel.pipeline.stages import Stages
from minidist.parallel.tensor.tensor_layers import SplitMixture

LOSS: dict[str, Any] = {"experts": 4, "capacity": 0.9, "noise": 0.1, "balance_weight": 0.1}


def model(mixture: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return what a tiny mixture has that a tiny GPT has not, in what can travel to ranks of a new
    mpirun."""
    return {**MOST, "layers": 2, "mixture": mixture, **changes}


def check_all(
    plan: dict[str, Any],
    mixture: dict[str, Any],
    *,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Parity, with SGD (Adam forgives a wrong scale); and bytes along every axis."""
    ranks = check(
        model(mixture, **(changes or {})), plan, **{"optimizer": "sgd", "clip": 0.05, **options}
    )
    formula = ranks[0]["formula"]
    expected = formula.get("axes", {"dp": formula["sent_bytes"]})
    assert sent_by_axis(ranks) == {axis: count for axis, count in expected.items() if count}
    return ranks


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("plan", "mixture"),
    [
        ({"dp": 3, "zero": 3}, BIAS),
        ({"dp": 2, "ep": 2, "zero": 3, "checkpoint_blocks": "0"}, LOSS),
        ({"dp": 2, "ep": 2, "tp": 2, "zero": 1, "accumulate": 2}, BIAS),
        ({"ep": 2, "cp": 2, "tp": 2, "sequence_parallel": True}, LOSS),
        ({"pp": 2, "ep": 2, "zero": 2, "schedule": "interleaved", "microbatches": 2}, LOSS),
    ],
    ids=lambda plan: (
        ",".join(f"{key}={value}" for key, value in plan.items()) if "experts" not in plan else ""
    ),
)
def test_equals_one_process(plan: dict[str, Any], mixture: dict[str, Any]) -> None:
    """Three sequences, so that one of four ranks has none, and takes part."""
    check_all(plan, mixture, sequences=3, steps=2)


@st.composite
def any_plan(draw: Any, ranks: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]:
    """(the plan, the mixture, the model, sequences) of a job of 2 to `ranks` ranks that is not
    refused."""
    tp, pp, cp, ep = (
        draw(st.sampled_from(sizes))
        for sizes in ((1, 1, 2, 3), (1, 1, 2, 3), (1, 1, 2), (1, 2, 2, 3))
    )
    assume(1 < tp * pp * cp * ep <= ranks)
    dp = draw(st.integers(1, min(3, ranks // (tp * pp * cp * ep))))
    heads = draw(st.integers(tp, 4))
    mixture = {
        "experts": ep * draw(st.integers(1, 3)),
        "top_k": 1,
        "noise": draw(st.sampled_from([0.0, 0.5])),
        "capacity": draw(st.sampled_from([None, 0.8, 1.2])),
        "shared": draw(st.integers(0, 1)),
        "balance": draw(st.sampled_from(["loss", "bias", "none"])),
        "balance_weight": 0.1,
        "bias_rate": 0.1,
    }
    mixture["top_k"] = draw(st.integers(1, min(3, mixture["experts"])))
    changes = {
        "layers": draw(st.integers(1, 3)),
        "heads": heads,
        "width": 2 * heads,
        "tied": draw(st.booleans()),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
        "activation": draw(st.sampled_from(["gelu", "silu"])),
        "positions": draw(st.sampled_from(["learned", "rotary"])),
    }
    plan = {
        "dp": dp,
        "pp": pp,
        "ep": ep,
        "cp": cp,
        "tp": tp,
        "zero": draw(st.integers(0, 3)),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "accumulate": draw(st.integers(1, 2)),
        "microbatches": draw(st.integers(1, 4)) if pp > 1 else None,
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "checkpoint_blocks": draw(st.sampled_from(["none", "all", "0"])),
    }
    try:
        Plan(**plan).require_model(tiny(**{**changes, "mixture": MixtureConfig(**mixture)}))
    except PlanError:
        assume(False)
    return plan, mixture, changes, draw(st.integers(1, 7))


@pytest.mark.soak
@settings(max_examples=100)
@given(any_plan(12))
def test_very_many_plans(job: tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]) -> None:
    """Any composition, 20 steps."""
    plan, mixture, changes, sequences = job
    check_all(plan, mixture, changes=changes, sequences=sequences, steps=20)


@pytest.mark.soak  # tests/parallel/experts/test_expert_parallel.py has it, too
@pytest.mark.parametrize(("precision", "plan"), [("fp16", {"ep": 2, "tp": 2, "zero": 1})])
def test_mixed_precision(precision: str, plan: dict[str, Any]) -> None:
    """Nearer to one process in the same precision than a tenth of the way that training went; all
    ranks alike."""
    changes = model(BIAS, dtype="float32")
    (start,), (serial,) = (
        md.run(
            train,
            changes,
            {"optimizer": "sgd", "steps": steps, "lr": 0.1, "plan": {"precision": precision}},
            size=1,
        )
        for steps in (0, 2)
    )
    ranks = md.run(
        train,
        changes,
        {"optimizer": "sgd", "lr": 0.1, "plan": {**plan, "precision": precision}},
        size=4,
    )
    assert len({(rank["digest"], *rank["losses"]) for rank in ranks}) == 1
    # those move by signs
    names = [name for name in serial["weights"] if not name.endswith("mlp.bias")]
    apart, way = (
        float(
            np.sqrt(sum(np.sum((a["weights"][name] - b["weights"][name]) ** 2.0) for name in names))
        )
        for a, b in ((ranks[0], serial), (serial, start))
    )
    assert apart < 0.1 * way
    assert sent_by_axis(ranks) == {
        axis: count for axis, count in ranks[0]["formula"]["axes"].items() if count
    }


def test_experts_are_divided_by_ep_and_their_state_by_dp() -> None:
    """With zero=1 a rank of dp=2, ep=2 has half of the experts and a quarter of their state; and of
    the rest's."""
    ranks = md.run(
        train, model(LOSS), {"plan": {"dp": 2, "ep": 2, "zero": 1, "bucket_bytes": 1 << 20}}, size=4
    )
    config = tiny(**model(LOSS))
    whole = md.run(train, model(LOSS), {"steps": 1}, size=1)[0]["memory"]["parameters"]["now"]
    experts = 8 * config.layers * 4 * 2 * config.width * config.hidden
    for rank in ranks:
        assert rank["memory"]["parameters"]["now"] == whole - experts + experts // 2
        # buckets need not divide
        assert abs(rank["memory"]["optimizer"]["now"] - 2 * whole // 4) <= 64
    assert experts > whole // 2


# -------------------------------------------------------------------- the parity test sees the bugs


BUGS = [
    Bug(
        "experts summed over ep too",
        Mesh,
        "experts",
        lambda right, mesh: mesh.copies,
        {"plan": {"dp": 2, "ep": 2}, "changes": model(LOSS)},
        raises=MismatchError,
    ),
    Bug(
        "norm of one rank's experts",
        Hybrid,
        "_counts",
        lambda right, self, owner: right(self, owner) and self.mesh.coordinates["ep"] == 0,
        {"plan": {"ep": 2}, "changes": model(LOSS)},
    ),
    Bug(
        "loads of one rank",
        expert_load,
        "rebalance",
        lambda right, model, counted: right(model, moe.loads(model)),
        {"plan": {"ep": 2}, "changes": model(BIAS)},
        raises=MismatchError,
    ),
    Bug(
        "gate's gradient of own columns",
        SplitMixture,
        "enter",
        lambda right, self, x: x if x.shape[-1] == 4 else self.region.enter(x),
        {"plan": {"tp": 2}, "changes": model(LOSS)},
        raises=MismatchError,
    ),
    Bug(
        "balance of own tokens",
        context_parallel.TokenShardSequences,
        "joined",
        lambda right, self, chosen: chosen,
        {"plan": {"cp": 2}, "changes": model(LOSS)},
        also=(
            (
                context_parallel.TokenShardSequences,
                "parted",
                lambda right, self, kept: kept,
            ),
        ),
    ),
    Bug(
        "stages' balance forgotten",
        Stages,
        "mixtures",
        lambda right, self, stage: [],
        {"plan": {"pp": 2}, "changes": model(LOSS)},
    ),
]


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check, optimizer="sgd", clip=0.05), monkeypatch)


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("plan", "mixture", "says"),
    [
        ({"dp": 2, "ep": 2}, None, r"no experts to divide; use dp=4, or a mixture \(--experts 4\)"),
        ({"ep": 3}, LOSS, "4 experts do not divide among 3 ranks; use dp=3, or 6 experts"),
        ({"ep": 8}, LOSS, "4 experts do not divide among 8 ranks; use dp=8, or 8 experts"),
        ({"dp": 2, "strategy": "parameter-server"}, LOSS, "use strategy=ddp"),
        ({"dp": 2, "precision": "fp8"}, LOSS, "not linears, which fp8 is for; use precision=bf16"),
    ],
)
def test_plan_refuses(plan: dict[str, Any], mixture: dict[str, Any] | None, says: str) -> None:
    config = tiny(mixture=None if mixture is None else MixtureConfig(**mixture))
    with pytest.raises(PlanError, match=says) as caught:
        Plan(**plan).require_model(config)
    assert "\n" not in str(caught.value)
