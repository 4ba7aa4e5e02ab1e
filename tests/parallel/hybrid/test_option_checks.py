"""Plans with local steps that cannot work are refused in one line that names a plan that fits."""

from typing import Any

import pytest
from training import tiny

from minidist.errors import PlanError
from minidist.nn import MixtureConfig
from minidist.parallel.compress.outer import OUTERS
from minidist.parallel.hybrid.option_checks import OF_STREAMING, OUTER_OPTIMIZERS
from minidist.parallel.hybrid.plan import Plan


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fragments": 4}, "plan fragments=4 with every gradient summed"),
        ({"outer_lr": 0.5}, "plan outer_lr=0.5 with every gradient summed"),
        (
            {"local_steps": 0},
            "ranks exchange weights after a whole number of steps; choose 1 or more",
        ),
        (
            {"local_steps": 2.5},
            "ranks exchange weights after a whole number of steps; choose 1 or more",
        ),
        (
            {"local_steps": 25, "tp": 2, "dp": 2},
            "local_steps=25 with tp=2: each rank trains its own whole model; use dp=4",
        ),
        (
            {"local_steps": 25, "zero": 1, "dp": 2},
            "zero, precision, offload and device_memory are for ranks that make ",
        ),
        ({"local_steps": 25, "precision": "bf16"}, "leave them out"),
        (
            {"local_steps": 25, "strategy": "parameter-server", "dp": 2},
            "use strategy=ddp, or parameter-server with asyn",
        ),
        (
            {"local_steps": 25, "strategy": "data-parallel", "replicas": 2},
            "use strategy=ddp, or parameter-server with as",
        ),
        (
            {
                "local_steps": 4,
                "strategy": "parameter-server",
                "dp": 2,
                "asynchronous": True,
                "mix": 0.5,
            },
            "with asynchronous and mix=0.5: a worker sends all weights at once, and waits for "
            "the answer; leave mix out",
        ),
        ({"local_steps": 25, "fragments": 3}, "choose fragments that divide local_steps"),
        ({"local_steps": 25, "fragments": 0}, "choose fragments that divide local_steps"),
        ({"local_steps": 25, "delay": 25}, "choose 0 to 24"),
        ({"local_steps": 25, "delay": -1}, "choose 0 to 24"),
        ({"local_steps": 25, "mix": 1.0}, "choose 0 to less than 1"),
        ({"local_steps": 25, "mix": float("nan")}, "choose 0 to less than 1"),
        ({"local_steps": 25, "outer": "adam"}, "plan outer='adam': choose one of sgd, nesterov"),
        (
            {"local_steps": 25, "outer_compress": "1-bit"},
            "plan outer_compress=1-bit: choose one of none, fp16, bf16, 8bit",
        ),
        (
            {"local_steps": 25, "outer_compress": "4bit:book=round"},
            "plan outer_compress 4bit: book='round'; choose one of linear",
        ),
        (
            {"local_steps": 25, "compress": "8bit", "dp": 2},
            "no gradient travels; use outer_compress",
        ),
        ({"local_steps": 25, "outer_lr": 0.0}, "choose an outer rate above 0"),
        ({"local_steps": 25, "outer_momentum": 1.0}, "choose from 0 to less than 1"),
        ({"local_steps": 25, "outer_momentum": 0.0}, "choose outer=sgd"),
    ],
)
def test_plan_refuses(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_refuses_a_mixture() -> None:
    with pytest.raises(PlanError, match="local_steps=25: no rank there adds up the experts' loads"):
        Plan(local_steps=25).require_model(tiny(mixture=MixtureConfig(experts=2)))


def test_options_are_fields_with_these_defaults() -> None:
    plan = Plan()
    assert {option: getattr(plan, option) for option in OF_STREAMING} == OF_STREAMING
    assert tuple(OUTERS) == OUTER_OPTIMIZERS


@pytest.mark.parametrize("which", ["x", "-1", "0,,1", "", "all,0", -1, 2.0, None])
def test_which_blocks_are_computed_again_is_refused_before_there_is_a_model(which: Any) -> None:
    with pytest.raises(
        PlanError, match="^checkpoint_blocks .*: choose none, scores, all, or numbers of blocks"
    ):
        Plan(checkpoint_blocks=which)
