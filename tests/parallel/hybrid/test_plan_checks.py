"""Bad plans fail before training, with one line that names a plan that fits."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import global_batch, tiny

import minidist as md
from minidist.errors import MemoryLimitError, PlanError
from minidist.nn import GPTConfig, MixtureConfig
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.hybrid.plan import AXES, Plan


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pp": 2, "schedule": "2f2b"}, "choose one of naive, gpipe, 1f1b"),
        ({"pp": 2, "microbatches": 0}, "at least one"),
        ({"dp": 2, "microbatches": 4}, "no pipeline to fill; use accumulate=4"),
        (
            {"dp": 2, "microbatches": 4, "accumulate": 3},
            "use accumulate=12, which makes as many passes",
        ),
        (
            {"dp": 2, "tp": 2, "strategy": "parameter-server"},
            "whole models; use strategy=ddp, or dp=4",
        ),
        ({"tp": 2, "strategy": "parameter-server"}, "whole models; use strategy=ddp, or dp=2"),
        (
            {"pp": 2, "dp": 2, "strategy": "parameter-server", "microbatches": 2},
            "or dp=4 without microbatches",
        ),
        ({"dp": 2, "algorithm": "halving"}, "choose one of naive, tree, ring, direct"),
        (
            {"dp": 2, "zero": 1, "algorithm": "direct"},
            "sends by reduce_scatter, all_gather: choose one of naive, ring",
        ),
        (
            {"dp": 4, "zero": 1, "shard": 2, "algorithm": "direct"},
            "reduce_scatter, all_gather, all_reduce: choose one of",
        ),
        (
            {"pp": 2, "stage_layers": "2,1,1"},
            "choose even, measured, or 2 numbers of layers, of each stage, as 2,2;",
        ),
        (
            {"pp": 2, "schedule": "interleaved", "stage_layers": "2,0,1,1"},
            "only the first and the last may have none",
        ),
        ({"pp": 2, "stage_layers": "evn"}, "choose even, measured"),
        ({"dp": 2, "stage_layers": "measured"}, "there is no pipeline; use pp=2"),
        ({"dp": 2, "attention": "all-to-all"}, "no sequence is cut; use cp=2"),
        ({"attention": "flash"}, "choose one of ring, all-to-all"),
        ({"cp": 2, "sequence_parallel": True}, "use tp=2, or cp=2"),
    ],
)
def test_plan_refuses(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        ({"pp": 6}, {}, "has 6 stages, and the model 2 layers: .*use dp=6, or at least 4 layers"),
        (
            {"pp": 3, "schedule": "interleaved", "tp": 2},
            {},
            "has 6 stages.*use dp=6, or at least 4 layers",
        ),
        ({"tp": 4}, {}, "2 heads leave a rank without any; use dp=4, or at least 4 heads"),
        (
            {"tp": 2, "sequence_parallel": True},
            {"heads": 1, "width": 4},
            "1 head leaves a rank without any; use dp=2 without sequence_parallel, or at least "
            "2 heads",
        ),
        ({"cp": 3, "attention": "all-to-all"}, {}, "use dp=3 without attention, or attention=ring"),
        ({"pp": 5, "microbatches": 3}, {}, "use dp=5 without microbatches, or at least 3 layers"),
        (
            {"pp": 2, "stage_layers": "2,1"},
            {},
            "are 3 layers, and the model has 2; use dp=2 without stage_layers, or stag",
        ),
        (
            {"cp": 4, "tp": 2, "attention": "all-to-all"},
            {"heads": 4},
            "use dp=8 without attention, or attention=ring",
        ),
    ],
)
def test_plan_refuses_a_model(options: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    config: GPTConfig = tiny(**changes)
    with pytest.raises(PlanError, match=says):
        Plan(**options).require_model(config)


def test_plan_names_one_for_so_many_ranks() -> None:
    with pytest.raises(
        PlanError,
        match="plan dp=2,pp=2,tp=2 is for 8 ranks, the job has 12; use dp=3,pp=2,tp=2, or",
    ):
        Plan(dp=2, pp=2, tp=2).require(12)
    with pytest.raises(
        PlanError, match="plan pp=2,tp=2 is for 4 ranks, the job has 6; use dp=6, or start 4"
    ):
        Plan(pp=2, tp=2).require(6)
    with pytest.raises(
        PlanError, match="plan dp=2,tp=2 is for 4 ranks, the job has 6; use dp=6 without shard"
    ):
        Plan(dp=2, tp=2, zero=1, shard=2).require(6)
    with pytest.raises(PlanError, match="use dp=2 without stage_layers$"):
        Plan(pp=3, stage_layers="1,1,1").require(2, tiny(layers=2))
    with pytest.raises(PlanError, match="plan dp=1 is for 1 rank, the job has 3; start 1$"):
        Plan(strategy="data-parallel", replicas=2).require(3)


def test_blocks_to_compute_again_that_the_model_lacks() -> None:
    """Refused with the plan, before there is a mesh or a model."""
    for which, layers, remedy in (
        ("1", 1, "choose none, scores, all, or 0$"),
        ("some", 2, "commas, like 0,1$"),
        ("0,2", 2, "numbers of blocks from 0 to 1"),
        ("-1", 2, "commas, like 0,1$"),
    ):
        with pytest.raises(PlanError, match=f"checkpoint_blocks '{which}': .*{remedy}"):
            Plan(checkpoint_blocks=which).require_model(tiny(layers=layers))
    Plan(checkpoint_blocks="0").require_model(tiny(layers=1))


def test_what_it_names_can_cut_the_model() -> None:
    """Neither two heads over four ranks, nor the plan itself, if that cannot either."""
    with pytest.raises(PlanError, match="plan tp=4 is for 4 ranks, the job has 8; use dp=8$"):
        Plan(tp=4).require(8, tiny())
    with pytest.raises(
        PlanError, match="plan tp=2 is for 2 ranks, the job has 4; use dp=2,tp=2, or start 2$"
    ):
        Plan(tp=2).require(4, tiny())
    with pytest.raises(
        PlanError, match="precision=fp8: experts' products are not linears, .* use precision=bf16"
    ):
        Plan(tp=2, precision="fp8").require(4, tiny(mixture=MixtureConfig(experts=2)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {},
            "raise it, use fewer sequences per pass (accumulate), keep less of them "
            "(checkpoint_blocks), or offload more (offload)",
        ),
        ({"dp": 2}, "(checkpoint_blocks), divide more (zero), or offload more (offload)"),
        (
            {"dp": 4, "zero": 2, "shard": 2},
            "(checkpoint_blocks), divide more (zero), or offload more (offload)",
        ),
        (
            {"tp": 2, "checkpoint_blocks": "all"},
            "raise it, use fewer sequences per pass (accumulate), or offload more (offload)",
        ),
        (
            {"pp": 2, "schedule": "pipedream", "checkpoint_blocks": "all"},
            "raise it, or use fewer sequences per pass (accumulate)",
        ),
        (
            {"zero": 3, "offload": "all"},
            "use fewer sequences per pass (accumulate), or keep less of them (checkpoint_blocks)",
        ),
    ],
)
def test_what_is_told_of_too_little_memory_is_not_refused(
    options: dict[str, Any], says: str
) -> None:
    assert Plan(**options).savings.endswith(says)


def test_a_composed_plan_that_meets_the_limit_is_sent_to_offload() -> None:
    def job(world: Any) -> None:
        Trainer(Plan(tp=2, device_memory=30_000), tiny(), world).step(global_batch(0, 2, tiny()))

    with pytest.raises(
        MemoryLimitError, match=r"limit of 30,000: .*\(checkpoint_blocks\), or offload more \(off"
    ):
        md.run(job, size=2)


@given(
    axes=st.fixed_dictionaries(
        {
            "dp": st.integers(1, 3),
            "pp": st.integers(1, 6),
            "cp": st.integers(1, 4),
            "tp": st.integers(1, 6),
        }
    ),
    options=st.fixed_dictionaries(
        {
            "zero": st.integers(0, 3),
            "schedule": st.sampled_from(["1f1b", "interleaved"]),
            "sequence_parallel": st.booleans(),
        }
    ),
    attention=st.sampled_from(["ring", "all-to-all"]),
    heads=st.integers(1, 4),
    grouped=st.booleans(),
)
def test_what_a_refusal_names_fits(
    axes: dict[str, int], options: dict[str, Any], attention: str, heads: int, grouped: bool
) -> None:
    """A model that a plan cannot cut can be cut by the one that is named, on as many ranks, without
    what it says."""
    options["sequence_parallel"] &= axes["tp"] > 1
    plan = Plan(**axes, **options, attention=attention if axes["cp"] > 1 else "ring")
    config = tiny(layers=2, heads=heads, width=2 * heads, kv_heads=1 if grouped else heads)
    try:
        plan.require_model(config)
    except PlanError as error:
        named = re.search(r"; use ((?:[dpect]p=\d+,?)+)(?: without ([a-z_ ]+))?, or ", str(error))
        assert named is not None  # the data axis alone fits every model
        usual: dict[str, Any] = {"attention": "ring", "sequence_parallel": False}
        left_out = {option: usual[option] for option in (named[2] or "").split(" and ") if option}
        other = replace(plan, **{**dict.fromkeys(AXES, 1), **Plan.parse(named[1]).axes}, **left_out)
        other.require_model(config)
        assert other.size == plan.size


@given(
    axes=st.fixed_dictionaries(
        {
            "dp": st.integers(1, 3),
            "pp": st.integers(1, 4),
            "ep": st.integers(1, 3),
            "cp": st.integers(1, 3),
            "tp": st.integers(1, 4),
        }
    ),
    ranks=st.integers(1, 24),
    heads=st.integers(1, 4),
    experts=st.sampled_from([None, 2, 6]),
    zero=st.integers(0, 3),
    shard=st.sampled_from([None, 1, 2, 3]),
)
def test_what_is_named_for_other_ranks_fits(
    axes: dict[str, int], ranks: int, heads: int, experts: int | None, zero: int, shard: int | None
) -> None:
    """The plan that is named is for that many ranks, and it, and the one that more ranks may be
    started for, can cut the model.
    """
    mixture = None if experts is None else MixtureConfig(experts=experts)
    config = tiny(layers=2, heads=heads, width=2 * heads, mixture=mixture)
    copies = axes["dp"] * axes["ep"] * axes["cp"]
    plan = Plan(
        **axes,
        zero=zero,
        shard=shard if shard and zero and copies % shard == 0 else None,
        schedule="interleaved",
        attention="all-to-all" if axes["cp"] > 1 else "ring",
        sequence_parallel=axes["tp"] > 1,
        microbatches=3 if axes["pp"] > 1 else None,
    )
    try:
        plan.require(ranks, config)
    except PlanError as error:
        named = re.search(
            r"; use ((?:[dpect]p=\d+,?)+)(?: without ([a-z_ ]+?))?(, or start \d+)?$", str(error)
        )
        assert named is not None  # the data axis alone fits every model
        usual: dict[str, Any] = {
            "attention": "ring",
            "sequence_parallel": False,
            "microbatches": None,
            "shard": None,
        }
        left_out = {option: usual[option] for option in (named[2] or "").split(" and ") if option}
        other = replace(plan, **{**dict.fromkeys(AXES, 1), **Plan.parse(named[1]).axes}, **left_out)
        other.require(ranks, config)
        other.require_model(config)
        if named[3]:
            plan.require_model(config)
    else:
        assert plan.size == ranks
