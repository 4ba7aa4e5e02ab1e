"""Bad plans fail before training, with one line that names the nearest plan that fits."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import tiny

from minidist.errors import PlanError
from minidist.nn import GPTConfig
from minidist.parallel.plan import AXES, Plan


@pytest.mark.parametrize(("options", "says"), [
    ({"pp": 2, "schedule": "2f2b"}, "choose one of naive, gpipe, 1f1b"), ({"pp": 2, "microbatches": 0}, "at least one"),
    ({"dp": 2, "microbatches": 4}, "no pipeline to fill; use accumulate=4"),
    ({"tp": 2, "zero": 3, "offload": "all"}, "offloads on the data axis alone; use offload=none, or dp=2 with zero=3"),
    ({"dp": 2, "tp": 2, "strategy": "parameter-server"}, "whole models; use strategy=ddp, or dp=4"),
    ({"tp": 2, "strategy": "parameter-server"}, "whole models; use strategy=ddp, or dp=2"),
    ({"dp": 2, "tp": 2, "precision": "fp8"}, "use bf16, or tp=1 with dp=4"),
    ({"tp": 2, "precision": "fp8", "sequence_parallel": True}, "or tp=1 with dp=2 without sequence_parallel"),
    ({"dp": 2, "attention": "all-to-all"}, "no sequence is cut; use cp=2"),
    ({"attention": "flash"}, "choose one of ring, all-to-all"),
    ({"cp": 2, "sequence_parallel": True}, "use tp=2, or cp=2"),
    ({"cp": 2, "offload": "all", "zero": 3}, "or dp=2 with")])
def test_plan_refuses(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "changes", "says"), [
    ({"pp": 6}, {}, "has 6 stages, and the model 2 layers: .*use dp=2,pp=3, or at least 4 layers"),
    ({"pp": 3, "schedule": "interleaved", "tp": 2}, {}, "has 6 stages.*use dp=3,tp=2, or at least 4 layers"),
    ({"tp": 4}, {}, "2 heads leave a rank without any; use dp=2,tp=2, or at least 4 heads"),
    ({"tp": 2, "sequence_parallel": True}, {"heads": 1, "width": 4},
     "1 head leaves a rank without any; use dp=2 without sequence_parallel, or at least 2 heads"),
    ({"cp": 3, "attention": "all-to-all"}, {}, "use dp=3 without attention, or attention=ring"),
    ({"pp": 5, "microbatches": 3}, {}, "use dp=5 without microbatches, or at least 3 layers"),
    ({"tp": 2, "zero": 1}, {"kv_heads": 1}, "use dp=2, or zero=0"),
    ({"cp": 4, "tp": 2, "attention": "all-to-all"}, {"heads": 4}, "use dp=2,cp=2,tp=2, or attention=ring")])
def test_plan_refuses_a_model(options: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    config: GPTConfig = tiny(**changes)
    with pytest.raises(PlanError, match=says):
        Plan(**options).require_model(config)


def test_plan_names_the_nearest_for_so_many_ranks() -> None:
    with pytest.raises(PlanError, match="plan dp=2,pp=2,tp=2 is for 8 ranks, the job has 12; use dp=3,pp=2,tp=2, or"):
        Plan(dp=2, pp=2, tp=2).require(12)
    with pytest.raises(PlanError, match="plan pp=2,tp=2 is for 4 ranks, the job has 6; use dp=3,pp=2, or start 4"):
        Plan(pp=2, tp=2).require(6)


@given(axes=st.fixed_dictionaries({"dp": st.integers(1, 3), "pp": st.integers(1, 6), "cp": st.integers(1, 4),
                                   "tp": st.integers(1, 6)}),
       options=st.fixed_dictionaries({"zero": st.integers(0, 3), "schedule": st.sampled_from(["1f1b", "interleaved"]),
                                      "sequence_parallel": st.booleans()}),
       attention=st.sampled_from(["ring", "all-to-all"]), heads=st.integers(1, 4), grouped=st.booleans())
def test_what_a_refusal_names_fits(axes: dict[str, int], options: dict[str, Any], attention: str, heads: int,
                                   grouped: bool) -> None:
    """A model that a plan cannot cut can be cut by the one that is named, on as many ranks, without what it says."""
    options["sequence_parallel"] &= axes["tp"] > 1
    plan = Plan(**axes, **options, attention=attention if axes["cp"] > 1 else "ring")
    config = tiny(layers=2, heads=heads, width=2 * heads, kv_heads=1 if grouped else heads)
    try:
        plan.require_model(config)
    except PlanError as error:
        named = re.search(r"; use ((?:[dpect]p=\d+,?)+)(?: without ([a-z_ ]+))?, or ", str(error))
        assert named is not None        # the data axis alone fits every model
        usual: dict[str, Any] = {"attention": "ring", "sequence_parallel": False}
        left_out = {option: usual[option] for option in (named[2] or "").split(" and ") if option}
        other = replace(plan, **{**dict.fromkeys(AXES, 1), **Plan.parse(named[1]).axes}, **left_out)
        other.require_model(config)
        assert other.size == plan.size
