"""A step of many passes, from two steps of few: the same seconds as when all passes are made."""

from dataclasses import replace

import pytest

from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.calibrate import Predictor
from minidist.simulate.cluster import Cluster
from minidist.simulate.few_passes import FewPasses, of_passes
from minidist.simulate.rates import CostProfile
from minidist.simulate.runs import Run

CONFIG = GPTConfig(vocabulary=512, context=128, layers=8, width=256, heads=4)
PROFILE = CostProfile("h100")
PLANS = [
    Plan(dp=4, accumulate=9, precision="bf16"),
    Plan(dp=4, accumulate=9, zero=3, precision="bf16", checkpoint_blocks="all"),
    Plan(dp=2, tp=2, accumulate=9, zero=1, precision="bf16"),
    Plan(dp=2, pp=2, microbatches=11, zero=1, precision="bf16"),
    Plan(pp=4, microbatches=13, precision="bf16", checkpoint_blocks="all"),
    Plan(pp=2, tp=2, microbatches=10, schedule="interleaved", stages_per_rank=2, precision="bf16"),
]


def run_of(plan: Plan) -> Run:
    batch = 2 * plan.dp * plan.pieces * plan.accumulate
    return Run("", plan, CONFIG, batch, Cluster.parse(f"h100:{plan.size}"), 1.0)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.axes}")
def test_seconds_are_those_of_all_passes(plan):
    run = run_of(plan)
    assert FewPasses()(run, PROFILE) == pytest.approx(Predictor()(run, PROFILE), rel=1e-9)


def test_few_passes_are_made_as_they_are():
    run = run_of(Plan(dp=4, accumulate=2, precision="bf16"))
    assert FewPasses()(run, PROFILE) == Predictor()(run, PROFILE)


def test_a_batch_that_does_not_divide_is_simulated_whole():
    run = run_of(Plan(dp=2, accumulate=3, precision="bf16"))
    run = run._replace(batch=run.batch + 2)
    assert FewPasses()(run, PROFILE) == Predictor()(run, PROFILE)


def test_a_pass_keeps_its_size():
    run = of_passes(run_of(Plan(dp=4, accumulate=9, precision="bf16")), 3)
    assert run.batch == 2 * 4 * 3
    assert replace(run.plan, accumulate=9) == Plan(dp=4, accumulate=9, precision="bf16")
