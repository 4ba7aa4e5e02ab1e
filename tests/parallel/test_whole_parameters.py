"""A user's rule over parameters: it is given each parameter whole, by name and shape, on every
plan."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import run
from training import difference, global_batch, tiny

from minidist.nn import MixtureConfig
from minidist.optim import WholeParameter
from minidist.parallel.hybrid.hybrid import Plan, Trainer

Rule = Callable[[WholeParameter], bool]
RULES: dict[str, Rule] = {
    "first dim": lambda parameter: parameter.shape[0] > 11,
    "size": lambda parameter: parameter.size % 3 == 0,
    "name": lambda parameter: parameter.name.endswith(("qkv.weight", "mlp.up.weight")),
    "data": lambda parameter: parameter.data.shape[-1] >= 12,
}
PLANS: dict[str, dict[str, Any]] = {
    "DDP": {"dp": 2},
    "ZeRO-1": {"dp": 2, "zero": 1},
    "ZeRO-2": {"dp": 3, "zero": 2},
    "ZeRO-3, copies": {"dp": 4, "zero": 3, "shard": 2},
    "parameter server": {"dp": 3, "strategy": "parameter-server"},
    "two servers": {"dp": 4, "strategy": "parameter-server", "servers": 2},
    "replicas in one process": {"strategy": "data-parallel", "replicas": 2},
    "optimizer on the host": {"offload": "optimizer"},
    "all on disk": {"dp": 2, "zero": 3, "offload": "all"},
    "tensor": {"tp": 2},
    "shared key heads": {"tp": 4},
    "context": {"cp": 2},
    "pipeline × tensor": {"pp": 2, "tp": 2},
    "experts × ZeRO-3": {"dp": 2, "ep": 2, "zero": 3},
    "ZeRO-3 × tensor": {"dp": 2, "tp": 2, "zero": 3},
}


def train(world: Any, plan: dict[str, Any], rule: Rule, folder: Any, experts: bool) -> Any:
    """Weights after two steps, and what the rule was asked on this rank."""
    asked = []

    def decay(parameter: WholeParameter) -> bool:
        assert np.isnan(parameter.data).all()
        asked.append((parameter.name, parameter.shape, parameter.dtype))
        return rule(parameter)

    mixture = MixtureConfig(experts=4, top_k=2) if experts else None
    config = tiny(width=12, heads=4, kv_heads=2, tied=True, mixture=mixture)
    options = {"decay": decay, "weight_decay": 0.5}
    trainer = Trainer(
        Plan(**plan), config, world, lr=1e-2, optimizer_options=options, offload_dir=folder
    )
    for step in range(2):
        trainer.step(global_batch(step, 6, config))
    weights = trainer.state_dict()
    trainer.close()
    return weights, asked


@pytest.mark.sampled
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_rule_of_weight_decay_is_given_whole_parameters(
    plan: dict[str, Any], rule: Rule, tmp_path: Any
) -> None:
    experts = "ep" in plan
    (serial, whole), *_ = run(train, {}, rule, None, experts, size=1)
    ranks = run(train, plan, rule, tmp_path, experts, size=Plan(**plan).size)
    assert difference(ranks[0][0], serial) < 1e-10
    assert {each for _, asked in ranks for each in asked} == set(whole)
