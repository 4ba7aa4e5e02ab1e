"""Candidates: every one is a plan that the model and the cluster can have, and none is given "
"twice."""

import numpy as np
import pytest

from minidist.errors import ConfigError
from minidist.nn import GPTConfig, MixtureConfig
from minidist.parallel.hybrid.plan_checks import AXES
from minidist.plan.candidates import candidates
from minidist.simulate.cluster import Cluster
from minidist.simulate.simulate import require

CONFIG = GPTConfig(
    vocabulary=512, context=4096, layers=4, width=256, heads=4, kv_heads=2, positions="rotary"
)
EXPERTS = GPTConfig(
    vocabulary=512, context=256, layers=4, width=256, heads=4, mixture=MixtureConfig(experts=4)
)
CLUSTER = Cluster.parse("h100:2x4")


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_every_candidate_is_a_plan_of_model_and_cluster(config: GPTConfig) -> None:
    found = candidates(config, CLUSTER, batch=16)
    for number in range(0, len(found), 7):
        plan = found.plan(number)
        plan.require_model(config)
        require(plan, config, CLUSTER, 16)
        assert plan.size == 8 and sorted(found.order(number)) == sorted(AXES)
        rows = found.column("rows")[number] * plan.dp * plan.ep * plan.pieces * plan.accumulate
        assert rows == 16


def test_none_stands_there_twice_and_all_kinds_are_there() -> None:
    found = candidates(CONFIG, CLUSTER, batch=16)
    assert len(np.unique(found.table, axis=0)) == len(found) > 1000
    for axis in ("dp", "pp", "cp", "tp"):
        assert set(found.column(axis).tolist()) >= {1, 2}
    assert set(found.column("zero").tolist()) == {0, 1, 2, 3}
    assert set(found.column("schedule").tolist()) == {0, 1, 2, 3, 4}
    assert (
        set(found.column("offload").tolist()) == {0, 1, 2}
        and len(set(found.column("order").tolist())) > 2
    )
    assert set(candidates(EXPERTS, CLUSTER, batch=16).column("ep").tolist()) == {1, 2, 4}


def test_inside_one_node_every_order_is_the_same() -> None:
    assert set(
        candidates(CONFIG, Cluster.parse("h100:1x8"), batch=16).column("order").tolist()
    ) == {0}


def test_a_batch_that_divides_in_no_way_is_refused_with_one_that_does() -> None:
    tiny = GPTConfig(vocabulary=64, context=32, layers=1, width=8, heads=1)
    with pytest.raises(
        ConfigError, match="a batch of 7 sequences on 8 devices.*choose a batch of 8"
    ):
        candidates(tiny, CLUSTER, batch=7)
