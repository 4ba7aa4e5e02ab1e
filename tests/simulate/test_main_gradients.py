"""Gradients in float32: memory by the formula, calls of twice the bytes, in the replay and in the
planner's estimates."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.observe.events import Busy
from minidist.parallel.hybrid.plan import Plan
from minidist.plan.ranking import plan_for
from minidist.simulate.main_gradients import _highest, with_float32_gradients
from minidist.simulate.one_rank import run_rank
from minidist.simulate.simulate import simulate

CONFIG = GPTConfig(vocabulary=512, context=64, layers=3, width=256, heads=4)
PLANS = [
    {"dp": 2, "accumulate": 2},
    {"dp": 2, "zero": 1},
    {"dp": 2, "zero": 2, "accumulate": 2},
    {"dp": 2, "zero": 3},
    {"dp": 2, "pp": 3, "tp": 2, "microbatches": 4},
]


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_gradients_take_twice_the_bytes_and_nothing_else_more(options: dict[str, int]) -> None:
    plan = Plan(precision="bf16", **options)
    trace = run_rank(plan, CONFIG, 0, rows=16)
    assert _highest(trace.events) == trace.peak["total"]
    wide = with_float32_gradients(trace, plan.pieces * plan.accumulate)
    assert wide.peak["gradients"] == 2 * trace.peak["gradients"]
    beside = {name for name in trace.peak if wide.peak[name] != trace.peak[name]}
    assert beside == {"gradients", "total"}
    assert 0 < wide.peak["total"] - trace.peak["total"] <= trace.peak["gradients"]
    assert wide.now["total"] - trace.now["total"] == trace.now["gradients"]


@pytest.mark.parametrize(
    "options",
    [
        {"dp": 2, "accumulate": 3},
        {"pp": 3, "microbatches": 4},
        {"pp": 2, "microbatches": 2, "accumulate": 2},
        {"pp": 3, "microbatches": 6, "schedule": "interleaved", "stages_per_rank": 2},
        {"pp": 3, "microbatches": 6, "schedule": "zb-v"},
        {"pp": 2, "microbatches": 4, "schedule": "dualpipe-v"},
    ],
    ids=str,
)
def test_a_step_adds_each_weights_gradient_once_a_microbatch(options: dict[str, Any]) -> None:
    """Also where a rank has several stages, each with a backward of its own."""
    plan = Plan(precision="bf16", **options)
    config = replace(CONFIG, layers=6)
    trace = run_rank(plan, config, plan.size - 1, rows=12)
    passes = plan.pieces * plan.accumulate
    step = trace.steps[-1]
    plain, wide = (
        sum(
            times * kernel.nbytes
            for event in each.events[step:]
            if isinstance(event, Busy)
            for kernel, times in each.segments[event.work]
        )
        for each in (trace, with_float32_gradients(trace, passes))
    )
    assert wide - plain == pytest.approx(4 * trace.parameters * passes)


def test_reductions_send_twice_the_bytes_and_gathers_the_same() -> None:
    found = [
        simulate(
            Plan(dp=4, zero=1, precision="bf16"), CONFIG, "h100:4", batch=8, float32_gradients=wide
        )
        for wide in (False, True)
    ]
    reduced, gathered = (
        [
            sum(row["nbytes"] for row in each.traces[0].last_step if row["verb"] == verb)
            for each in found
        ]
        for verb in ("reduce_scatter", "all_gather")
    )
    assert reduced[1] == 2 * reduced[0] > 0
    assert gathered[1] == gathered[0] > 0
    assert found[1].step_seconds >= found[0].step_seconds


def test_in_float32_nothing_changes() -> None:
    plain, wide = (
        simulate("dp=2", CONFIG, "h100:2", batch=4, float32_gradients=asked)
        for asked in (False, True)
    )
    assert plain.step_seconds == wide.step_seconds
    assert plain.peak(0) == wide.peak(0)


def test_the_planner_estimates_them_as_the_replay_finds_them() -> None:
    config = replace(CONFIG, width=1024, context=512)  # its device is slower than its host
    ranking = plan_for(config, "h100:4", batch=64, confirm=3, float32_gradients=True)
    for choice in ranking.confirmed:
        assert choice.total == pytest.approx(choice.known_total, rel=0.06)
        assert choice.step_seconds == pytest.approx(choice.known_seconds, rel=0.1)
    plain = plan_for(config, "h100:4", batch=64)
    both = dict(zip(_rows(plain), plain.estimates.total[plain.order], strict=True))
    wide = dict(zip(_rows(ranking), ranking.estimates.total[ranking.order], strict=True))
    same = wide.keys() & both.keys()
    # of one microbatch on one copy, gradients are made while activations are freed
    assert all(wide[row] >= both[row] for row in same)
    assert sum(wide[row] > both[row] for row in same) > len(same) / 2


def _rows(ranking: object) -> list[bytes]:
    found = ranking.estimates.candidates  # type: ignore[attr-defined]
    return [np.asarray(found.table[number]).tobytes() for number in ranking.order]  # type: ignore[attr-defined]


def test_a_file_of_runs_can_ask_for_them(tmp_path) -> None:
    from minidist.simulate.runs import read_runs

    path = tmp_path / "runs.csv"
    head = "layers,width,heads,sequence,vocab,devices,batch,seconds,gradients,scores\n"
    path.write_text(head + "2,64,4,32,128,4,8,1,float32,11\n2,64,4,32,128,4,8,1,,\n")
    first, second = read_runs(path, "h100")
    assert (first.float32_gradients, first.scores) == (True, 11)
    assert (second.float32_gradients, second.scores) == (False, 0)
    path.write_text(head + "2,64,4,32,128,4,8,1,float16,\n")
    with pytest.raises(ConfigError, match="line 2: gradients=float16: choose float32"):
        read_runs(path, "h100")
